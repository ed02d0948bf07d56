"""How near this machine, or this container, is to having no memory left, which is when Linux kills processes.

Runs in the agent. The last seconds are remembered, since memory is free again once a process was killed for it.
"""

from __future__ import annotations

import collections
import contextlib
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from notebook_accel.events import MemoryShortage

__all__ = ["MemoryWatch"]

_PERIOD_S = 1.0
_REMEMBERED_SAMPLES = 10
_NEARLY_GONE = 0.05  # of the limit left
_CGROUPS = pathlib.Path("/sys/fs/cgroup")


class _Names(NamedTuple):
    """What the files and rows of a control group are called. See cgroups(7) and linux's cgroup-v1/memory.rst."""

    limit: str
    used: str
    kills: str
    reclaimable: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "memory.events", "inactive_file")


class _Room(NamedTuple):
    """What some limit leaves free."""

    free_bytes: int
    limit_bytes: int
    is_machine: bool


class MemoryWatch:
    """Looks once a second while it is told the time."""

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[_Room, int]] = collections.deque(maxlen=_REMEMBERED_SAMPLES)
        self._next_look_s = 0.0

    def tick(self, now_s: float) -> None:
        """Looks, if it is time to."""
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _PERIOD_S
            self._samples.append(_look())

    def shortage(self) -> MemoryShortage | None:
        """What the last seconds say, if they are a reason for processes to have been killed."""
        self._samples.append(_look())
        room = min((room for room, _ in self._samples), key=lambda room: room.free_bytes / room.limit_bytes)
        kills = self._samples[-1][1] - self._samples[0][1]
        if room.free_bytes > _NEARLY_GONE * room.limit_bytes:
            if kills <= 0:
                return None
            room = self._samples[-1][0]  # it went faster than anybody looked: the limit that counts is the present one
        return MemoryShortage(
            free_bytes=room.free_bytes, limit_bytes=room.limit_bytes, is_machine=room.is_machine, was_seen=kills > 0
        )


def _look() -> tuple[_Room, int]:
    """The least room that there is, and how many processes the system has ever killed for want of memory."""
    machine = _rows(pathlib.Path("/proc/meminfo"))
    rooms = [_Room(1024 * machine.get("MemAvailable:", 0), max(1, 1024 * machine.get("MemTotal:", 0)), True)]
    kills = []
    for folder, names in _groups():
        with contextlib.suppress(OSError, ValueError):  # "max" is no number, and no limit
            limit_bytes = int((folder / names.limit).read_text())
            reclaimable_bytes = _rows(folder / "memory.stat").get(names.reclaimable, 0)
            free_bytes = limit_bytes - int((folder / names.used).read_text()) + reclaimable_bytes
            if 0 < limit_bytes < rooms[0].limit_bytes:
                rooms.append(_Room(max(0, free_bytes), limit_bytes, False))
        count = _rows(folder / names.kills).get("oom_kill")
        if count is not None:
            kills.append(count)
    if not kills:  # it counts what is killed in the containers of others, too
        kills.append(_rows(pathlib.Path("/proc/vmstat")).get("oom_kill", 0))
    return min(rooms), sum(kills)


def _groups() -> Iterator[tuple[pathlib.Path, _Names]]:
    """The control groups that this process is in and that exist here: its own and those around it."""
    with contextlib.suppress(OSError):
        for row in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = row.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            names, root = (_V1, _CGROUPS / "memory") if controllers else (_V2, _CGROUPS)
            own = root / path.lstrip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(root) and (folder / names.limit).exists():
                    yield folder, names


def _rows(path: pathlib.Path) -> dict[str, int]:
    """A file of rows of a name and a number."""
    with contextlib.suppress(OSError):
        rows = [row.split() for row in path.read_text().splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
    return {}

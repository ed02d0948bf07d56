"""The memory of this machine, and of the control groups that this process is in: what there is and what is left.

A container's limit is that of a control group. See cgroups(7) and Linux's cgroup-v1/memory.rst for the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Room", "available_bytes", "kills", "rooms", "total_bytes"]

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_MEMBERSHIP = pathlib.Path("/proc/self/cgroup")
_MEMINFO = pathlib.Path("/proc/meminfo")
_VMSTAT = pathlib.Path("/proc/vmstat")


@dataclasses.dataclass(frozen=True)
class _Names:
    """What the files and rows of a control group are called."""

    limit: str
    used: str
    kills: str
    reclaimable: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "memory.events", "inactive_file")


class Room(NamedTuple):
    """What some limit leaves free, in bytes; ``is_machine``: whether the limit is all that the machine has."""

    free_bytes: int
    limit_bytes: int
    is_machine: bool


def total_bytes() -> int:
    """The machine's memory, or less where a control group has a limit."""
    return min(room.limit_bytes for room in rooms())


def available_bytes() -> int:
    """What the machine, and every control group that this process is in, can still give: memory and swap."""
    rows = _rows(_MEMINFO)
    machine = _machine(rows)
    left_bytes = [room.free_bytes for room in _limits(machine)]
    return max(0, min([machine.free_bytes + 1024 * rows.get("SwapFree:", 0), *left_bytes]))


def rooms() -> list[Room]:
    """The machine's memory, and after it that of each control group that limits it further."""
    machine = _machine(_rows(_MEMINFO))
    return [machine, *_limits(machine)]


def _machine(rows: dict[str, int]) -> Room:
    return Room(1024 * rows.get("MemAvailable:", 0), max(1, 1024 * rows.get("MemTotal:", 0)), True)


def _limits(machine: Room) -> list[Room]:
    """The control groups that leave this process less than the machine has."""
    found = []
    for folder, names in _groups():
        with contextlib.suppress(OSError, ValueError):  # "max" is no number, and no limit
            limit_bytes = int((folder / names.limit).read_text())
            if 0 < limit_bytes < machine.limit_bytes:
                reclaimable_bytes = _rows(folder / "memory.stat").get(names.reclaimable, 0)
                free_bytes = limit_bytes - int((folder / names.used).read_text()) + reclaimable_bytes
                found.append(Room(max(0, free_bytes), limit_bytes, False))
    return found


def kills() -> dict[pathlib.Path, int]:
    """How many processes the system has ever killed for want of memory, by the control group that has counted them."""
    counts = {folder: _rows(folder / names.kills).get("oom_kill") for folder, names in _groups()}
    known = {folder: count for folder, count in counts.items() if count is not None}
    # The machine's count, where no group has one, is also of what is killed in the containers of others.
    return known or {_VMSTAT: _rows(_VMSTAT).get("oom_kill", 0)}


def _groups() -> Sequence[tuple[pathlib.Path, _Names]]:
    """The control groups that this process is in and that can be seen from here: its own and those around it."""
    with contextlib.suppress(OSError):
        return _found(_CGROUPS, _MEMBERSHIP.read_text())
    return ()


@functools.cache  # every launch asks
def _found(cgroups: pathlib.Path, membership: str) -> Sequence[tuple[pathlib.Path, _Names]]:
    found = []
    for row in membership.splitlines():
        _, controllers, path = row.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names, root = (_V1, cgroups / "memory") if controllers else (_V2, cgroups)
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root) and (folder / names.limit).exists():
                found.append((folder, names))
    return found


def _rows(path: pathlib.Path) -> dict[str, int]:
    """A file of rows of a name and a number."""
    with contextlib.suppress(OSError):
        rows = [row.split() for row in path.read_text().splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
    return {}

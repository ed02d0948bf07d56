"""The memory and the processors of this machine and of this process's control groups, and the waiting for a core.

A container's limit is that of a control group. See cgroups(7), and Linux's cgroup-v1/memory.rst, cgroup-v2.rst,
scheduler/sched-bwc.rst and scheduler/sched-stats.rst for the files.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from notebook_accel.protocol.events import MemoryShortage

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_MEMBERSHIP = pathlib.Path("/proc/self/cgroup")
_MEMINFO = pathlib.Path("/proc/meminfo")
_VMSTAT = pathlib.Path("/proc/vmstat")
_THREADS = pathlib.Path("/proc/self/task")


@dataclasses.dataclass(frozen=True)
class _Files:
    """The names of a control group's memory files, and of the row with reclaimable memory."""

    limit: str
    used: str
    kills: str
    reclaimable: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "memory.events", "inactive_file")

# By controller and the version of control groups: a file that only groups with this controller have.
_MARKS = {
    "memory": {1: _V1.limit, 2: _V2.limit},
    "cpu": {1: "cpu.cfs_quota_us", 2: "cpu.max"},
}


class MemoryLimit(NamedTuple):
    """The free memory under one limit: the machine's own (``is_machine``) or a control group's."""

    free_bytes: int
    limit_bytes: int
    is_machine: bool


def total_bytes() -> int:
    """Return the machine's memory, or less where a control group has a limit."""
    return min(limit.limit_bytes for limit in limits())


def available_bytes() -> int:
    """Return the memory and swap that are free on the machine and in each control group of this process."""
    rows = _rows(_MEMINFO)
    machine = _machine(rows)
    left_bytes = [limit.free_bytes for limit in _group_limits(machine)]
    return max(0, min([machine.free_bytes + 1024 * rows.get("SwapFree:", 0), *left_bytes]))


def limits() -> list[MemoryLimit]:
    """Return the free memory of the machine, and after it that of each control group with a lower limit."""
    machine = _machine(_rows(_MEMINFO))
    return [machine, *_group_limits(machine)]


def _machine(rows: dict[str, int]) -> MemoryLimit:
    return MemoryLimit(1024 * rows.get("MemAvailable:", 0), max(1, 1024 * rows.get("MemTotal:", 0)), True)


def _group_limits(machine: MemoryLimit) -> list[MemoryLimit]:
    """Return the free memory of the control groups whose limit is below the machine's memory."""
    found = []
    for folder, names in _memory_groups():
        with contextlib.suppress(OSError, ValueError):  # "max" is no number, and no limit
            limit_bytes = int(_text(folder / names.limit))
            if 0 < limit_bytes < machine.limit_bytes:
                reclaimable_bytes = _rows(folder / "memory.stat").get(names.reclaimable, 0)
                free_bytes = limit_bytes - int(_text(folder / names.used)) + reclaimable_bytes
                found.append(MemoryLimit(max(0, free_bytes), limit_bytes, False))
    return found


def kills() -> dict[pathlib.Path, int]:
    """Return the number of out-of-memory kills so far, by the control group that counted them."""
    counts = {folder: _rows(folder / names.kills).get("oom_kill") for folder, names in _memory_groups()}
    known = {folder: count for folder, count in counts.items() if count is not None}
    # Without a group's count, take the machine's, which includes kills in other containers.
    return known or {_VMSTAT: _rows(_VMSTAT).get("oom_kill", 0)}


def cores() -> int:
    """Return the number of processors that this process may use, by a control group's quota too. At least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota(folder, version) for folder, version in _groups("cpu")]
    return max(1, min([count, *(quota for quota in quotas if quota is not None)]))


def _quota(folder: pathlib.Path, version: int) -> int | None:
    """Return a control group's quota in processors, rounded up; ``None`` if it has none."""
    with contextlib.suppress(OSError, ValueError):  # "max" is no number, and no limit
        text = _text(folder / _MARKS["cpu"][version])
        quota_us, period_us = text.split() if version == 2 else (text, _text(folder / "cpu.cfs_period_us"))
        if int(quota_us) > 0 and int(period_us) > 0:
            return -(-int(quota_us) // int(period_us))
    return None


class CoreWatch:
    """Measures how long this process waits for cores between two calls of ``take``."""

    def __init__(self) -> None:
        self._looked_s, self._waits_ns = time.monotonic(), _waits_for_cores()

    def take(self) -> float:
        """Return the share of the time since the last call in which a thread was ready to run and had no core.

        It is from 0 to 1, that of the thread that waited longest, and 0 where Linux doesn't measure it.
        """
        before_s, before_ns = self._looked_s, self._waits_ns
        self._looked_s, self._waits_ns = time.monotonic(), _waits_for_cores()
        waits_ns = (wait_ns - before_ns.get(thread, 0) for thread, wait_ns in self._waits_ns.items())
        return min(max(waits_ns, default=0) / 1e9 / max(self._looked_s - before_s, 1e-3), 1.0)


def _waits_for_cores() -> dict[str, int]:
    """Return for each thread of this process the nanoseconds for which it was ready to run and had no core.

    The package's own threads are left out. They wake up often, and so wait often, but no step waits for them.
    """
    found = {}
    own = {str(thread.native_id) for thread in threading.enumerate() if thread.name.startswith("notebook-accel-")}
    with contextlib.suppress(OSError):
        for thread in set(os.listdir(_THREADS)) - own:
            with contextlib.suppress(OSError, ValueError, IndexError):  # it may have just ended
                found[thread] = int(_text(f"{_THREADS}/{thread}/schedstat").split()[1])
    return found


def _memory_groups() -> Sequence[tuple[pathlib.Path, _Files]]:
    return [(folder, _V1 if version == 1 else _V2) for folder, version in _groups("memory")]


def _groups(controller: str) -> Sequence[tuple[pathlib.Path, int]]:
    """Return the folders and versions of this process's visible control groups that have the controller."""
    with contextlib.suppress(OSError):
        return _find_groups(_CGROUPS, _text(_MEMBERSHIP), controller)
    return ()


@functools.cache  # every launch asks
def _find_groups(cgroups: pathlib.Path, membership: str, controller: str) -> Sequence[tuple[pathlib.Path, int]]:
    found = []
    for row in membership.splitlines():
        _, controllers, path = row.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, root = (1, cgroups / controller) if controllers else (2, cgroups)
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root) and (folder / _MARKS[controller][version]).exists():
                found.append((folder, version))
    return found


def _text(path: pathlib.Path | str) -> str:
    """Return a system file's content. pathlib takes twice as long, and there may be a file for each of 100 threads."""
    with open(path, "rb", buffering=0) as file:
        return file.read().decode()


def _rows(path: pathlib.Path) -> dict[str, int]:
    """Return a file's rows, each with a name and a number."""
    with contextlib.suppress(OSError):
        rows = [row.split() for row in _text(path).splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
    return {}


_PERIOD_S = 1.0
_REMEMBERED_SAMPLES = 10
_NEARLY_GONE = 0.05  # of the limit left

_Sample: TypeAlias = tuple[MemoryLimit, dict[pathlib.Path, int]]


class MemoryWatch:
    """Samples the host's memory once a second, as long as ``tick`` is called.

    The samples of the last seconds are kept, because memory is free again once Linux has killed a process.
    """

    def __init__(self) -> None:
        self._samples: collections.deque[_Sample] = collections.deque(maxlen=_REMEMBERED_SAMPLES)
        self._next_look_s = 0.0

    def tick(self, now_s: float) -> None:
        """Take a sample if one is due."""
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _PERIOD_S
            self._samples.append(_look())

    def shortage(self) -> MemoryShortage | None:
        """Return the shortage of the last seconds, ``None`` if memory was no reason to kill a process."""
        self._samples.append(_look())
        room = min((room for room, _ in self._samples), key=lambda room: room.free_bytes / room.limit_bytes)
        earlier, now = self._samples[0][1], self._samples[-1][1]
        # If this process was moved to another control group meanwhile, that group's count starts from zero here.
        was_seen = any(count > earlier.get(group, 0) for group, count in now.items())
        if room.free_bytes > _NEARLY_GONE * room.limit_bytes:
            if not was_seen:
                return None
            room = self._samples[-1][0]  # memory ran out between two samples, so the present limit counts
        return MemoryShortage(
            free_bytes=room.free_bytes, limit_bytes=room.limit_bytes, is_machine=room.is_machine, was_seen=was_seen
        )


def _look() -> _Sample:
    """Return the limit with the least free memory, and the number of out-of-memory kills by control group."""
    return min(limits()), kills()

"""The memory and the processors of this machine and of this process's control groups, and the waiting for them.

A container's limit is that of a control group. See cgroups(7), and Linux's cgroup-v1/memory.rst, cgroup-v2.rst,
scheduler/sched-bwc.rst, scheduler/sched-stats.rst, accounting/psi.rst and proc_stat(5) for the files.
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
_PRESSURE = pathlib.Path("/proc/pressure")
_STAT = pathlib.Path("/proc/stat")
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

# By controller and the version of control groups: a file that only groups with this controller have. All groups of
# version 2 have files of pressure, where Linux measures it.
_MARKS = {
    "memory": {1: _V1.limit, 2: _V2.limit},
    "cpu": {1: "cpu.cfs_quota_us", 2: "cpu.max"},
    "pressure": {2: "memory.pressure"},
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


class Delays(NamedTuple):
    """Shares of a time, from 0 to 1, in which something was waited for; 0 where Linux doesn't measure it."""

    core: float  # a thread of the program was ready to run, and had no core: the one that waited longest
    stolen: float  # the host of this virtual machine gave a core to others while this program used it
    quota: float  # periods in which a control group has used up its quota of CPU time
    # Some thread of this process's control group waited; of the machine, where the group isn't known or measured.
    memory: float  # for memory, such as for pages in swap
    disk: float


NO_DELAYS = Delays(0.0, 0.0, 0.0, 0.0, 0.0)


class _Counts(NamedTuple):
    """The counts of waiting up to some time."""

    time_s: float
    threads_ns: dict[str, int]
    stolen: tuple[int, int]
    used_s: float  # CPU time of this process
    periods: dict[pathlib.Path, tuple[int, int]]
    stalled_us: tuple[int, int]  # by memory and by disks


class DelayWatch:
    """Measures what this process and those beside it wait for between two calls of ``take``."""

    def __init__(self) -> None:
        self._before = self._look()

    def take(self) -> Delays:
        """Return the delays since the last call."""
        before, self._before = self._before, self._look()
        now = self._before
        took_s = max(now.time_s - before.time_s, 1e-3)
        waits_ns = (wait_ns - before.threads_ns.get(thread, 0) for thread, wait_ns in now.threads_ns.items())
        core = max(waits_ns, default=0) / 1e9 / took_s
        stolen, used = (later - earlier for earlier, later in zip(before.stolen, now.stolen, strict=True))
        # Linux counts a stolen time as used by nobody.
        stolen_share = min((now.used_s - before.used_s) / took_s, 1.0) * stolen / max(used, 1)
        passed = {
            group: (count - before.periods[group][0], throttled - before.periods[group][1])
            for group, (count, throttled) in now.periods.items()
            if group in before.periods
        }
        quota = max((throttled / count for count, throttled in passed.values() if count > 0), default=0.0)
        memory, disk = (
            (now_us - then_us) / 1e6 / took_s for then_us, now_us in zip(before.stalled_us, now.stalled_us, strict=True)
        )
        # Counts are lower than before where this process was moved to another control group.
        return Delays(*(min(max(share, 0.0), 1.0) for share in (core, stolen_share, quota, memory, disk)))

    @staticmethod
    def _look() -> _Counts:
        stalled_us = (_stalled_us("memory"), _stalled_us("io"))
        used_s = time.process_time()
        return _Counts(time.monotonic(), _waits_for_cores(), _stolen_and_used(), used_s, _quota_periods(), stalled_us)


def swapped_bytes() -> int:
    """Return the size of this process's memory that is in swap."""
    return 1024 * _rows(_THREADS.parent / "status").get("VmSwap:", 0)


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


def _stolen_and_used() -> tuple[int, int]:
    """Return the clock ticks for which this process's cores were stolen by a host, and those for which they worked."""
    stolen = used = 0
    with contextlib.suppress(OSError, AttributeError, IndexError, ValueError):
        own = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        for name, *numbers in (row.split() for row in _text(_STAT).splitlines() if row.startswith("cpu")):
            if name in own:
                user, nice, system, _, _, irq, softirq, steal = map(int, numbers[:8])
                stolen, used = stolen + steal, used + user + nice + system + irq + softirq
    return stolen, used


def _quota_periods() -> dict[pathlib.Path, tuple[int, int]]:
    """Return for each control group with a quota its periods, and those in which the quota was used up."""
    rows = {folder: _rows(folder / "cpu.stat") for folder, _ in _groups("cpu")}
    return {folder: (row.get("nr_periods", 0), row.get("nr_throttled", 0)) for folder, row in rows.items()}


def _stalled_us(resource: str) -> int:
    """Return the microseconds for which some thread of this control group, or of the machine, waited for a resource."""
    own = [folder / f"{resource}.pressure" for folder, _ in _groups("pressure")]
    with contextlib.suppress(OSError, ValueError):
        some = _text([*own, _PRESSURE / resource][0]).partition("\n")[0]
        return int(some.rpartition("total=")[2])
    return 0


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

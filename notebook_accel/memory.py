"""How much memory can still be had, here and now."""

from __future__ import annotations

import contextlib
import functools
import pathlib

__all__ = ["available_bytes"]

_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_MEMBERSHIP = pathlib.Path("/proc/self/cgroup")
# Limit, usage and statistics of a control group, and which of the statistics can be given back, for either version.
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes() -> int:
    """What the machine, and every control group that this process is in, can still give: memory and swap."""
    fields = dict(line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    total, available, swap = (
        int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable", "SwapFree")
    )
    limits = [_left(folder, version) for folder, version in _limited(_CGROUPS, _MEMBERSHIP, total)]
    return max(0, min([available + swap, *limits]))


@functools.cache  # a process stays in its group, and every launch asks
def _limited(cgroups: pathlib.Path, membership: pathlib.Path, total_bytes: int) -> tuple[tuple[pathlib.Path, int], ...]:
    """The groups around this process that have a limit below the machine's memory, with their version."""
    found = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version = 1 if "memory" in controllers.split(",") else 2 if not controllers else 0
        if not version:
            continue
        root = cgroups / "memory" if version == 1 else cgroups
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            # In a container, only some of them can be seen; and the text of no limit is `max`.
            with contextlib.suppress(OSError, ValueError):
                if int((folder / _FILES[version][0]).read_text()) < total_bytes:
                    found.append((folder, version))
            if folder == root:
                break
    return tuple(found)


def _left(folder: pathlib.Path, version: int) -> int:
    limit, usage, reclaimable = _FILES[version]
    statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    used = int((folder / usage).read_text()) - int(statistics.get(reclaimable, 0))
    return int((folder / limit).read_text()) - used

"""Watches how much host memory is left on this machine or in this container, since Linux kills processes at the end.

The samples of the last seconds are kept, because memory is free again once a process was killed.
"""

from __future__ import annotations

import collections
import pathlib
from typing import TypeAlias

from notebook_accel import host_memory
from notebook_accel.host_memory import MemoryLimit
from notebook_accel.protocol.events import MemoryShortage

_PERIOD_S = 1.0
_REMEMBERED_SAMPLES = 10
_NEARLY_GONE = 0.05  # of the limit left

_Sample: TypeAlias = tuple[MemoryLimit, dict[pathlib.Path, int]]


class MemoryWatch:
    """Samples the host's memory once a second, as long as ``tick`` is called."""

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
            room = self._samples[-1][0]  # it was too fast for the samples, so the present limit counts
        return MemoryShortage(
            free_bytes=room.free_bytes, limit_bytes=room.limit_bytes, is_machine=room.is_machine, was_seen=was_seen
        )


def _look() -> _Sample:
    """Return the tightest limit, and how many processes the system has killed because memory ran out."""
    return min(host_memory.limits()), host_memory.kills()

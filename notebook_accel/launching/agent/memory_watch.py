"""How near this machine, or this container, is to having no memory left, which is when Linux kills processes.

Runs in the agent. The last seconds are remembered, since memory is free again once a process was killed for it.
"""

from __future__ import annotations

import collections
import pathlib
from typing import TypeAlias

from notebook_accel import host_memory
from notebook_accel.host_memory import MemoryLimit
from notebook_accel.protocol.events import MemoryShortage

__all__ = ["MemoryWatch"]

_PERIOD_S = 1.0
_REMEMBERED_SAMPLES = 10
_NEARLY_GONE = 0.05  # of the limit left

_Sample: TypeAlias = tuple[MemoryLimit, dict[pathlib.Path, int]]


class MemoryWatch:
    """Looks once a second while it is told the time."""

    def __init__(self) -> None:
        self._samples: collections.deque[_Sample] = collections.deque(maxlen=_REMEMBERED_SAMPLES)
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
        earlier, now = self._samples[0][1], self._samples[-1][1]
        # A control group that this process has been moved to since then has counted from nothing, as far as it goes.
        was_seen = any(count > earlier.get(group, 0) for group, count in now.items())
        if room.free_bytes > _NEARLY_GONE * room.limit_bytes:
            if not was_seen:
                return None
            room = self._samples[-1][0]  # it went faster than anybody looked: the limit that counts is the present one
        return MemoryShortage(
            free_bytes=room.free_bytes, limit_bytes=room.limit_bytes, is_machine=room.is_machine, was_seen=was_seen
        )


def _look() -> _Sample:
    """The least room that there is, and how many processes the system has killed for want of memory."""
    return min(host_memory.limits()), host_memory.kills()

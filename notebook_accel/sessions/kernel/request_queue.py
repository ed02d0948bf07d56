"""Whose turn it is with the ranks: one thing at a time, in the order in which they came."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from notebook_accel.uninterruptible import Latch

__all__ = ["Turns"]

_LOOK_PERIOD_S = 0.1


class _Turn:
    def __init__(self, what: str) -> None:
        self.what = what
        self.is_mine = Latch()


class Turns:
    """The queue. Each waits in a thread of its own, with the interrupts held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: list[_Turn] = []

    @property
    def queue(self) -> list[str]:
        """What the ranks are busy with, and then what waits, in words."""
        return [turn.what for turn in list(self._queue)]

    @contextlib.contextmanager
    def turn(self, what: str, *, says: bool = True, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Waits until the ranks are free, and has them in the body.

        Args:
            what: For what, in words.
            says: Whether to say that it waits, and for what.
            check: Called now and then while it waits; what it raises ends that and nothing else.
        """
        mine = _Turn(what)
        try:
            busy_with = self._join(mine)
            if says and busy_with:
                sys.stderr.write(f"[{what} waits until {busy_with} has ended; an interrupt ends only the waiting]\n")
            while not mine.is_mine.is_set:
                check()
                mine.is_mine.wait(_LOOK_PERIOD_S)
            yield
        finally:
            self._leave(mine)

    @contextlib.contextmanager
    def if_free(self, what: str) -> Iterator[bool]:
        """Has the ranks in the body if they are free, which it gives; else they are with somebody else."""
        mine = _Turn(what)
        with self._lock:
            is_free = not self._queue
            if is_free:
                self._queue.append(mine)
        try:
            yield is_free
        finally:
            self._leave(mine)

    def _join(self, turn: _Turn) -> str:
        """What the ranks are busy with, empty if they are free: later that may be the turn itself."""
        with self._lock:
            self._queue.append(turn)
            self._queue[0].is_mine.set()
            return "" if self._queue[0] is turn else self._queue[0].what

    def _leave(self, turn: _Turn) -> None:
        with self._lock:
            if turn in self._queue:
                self._queue.remove(turn)
            if self._queue:
                self._queue[0].is_mine.set()

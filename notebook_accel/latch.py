"""An event that happens once, and that an interrupt of the kernel can't break."""

from __future__ import annotations

import collections
import contextlib
import threading

__all__ = ["Latch"]


class Latch:
    """What ``threading.Event`` is, without going back, for what the kernel's main thread waits for.

    An event of the standard library takes its lock in Python code. A KeyboardInterrupt that comes when it is taken and
    not yet in the care of a ``with`` leaves it taken for good: whoever sets the event then, such as the thread that
    ends a run, waits for ever. Here each waiter has a lock of its own, and nobody waits for a waiter's.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: collections.deque[threading.Lock] = collections.deque()

    @property
    def is_set(self) -> bool:
        """True if it has happened."""
        return self._is_set

    def set(self) -> None:
        """It has happened. Again, and from several threads at once, does no harm."""
        self._is_set = True  # first: who comes now sees it, and who came before is in the queue
        with contextlib.suppress(IndexError):
            while True:
                self._waiters.popleft().release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has happened; returns whether it has.

        Args:
            timeout_s: How long; ``None``: until then, however long that takes.
        """
        if self._is_set:
            return True
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        if not self._is_set:
            waiter.acquire(timeout=-1 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        if not self._is_set:
            with contextlib.suppress(ValueError, IndexError):  # it has just happened
                self._waiters.remove(waiter)
        return self._is_set

"""The kernel's queue of requests that wait until the ranks of a session are free."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator

from notebook_accel.launching.kernel.job import Status
from notebook_accel.uninterruptible import Latch

_POLL_PERIOD_S = 0.1


@dataclasses.dataclass(eq=False)
class _Turn:
    """The turn of a request."""

    title: str  # the request in words
    has_come: Latch = dataclasses.field(default_factory=Latch)


class RequestQueue:
    """Gives the ranks to one request at a time, in order of arrival.

    Each request waits in its own thread, with interrupts held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: list[_Turn] = []  # first that of the request that has the ranks

    @property
    def titles(self) -> list[str]:
        """The requests in words: first the one that has the ranks, then those that wait."""
        return [turn.title for turn in list(self._queue)]

    @contextlib.contextmanager
    def turn(
        self,
        title: str,
        check: Callable[[], None] = lambda: None,
        *,
        on_status: Callable[[Status], object] | None = None,
    ) -> Iterator[None]:
        """Wait until the ranks are free, and reserve them for the body.

        ``check`` is called repeatedly during the wait; an exception that it raises ends only the wait. ``on_status`` is
        called with ``waiting`` if the request must wait; without ``on_status``, a message names the request in front.
        """
        mine = _Turn(title)
        try:
            busy_with = self._join(mine)
            if busy_with and on_status is not None:
                on_status("waiting")
            elif busy_with:
                sys.stderr.write(f"[{title} waits until {busy_with} has ended; an interrupt ends only the waiting]\n")
            while not mine.has_come.is_set:
                check()
                mine.has_come.wait(_POLL_PERIOD_S)
            yield
        finally:
            self._leave(mine)

    @contextlib.contextmanager
    def if_free(self, title: str) -> Iterator[bool]:
        """Reserve the ranks for the body if they are free now. Yield whether they are."""
        mine = _Turn(title)
        with self._lock:
            is_free = not self._queue
            if is_free:
                self._queue.append(mine)
        try:
            yield is_free
        finally:
            self._leave(mine)

    def _join(self, turn: _Turn) -> str:
        """Join the queue. Return the title of the request that has the ranks; empty if they were free."""
        with self._lock:
            self._queue.append(turn)
            first = self._queue[0]
            first.has_come.set()
            return "" if first is turn else first.title  # read under the lock: soon the caller itself may be first

    def _leave(self, turn: _Turn) -> None:
        with self._lock:
            if turn in self._queue:
                self._queue.remove(turn)
            if self._queue:
                self._queue[0].has_come.set()

"""The kernel's interrupts during a session's requests: noted first, and raised only where that does no harm.

Python raises KeyboardInterrupt in the main thread between any two bytecodes: in a ``finally`` that frees the ranks, in
the handling of the first interrupt, in the standard library's locks. So during a request the signal's handler raises
nothing, and loops that wait check whether an interrupt has arrived.
"""

from __future__ import annotations

import collections
import contextlib
import math
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator

__all__ = ["Interrupts", "held"]

_SAME_CLICK_S = 0.5  # a double click counts once: a second interrupt would kill ranks that are about to end


class Interrupts:
    """Interrupts of the main thread in the body of a ``held``. In other threads none arrive."""

    def __init__(self) -> None:
        self._noted: collections.deque[BaseException] = collections.deque()
        self._take: Callable[[BaseException], None] = self._noted.append
        self._last: BaseException | None = None
        self._is_open = False
        self._since_s = -math.inf  # time of the last one that counted
        self._handler: signal._HANDLER = None

    def check(self) -> None:
        """Raise the pending interrupt, if there is one. For loops that may wait for long."""
        if self._noted:
            raise self._noted.popleft()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let an interrupt be raised in the body: for user code, which may never end."""
        self.check()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    @contextlib.contextmanager
    def taken_by(self, take: Callable[[BaseException], None]) -> Iterator[None]:
        """Hand the body's interrupts to ``take``, which may be called in the middle of anything."""
        before, self._take = self._take, take
        try:
            while self._noted:  # one that arrived just before
                take(self._noted.popleft())
            yield
        finally:
            self._take = before

    def end(self) -> None:
        """Raise the interrupt that has arrived, even one that was taken. Called if nothing else was raised."""
        if self._last is not None:
            raise self._last

    def heeded(self) -> None:
        """Forget the interrupts that were taken: they have had their effect."""
        self._last = None

    @property
    def have_come(self) -> bool:
        """True if an interrupt is pending that nobody has taken."""
        return bool(self._noted)

    def hold(self) -> None:
        """Install the handler, in the main thread and if an interrupt would be raised there."""
        if threading.current_thread() is threading.main_thread() and callable(handler := _present()):
            self._handler = handler
            signal.signal(signal.SIGINT, self._come)

    def release(self) -> None:
        """Restore the handler that was there before."""
        if self._handler is not None and _present() == self._come:
            signal.signal(signal.SIGINT, self._handler)

    def _come(self, number: int, frame: types.FrameType | None) -> None:
        """Note an interrupt, as the signal's handler. A second one may arrive in the middle of it."""
        is_open, self._is_open = self._is_open, False  # the next one would strike the cleanup after this one
        assert callable(self._handler)
        try:
            self._handler(number, frame)
        except BaseException as interrupt:
            now_s = time.monotonic()
            if now_s - self._since_s >= _SAME_CLICK_S:
                self._since_s = now_s
                if is_open:
                    raise
                self._last = interrupt
                self._take(interrupt)
        self._is_open = is_open


def _present() -> signal._HANDLER:
    return signal.getsignal(signal.SIGINT)


@contextlib.contextmanager
def held() -> Iterator[Interrupts]:
    """Hold back the kernel's interrupts in the body. Raise a pending one at its end, if nothing else is raised."""
    owner = getattr(_present(), "__self__", None)
    if isinstance(owner, Interrupts) and threading.current_thread() is threading.main_thread():
        yield owner
        return
    interrupts = Interrupts()
    interrupts.hold()
    try:
        yield interrupts
    finally:
        interrupts.release()
    interrupts.end()

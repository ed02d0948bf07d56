"""The kernel's interrupts while a session is at work: they are noted, and raised only where that does no harm.

Python raises KeyboardInterrupt in the main thread between any two steps: in a ``finally`` that gives the ranks back, in
the handling of the first interrupt, in the locks of the standard library. So as long as something is asked of ranks
the signal's handler is one that raises nothing, and who waits looks whether an interrupt has come.
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

_SAME_CLICK_S = 0.5  # who clicks twice means it once; a second interrupt would kill ranks that are about to end


class Interrupts:
    """Those that come in the main thread in the body of a ``held``. In other threads none come."""

    def __init__(self) -> None:
        self._noted: collections.deque[BaseException] = collections.deque()
        self._take: Callable[[BaseException], None] = self._noted.append
        self._last: BaseException | None = None
        self._is_open = False
        self._since_s = -math.inf  # when the last one came that counted
        self._handler: signal._HANDLER = None

    def check(self) -> None:
        """Raises the interrupt that has come, if one has. For who waits for something that may take a while."""
        if self._noted:
            raise self._noted.popleft()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Lets an interrupt be raised in the body: for what runs the user's code, which may never end."""
        self.check()
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    @contextlib.contextmanager
    def taken_by(self, take: Callable[[BaseException], None]) -> Iterator[None]:
        """Gives the interrupts to somebody who heeds them by himself in the body, in the middle of anything."""
        before, self._take = self._take, take
        try:
            while self._noted:  # it came just before
                take(self._noted.popleft())
            yield
        finally:
            self._take = before

    def end(self) -> None:
        """Nothing else has been raised by the end. Raises the interrupt that has come, whoever has taken it."""
        if self._last is not None:
            raise self._last

    def heeded(self) -> None:
        """Those that were taken have done what they were meant for: they are not raised any more."""
        self._last = None

    @property
    def have_come(self) -> bool:
        """True if there is one that nobody has taken."""
        return bool(self._noted)

    def hold(self) -> None:
        """Puts the handler in place, if this is the main thread and an interrupt would be raised in it."""
        if threading.current_thread() is threading.main_thread() and callable(handler := _present()):
            self._handler = handler
            signal.signal(signal.SIGINT, self._come)

    def release(self) -> None:
        """Takes it away."""
        if self._handler is not None and _present() == self._come:
            signal.signal(signal.SIGINT, self._handler)

    def _come(self, number: int, frame: types.FrameType | None) -> None:
        """The handler. A second interrupt may come in the middle of it."""
        is_open, self._is_open = self._is_open, False  # the next one finds somebody who tidies up after this one
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
    """Holds back the kernel's interrupts in the body; if one has come, it is raised at the end, if nothing else is."""
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

"""Interrupts during a session's requests: they are noted first, and raised only where that does no harm.

Python raises KeyboardInterrupt in the main thread between any two bytecodes: in a ``finally`` that frees the ranks, in
the handling of the first interrupt, in the standard library's locks. So during a request the signal's handler raises
nothing, and loops that wait check for a noted interrupt. A cell in the background is interrupted in the same way, by
its handle instead of a signal.
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

_SAME_CLICK_S = 0.5  # a double click counts once: a second interrupt would kill ranks that are about to end
_of_thread = threading.local()


class Interrupts:
    """The interrupts in the body of a ``held``: the kernel's, in the main thread, and those that ``note`` adds."""

    def __init__(self) -> None:
        self._pending: collections.deque[BaseException] = collections.deque()
        self._wake: Callable[[], object] = lambda: None
        self._last: BaseException | None = None  # the kernel's
        self._is_allowed = False
        self._since_s = -math.inf  # time of the last one that counted
        self._handler: signal._HANDLER = None
        self._is_closed = False
        self._lock = threading.Lock()  # never taken by a signal handler

    @property
    def has_pending(self) -> bool:
        """True if an interrupt has arrived that nobody has taken."""
        return bool(self._pending)

    def note(self, interrupt: BaseException) -> None:
        """Note an interrupt. Any thread may call this, and a signal handler in the middle of anything."""
        self._pending.append(interrupt)
        self._wake()

    def note_unless_closed(self, interrupt: BaseException) -> None:
        """Note another thread's interrupt, unless the code for which it is meant has ended."""
        with self._lock:
            if not self._is_closed:
                self.note(interrupt)

    def close(self) -> None:
        """Drop what other threads have noted, and take no more: the code for which it was meant has ended."""
        with self._lock:
            if self._handler is None:  # the kernel's interrupts stay
                self._is_closed = True
                self._pending.clear()

    def take(self) -> BaseException | None:
        """Return the next pending interrupt, for a loop that acts on it; ``None`` if there is none."""
        return self._pending.popleft() if self._pending else None

    def check(self) -> None:
        """Raise the pending interrupt, if there is one. For loops that may wait for long."""
        interrupt = self.take()
        if interrupt is not None:
            raise interrupt

    @contextlib.contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Call ``wake`` for each interrupt that is noted during the body, so that its loop takes it at once."""
        before, self._wake = self._wake, wake
        try:
            yield
        finally:
            self._wake = before

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let the kernel's interrupt be raised in the body: for user code, which may never end."""
        self.check()
        self._is_allowed = True
        try:
            yield
        finally:
            self._is_allowed = False

    def forget_taken(self) -> None:
        """Forget the interrupts that were taken: they have had their effect."""
        self._last = None

    def hold(self) -> None:
        """Hold back this thread's interrupts; the kernel's only where it would raise one."""
        if threading.current_thread() is not threading.main_thread():
            _of_thread.interrupts = self
        elif callable(handler := _handler_now()):
            self._handler = handler
            signal.signal(signal.SIGINT, self._arrive)

    def release(self) -> None:
        """Restore what was there before."""
        if threading.current_thread() is not threading.main_thread():
            _of_thread.interrupts = None
        elif self._handler is not None and _handler_now() == self._arrive:
            signal.signal(signal.SIGINT, self._handler)

    def end(self) -> None:
        """Raise the kernel's interrupt, even one that was taken. Called if nothing else was raised."""
        if self._last is not None:
            raise self._last

    def _arrive(self, number: int, frame: types.FrameType | None) -> None:
        """Note an interrupt, as the signal's handler. A second one may arrive in the middle of it."""
        is_allowed, self._is_allowed = self._is_allowed, False  # the next one would break the cleanup after this one
        assert callable(self._handler)
        try:
            self._handler(number, frame)
        except BaseException as interrupt:
            now_s = time.monotonic()
            if now_s - self._since_s >= _SAME_CLICK_S:
                self._since_s = now_s
                if is_allowed:
                    raise
                self._last = interrupt
                self.note(interrupt)
        self._is_allowed = is_allowed


def _handler_now() -> signal._HANDLER:
    return signal.getsignal(signal.SIGINT)


def _of_this_thread() -> Interrupts | None:
    if threading.current_thread() is not threading.main_thread():
        return getattr(_of_thread, "interrupts", None)
    owner = getattr(_handler_now(), "__self__", None)
    return owner if isinstance(owner, Interrupts) else None


@contextlib.contextmanager
def held(interrupts: Interrupts | None = None) -> Iterator[Interrupts]:
    """Hold back this thread's interrupts in the body. Raise the kernel's at its end, if nothing else is raised.

    ``interrupts`` notes them; by default that of the enclosing ``held``, or a new one.
    """
    owner = _of_this_thread()
    if owner is not None:
        yield owner
        return
    interrupts = interrupts or Interrupts()
    interrupts.hold()
    try:
        yield interrupts
    finally:
        interrupts.release()
    interrupts.end()

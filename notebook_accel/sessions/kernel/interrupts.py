"""Interrupts in the kernel during a session's requests: queued first, and raised only where they do no harm.

Python raises KeyboardInterrupt in the main thread between any two bytecodes: in a ``finally`` that frees the ranks, in
the handling of the first interrupt, in the standard library's locks. So during a request the signal handler only queues
the interrupt, and waiting loops check the queue. A background cell is interrupted in the same way, by its handle
instead of a signal.
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

_SAME_CLICK_S = 0.5  # a double click counts as one interrupt: a second would kill ranks that are about to end
_of_thread = threading.local()


class Interrupts:
    """The queued interrupts in the body of ``held``: the kernel's, in the main thread, and those of ``add``."""

    def __init__(self) -> None:
        self._pending: collections.deque[BaseException] = collections.deque()
        self._wake: Callable[[], object] = lambda: None
        self._last: BaseException | None = None  # the kernel's last interrupt
        self._is_allowed = False
        self._since_s = -math.inf  # time of the last interrupt that counted
        self._handler: signal._HANDLER = None
        self._is_closed = False
        self._lock = threading.Lock()  # never taken by a signal handler

    @property
    def has_pending(self) -> bool:
        """True if an interrupt is queued."""
        return bool(self._pending)

    def add(self, interrupt: BaseException) -> None:
        """Queue an interrupt. Any thread may call this, and a signal handler at any moment."""
        self._pending.append(interrupt)
        self._wake()

    def add_unless_closed(self, interrupt: BaseException) -> None:
        """Queue another thread's interrupt, unless the code that it is meant for has ended."""
        with self._lock:
            if not self._is_closed:
                self.add(interrupt)

    def close(self) -> None:
        """Drop interrupts from other threads, and accept no more: the code that they are meant for has ended."""
        with self._lock:
            if self._handler is None:  # the kernel's interrupts stay
                self._is_closed = True
                self._pending.clear()

    def take(self) -> BaseException | None:
        """Remove and return the next queued interrupt, for a loop that acts on it; ``None`` if there is none."""
        return self._pending.popleft() if self._pending else None

    def check(self) -> None:
        """Raise the next queued interrupt, if there is one. For loops that may wait for long."""
        interrupt = self.take()
        if interrupt is not None:
            raise interrupt

    @contextlib.contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Call ``wake`` for each interrupt that is queued during the body, so that its loop reacts at once."""
        before, self._wake = self._wake, wake
        try:
            yield
        finally:
            self._wake = before

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Let the kernel's interrupt be raised in the body. For user code, which may never end."""
        self.check()
        self._is_allowed = True
        try:
            yield
        finally:
            self._is_allowed = False

    def forget_taken(self) -> None:
        """Forget the kernel's last interrupt, which has had its effect, so that ``end`` doesn't raise it."""
        self._last = None

    @contextlib.contextmanager
    def holding(self) -> Iterator[Interrupts]:
        """Hold back this thread's interrupts in the body. See ``held``."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main:
            _of_thread.interrupts = self
        elif callable(handler := _handler_now()):
            self._handler = handler
            signal.signal(signal.SIGINT, self._arrive)
        try:
            yield self
        finally:
            if not is_main:
                _of_thread.interrupts = None
            elif self._handler is not None and _handler_now() == self._arrive:
                signal.signal(signal.SIGINT, self._handler)
        if self._last is not None:  # even if it was taken
            raise self._last

    def _arrive(self, number: int, frame: types.FrameType | None) -> None:
        """Handle SIGINT: queue the interrupt, or raise it where ``allowed``. A second one may arrive in the middle."""
        is_allowed, self._is_allowed = self._is_allowed, False  # a further interrupt must not break the cleanup
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
                self.add(interrupt)
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
    """Hold back this thread's interrupts in the body. At its end raise the kernel's, if nothing else is raised.

    The interrupts are queued in ``interrupts``, by default a new object. Inside another ``held``, its object is used.
    """
    owner = _of_this_thread()
    if owner is not None:
        yield owner
        return
    with (interrupts or Interrupts()).holding() as owner:
        yield owner

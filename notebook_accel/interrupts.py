"""Interrupts of the kernel: held back where they would do harm, and looked at at named points.

Python raises KeyboardInterrupt in the main thread between any two bytecodes: in a ``finally`` that frees the ranks,
between the start of a run and the assignment of its job, in the standard library's locks. So what must not break runs
in ``held``: there the signal handler only queues the interrupt. Code that may take long in there, such as the user's
own or a wait, runs in ``allowed``, where the interrupt is raised at once; loops that act on interrupts themselves take
them from the queue.

A background cell of a session is interrupted in the same way, by its handle instead of a signal.
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
from typing import Any

_SAME_CLICK_S = 0.5  # a double click counts as one interrupt: a second would kill ranks that are about to end
_of_thread = threading.local()


class Latch:
    """A ``threading.Event`` that is set once, for waits of the kernel's main thread outside ``held`` or in ``allowed``.

    The standard library's event acquires its lock in Python code. A KeyboardInterrupt between that and the ``with``
    block leaves the lock acquired for good, and a thread that sets the event then waits for ever. Here each waiter has
    a lock of its own, and nobody else waits for it.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: collections.deque[threading.Lock] = collections.deque()

    @property
    def is_set(self) -> bool:
        """True once the latch is set."""
        return self._is_set

    def set(self) -> None:
        """Set the latch. It may be set repeatedly, and from several threads at once."""
        self._is_set = True  # first: later waiters see it, and earlier ones are in the queue
        with contextlib.suppress(IndexError):
            while True:
                self._waiters.popleft().release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the latch is set, or for ``timeout_s``, and return whether it is set."""
        if self._is_set:
            return True
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        if not self._is_set:
            waiter.acquire(timeout=-1 if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        if not self._is_set:
            with contextlib.suppress(ValueError, IndexError):  # the latch has been set just now
                self._waiters.remove(waiter)
        return self._is_set


class Interrupts:
    """The queued interrupts in the body of ``held``: the kernel's, in the main thread, and those of ``add``."""

    def __init__(self) -> None:
        self._pending: collections.deque[BaseException] = collections.deque()
        self._wake: Callable[[], object] = lambda: None
        self._last: BaseException | None = None  # the kernel's last interrupt
        self._is_allowed = False
        self._since_s = -math.inf  # time of the last interrupt that counted
        self._is_of_kernel = False  # they are held in the main thread, which gets signals
        self._handler: Callable[[int, types.FrameType | None], Any] = signal.default_int_handler
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
            if not self._is_of_kernel:  # the kernel's interrupts stay
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
        """Let the kernel's interrupt be raised in the body. For user code and waits, which may never end."""
        with self._allowing(True):
            self.check()
            yield

    def held_again(self) -> contextlib.AbstractContextManager[None]:
        """Hold back interrupts in the body, also inside ``allowed``, which raises them at this end."""
        return self._allowing(False)

    @contextlib.contextmanager
    def _allowing(self, is_allowed: bool) -> Iterator[None]:
        before, self._is_allowed = self._is_allowed, is_allowed
        try:
            yield
        finally:
            self._is_allowed = before
        if before:
            self.check()

    def forget_taken(self) -> None:
        """Forget the kernel's last interrupt, which has had its effect, so that ``held`` doesn't raise it."""
        self._last = None

    @contextlib.contextmanager
    def holding(self) -> Iterator[Interrupts]:
        """Hold back this thread's interrupts in the body. See ``held``."""
        self._is_of_kernel = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT) if self._is_of_kernel else None
        try:
            _of_thread.interrupts = self
            if callable(before):
                self._handler = before
                signal.signal(signal.SIGINT, self.arrive)
            yield self
        finally:
            _of_thread.interrupts = None  # first: nothing can be raised before the next statement
            if callable(before) and signal.getsignal(signal.SIGINT) == self.arrive:
                signal.signal(signal.SIGINT, before)
        if self._last is not None:  # even if it was taken
            raise self._last

    def arrive(self, number: int, frame: types.FrameType | None) -> None:
        """Handle SIGINT: queue the interrupt, or raise it where ``allowed``. A second one may arrive in the middle."""
        is_allowed, self._is_allowed = self._is_allowed, False  # a further interrupt must not break the cleanup
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


def _of_this_thread() -> Interrupts | None:
    return getattr(_of_thread, "interrupts", None)


@contextlib.contextmanager
def held(interrupts: Interrupts | None = None) -> Iterator[Interrupts]:
    """Hold back this thread's interrupts in the body. At its end raise the kernel's, if nothing else is raised.

    The interrupts are queued in ``interrupts``, by default a new object. Inside another ``held``, its object is used,
    and raises nothing at this end, unless the other one allows interrupts there.
    """
    owner = _of_this_thread()
    if owner is None:
        with (interrupts or Interrupts()).holding() as owner:
            yield owner
    else:
        with owner.held_again():
            yield owner


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Let this thread's interrupts be raised in the body, also inside ``held``."""
    owner = _of_this_thread()
    with contextlib.nullcontext() if owner is None else owner.allowed():
        yield


def check() -> None:
    """Raise an interrupt that this thread's ``held`` has queued, if there is one. For loops that may wait for long."""
    owner = _of_this_thread()
    if owner is not None:
        owner.check()


def interrupt() -> None:
    """Do in the handler of another signal what SIGINT does: raise KeyboardInterrupt, or queue it inside ``held``."""
    owner = _of_this_thread()
    (signal.default_int_handler if owner is None else owner.arrive)(signal.SIGINT, None)

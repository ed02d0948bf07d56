"""Actions and waits that an interrupt of the kernel can't break."""

from __future__ import annotations

import _thread
import collections
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar


class Latch:
    """A ``threading.Event`` that is set once, for waits of the kernel's main thread.

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


_T = TypeVar("_T")
_PATIENCE_S = 10.0


def call(
    act: Callable[[], _T], undo: Callable[[_T], Any] = lambda _: None, caller_lock: threading.Lock | None = None
) -> _T:
    """Run an action in a thread, where no KeyboardInterrupt is raised, and wait for its end.

    Args:
        act: The action.
        undo: Function that undoes the action's result after an interrupt, since the caller doesn't get the result then.
        caller_lock: A lock that the caller holds, by ``with``, while it uses the result. Once the lock is free, the
            result is undone too. An interrupt can come between any two steps of the caller, even while it handles an
            earlier one; but no exception leaves the block without releasing the lock.

    Raises:
        KeyboardInterrupt: An interrupt has come. The action is undone, now or as soon as it is done.
        Exception: The error that ``act`` raised.
    """
    context = contextvars.copy_context()  # has the cell to which printed output belongs
    is_over, lock = Latch(), threading.Lock()
    is_abandoned = False
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result = context.run(act)
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            errors.append(error)
            is_over.set()
            return
        with lock:
            is_wanted = not is_abandoned
            if is_wanted:
                results.append(result)
        if is_wanted:
            is_over.set()
            if caller_lock is None:
                return
            with caller_lock:
                pass
        undo(result)
        is_over.set()

    try:
        # Not threading.Thread, whose start() and join() an interrupt can break.
        _thread.start_new_thread(run, ())
        is_over.wait()
    except BaseException:
        with lock:
            is_abandoned = True
        for result in results:
            undo(result)
        is_over.wait(_PATIENCE_S)
        raise
    for error in errors:
        raise error
    [result] = results
    return result

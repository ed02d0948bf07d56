"""SIGINT in a rank: it raises KeyboardInterrupt in the user's code only, also where that waits for other ranks.

Before the user's code SIGINT is blocked, and after it deferred, so that none is lost.

A rank that waits for others in C++ code doesn't return to Python for a signal. So a watcher thread, the one that ends
a launched rank's waits for whatever reason, is woken by every SIGINT too (``signal.set_wakeup_fd``). If the main thread
still sleeps in the same call a moment later, the watcher shuts down this rank's connections to other ranks. That ends
the call with an error, and KeyboardInterrupt can be raised. Those connections were recorded when process groups were
made. The user's connections, to a database for example, stay, and so do those to the store, unless the rank waits for
the store.

A rank that waits for a GPU, which in turn waits for other ranks in NCCL, may use its CPU meanwhile. So if the main
thread is in the same call after a longer while, the watcher aborts NCCL's communicators where that is safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from notebook_accel import nccl
from notebook_accel.launching import processes
from notebook_accel.peer_sockets import PeerSockets

_PATIENCE_S = 0.2
_POLL_S = 0.05
_DEVICE_PATIENCE_S = 1.0
_LOOK_PERIOD_S = 1.0

_deferred_s: float | None = None  # when a SIGINT was deferred last
_allowances = 0  # how often ``allow`` was called: an interrupt of one cell is not for the next
_wakeups = -1  # descriptor with a byte for each signal, read without waiting
_look: Callable[[], None] | None = None  # the watcher calls it about once a second
_peers: PeerSockets | None = None  # this rank's connections to other ranks
_signal_lock = threading.Lock()  # held from reading a signal until the main thread's place is known


def block() -> None:
    """Block SIGINT in this thread and its forks until ``allow``. It stays pending although the template ignores it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def allow() -> None:
    """Allow SIGINT to raise KeyboardInterrupt in the main thread; raise it here if a SIGINT has come before.

    Raises:
        KeyboardInterrupt: A SIGINT was blocked or deferred.
    """
    global _deferred_s, _allowances
    _allowances += 1
    with _signal_lock:  # an earlier signal is raised here; the watcher must not apply it to the code that comes next
        _read_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if _deferred_s is not None:
        _deferred_s = None
        raise KeyboardInterrupt


def defer() -> None:
    """Make SIGINT raise nothing until ``allow``."""
    while signal.getsignal(signal.SIGINT) is not _on_sigint:
        with contextlib.suppress(KeyboardInterrupt):  # a SIGINT may come until the last moment
            signal.signal(signal.SIGINT, _on_sigint)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Defer SIGINT in the body, and raise it afterwards if SIGINT was allowed before.

    Raises:
        KeyboardInterrupt: A SIGINT has come, in the body or just before it.
    """
    if signal.signal(signal.SIGINT, _on_sigint) is _on_sigint:
        yield
        return
    try:
        yield
    finally:
        allow()


def discard_deferred(before_s: float) -> bool:
    """Discard a SIGINT that was deferred before this ``time.monotonic()``: it was meant for code that has ended.

    Returns whether there was one.
    """
    global _deferred_s
    was_late = _deferred_s is not None and _deferred_s < before_s
    if was_late:
        _deferred_s = None
    return was_late


def _on_sigint(*_: object) -> None:
    global _deferred_s
    _deferred_s = time.monotonic()


def prefer_interrupt(error: BaseException) -> BaseException:
    """Return the error that has ended the user's code, or the interrupt that caused it.

    An interrupt is the cause if it was pending when C++ code failed, or if a library exits because of it, as Lightning
    does.
    """
    try:
        defer()
    except KeyboardInterrupt as interrupt:
        defer()
        return interrupt.with_traceback(error.__traceback__)
    if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
        return error.__context__
    return error


def watch(store_port: int) -> None:
    """Start the watcher, which ends waits for other ranks at an interrupt. Called once, in the main thread."""
    global _wakeups, _peers
    _peers = PeerSockets(store_port)
    _wakeups, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a worker's signals are not this rank's
    threading.Thread(target=_watch, name="notebook-accel-interruption", daemon=True).start()
    _record_connections(_peers)
    _raise_promptly()
    _raise_again_what_python_ignores()


def look_each_second(look: Callable[[], None]) -> None:
    """Make the watcher call a function about once a second from now on, or as soon as it is started."""
    global _look
    _look = look


def _raise_again_what_python_ignores() -> None:
    """Raise an interrupt again that came in a finalizer or a callback, whose exceptions Python prints and ignores.

    Otherwise the rank would go on until it is killed.
    """
    rank_pid, report = os.getpid(), sys.unraisablehook

    def interrupt_again(allowance: int) -> None:
        time.sleep(_POLL_S)  # until the finalizer has returned
        if allowance == _allowances and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            os.kill(rank_pid, signal.SIGINT)

    def hook(unraisable: Any) -> None:
        if os.getpid() == rank_pid and issubclass(unraisable.exc_type, KeyboardInterrupt):
            # Not in the watcher's thread, which may wait for a main thread that computes.
            threading.Thread(target=interrupt_again, args=(_allowances,), daemon=True).start()
        else:
            report(unraisable)

    sys.unraisablehook = hook


def _read_signals() -> bytes:
    """Return the numbers of the signals that have come since the last call."""
    with contextlib.suppress(OSError):  # there are no signals, or there is no watcher
        return os.read(_wakeups, 4096)
    return b""


def disconnect(*, is_of_store: bool) -> None:
    """Shut down this rank's connections to other ranks, or to the store, so that calls that wait on them raise."""
    if _peers is not None:
        (_peers.shut_down_store if is_of_store else _peers.shut_down)()


def _watch() -> None:
    """Run the watcher: end a wait for each SIGINT, and look once a second if there is something to look at."""
    wakeups = select.poll()
    wakeups.register(_wakeups, select.POLLIN)
    looked_s = time.monotonic()
    while True:
        if wakeups.poll(1000 * _LOOK_PERIOD_S):
            _end_waits()
        if _look is not None and time.monotonic() - looked_s >= _LOOK_PERIOD_S:  # also if signals come all the time
            _look()
            looked_s = time.monotonic()


def _end_waits() -> None:
    """If a SIGINT has come, end first the connections to other ranks, then those to the store."""
    with _signal_lock:
        signals = _read_signals()
        _run_handlers()
        if signal.SIGINT not in signals:
            return
        waiting = _Wait()
    if nccl.can_abort() and waiting.stays(_DEVICE_PATIENCE_S):
        nccl.abort()
    assert _peers is not None
    for shut_down in (_peers.shut_down, _peers.shut_down_store):
        if not waiting.goes_on():
            break
        shut_down(waiting.is_in_the_same_call)  # it may end meanwhile, and the connections be those of a new group


def _run_handlers() -> None:
    """Make the main thread run the handlers of the signals that have come.

    Usually the interpreter does. But in a fork of a thread that wasn't the main one, Python 3.13 and later notifies the
    thread that was the main one before the fork.
    """
    ctypes.pythonapi.Py_AddPendingCall(ctypes.cast(ctypes.pythonapi.PyErr_CheckSignals, ctypes.c_void_p), None)


class _Wait:
    """The call that the main thread was in when the signal came."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._frame = self._current()
        self._instruction = self._frame.f_lasti if self._frame else -1

    def goes_on(self) -> bool:
        """Return whether the main thread sleeps in that call after a moment. Wait while the thread computes."""
        while self.stays(_PATIENCE_S):
            if processes.state(os.getpid()) in {"S", "D"}:  # a process's state is that of its main thread
                return True
        return False

    def stays(self, patience_s: float) -> bool:
        """Return whether the main thread stays in that call for ``patience_s``."""
        deadline_s = time.monotonic() + patience_s
        while self.is_in_the_same_call():
            if time.monotonic() > deadline_s:
                return True
            time.sleep(_POLL_S)
        return False

    def is_in_the_same_call(self) -> bool:
        """Return whether the main thread is still in that call."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False  # the user's own handler decides, once the call has ended
        frame = self._current()
        return frame is self._frame and frame is not None and frame.f_lasti == self._instruction

    def _current(self) -> Any:
        return sys._current_frames().get(self._main or 0)


def _record_connections(peers: PeerSockets) -> None:
    """Record the connections of every process group that is made."""
    module = importlib.import_module("torch.distributed.distributed_c10d")
    make = module._new_process_group_helper

    @functools.wraps(make)
    def make_recorded(*args: Any, **kwargs: Any) -> Any:
        with peers.opened_inside():
            return make(*args, **kwargs)

    module._new_process_group_helper = make_recorded  # type: ignore[attr-defined]


def _raise_promptly() -> None:
    """Make torch's waits raise KeyboardInterrupt where they end, instead of later, in the user's ``finally``.

    Python raises it when the main thread next calls or loops in Python. Most of torch's functions do so when a
    collective has failed, but the functions that are wrapped here would raise the error directly in the user's code.
    """
    distributed = importlib.import_module("torch.distributed")
    for owner, names in (
        (importlib.import_module("torch.autograd"), ("backward",)),
        (distributed.Work, ("wait",)),
        (distributed.Store, ("get", "wait")),
    ):
        for name in names:
            setattr(owner, name, _prompt(getattr(owner, name)))


def _prompt(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError:
            _check_signals()
            raise

    return call


def _check_signals() -> None:
    """Do nothing. Python checks for signals when a function is called."""

"""SIGINT in a rank: raised as KeyboardInterrupt in the user's code, wherever that is, and nowhere else.

Before the user's code it is held back and after it only noted, so that one which comes in between isn't lost.

A rank that waits for others in C++ code doesn't return to Python for a signal. So a thread hears of every SIGINT too
(``signal.set_wakeup_fd``), and when the main thread still sleeps in the same call a moment later, it shuts down this
rank's connections to other ranks, which ends the call with an error; only then can KeyboardInterrupt be raised. Which
connections: those whose other end is held by a process with the same parent. So connections of the user's, to a
database for example, stay; and so do those to the store, unless the rank waits for that.

A rank that waits for a GPU, which in turn waits for other ranks in NCCL, may compute all the while. So NCCL's
communicators are aborted, where that can be done, if the main thread is in the same call after a longer while.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from notebook_accel.launching.ranks import nccl

__all__ = ["allow", "forget", "hold_back", "note_only", "only_noted", "settle", "watch"]

_PATIENCE_S = 0.2
_POLL_S = 0.05
_DEVICE_PATIENCE_S = 1.0
_ESTABLISHED = "01"  # as /proc/net/tcp has it; linux/tcp_states.h
_MAPPED = "0000000000000000FFFF0000"  # before an IPv4 address as /proc/net/tcp6 has it

_noted_s: float | None = None  # when a SIGINT was noted last
_wakeups = -1  # descriptor from which one hears of every SIGINT, without waiting
_hearing = threading.Lock()  # held from then until it is known where the main thread is


def hold_back() -> None:
    """Blocks SIGINT in this thread and what it forks: it waits, although the template ignores it, for ``allow``."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def allow() -> None:
    """From now on SIGINT raises KeyboardInterrupt in the main thread. One that has come before does so here.

    Raises:
        KeyboardInterrupt: A SIGINT was held back or noted.
    """
    global _noted_s
    with _hearing:  # what has come before is raised here, and the watcher would take it for the next code's
        _heard()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if _noted_s is not None:
        _noted_s = None
        raise KeyboardInterrupt


def note_only() -> None:
    """From now on SIGINT raises nothing, until ``allow``."""
    while signal.getsignal(signal.SIGINT) is not _note:
        with contextlib.suppress(KeyboardInterrupt):  # it may come until the last moment
            signal.signal(signal.SIGINT, _note)


@contextlib.contextmanager
def only_noted() -> Iterator[None]:
    """SIGINT raises nothing in the body; one that comes there is raised after it, if it would have been before.

    Raises:
        KeyboardInterrupt: A SIGINT has come, in the body or just before it.
    """
    if signal.signal(signal.SIGINT, _note) is _note:
        yield
        return
    try:
        yield
    finally:
        allow()


def forget(before_s: float) -> None:
    """A SIGINT that was noted before this time raises nothing any more: what it was meant for has ended.

    Args:
        before_s: In seconds of ``time.monotonic()``.
    """
    global _noted_s
    if _noted_s is not None and _noted_s < before_s:
        _noted_s = None


def _note(*_: object) -> None:
    global _noted_s
    _noted_s = time.monotonic()


def settle(error: BaseException) -> BaseException:
    """What the user's code has really ended by: an interrupt, if one was pending when a call of C++ code failed."""
    try:
        note_only()
    except KeyboardInterrupt as interrupt:
        note_only()
        return interrupt.with_traceback(error.__traceback__)
    return error


def watch(store_port: int) -> None:
    """Has waits for other ranks end at an interrupt, from now on. Called once, in the main thread.

    Args:
        store_port: Of the store through which ranks find each other.
    """
    global _wakeups
    _wakeups, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a worker's signals are not this rank's
    thread = threading.Thread(target=_end_waits, args=(store_port,), name="notebook-accel-interruption", daemon=True)
    thread.start()
    _raise_promptly()


def _heard() -> bytes:
    """The signals that have come since the last call."""
    with contextlib.suppress(OSError):  # there are none, or nobody watches
        return os.read(_wakeups, 4096)
    return b""


def _end_waits(store_port: int) -> None:
    """The thread: for each SIGINT, first the connections to other ranks, then those to the store."""
    news = select.poll()
    news.register(_wakeups, select.POLLIN)
    while True:
        news.poll()
        with _hearing:
            heard = _heard()
            _look_for_signals()
            if signal.SIGINT not in heard:
                continue
            waiting = _Wait()
        if nccl.can_abort() and waiting.stays(_DEVICE_PATIENCE_S):
            nccl.abort()
        for is_of_store in (False, True):
            if not waiting.goes_on():
                break
            for descriptor in _connections(store_port, is_of_store=is_of_store):
                # To look for them takes a while, in which the call may have ended, and they may be those of a group
                # that was made since.
                if waiting.is_in_the_same_call():
                    _shut_down(descriptor)
        del waiting


def _look_for_signals() -> None:
    """Have the main thread call the handlers of the signals that have come.

    It does so by itself, except in a fork of a thread that wasn't the main one on Python 3.13 or later: there the
    interpreter tells the thread that was the main one before the fork.
    """
    ctypes.pythonapi.Py_AddPendingCall(ctypes.cast(ctypes.pythonapi.PyErr_CheckSignals, ctypes.c_void_p), None)


class _Wait:
    """The main thread's place when the signal came."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._frame = self._current()
        self._instruction = self._frame.f_lasti if self._frame else -1

    def goes_on(self) -> bool:
        """Whether the main thread sleeps, after a moment, in the call that it was in. Waits while it computes."""
        time.sleep(_PATIENCE_S)
        while self.is_in_the_same_call():
            if _main_thread_sleeps():
                return True
            time.sleep(_POLL_S)
        return False

    def stays(self, patience_s: float) -> bool:
        """Return whether the main thread is in the call that it was in for so long."""
        deadline_s = time.monotonic() + patience_s
        while self.is_in_the_same_call():
            if time.monotonic() > deadline_s:
                return True
            time.sleep(_POLL_S)
        return False

    def is_in_the_same_call(self) -> bool:
        """Return whether the main thread is where it was."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False  # the user's own handler means something else by it, and is asked when the call has ended
        frame = self._current()
        return frame is self._frame and frame is not None and frame.f_lasti == self._instruction

    def _current(self) -> Any:
        return sys._current_frames().get(self._main or 0)


def _main_thread_sleeps() -> bool:
    with open("/proc/self/stat", "rb") as file:  # of a process, which is also that of its main thread
        return file.read().rpartition(b") ")[2][:1] in (b"S", b"D")


def _connections(store_port: int, *, is_of_store: bool) -> list[int]:
    """Descriptors of this process: its connections as a client of the store, or those to other ranks."""
    ends = _tcp_connections()
    inodes = {pair: inode for inode, pair in ends.items()}
    of_ranks = set() if is_of_store else {inode for pid in _other_ranks() for _, inode in _sockets(pid)}
    found = []
    for descriptor, inode in _sockets(os.getpid()):
        if inode not in ends:
            continue
        here, there = ends[inode]
        if is_of_store:
            wanted = _port(there) == store_port
        else:
            wanted = store_port not in (_port(here), _port(there)) and inodes.get((there, here)) in of_ranks
        if wanted:
            found.append(descriptor)
    return found


def _tcp_connections() -> dict[str, tuple[str, str]]:
    """The local and the remote address of every established connection of this network, by the socket's inode."""
    found = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{name}") as file:
            for row in map(str.split, file.readlines()[1:]):
                if row[3] == _ESTABLISHED:
                    found[row[9]] = (row[1].removeprefix(_MAPPED), row[2].removeprefix(_MAPPED))
    return found


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _other_ranks() -> Iterator[int]:
    """The processes with this one's parent."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            parent = int(file.read().rpartition(b") ")[2].split()[1])
            if parent == os.getppid() and pid != os.getpid():
                yield pid


def _sockets(pid: int) -> Iterator[tuple[int, str]]:
    """A process's descriptors of sockets, with their inodes."""
    with contextlib.suppress(OSError):  # it has just ended, or it is another user's
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield int(name), target[8:-1]


def _shut_down(descriptor: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _raise_promptly() -> None:
    """Has KeyboardInterrupt raised where a wait ends, not somewhat later, in the middle of the user's ``finally``.

    Python raises it when the main thread next calls or loops in Python. Most of torch's functions do so when a
    collective has failed; from these the error goes straight to the user's code.
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
            _let_it_be_raised()
            raise

    return call


def _let_it_be_raised() -> None:
    """Nothing: Python looks for signals when a function is called."""

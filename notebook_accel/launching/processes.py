"""A few Linux calls that the standard library doesn't have, and how our processes are told where to import from."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence

from notebook_accel import environment

__all__ = [
    "are_supported",
    "bootstrap",
    "die_with_parent",
    "end_with_parent",
    "kill_group",
    "resume_if_stopped",
    "state",
]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TRACKER = b"multiprocessing.resource_tracker"  # in its command line


def are_supported() -> bool:
    """Whether this system has the calls that processes are started and cleaned up with: Linux 5.3 or later."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


@functools.cache
def _libc() -> ctypes.CDLL:
    """Found once, in the template, instead of in each rank."""
    return ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Asks for a signal when the thread that started this process ends; ends now if it has ended already."""
    if _libc().prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def end_with_parent(parent_pid: int) -> None:
    """Ends this process by SystemExit, through every ``finally``, when its parent ends, or at SIGTERM.

    The signal asked for is SIGCONT, since any other but SIGKILL would wait for ever in a process that is stopped.
    """
    pid = os.getpid()

    def end_if_orphaned(*_: object) -> None:
        if os.getpid() == pid and os.getppid() != parent_pid:  # not in a fork of this process, which has other parents
            sys.exit(0)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGCONT, end_if_orphaned)
    die_with_parent(parent_pid, signal.SIGCONT)


def state(pid: int) -> str:
    """A process's state as ``ps`` shows it, ``T`` for one that is stopped; empty if it isn't there."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2][:1].decode()
    return ""


def resume_if_stopped(pid: int) -> None:
    """Lets a child that somebody has stopped with SIGSTOP go on: others wait for it."""
    if state(pid) == "T":
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def kill_group(leader_pid: int, *, has_tidied_up: bool = False) -> None:
    """Kills a process and its group, which it may not lead yet when it is very young.

    Its resource tracker, if multiprocessing has started one, is left: it removes what the others leave behind in shared
    memory, and ends when they have ended. Call it before the leader is reaped: until then nobody else can have its
    number.

    Args:
        leader_pid: The process.
        has_tidied_up: Whether it has ended by itself, in order, so that it left nothing. This is quicker.
    """
    killed: set[int] = set()
    trackers, others = ([], []) if has_tidied_up else _members(leader_pid)
    if not trackers:
        _kill(os.killpg, leader_pid, signal.SIGKILL)
        _kill(os.kill, leader_pid, signal.SIGKILL)
        return
    while new := set(others) - killed:  # until none has started another before it was killed
        for pid in new:
            _kill(os.kill, pid, signal.SIGKILL)
        killed |= new
        _, others = _members(leader_pid)
    for pid in trackers:
        _kill(os.kill, pid, signal.SIGCONT)


def _kill(kill: Callable[[int, int], None], pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        kill(pid, number)


def _members(group: int) -> tuple[list[int], list[int]]:
    """The living processes of a group: multiprocessing's resource trackers, and the others."""
    trackers: list[int] = []
    others: list[int] = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has just ended
            if os.getpgid(pid) == group and state(pid) not in ("Z", "X", ""):
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    (trackers if _TRACKER in file.read() else others).append(pid)
    return trackers, others


def bootstrap(module: str, *arguments: str, sys_path: Sequence[str] = ()) -> list[str]:
    """A command line that calls ``module.main(*arguments)`` in a new interpreter with this import path.

    Python puts the working directory in front, with ``-c`` and with ``-m``, and a ``random.py`` of the user's there
    would be ours. So nothing is imported but ``sys``, which is built in, before the import path is what it should be.
    """
    code = (
        "import sys; end = 2 + int(sys.argv[1]); sys.path[:] = sys.argv[2:end]; "
        "import importlib; importlib.import_module(sys.argv[end]).main(*sys.argv[end + 1:])"
    )
    path = list(sys_path or environment.import_path())
    return [sys.executable, "-c", code, str(len(path)), *path, module, *arguments]

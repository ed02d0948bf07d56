"""Linux calls that Python may lack, ending processes, and how our processes are told where to import from.

Python has ``os.pidfd_open`` and its like only if it was built with headers of a recent kernel. Conda's and uv's builds
were not, so what Python offers says nothing about the system: what it can do is found out by asking it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence

from notebook_accel import environment
from notebook_accel.payload import memory_files

__all__ = [
    "are_supported",
    "bootstrap",
    "close_all",
    "die_with_parent",
    "end_with_parent",
    "kill_group",
    "missing_call",
    "pidfd_open",
    "pidfd_send_signal",
    "resume_if_stopped",
    "state",
]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # the same numbers on every architecture that torch has packages for
_TRACKER = b"multiprocessing.resource_tracker"  # in its command line


def are_supported() -> bool:
    """Return whether this system has the calls that processes are started and cleaned up with."""
    return sys.platform == "linux" and not missing_call()


@functools.cache  # every launch asks
def missing_call() -> str:
    """Make each call once that launching can't do without.

    Returns:
        The first one that fails, with what the system says, such as ``pidfd_open (Function not implemented)``; empty if
        all work. An old kernel doesn't have them, and the sandbox of a container may forbid them.
    """
    opened: list[int] = []
    call = "memfd_create"
    try:
        opened.append(memory_files.memory_file("notebook-accel-probe"))
        memory_files.make_unwritable(opened[0])
        call = "pidfd_open"
        opened.append(pidfd_open(os.getpid()))
        call = "pidfd_send_signal"
        pidfd_send_signal(opened[1], 0)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # of which the launch itself speaks
            return f"{call} ({os.strerror(error.errno or 0)})"
    finally:
        close_all(opened)
    return ""


def pidfd_open(pid: int) -> int:
    """Return a descriptor that leads to a process, whatever becomes of its number.

    Raises:
        OSError: There is no such process, or no room for the descriptor.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _system_call(_PIDFD_OPEN, pid, 0)  # closed on exec, as all of these are


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """Send a signal to the process that ``pidfd_open`` was called for; 0 only looks whether one could be sent.

    Raises:
        OSError: It has ended.
    """
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(pidfd, number)
    else:
        _system_call(_PIDFD_SEND_SIGNAL, pidfd, number, None, 0)


def _system_call(number: int, *arguments: int | None) -> int:
    wide = [None if argument is None else ctypes.c_long(argument) for argument in arguments]
    result = int(_libc().syscall(ctypes.c_long(number), *wide))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors.

    An error says that what was written to a network's file may be lost. The descriptor is closed all the same, and
    those after it are to be.
    """
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


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
    """Ends this process by SystemExit, through every ``finally``, when its parent ends.

    The signal asked for is SIGCONT, since any other but SIGKILL would wait for ever in a process that is stopped.
    SIGTERM is ignored: a batch system such as Slurm sends it to all processes of a job at once, and ranks that save
    what they have need those above them until they are done.
    """
    pid = os.getpid()

    def end_if_orphaned(*_: object) -> None:
        if os.getpid() == pid and os.getppid() != parent_pid:  # not in a fork of this process, which has other parents
            sys.exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
        with contextlib.suppress(OSError):
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
    with contextlib.suppress(OSError):  # it has ended, or became another user's
        kill(pid, number)


def _members(group: int) -> tuple[list[int], list[int]]:
    """The living processes of a group: multiprocessing's resource trackers, and the others. None if nobody may look."""
    trackers: list[int] = []
    others: list[int] = []
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir("/proc")
    for pid in map(int, filter(str.isdigit, names)):
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

"""Process control on Linux, for all processes: system calls that Python may lack, kills, stacks, and starting our own.

Python has ``os.pidfd_open`` and its like only if it was built with a recent kernel's headers; conda's and uv's builds
were not. So we try the system calls themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import functools
import os
import pathlib
import select
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence

from notebook_accel import environment, torch_internals
from notebook_accel.payload import memory_files
from notebook_accel.protocol.channel import close_all

# The signals that ask a rank for its stacks: real-time signals, which no library uses. SIGUSR1 and SIGUSR2 belong to
# the user's code, which may handle them for a cluster's scheduler. A thread of the rank answers STACKS_REQUEST as soon
# as it gets the interpreter's lock. STACKS_SIGNAL, for ranks that don't answer, makes Python's fault handler answer
# without that lock, which can crash a process whose threads run Python code (seen with Python 3.11).
STACKS_REQUEST = getattr(signal, "SIGRTMIN", 34) + 8
STACKS_SIGNAL = getattr(signal, "SIGRTMIN", 34) + 7
STACKS_MARK = "# stacks\n"
"""The line before and after the stacks that the thread writes."""
COLLECTIVE_MARK = "# collective "
"""The begin of a line with the number, name and process group of the rank's last collective."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # the same numbers on every architecture that torch has packages for
_TRACKER_DEADLINE_S = 10.0
_TRACKER = b"multiprocessing.resource_tracker"  # in the tracker's command line


def are_supported() -> bool:
    """Return whether this system has the calls that launching needs."""
    return sys.platform == "linux" and not missing_call()


@functools.cache  # every launch asks
def missing_call() -> str:
    """Try each system call that launching needs. An old kernel lacks them, and a container's sandbox may forbid them.

    Returns:
        The first call that fails, with the system's message, such as ``pidfd_open (Function not implemented)``; empty
        if all work.
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
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # the launch itself reports these
            return f"{call} ({os.strerror(error.errno or 0)})"
    finally:
        close_all(opened)
    return ""


def pidfd_open(pid: int) -> int:
    """Return a descriptor that refers to this process even after its pid is reused.

    Raises:
        OSError: There is no such process, or there are too many open files.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _system_call(_PIDFD_OPEN, pid, 0)  # Linux closes every pidfd on exec


def pidfd_send_signal(pidfd: int, number: int) -> None:
    """Send a signal to the process of a pidfd; 0 only checks that a signal could be sent.

    Raises:
        OSError: The process has ended.
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


@functools.cache
def _libc() -> ctypes.CDLL:
    """Load the C library, which ranks inherit from the template."""
    return ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Ask Linux for a signal when the thread that started this process ends. Exit now if the parent has gone."""
    if _libc().prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def end_with_parent(parent_pid: int) -> None:
    """End this process by SystemExit, through every ``finally``, when its parent ends.

    The parent-death signal is SIGCONT, since a stopped process handles no other signal but SIGKILL. SIGTERM is ignored:
    a batch system such as Slurm sends it to all processes of a job at once, and ranks that are saving need this one.
    """
    pid = os.getpid()

    def end_if_orphaned(*_: object) -> None:
        if os.getpid() == pid and os.getppid() != parent_pid:  # a fork of this process has another parent
            sys.exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCONT, end_if_orphaned)
    die_with_parent(parent_pid, signal.SIGCONT)


def outlive_parent(log: pathlib.Path) -> None:
    """Undo ``end_with_parent``, ignore the SIGHUP of a terminal that closes, and print to a file from now on."""
    with contextlib.suppress(OSError):  # a full disk
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)
    _libc().prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def state(pid: int) -> str:
    """Return a process's state as ``ps`` shows it, such as ``T`` for stopped; empty if there is no such process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2][:1].decode()
    return ""


def resume_if_stopped(pid: int) -> None:
    """Resume a child process that was stopped by SIGSTOP, because others wait for it."""
    if state(pid) == "T":
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def kill_group(leader_pid: int, *, has_tidied_up: bool = False) -> None:
    """Kill a process and its group. Also works for a very young process that doesn't lead a group yet.

    A resource tracker of multiprocessing is spared: it removes the shared memory of the others, and then ends by
    itself. Call this before the leader is reaped, while no other process can have its pid. If it ``has_tidied_up``,
    since it has exited normally, no tracker is sought, which is quicker.
    """
    killed: set[int] = set()
    trackers, others = ([], []) if has_tidied_up else _members(leader_pid)
    if not trackers:
        _kill(os.killpg, leader_pid, signal.SIGKILL)
        _kill(os.kill, leader_pid, signal.SIGKILL)
        return
    while new := set(others) - killed:  # repeat, since a process may start another before it is killed
        for pid in new:
            _kill(os.kill, pid, signal.SIGKILL)
        killed |= new
        _, others = _members(leader_pid)
    for pid in trackers:
        _kill(os.kill, pid, signal.SIGCONT)


def _kill(kill: Callable[[int, int], None], pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):  # the process has ended, or became another user's
        kill(pid, number)


def _members(group: int) -> tuple[list[int], list[int]]:
    """Return the living processes of a group: first multiprocessing's resource trackers, then the others."""
    trackers: list[int] = []
    others: list[int] = []
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = os.listdir("/proc")
    for pid in map(int, filter(str.isdigit, names)):
        with contextlib.suppress(OSError):  # the process has just ended
            if os.getpgid(pid) == group and state(pid) not in ("Z", "X", ""):
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    (trackers if _TRACKER in file.read() else others).append(pid)
    return trackers, others


def end_tracker() -> None:
    """Let this process's resource tracker of multiprocessing, if it has one, remove the shared memory that is left.

    The tracker does so once nobody holds its pipe. So this kills the rest of this process's group, and waits a moment.
    """
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    if tracker is None or tracker._fd is None:
        return
    watch = pidfd_open(tracker._pid)
    os.close(tracker._fd)
    for pid in _members(os.getpgid(0))[1]:
        if pid != os.getpid():
            _kill(os.kill, pid, signal.SIGKILL)
    select.select([watch], [], [], _TRACKER_DEADLINE_S)


def arm_stacks(dump: int) -> None:
    """Make both stack signals write this process's stacks to ``dump``. Call it in the main thread."""
    faulthandler.register(STACKS_SIGNAL, file=dump, all_threads=True, chain=False)
    signal.pthread_sigmask(signal.SIG_BLOCK, {STACKS_REQUEST})  # new threads inherit this, so only ``sigwait`` takes it
    signal.signal(STACKS_REQUEST, signal.SIG_IGN)  # in case a thread unblocks it
    threading.Thread(target=_answer_requests, args=(dump,), name="notebook-accel-stacks", daemon=True).start()


def _answer_requests(dump: int) -> None:
    while True:
        signal.sigwait({STACKS_REQUEST})
        with contextlib.suppress(OSError):
            collective = torch_internals.last_collective()
            line = f"{COLLECTIVE_MARK}{collective}\n" if collective else ""
            text = f"{STACKS_MARK}{line}{_stacks()}{STACKS_MARK}"
            rest = memoryview(text.encode(errors="backslashreplace"))
            while rest:
                rest = rest[os.write(dump, rest) :]


def _stacks() -> str:
    """Return the stacks of all threads in the fault handler's format, the main thread's last.

    Not by ``faulthandler.dump_traceback``, which reads running threads' frames without a reference to them and has
    crashed a rank (seen with Python 3.11).
    """
    main = threading.main_thread().ident
    frames = sys._current_frames()
    # This function's own frame would form a cycle that keeps all frames, and so the user's tensors, loaders and
    # workers, alive until the next garbage collection.
    del frames[threading.get_ident()]
    return "\n".join(
        f"Thread 0x{thread:016x} (most recent call first):\n{''.join(_lines(frames[thread]))}"
        for thread in sorted(frames, key=main.__eq__)
    )


def _lines(innermost: types.FrameType) -> Iterator[str]:
    frame: types.FrameType | None = innermost
    while frame is not None:
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {frame.f_lineno or code.co_firstlineno} in {code.co_name}\n'
        frame = frame.f_back


def set_title(title: str) -> None:
    """Make ``ps`` and ``nvidia-smi`` show a title, cut to the length of this process's command line."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5), 0 without permission
        if 0 < start < end:
            shown = title.encode(errors="backslashreplace")[: end - start - 1]
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, shown, len(shown))


def bootstrap(module: str, *arguments: str, sys_path: Sequence[str] = ()) -> list[str]:
    """Return a command line that calls ``module.main(*arguments)`` in a new interpreter with this import path.

    Python puts the working directory first on the path, where a user's ``random.py`` would hide Python's. So the
    command sets the path before it imports anything but ``sys``, which is built in.
    """
    code = (
        "import sys; end = 2 + int(sys.argv[1]); sys.path[:] = sys.argv[2:end]; "
        "import importlib; importlib.import_module(sys.argv[end]).main(*sys.argv[end + 1:])"
    )
    path = list(sys_path or environment.import_path())
    return [sys.executable, "-c", code, str(len(path)), *path, module, *arguments]

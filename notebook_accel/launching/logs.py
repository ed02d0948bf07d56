"""The ranks' log files: their paths, reading them, and removing old ones. Used by the kernel and the agent.

Each run has a folder with one file for each rank. By default it is in the system's folder for temporary files, which
is local and fast even if the user's home isn't.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import pathlib
import re
import shutil
import stat
import tempfile
import time

from notebook_accel.errors import ConfigError, NotebookAccelError

KEPT_RUNS = 20
_BLOCK_BYTES = 1 << 16


def make_folder(log_dir: str, name: str) -> pathlib.Path | None:
    """Make a run's folder, which only this user can open, in ``log_dir`` or in the temporary folder.

    Returns ``None`` if no temporary folder can be made, since a run works without logs.

    Raises:
        ConfigError: The folder can't be made in ``log_dir``.
    """
    prefix = f"{dated(name)}-{os.getpid()}-"  # ``remove_old`` reads the process id
    if not log_dir:
        with contextlib.suppress(OSError):
            return pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=root()))
        return None
    try:
        parent = pathlib.Path(log_dir).expanduser().absolute()
        parent.mkdir(parents=True, exist_ok=True)
        return pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"log_dir={log_dir!r} can't hold the ranks' logs: {error}", fix="name a folder that you can write to"
        ) from None


def last_words(log: int) -> str:
    """Return the end of a process's log, for an error's ``why``; empty if the log is empty or closed."""
    with contextlib.suppress(ValueError, OSError):
        size = os.fstat(log).st_size
        text = os.pread(log, 4000, max(0, size - 4000)).decode(errors="replace").strip()
        return f"It last wrote:\n{text}" if text else ""
    return ""


def dated(name: str) -> str:
    """Return the beginning of a folder's name: the time, and the words of a run's name."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:40]
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{words}"


def root() -> pathlib.Path:
    """Return the folder of this user's runs in the temporary folder.

    Raises:
        OSError: Another user owns this folder, or can open it.
    """
    folder = _root()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(errno.EPERM, "not this user's folder, or not only this user's", str(folder))
    return folder


def _root() -> pathlib.Path:
    return pathlib.Path(tempfile.gettempdir(), f"notebook-accel-{os.getuid()}")


def log_file(folder: str | pathlib.Path, rank: int) -> pathlib.Path:
    """Return the path of a rank's log in its run's folder."""
    return pathlib.Path(folder, f"rank_{rank}.log")


def profile_file(folder: str | pathlib.Path, number: str, rank: int | None, *, memory: bool = False) -> pathlib.Path:
    """Return the path of a rank's trace or memory snapshot in its run's folder; without a rank, of the merged trace."""
    name = "all_ranks" if rank is None else f"rank_{rank}"
    return pathlib.Path(folder, f"profile_{number}_{name}.{'pickle' if memory else 'json'}")


def read(path: pathlib.Path, tail: int | None = None) -> str:
    """Return a log's text, or its ``tail`` last lines. It is empty for a rank that hasn't begun, which has no file yet.

    Raises:
        NotebookAccelError: The log can't be read, or the run's folder was removed.
    """
    try:
        with path.open("rb") as file:
            data = file.read() if tail is None else _last_lines(file.fileno(), tail)
    except OSError as error:
        has_folder = path.parent.exists()
        if isinstance(error, FileNotFoundError) and has_folder:
            return ""
        what = f"The log {path} can't be read: {error.strerror}."
        if not path.is_relative_to(_root()):
            why = "" if has_folder else f"The run's folder {path.parent} was removed."
            raise NotebookAccelError(what, why=why) from None
        raise NotebookAccelError(
            what,
            why=f"Temporary logs are kept for {KEPT_RUNS} runs of a notebook, or until the folder is emptied.",
            fix="give log_dir a folder of your own in the next run: logs there stay",
        ) from None
    return data.decode(errors="replace")


def _last_lines(descriptor: int, count: int) -> bytes:
    size = os.fstat(descriptor).st_size
    step = _BLOCK_BYTES
    while True:
        start = max(size - step, 0)
        lines = os.pread(descriptor, size - start, start).split(b"\n")
        is_ended = lines[-1] == b""  # the text ends with a newline, after which there is no line
        if start == 0 or len(lines) - is_ended > count:  # more than ``count``, since the first line may be cut off
            return b"\n".join(lines[-count - is_ended :]) if count > 0 else b""
        step *= 4


def hold(folder: str) -> int | None:
    """Return a descriptor that, while open, protects a run's folder from removal by this and other kernels."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            flock(descriptor, "LOCK_SH")
        return descriptor
    return None


def remove_old(kernel_pid: int, kept: int = KEPT_RUNS) -> None:
    """Remove all but the ``kept`` newest folders of a kernel, and likewise of the kernels that are gone, together.

    Folders of other living kernels stay, and so do folders that are held.
    """
    with contextlib.suppress(OSError):
        oldest_first = sorted(entry for entry in root().iterdir() if entry.is_dir() and not entry.is_symlink())
        mine = [folder for folder in oldest_first if _owner(folder) == str(kernel_pid)]
        orphaned = [folder for folder in oldest_first if not os.path.exists(f"/proc/{_owner(folder)}")]
        for folder in (*mine[: max(len(mine) - kept, 0)], *orphaned[: max(len(orphaned) - kept, 0)]):
            _remove_unless_held(folder)


def _owner(folder: pathlib.Path) -> str:
    """Return the pid of the kernel that launched the run, as text."""
    return folder.name.rpartition("-")[0].rpartition("-")[2]


def _remove_unless_held(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flock(descriptor, "LOCK_EX")
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)


def flock(descriptor: int, how: str, *, waits: bool = False) -> None:
    """Take the lock of an open file, ``LOCK_EX`` or ``LOCK_SH``. Raise BlockingIOError if it is held."""
    fcntl = importlib.import_module("fcntl")  # not at the top: Windows, where this module can be imported, lacks it
    fcntl.flock(descriptor, getattr(fcntl, how) | (0 if waits else fcntl.LOCK_NB))

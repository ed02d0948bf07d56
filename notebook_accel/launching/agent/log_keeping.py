"""How long temporary logs stay: until there are many newer ones, and at least as long as their run. For the agent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil

from notebook_accel.launching import logs

__all__ = ["hold", "remove_old"]


def hold(folder: str) -> int | None:
    """A descriptor that keeps a run's folder from being removed as long as it is open, also by other kernels."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return descriptor
    return None


def remove_old(kernel_pid: int, kept: int = logs.KEPT_RUNS) -> None:
    """Removes temporary folders: all but a kernel's newest ones, and all but the newest of kernels that are gone.

    What belongs to another kernel that lives is left to that one, and what is held stays.
    """
    with contextlib.suppress(OSError):
        oldest_first = sorted(entry for entry in logs.root().iterdir() if entry.is_dir() and not entry.is_symlink())
        mine = [folder for folder in oldest_first if _owner(folder) == str(kernel_pid)]
        orphaned = [folder for folder in oldest_first if not os.path.exists(f"/proc/{_owner(folder)}")]
        for folder in (*mine[: max(len(mine) - kept, 0)], *orphaned[: max(len(orphaned) - kept, 0)]):
            _remove_unless_held(folder)


def _owner(folder: pathlib.Path) -> str:
    """The process whose run it was of, as text."""
    return folder.name.rpartition("-")[0].rpartition("-")[2]


def _remove_unless_held(folder: pathlib.Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        finally:
            os.close(descriptor)

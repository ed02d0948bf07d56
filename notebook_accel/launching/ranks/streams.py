"""A rank's standard output and error, which both go to one log, unchanged and line by line.

This runs in a rank and in its worker processes. The log is a file, so a write never waits for a reader. A write to a
full disk doesn't fail either: the output is lost, a message reports that, and the training goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from notebook_accel import reporting
from notebook_accel.protocol import events

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LINE_BUFFERED = 1  # _IOLBF of stdio.h
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)


def redirect(log: int) -> None:
    """Make ``log`` the standard output and error of this process and its children."""
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    replace_streams()


def replace_streams() -> None:
    """Make Python's and C's streams write whole lines to descriptors 1 and 2, which lead to a log already."""
    restore()
    with contextlib.suppress(OSError, ValueError):  # a C library with another name for ``stdout``
        libc = ctypes.CDLL(None)
        # By default C buffers a page of output that isn't for a terminal, and loses it if the rank is killed.
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINE_BUFFERED, ctypes.c_size_t(0))


def restore() -> None:
    """Make Python's streams write to descriptors 1 and 2, whatever the user's code has made of them."""
    sys.stdout, sys.stderr = _by_line(1), _by_line(2)


def flush() -> None:
    """Flush Python's and C's buffers."""
    for name in ("stdout", "stderr"):
        with contextlib.suppress(Exception):  # the user's code may have closed, replaced or deleted them
            stream: Any = vars(sys).setdefault(name, None)  # a thread can't be started without ``sys.stderr``
            stream.flush()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)


def log_bytes() -> int:
    """Flush Python's buffer, and return the size of this process's log."""
    with contextlib.suppress(Exception):  # as above
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        return os.fstat(1).st_size
    return 0


def _by_line(descriptor: int) -> TextIO:
    return io.TextIOWrapper(
        _LogWriter(descriptor),  # type: ignore[type-var, unused-ignore]  # as Python itself does for unbuffered streams
        encoding="utf-8", errors="backslashreplace", line_buffering=True,
    )  # fmt: skip


class _LogWriter(io.RawIOBase):
    """A stream into a log that two streams share. It never breaks the other stream's line, and never fails."""

    _unfinished: ClassVar[_LogWriter | None] = None  # the one of the two that has written a part of a line last

    def __init__(self, descriptor: int) -> None:
        self.name = f"<{'stdout' if descriptor == 1 else 'stderr'}>"
        self._descriptor = descriptor
        self._lost_bytes = 0

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        whole = bytes(data)
        if not whole:
            return 0
        parts = []
        if self._lost_bytes:
            parts.append(f"\n[{self._lost_bytes:,} bytes could not be written here and are lost]\n".encode())
        elif _LogWriter._unfinished not in (None, self):
            parts.append(b"\n")
        if self._write_all(b"".join([*parts, whole])):
            _LogWriter._unfinished = None if whole.endswith(b"\n") else self
            self._lost_bytes = 0
        else:
            self._lost_bytes += len(whole)
        return len(whole)

    def _write_all(self, data: bytes) -> bool:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            if not self._lost_bytes:
                text = f"[the log can't take this rank's output, which is lost from here on: {error.strerror}]"
                reporting.reporter().post(events.Output(text=text))
            return False
        return True

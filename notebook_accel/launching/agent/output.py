"""Reads the ranks' logs in the agent, and sends their lines to the kernel.

A rank itself writes its log file. So a slow agent, kernel or front end never delays a print, and the file is complete
even if they die. The agent reads the file as it grows. If there are too many lines for a notebook, some are only
counted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from notebook_accel.launching.logs import log_file
from notebook_accel.payload import memory_files
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import close_all

_MIB = 1 << 20
_BURST_BYTES = 4 * _MIB  # of all ranks of a run together, after a pause
_BYTES_PER_S = _MIB  # of all ranks of a run together, sustained
_SMALLEST_SHARE_BYTES = 1 << 14
_FIRST_BYTES = 1 << 16  # of each rank, always sent
_LAST_BYTES = 1 << 16  # of each rank, always sent at its end
_LONGEST_LINE_BYTES = _MIB
_CHUNK_BYTES = _MIB
_MOST_SCANNED_BYTES = 64 * _MIB  # at a time, so that the agent's event loop isn't blocked


def open_log(folder: str, rank: int) -> tuple[int, str]:
    """Open a rank's log, which the rank writes and the agent reads.

    Returns the descriptor, and a message to the user if the log is in memory only. ``folder`` is empty if none could be
    made.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        if folder:
            return os.open(log_file(folder, rank), flags, 0o600), ""
        why = "no folder for it could be made"
    except OSError as error:
        why = str(error.strerror)
    in_memory = memory_files.appending_file(f"notebook-accel-log-{rank}")
    return in_memory, f"[this rank has no log file ({why}): its output is kept in memory until the run ends]"


class Allowance:
    """A token bucket for a rank's share of a run's output: a burst at once, then limited bytes per second."""

    def __init__(self, world_size: int) -> None:
        self._most = max(_BURST_BYTES // world_size, 4 * _SMALLEST_SHARE_BYTES)
        self._bytes_per_s = max(_BYTES_PER_S // world_size, _SMALLEST_SHARE_BYTES)
        self._left = float(self._most)
        self._filled_s: float | None = None

    @property
    def left_bytes(self) -> int:
        """Number of bytes that may be sent now."""
        return int(self._left)

    @property
    def is_worth_a_gap(self) -> bool:
        """True if enough bytes may be sent to make skipping lines worthwhile, at most once a second."""
        return self._left >= min(_LAST_BYTES, self._bytes_per_s)

    def fill(self, now_s: float) -> None:
        """Add the allowance for the time since the last call."""
        if self._filled_s is not None:
            self._left = min(self._left + (now_s - self._filled_s) * self._bytes_per_s, self._most)
        self._filled_s = now_s

    def take(self, size_bytes: int) -> None:
        """Subtract sent bytes from the allowance."""
        self._left = max(self._left - size_bytes, 0.0)


class LogTail:
    """Follows one rank's log, which it owns, and sends its whole lines in order; if there are too many, only the last.

    A carriage return restarts a line, as on a terminal, so that a progress bar becomes one line: its last state.
    """

    def __init__(self, descriptor: int, allowance: Allowance, send: Callable[[events.Output], None]) -> None:
        self.descriptor = descriptor
        self._allowance = allowance
        self._send = send
        # The first byte that was neither sent nor skipped. A restarted rank continues its log.
        self.position = self._seen_size = self.size_bytes
        self._left_out = 0
        self._first_bytes = _FIRST_BYTES
        self._is_unreadable = False

    def close(self) -> None:
        """Close the log."""
        close_all([self.descriptor])

    @property
    def size_bytes(self) -> int:
        """The log's length."""
        return os.fstat(self.descriptor).st_size

    @property
    def grown_bytes(self) -> int | None:
        """The log's length; ``None`` if it hasn't grown since the last read, or can't be read."""
        with self._reporting_read_errors():
            if not self._is_unreadable and self.size_bytes != self._seen_size:
                return self.size_bytes
        return None

    def read(self, now_s: float, size: int) -> None:
        """Send the new lines up to position ``size``, or leave them for a later call if the allowance is too small."""
        with self._reporting_read_errors():
            if self._is_unreadable:
                return
            self._allowance.fill(now_s)
            if self.size_bytes < self.position:  # the user has truncated the file
                self.position = 0
            size = min(size, self.size_bytes)
            if size <= self.position:
                return
            self._send_first_lines(size)
            start = size - self._allowance.left_bytes
            if start > self.position and not (self._allowance.is_worth_a_gap and self._pass_over(start)):
                return
            self._seen_size = size
            self._send_lines(size)

    def finish(self) -> None:
        """Send the last lines, even one without a newline. Call it when the rank is gone."""
        with self._reporting_read_errors():  # try even a log that couldn't be read before: its network may work again
            size = self.size_bytes
            self._send_first_lines(size)
            start = size - max(self._allowance.left_bytes, _LAST_BYTES)
            while not self._pass_over(start):
                pass
            self._send_lines(size)
            rest = os.pread(self.descriptor, size - self.position, self.position)
            if rest:
                self._send_text([rest])

    @contextlib.contextmanager
    def _reporting_read_errors(self) -> Iterator[None]:
        """On an ``OSError``, such as of a network file system, report once that the log can't be read."""
        try:
            yield
        except OSError as error:
            if not self._is_unreadable:
                self._is_unreadable = True
                text = f"[this rank's log can't be read ({error.strerror}): what it prints now may not be shown]"
                self._send(events.Output(text=text, left_out=self._left_out))
                self._left_out = 0

    def _send_first_lines(self, size: int) -> None:
        if self._first_bytes:
            self._send_lines(min(size, self.position + self._first_bytes))
            self._first_bytes = 0

    def _pass_over(self, start: int) -> bool:
        """Skip a part of the lines before ``start``. Return True once all are skipped; until then, call it again."""
        if start <= self.position:
            return True
        stop = min(start, self.position + _MOST_SCANNED_BYTES)
        while self.position < stop:
            chunk = os.pread(self.descriptor, min(_CHUNK_BYTES, stop - self.position), self.position)
            if not chunk:  # the user has truncated the file
                return True
            self._left_out += chunk.count(b"\n")
            self.position += len(chunk)
        if stop < start:
            return False
        if os.pread(self.descriptor, 1, self.position - 1) != b"\n":
            self._left_out += 1  # skip the rest of the line that crosses ``start``, if its end is near
            self.position += os.pread(self.descriptor, _LAST_BYTES, self.position).find(b"\n") + 1
        return True

    def _send_lines(self, size: int) -> None:
        data = os.pread(self.descriptor, size - self.position, self.position)
        body, newline, rest = data.rpartition(b"\n")
        lines = body.split(b"\n") if newline else []
        if len(rest) > _LONGEST_LINE_BYTES:
            lines.append(rest)
            rest = b""
        else:  # don't read again what a carriage return has overwritten
            rest = rest[max(rest.rstrip(b"\r").rfind(b"\r"), 0) :]
        self.position += len(data) - len(rest)
        if lines:
            self._send_text(lines)

    def _send_text(self, lines: list[bytes]) -> None:
        text = "\n".join(map(_as_terminal, lines))
        self._allowance.take(len(text))
        self._send(events.Output(text=text, left_out=self._left_out))
        self._left_out = 0


def _as_terminal(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")

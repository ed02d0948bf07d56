"""From a rank's log to lines in the notebook, in the agent.

A rank writes to its log file itself: nothing that the agent, the kernel or a front end does, however slow, can hold up
a print, and the file is whole whatever happens to them. The agent reads the file as it grows. What is too much for a
notebook it passes over, counts, and leaves in the file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from notebook_accel.launching.logs import log_file
from notebook_accel.launching.processes import close_all
from notebook_accel.payload import memory_files
from notebook_accel.protocol import events

__all__ = ["Allowance", "LogTail", "open_log"]

_MIB = 1 << 20
_BURST_BYTES = 4 * _MIB  # of all ranks of a run together, after some calm
_BYTES_PER_S = _MIB  # of all ranks of a run together, for good
_SMALLEST_SHARE_BYTES = 1 << 14
_FIRST_BYTES = 1 << 16  # of each rank that are said in any case, also if there are far too many when one first looks
_LAST_BYTES = 1 << 16  # of each rank that are said at its end, whatever it wrote before
_LONGEST_LINE_BYTES = _MIB
_CHUNK_BYTES = _MIB
_MOST_SCANNED_BYTES = 64 * _MIB  # at a time, so that the agent can look after other things in between


def open_log(folder: str, rank: int) -> tuple[int, str]:
    """Opens a rank's log for its own writing and our reading.

    Args:
        folder: The run's folder; empty if none could be made.
        rank: The rank.

    Returns:
        The descriptor, and what to tell the user: empty, or why the log is in memory only.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        if folder:
            return os.open(log_file(folder, rank), flags, 0o600), ""
        why = "no folder for it could be made"
    except OSError as error:
        why = str(error.strerror)
    in_memory = memory_files.memory_file(f"notebook-accel-log-{rank}")
    # Opened a second time, since that is the way to have it written at its end only.
    try:
        descriptor = os.open(f"/proc/self/fd/{in_memory}", flags & ~(os.O_CREAT | os.O_NOFOLLOW))
    finally:
        os.close(in_memory)
    return descriptor, f"[this rank has no log file ({why}): its output is kept in memory until the run ends]"


class Allowance:
    """How much of a rank's output the notebook takes: some at once, then so much a second.

    Args:
        world_size: Number of ranks that share what a run may say.
    """

    def __init__(self, world_size: int) -> None:
        self._most = max(_BURST_BYTES // world_size, 4 * _SMALLEST_SHARE_BYTES)
        self._bytes_per_s = max(_BYTES_PER_S // world_size, _SMALLEST_SHARE_BYTES)
        self._left = float(self._most)
        self._filled_s: float | None = None

    @property
    def left_bytes(self) -> int:
        """What may be said now."""
        return int(self._left)

    @property
    def is_worth_a_gap(self) -> bool:
        """True if so much may be said that it is worth passing over something: at most once a second."""
        return self._left >= min(_LAST_BYTES, self._bytes_per_s)

    def fill(self, now_s: float) -> None:
        """Counts the time since the last call."""
        if self._filled_s is not None:
            self._left = min(self._left + (now_s - self._filled_s) * self._bytes_per_s, self._most)
        self._filled_s = now_s

    def take(self, size_bytes: int) -> None:
        """Counts what was said."""
        self._left = max(self._left - size_bytes, 0.0)


class LogTail:
    """Follows one rank's log and says its whole lines, in order, and of too many the last ones.

    A carriage return starts a line over, as on a terminal, so that a progress bar is the one line that it ends as.

    Args:
        descriptor: The log, which this owns.
        allowance: How much may be said.
        say: Takes the lines, and how many before them are in the log only.
    """

    def __init__(self, descriptor: int, allowance: Allowance, say: Callable[[events.Output], None]) -> None:
        self.descriptor = descriptor
        self._allowance = allowance
        self._say = say
        # Of the first byte that was neither said nor passed over. A rank that is started once more goes on in its log.
        self._position = self._seen_size = self.size_bytes
        self._left_out = 0
        self._first_bytes = _FIRST_BYTES
        self._is_unreadable = False

    def close(self) -> None:
        """Closes the log."""
        close_all([self.descriptor])

    @property
    def size_bytes(self) -> int:
        """How long the log is now."""
        return os.fstat(self.descriptor).st_size

    @property
    def grown_bytes(self) -> int | None:
        """How long the log is now; ``None`` if all of it was looked at, or if it can't be read."""
        with self._owning_errors():
            if not self._is_unreadable and self.size_bytes != self._seen_size:
                return self.size_bytes
        return None

    def read(self, now_s: float, size: int) -> None:
        """Says what is new, or leaves it in the file for a later call if that is too much at the moment.

        Args:
            now_s: The time, in seconds of ``time.monotonic()``.
            size: Where in the log to stop.
        """
        with self._owning_errors():
            if not self._is_unreadable:
                self._read(now_s, size)

    def _read(self, now_s: float, size: int) -> None:
        self._allowance.fill(now_s)
        if self.size_bytes < self._position:  # somebody has emptied the file
            self._position = 0
        size = min(size, self.size_bytes)
        if size <= self._position:
            return
        self._say_first_lines(size)
        start = size - self._allowance.left_bytes
        if start > self._position and not (self._allowance.is_worth_a_gap and self._pass_over(start)):
            return
        self._seen_size = size
        self._say_lines(size)

    def finish(self) -> None:
        """Says the last lines, one without its end too. For when the rank is gone."""
        with self._owning_errors():  # also if it couldn't be read before: a network may be there again
            self._finish()

    def _finish(self) -> None:
        size = self.size_bytes
        self._say_first_lines(size)
        start = size - max(self._allowance.left_bytes, _LAST_BYTES)
        while not self._pass_over(start):
            pass
        self._say_lines(size)
        rest = os.pread(self.descriptor, size - self._position, self._position)
        if rest:
            self._say_text([rest])

    @contextlib.contextmanager
    def _owning_errors(self) -> Iterator[None]:
        """The seam of logs: one that can't be read, on a network's file system for example, is marked as that once."""
        try:
            yield
        except OSError as error:
            if not self._is_unreadable:
                self._is_unreadable = True
                text = f"[this rank's log can't be read ({error.strerror}): what it prints now may not be shown]"
                self._say(events.Output(text=text, left_out=self._left_out))
                self._left_out = 0

    def _say_first_lines(self, size: int) -> None:
        if self._first_bytes:
            self._say_lines(min(size, self._position + self._first_bytes))
            self._first_bytes = 0

    def _pass_over(self, start: int) -> bool:
        """Leaves out the lines before ``start``; returns whether that was done, or is to be gone on with."""
        if start <= self._position:
            return True
        stop = min(start, self._position + _MOST_SCANNED_BYTES)
        while self._position < stop:
            chunk = os.pread(self.descriptor, min(_CHUNK_BYTES, stop - self._position), self._position)
            if not chunk:  # somebody has emptied the file
                return True
            self._left_out += chunk.count(b"\n")
            self._position += len(chunk)
        if stop < start:
            return False
        if os.pread(self.descriptor, 1, self._position - 1) != b"\n":
            self._left_out += 1  # the line that goes on here: its end is left out too, if it comes soon
            self._position += os.pread(self.descriptor, _LAST_BYTES, self._position).find(b"\n") + 1
        return True

    def _say_lines(self, size: int) -> None:
        data = os.pread(self.descriptor, size - self._position, self._position)
        body, newline, rest = data.rpartition(b"\n")
        lines = body.split(b"\n") if newline else []
        if len(rest) > _LONGEST_LINE_BYTES:
            lines.append(rest)
            rest = b""
        else:  # what was written over need not be read again
            rest = rest[max(rest.rstrip(b"\r").rfind(b"\r"), 0) :]
        self._position += len(data) - len(rest)
        if lines:
            self._say_text(lines)

    def _say_text(self, lines: list[bytes]) -> None:
        text = "\n".join(map(_as_terminal, lines))
        self._allowance.take(len(text))
        self._say(events.Output(text=text, left_out=self._left_out))
        self._left_out = 0


def _as_terminal(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")

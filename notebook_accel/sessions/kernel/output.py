"""What ranks print, display and count while a cell runs, in the cell.

What they print is read from their logs, rank by rank, line by line. What they display comes over their lines, with how
long the log was then. A line that several ranks print alike stands once.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from notebook_accel.formatting import clipped, plain_text
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.views.rank_lines import AlikeLines, KernelDisplay, RankLine
from notebook_accel.launching.views.view import HOLD_S, line_prefix
from notebook_accel.protocol.events import Display
from notebook_accel.protocol.session_messages import Reply
from notebook_accel.sessions.kernel.progress import CellProgress

__all__ = ["Output"]

_CHUNK_BYTES = 1 << 20
_MOST_LINES = 4000  # of a cell, of all ranks together
_LAST_LINES = 20


class _Log:
    """One rank's log, from where it was read to.

    Args:
        path: The file.
        most_lines: How many lines of a cell are shown as they come.
        show: Takes lines that are to be shown.
    """

    def __init__(self, path: str, most_lines: int, show: Callable[[Sequence[str]], object]) -> None:
        self._path = path
        self._most_lines = most_lines
        self._show = show
        self._descriptor = -1
        self._position = 0
        self._begun = b""
        self.start()

    def start(self) -> None:
        """A cell begins."""
        self._free = self._most_lines
        self._left_out = 0
        self._last: collections.deque[bytes] = collections.deque(maxlen=_LAST_LINES)

    def read(self, until: int | None) -> None:
        """Shows the lines that are there now, or until so many bytes."""
        if self._descriptor < 0:
            with contextlib.suppress(OSError):
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        if self._descriptor < 0:
            return
        end = os.fstat(self._descriptor).st_size if until is None else until
        while self._position < end:
            data = os.pread(self._descriptor, min(_CHUNK_BYTES, end - self._position), self._position)
            if not data:
                break
            self._position += len(data)
            *lines, self._begun = (self._begun + data).split(b"\n")
            self._take(lines)

    def end_line(self) -> None:
        """What comes next begins a line of its own."""
        if self._begun:
            self._take([self._begun])
            self._begun = b""

    def rest(self) -> list[str]:
        """What is to be shown of this rank at the end of the cell."""
        left_out = self._left_out - len(self._last)
        note = f"[{left_out:,} lines left out here; the whole output is in {self._path}]"
        return [*([note] if left_out > 0 else []), *map(_shown, self._last)]

    def add(self, text: str) -> None:
        """Shows lines that are not in the log."""
        self._take([line.encode() for line in text.splitlines()])

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _take(self, lines: Sequence[bytes]) -> None:
        now, later = lines[: self._free], lines[self._free :]
        self._free -= len(now)
        self._left_out += len(later)
        self._last.extend(later)
        if now:
            self._show([_shown(line) for line in now])


def _shown(line: bytes) -> str:
    return clipped(plain_text(line.decode(errors="replace")))


class Output:
    """The ranks' output, in the cells that it belongs to.

    Args:
        job: Their run. Without log files, which there are unless there is no room for any, nothing is shown.
    """

    def __init__(self, job: Job) -> None:
        most = max(_MOST_LINES // job.world_size, 1)
        self._job = job
        self._alike = AlikeLines(job.world_size, HOLD_S, self._write)
        self._logs = [
            _Log(str(path), most, lambda lines, rank=rank: self._alike.add(rank, lines, time.monotonic()))  # type: ignore[misc]
            for rank, path in enumerate(job.log_files)
        ]
        self._display = KernelDisplay()
        self._progress = CellProgress(job, self._display)

    def start(self) -> None:
        """A cell begins. What ranks have printed since the last one is shown in it, too."""
        self._display.begin_cell()
        self._progress.begin()
        for log in self._logs:
            log.start()

    def show_new(self) -> None:
        """Prints whole lines that are there now, after a moment in which other ranks may print the same."""
        for log in self._logs:
            log.read(None)
        self._alike.settle(time.monotonic())
        self._progress.show()

    def show_until(self, rank: int, log_bytes: int) -> None:
        """Prints what a rank has written until then, so that what it says otherwise comes after it."""
        if self._logs:
            self._logs[rank].read(log_bytes)
            self._logs[rank].end_line()
        self._alike.settle()

    def display(self, rank: int, event: Display) -> None:
        """Shows what a rank has displayed; what is only text, as a line of it."""
        self.show_until(rank, event.log_bytes)
        if not self._display.show(event) and self._logs:
            self._logs[rank].add(str(event.data.get("text/plain", "")))

    def finish(self, replies: Mapping[int, Reply]) -> None:
        """Shows all that these ranks have printed and counted by the end of the cell."""
        for rank, log in enumerate(self._logs):
            log.read(replies[rank].log_bytes if rank in replies else None)
            log.end_line()
        self._alike.settle()
        for rank, log in enumerate(self._logs):
            for text in log.rest():
                sys.stdout.write(f"{line_prefix(self._job, [rank])}{text}\n")
        self._progress.end({rank: reply.steps for rank, reply in replies.items()})

    def _write(self, line: RankLine) -> None:
        sys.stdout.write(f"{line_prefix(self._job, line.ranks)}{line.text}\n")

    def close(self) -> None:
        for log in self._logs:
            log.close()

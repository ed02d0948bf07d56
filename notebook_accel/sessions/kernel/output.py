"""Shows the output, displays, progress and values of a cell's ranks under the cell, in the kernel.

Printed lines are read from the ranks' logs. Displays arrive over the connections, each with the log's length at that
moment, so that both appear in order. Equal lines of several ranks are shown once.
"""

from __future__ import annotations

import contextlib
import functools
import html
import os
import pathlib
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from notebook_accel.formatting import clipped, format_clock, plain_text, ranks_in_words
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.views import rank_lines
from notebook_accel.launching.views.rank_lines import KernelDisplay
from notebook_accel.launching.views.view import RankPrinter
from notebook_accel.protocol.events import Display
from notebook_accel.protocol.session_messages import Reply

_CHUNK_BYTES = 1 << 20
_MOST_LINES = 4000  # of all ranks of a cell together
_LAST_LINES = 20
_PERIOD_S = 1.0
_LINE_PERIOD_S = 5.0  # in a terminal or log, where earlier output can't be replaced
_PERIOD_GROWTH = 1.5
_LONGEST_PERIOD_S = 60.0
_LAST_DEADLINE_S = 5.0
_POLL_PERIOD_S = 0.01
_TEXT, _HTML = "text/plain", "text/html"
_IMAGES = ("image/png", "image/jpeg")


class _Log:
    """A rank's log file, and the position up to which it was read."""

    def __init__(self, path: pathlib.Path, show: Callable[[Sequence[bytes]], object]) -> None:
        self._path = path
        self._show = show
        self._descriptor = -1
        self._position = 0
        self._unfinished = b""  # the last line, without a newline yet

    def read(self, until: int | None) -> None:
        """Show the lines up to ``until`` bytes, by default all."""
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
            *lines, self._unfinished = (self._unfinished + data).split(b"\n")
            self._show(lines)

    def skip_earlier(self) -> None:
        """Skip all that is in the log now."""
        with contextlib.suppress(OSError):
            self._position = os.stat(self._path).st_size

    def end_line(self) -> None:
        """End an unfinished line, so that later output starts a new one."""
        if self._unfinished:
            self._show([self._unfinished])
            self._unfinished = b""

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _shown(line: bytes) -> str:
    return clipped(plain_text(line.decode(errors="replace")))


def _write(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")


class CellOutput:
    """Shows the ranks' output under the cells that it belongs to; nothing if the run has no log files."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._logs = [_Log(path, functools.partial(self._add, rank)) for rank, path in enumerate(job.log_files)]
        self._lines = self._new_lines()
        self._display = KernelDisplay()
        self._progress = _CellProgress(job, self._display)

    def skip_earlier(self) -> None:
        """Skip all output so far, which belongs to cells of an earlier notebook."""
        for log in self._logs:
            log.skip_earlier()

    def start(self) -> None:
        """Start a cell. Output that ranks have written since the last cell appears here too."""
        self._display.begin_cell()
        self._progress.begin()
        self._lines.settle()
        self._lines = self._new_lines()

    def _new_lines(self) -> RankPrinter[bytes]:
        first = max(_MOST_LINES // self._job.world_size, 1)
        return RankPrinter(self._job, first, _LAST_LINES, _write, _shown)

    def _add(self, rank: int, lines: Sequence[bytes]) -> None:
        self._lines.add(rank, lines, time.monotonic())

    def show_new(self) -> None:
        """Print new whole lines. Each is held back for a moment, in which other ranks may print the same line."""
        for log in self._logs:
            log.read(None)
        self._lines.settle(time.monotonic())
        self._progress.show()

    def show_until(self, rank: int, log_bytes: int) -> None:
        """Print a rank's output up to this length of its log, before messages that came later."""
        if self._logs:
            self._logs[rank].read(log_bytes)
            self._logs[rank].end_line()
        self._lines.settle()

    def display(self, rank: int, event: Display) -> None:
        """Show a rank's display. A display of mere text becomes a line of the rank's output."""
        self.show_until(rank, event.log_bytes)
        if not self._display.show(event) and self._logs:
            self._add(rank, [line.encode() for line in str(event.data.get(_TEXT, "")).splitlines()])

    def finish(self, replies: Mapping[int, Reply]) -> None:
        """Show the rest of these ranks' output, and their final step counts."""
        for rank, log in enumerate(self._logs):
            log.read(replies[rank].log_bytes if rank in replies else None)
            log.end_line()
        self._lines.end()
        self._progress.end({rank: reply.steps for rank, reply in replies.items()})

    def close(self) -> None:
        for log in self._logs:
            log.close()


class _CellProgress:
    """Shows the steps and metrics of the running cell, if it counts any."""

    def __init__(self, job: Job, display: KernelDisplay) -> None:
        self._job = job
        self._display = display
        self.begin()

    def begin(self) -> None:
        """Start a cell, whose steps are counted from here."""
        self._before = self._job.ranks
        self._display_id = ""
        self._shown: list[str] = []
        self._began_s = time.monotonic()
        self._period_s = _LINE_PERIOD_S
        self._due_s = self._began_s + _PERIOD_S

    def show(self) -> None:
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _PERIOD_S
            self._show(is_end=False)

    def end(self, steps: Mapping[int, int]) -> None:
        """Show the final counts, if any were shown before."""
        if not self._shown:
            return
        deadline_s = time.monotonic() + _LAST_DEADLINE_S
        # The ranks' last progress events may still be on the way.
        while any(self._job.ranks[rank].steps != count for rank, count in steps.items() if count):
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_PERIOD_S)
        self._show(is_end=True)

    def _show(self, *, is_end: bool) -> None:
        if self._job.config.view == "none":
            return
        pairs = zip(self._before, self._job.ranks, strict=True)
        ranks = [now.since(before, self._began_s) for before, now in pairs]
        reported = [rank for rank in ranks if rank.steps is not None or rank.metrics]
        described = rank_lines.lines(reported, time.monotonic())
        if described in ([], self._shown):
            return
        text = "\n".join(described)
        shown = Display(
            data={"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"},
            display_id=self._display_id or uuid.uuid4().hex,
            is_update=bool(self._display_id),
        )
        if self._display.show(shown):
            self._shown, self._display_id = described, shown.display_id
        elif is_end or time.monotonic() >= self._began_s + self._period_s:
            self._shown = described
            self._period_s += min(self._period_s * _PERIOD_GROWTH, _LONGEST_PERIOD_S)
            taken = format_clock(time.monotonic() - self._began_s)
            sys.stdout.writelines(f"[{taken}] {line}\n" for line in described)


class Shown(Mapping[int, str]):
    """A cell's value as text, by rank. In a notebook it shows each rank's value, and equal values once.

    Args:
        bundles: The value as each rank shows it, by mime type.
    """

    def __init__(self, bundles: Mapping[int, dict[str, str]]) -> None:
        self._bundles = dict(sorted(bundles.items()))

    def __getitem__(self, rank: int) -> str:
        return self._bundles[rank][_TEXT]

    def __iter__(self) -> Iterator[int]:
        return iter(self._bundles)

    def __len__(self) -> int:
        return len(self._bundles)

    def __repr__(self) -> str:
        parts = []
        for ranks, data in self._groups():
            text = data[_TEXT]
            parts.append(f"{ranks_in_words(ranks)}:{chr(10) if chr(10) in text else ' '}{text}")
        return "\n".join(parts)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        del include, exclude
        shown, groups = {_TEXT: repr(self)}, self._groups()
        markups = [_markup(data) for _, data in groups]
        if any(markups):
            shown[_HTML] = "".join(
                f"<div>{ranks_in_words(ranks)}:</div>{markup or f'<pre>{html.escape(data[_TEXT])}</pre>'}"
                for (ranks, data), markup in zip(groups, markups, strict=True)
            )
        elif len(groups) == 1:  # other types, such as Markdown, can't be combined
            shown = {**groups[0][1], **shown}
        return shown

    def _groups(self) -> list[tuple[list[int], dict[str, str]]]:
        """Group the ranks that show equal values, ordered by their lowest rank."""
        groups: list[tuple[list[int], dict[str, str]]] = []
        for rank, data in self._bundles.items():
            for ranks, other in groups:
                if other == data:
                    ranks.append(rank)
                    break
            else:
                groups.append(([rank], data))
        return groups


def _markup(data: Mapping[str, str]) -> str:
    """Return a value as HTML that can be combined with other ranks' values; empty if it has no such form."""
    if _HTML in data:
        return data[_HTML]
    for kind in _IMAGES:
        if kind in data:
            return f'<img src="data:{kind};base64,{data[kind].strip()}">'
    return data.get("image/svg+xml", "")

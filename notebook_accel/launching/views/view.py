"""The views of a job in the kernel: the function that opens one, the view that shows nothing, and plain lines.

Further views come from the entry point group ``notebook_accel.views``: each is a callable that takes the job and
returns a view, or ``None`` if it can't show one here. So a notebook gets its panel without a dependency on notebooks.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TextIO, TypeVar

from notebook_accel.formatting import OutputWindow, format_clock, plain_lines, plain_text
from notebook_accel.launching.views import rank_lines
from notebook_accel.launching.views.rank_lines import AlikeLines, KernelDisplay
from notebook_accel.protocol import events

if TYPE_CHECKING:
    from notebook_accel.launching.kernel.job import Job

_Line = TypeVar("_Line")
_GROUP = "notebook_accel.views"
_HOLD_S = 0.2  # for which a line is held back, since other ranks may print the same and it can't be changed afterwards
_PERIOD_S = 5.0  # between two lines of progress at first
_LONGEST_PERIOD_S = 60.0  # reached in a run of 20 minutes
_PERIOD_SHARE = 0.05  # of the time that the run has taken
_TERMINAL_PERIOD_S = 1.0  # between updates of a terminal's status line
# Limits for all ranks of a run together: a notebook with more lines can't be opened any more.
_MOST_LINES = 10_000
_LAST_LINES = 1_000
_ERASE_LINE = "\r\x1b[K"
_USUAL_COLUMNS = 80
KERNEL_INTERRUPT = "an interrupt of the kernel"
"""A job's ``ended_by`` from the interrupt of its cell on. A second interrupt kills the ranks."""
_NOTICES = (events.Display, events.Silent, events.Restarting, events.Nodes)


class View(Protocol):
    """Shows one job."""

    def refresh(self) -> None:
        """Show what is new. Called at most five times a second, by the thread that follows the job."""

    def close(self) -> None:
        """Show how the job has ended."""


def open_view(job: Job) -> View:
    """Return the first view that can show the job, otherwise plain lines."""
    if job.config.view == "none":
        return NoView(job)
    return open_panel(job) or LinesView(job, sys.stdout)


def open_panel(job: Job) -> View | None:
    """Return the first view, other than plain lines, that can show the job; ``None`` if there is none."""
    views = (opener(job) for opener in _openers()) if job.config.view not in ("lines", "none") else ()
    return next((view for view in views if view is not None), None)


def warm() -> None:
    """Import the views' modules ahead of the first launch."""
    _openers()


@functools.cache
def _openers() -> tuple[Callable[[Job], View | None], ...]:
    return tuple(entry.load() for entry in importlib.metadata.entry_points(group=_GROUP))


class NoView:
    """A view that shows nothing."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def refresh(self) -> None:
        """Discard the events, so that they don't pile up."""
        self._job.events()

    def close(self) -> None:
        """Do nothing."""


def line_prefix(job: Job, ranks: Iterable[int]) -> str:
    """Return the prefix of a line that these ranks print: the option's template filled in, or their numbers."""
    template = job.config.log_line_prefix_template or ""
    return rank_lines.margin(ranks, job.total_ranks, first=job.first_rank, template=template)


class RankPrinter(Generic[_Line]):
    """Prints the lines of a run's ranks: the first of each rank as they come, and its last at the end.

    Equal lines of several ranks are printed once.

    Args:
        job: The run.
        first: Number of lines of each rank to print as they come.
        last: Number of lines of each rank to keep for the end.
        write: Function that prints lines of text.
        text: Function that makes text of a line, if it is to be printed.
    """

    def __init__(
        self,
        job: Job,
        first: int,
        last: int,
        write: Callable[[Iterable[str]], object],
        text: Callable[[Any], str] = str,
    ) -> None:
        self._job = job
        self._write = write
        self._text = text
        self._windows = [OutputWindow[_Line](first, last) for _ in range(job.world_size)]
        self._alike = AlikeLines(job.world_size, _HOLD_S, lambda line: self._print(line.ranks, [line.text]))

    def add(self, rank: int, lines: Sequence[_Line], came_s: float, left_out: int = 0) -> None:
        """Add a rank's lines, which came at ``came_s``, after those that the sender has left out."""
        self._windows[rank].pass_over(left_out)
        self._alike.add(rank, list(map(self._text, self._windows[rank].add(lines))), came_s)

    def settle(self, now_s: float = float("inf")) -> None:
        """Print the lines that have been held back long enough at ``now_s``; without it, all lines."""
        self._alike.settle(now_s)

    def end(self) -> None:
        """Print all that is left: the lines held back, and each rank's last lines."""
        self._alike.settle()
        for rank, window in enumerate(self._windows):
            log = str(self._job.log_files[rank]) if self._job.log_files else ""
            self._print([rank], [*window.gap(log), *map(self._text, window.tail)])

    def _print(self, ranks: Iterable[int], texts: Sequence[str]) -> None:
        prefix = line_prefix(self._job, ranks) if texts else ""
        self._write(f"{prefix}{text}" for text in texts)


def describe_interrupt(job: Job) -> str:
    """Return the course of an interrupt, and what another one does if it was the kernel's."""
    now = ", or now by another interrupt" if job.ended_by == KERNEL_INTERRUPT else ""
    return f"interrupting …; what goes on is ended after {job.config.grace_s:g} s{now}"


class LinesView:
    """Prints the ranks' lines with a prefix, and from time to time each rank's progress. Needs no notebook.

    In a terminal, the progress is one line below the output. Elsewhere no line is ever overwritten, and none has a
    control character. Without ``period_s``, progress is printed every 5 seconds, and less often in a long run.
    """

    def __init__(self, job: Job, out: TextIO, period_s: float | None = None) -> None:
        self._job = job
        self._out = out
        self._period_s = period_s
        self._due_s = job.started_s + (_PERIOD_S if period_s is None else period_s)
        self._shown: list[str] = []
        most, last = (max(count // job.world_size, 1) for count in (_MOST_LINES, _LAST_LINES))
        self._lines = RankPrinter[str](job, most, last, self._print)
        self._silent_steps: dict[int, int | None] = {}
        self._nodes: list[str] = []
        self._has_told_of_interrupt = False
        self._is_terminal = out.isatty()
        self._status_line = _StatusLine(out)  # drawn in a terminal only
        self._displays = KernelDisplay()

    def refresh(self) -> None:
        """Print the new lines, and the progress if it is due."""
        now_s = time.monotonic()
        for rank, event in self._job.events():
            self._take(rank, event, now_s)
        self._lines.settle(now_s)
        if self._job.ended_by == KERNEL_INTERRUPT and not self._job.done and not self._has_told_of_interrupt:
            self._has_told_of_interrupt = True
            self._print([f"[{describe_interrupt(self._job)}]"])
        if self._is_terminal:
            self._status_line.draw(lambda: self._describe(now_s, folded=True))
        elif now_s >= self._due_s:
            self._due_s = now_s + self._next_period_s(now_s)
            self._print_progress(now_s)

    def close(self) -> None:
        """Print the remaining lines, the last progress of each rank, and an error that no cell raises."""
        self._due_s = float("inf")
        self.refresh()
        self._lines.end()
        self._print_progress(self._job.ended_s or time.monotonic())
        diagnosis = self._job.diagnosis()
        self._print(filter(None, (diagnosis.sentence, diagnosis.cost)))
        if self._job.is_background and self._job.error is not None:
            self._print(plain_lines(str(self._job.error)))
        self._out.flush()

    def _next_period_s(self, now_s: float) -> float:
        if self._period_s is not None:
            return self._period_s
        return min(max(_PERIOD_S, _PERIOD_SHARE * (now_s - self._job.started_s)), _LONGEST_PERIOD_S)

    def _print(self, lines: Iterable[str]) -> None:
        self._status_line.erase()
        self._out.writelines(f"{line}\n" for line in lines)

    def _take(self, rank: int, event: events.Event, now_s: float) -> None:
        if isinstance(event, _NOTICES):
            self._lines.settle()  # print the lines that came before the notice
        came_s = min(event.time_s, now_s)
        if isinstance(event, events.Output):
            self._lines.add(rank, list(plain_lines(event.text)), came_s, event.left_out)
        elif isinstance(event, events.Display):
            self._status_line.erase()
            self._out.flush()
            if not self._displays.show(event) and (text := str(event.data.get("text/plain", ""))):
                self._lines.add(rank, list(plain_lines(text)), came_s)
        elif isinstance(event, events.Silent):
            self._print_silent(rank, event)
        elif isinstance(event, events.Restarting):
            self._print([f"[{event.in_words}]"])
            self._silent_steps.clear()
        elif isinstance(event, events.Nodes):
            self._nodes = [plain_text(line) for line in event.lines]
            if event.is_news:
                self._print(f"[{line}]" for line in self._nodes)

    def _print_silent(self, rank: int, event: events.Silent) -> None:
        """Report a silent rank, once for each step at which it stalls; ranks that wait only if no rank is silent."""
        with self._job.state_lock:
            steps, is_deadlocked = self._job.state.ranks[rank].steps, self._job.state.is_deadlocked
        if event.waits_in and not is_deadlocked:
            return
        if rank not in self._silent_steps or self._silent_steps[rank] != steps:
            self._silent_steps[rank] = steps
            at = f": {plain_text(event.at)}" if event.at else ""
            number, since_s = self._job.first_rank + rank, event.time_s - event.since_s
            why = f"nor has any other; it is in {event.waits_in}" if event.waits_in else "and others wait"
            self._print([f"[rank {number} has done no step for {since_s:.0f} s, {why}{at}]"])

    def _print_progress(self, now_s: float) -> None:
        described = self._describe(now_s)
        described += self._nodes if described else []
        if described and described != self._shown:
            self._shown = described
            self._lines.settle()
            self._print(f"[{self._clock(now_s)}] {line}" for line in described)

    def _describe(self, now_s: float, *, folded: bool = False) -> list[str]:
        with self._job.state_lock:
            ranks = self._job.state.ranks
            described = rank_lines.lines(ranks, now_s)
            if folded and described:
                described = [f"[{self._clock(now_s)}] {rank_lines.folded(ranks, now_s)}"]
        return described

    def _clock(self, now_s: float) -> str:
        return format_clock(now_s - self._job.started_s)


class _StatusLine:
    """The last line of a terminal, which is overwritten."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_drawn = False
        self._text = ""
        self._due_s = 0.0

    def erase(self) -> None:
        """Erase the line before other output."""
        if self._is_drawn:
            self._out.write(_ERASE_LINE)
            self._is_drawn = False

    def draw(self, describe: Callable[[], list[str]]) -> None:
        """Draw the line if new text is due, or redraw the old text after ``erase``."""
        now_s = time.monotonic()
        is_due = now_s >= self._due_s
        if is_due:
            self._due_s = now_s + _TERMINAL_PERIOD_S
            self._text = "".join(describe())
        if self._text and (is_due or not self._is_drawn):
            self._out.write(f"{_ERASE_LINE}{self._text[: self._columns() - 1]}")
            self._is_drawn = True
        self._out.flush()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._out.fileno()).columns or _USUAL_COLUMNS
        except (OSError, ValueError):  # some terminals have no size
            return _USUAL_COLUMNS

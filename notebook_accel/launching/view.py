"""What shows a run while it goes on: a seam with one verb, ``open``, and its small twin that prints plain lines.

Views come from the entry point group ``notebook_accel.views``: a callable that takes the job and returns a view, or
``None`` where it can't show anything. So a notebook has its panel without this package knowing of notebooks.
"""

from __future__ import annotations

import collections
import functools
import importlib.metadata
import string
import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from notebook_accel import events
from notebook_accel.launching.job import Job

__all__ = ["LinesView", "NoView", "View", "line_prefix", "open_view"]

_GROUP = "notebook_accel.views"
_PERIOD_S = 5.0
# A notebook with more lines can't be opened any more. Of all ranks of a run together.
_MOST_LINES = 10_000
_LAST_LINES = 1_000
_ROLE = "default_role"  # what torch calls it


class View(Protocol):
    """Shows one job."""

    def refresh(self) -> None:
        """Shows what is new. Called at most five times a second, by the thread that follows the job."""

    def close(self) -> None:
        """The job has ended: shows how."""


def open_view(job: Job) -> View:
    """The view that fits the job's options and the place: the first that can show it, else plain lines."""
    if job.config.view == "none":
        return NoView(job)
    if job.config.view != "lines":
        for opener in _openers():
            view = opener(job)
            if view is not None:
                return view
    return LinesView(job, sys.stdout)


@functools.cache
def _openers() -> tuple[Callable[[Job], View | None], ...]:
    return tuple(entry.load() for entry in importlib.metadata.entry_points(group=_GROUP))


def line_prefix(job: Job, rank: int) -> str:
    """What stands before a line of a rank's output: the option's template filled in, or the rank."""
    template = job.config.log_line_prefix_template
    if not template:
        return f"{rank:>{len(str(job.world_size - 1))}} │ "
    return string.Template(template).substitute(role_name=_ROLE, rank=rank, local_rank=rank)


class NoView:
    """Shows nothing."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def refresh(self) -> None:
        """Takes the events, so that they don't pile up."""
        self._job.events()

    def close(self) -> None:
        """Nothing."""


class _Lines:
    """One rank's lines on their way out: the first ones as they come, and of the others the last ones at the end."""

    def __init__(self, out: TextIO, prefix: str, job: Job, rank: int) -> None:
        self._out = out
        self._prefix = prefix
        self._log_file = str(job.log_files[rank]) if job.log_files else ""
        self._free = max(_MOST_LINES // job.world_size, 1)
        self._held = collections.deque[str](maxlen=max(_LAST_LINES // job.world_size, 1))
        self._left_out = 0

    def add(self, text: str, left_out: int = 0) -> None:
        if left_out:
            self._left_out += left_out + len(self._held)
            self._held.clear()
            self._free = 0
        for line in text.split("\n"):
            if self._free:
                self._free -= 1
                self._out.write(f"{self._prefix}{line}\n")
            else:
                self._left_out += len(self._held) == self._held.maxlen
                self._held.append(line)

    def close(self) -> None:
        if self._left_out:
            where = f"; the whole output is in {self._log_file}" if self._log_file else ""
            self._out.write(f"{self._prefix}[{self._left_out:,} lines left out here{where}]\n")
        self._out.writelines(f"{self._prefix}{line}\n" for line in self._held)


class LinesView:
    """Prints what ranks print, line by line with the rank in front, and now and then where each rank stands.

    Args:
        job: The run.
        out: Where to.
        period_s: Seconds between two lines of progress.
    """

    def __init__(self, job: Job, out: TextIO, period_s: float = _PERIOD_S) -> None:
        self._job = job
        self._out = out
        self._period_s = period_s
        self._due_s = job.started_s + period_s
        self._progress: dict[int, events.Progress] = {}
        self._rate_from: dict[int, events.Progress] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._shown = ""
        self._lines = [_Lines(out, line_prefix(job, rank), job, rank) for rank in range(job.world_size)]
        self._silent_steps: dict[int, int] = {}

    def refresh(self) -> None:
        """Prints the new lines, and the progress when it is due."""
        for rank, event in self._job.events():
            self._take(rank, event)
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + self._period_s
            self._print_progress()

    def close(self) -> None:
        """Prints what is left and where each rank ended."""
        self._due_s = 0.0
        self.refresh()
        for lines in self._lines:
            lines.close()
        self._out.flush()

    def _take(self, rank: int, event: events.Event) -> None:
        if isinstance(event, events.Output):
            self._lines[rank].add(event.text, event.left_out)
        elif isinstance(event, events.Display):
            self._lines[rank].add(event.data.get("text/plain", "[a figure]"))
        elif isinstance(event, events.Progress):
            self._progress[rank] = event
            self._rate_from.setdefault(rank, event)
        elif isinstance(event, events.Metrics):
            self._metrics[rank] = event.values
        elif isinstance(event, events.Silent) and not event.waits_in:
            self._print_silent(rank, event)

    def _print_silent(self, rank: int, event: events.Silent) -> None:
        """Once for each step that a rank doesn't get beyond; the ranks that wait for it need no line."""
        steps = self._progress[rank].steps if rank in self._progress else 0
        if self._silent_steps.get(rank) != steps:
            self._silent_steps[rank] = steps
            at = f": {event.at}" if event.at else ""
            self._out.write(
                f"[rank {rank} has done no step for {event.time_s - event.since_s:.0f} s, and others wait{at}]\n"
            )

    def _print_progress(self) -> None:
        parts = [self._describe(rank) for rank in sorted(self._progress.keys() | self._metrics.keys())]
        text = " | ".join(parts)
        if text and text != self._shown:
            self._shown = text
            self._out.write(f"[{time.monotonic() - self._job.started_s:.0f} s] {text}\n")
        self._rate_from = dict(self._progress)

    def _describe(self, rank: int) -> str:
        words = [f"rank {rank}", *self._describe_progress(rank)]
        words += [f"{name} {value:.4g}" for name, value in self._metrics.get(rank, {}).items()]
        return "  ".join(words)

    def _describe_progress(self, rank: int) -> list[str]:
        now = self._progress.get(rank)
        if now is None:
            return []
        words = []
        if now.epoch is not None:
            words.append(f"epoch {now.epoch}" + (f"/{now.epochs}" if now.epochs else ""))
        words.append(f"step {now.step}" + (f"/{now.total}" if now.total else ""))
        before = self._rate_from.get(rank, now)
        if now.time_s > before.time_s:
            words.append(f"{(now.steps - before.steps) / (now.time_s - before.time_s):.1f} steps/s")
        return words

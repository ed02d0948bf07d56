"""What shows a run while it goes on: a seam with one verb, ``open``, and its small twin that prints plain lines.

Views come from the entry point group ``notebook_accel.views``: a callable that takes the job and returns a view, or
``None`` where it can't show anything. So a notebook has its panel without this package knowing of notebooks.
"""

from __future__ import annotations

import collections
import functools
import importlib.metadata
import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from notebook_accel import events
from notebook_accel.launching.job import Job

__all__ = ["LinesView", "View", "open_view"]

_GROUP = "notebook_accel.views"
_PERIOD_S = 5.0
# A notebook with more lines can't be opened any more.
_MOST_LINES = 10_000
_LAST_LINES = 1_000


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


class NoView:
    """Shows nothing."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def refresh(self) -> None:
        """Takes the events, so that they don't pile up."""
        self._job.events()

    def close(self) -> None:
        """Nothing."""


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
        self._printed = 0
        self._held = collections.deque[str](maxlen=_LAST_LINES)

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
        left_out = self._printed - _MOST_LINES - len(self._held)
        if left_out > 0:
            self._out.write(f"[{left_out:,} lines left out]\n")
        self._out.writelines(self._held)
        self._out.flush()

    def _take(self, rank: int, event: events.Event) -> None:
        if isinstance(event, events.Output):
            for line in event.text.split("\n"):
                self._print(f"{rank} │ {line}\n")
        elif isinstance(event, events.Display):
            self._print(f"{rank} │ {event.data.get('text/plain', '[a figure]')}\n")
        elif isinstance(event, events.Progress):
            self._progress[rank] = event
            self._rate_from.setdefault(rank, event)
        elif isinstance(event, events.Metrics):
            self._metrics[rank] = event.values

    def _print(self, line: str) -> None:
        """Prints the first lines as they come, and keeps the last ones for the end."""
        self._printed += 1
        if self._printed <= _MOST_LINES:
            self._out.write(line)
        else:
            self._held.append(line)

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

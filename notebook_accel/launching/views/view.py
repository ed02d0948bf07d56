"""The seam of the views of a running job: one verb, ``open``, and a small twin that shows nothing.

Views come from the entry point group ``notebook_accel.views``: a callable that takes the job and returns a view, or
``None`` where it can't show anything. So a notebook has its panel without this package knowing of notebooks.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from notebook_accel.launching.views.lines_view import HOLD_S, LinesView, line_prefix

if TYPE_CHECKING:
    from notebook_accel.launching.kernel.job import Job
__all__ = ["HOLD_S", "NoView", "View", "line_prefix", "open_panel", "open_view", "warm"]

_GROUP = "notebook_accel.views"


class View(Protocol):
    """Shows one job."""

    def refresh(self) -> None:
        """Show what is new. Called at most five times a second, by the thread that follows the job."""

    def close(self) -> None:
        """Show how the job has ended."""


def open_view(job: Job) -> View:
    """Return the first view that can show the job, else plain lines."""
    if job.config.view == "none":
        return NoView(job)
    return open_panel(job) or LinesView(job, sys.stdout)


def open_panel(job: Job) -> View | None:
    """Return the first view, other than plain lines, that can show the job; ``None`` if there is none."""
    views = (opener(job) for opener in _openers()) if job.config.view not in ("lines", "none") else ()
    return next((view for view in views if view is not None), None)


def warm() -> None:
    """Import the modules of the views, so that the first launch need not wait for them."""
    _openers()


@functools.cache
def _openers() -> tuple[Callable[[Job], View | None], ...]:
    return tuple(entry.load() for entry in importlib.metadata.entry_points(group=_GROUP))


class NoView:
    """A view that shows nothing."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def refresh(self) -> None:
        """Take the events, so that they don't pile up."""
        self._job.events()

    def close(self) -> None:
        """Do nothing."""

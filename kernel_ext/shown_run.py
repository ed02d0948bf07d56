"""A run as it is displayed under its cell: its output, and where and how what is shown of it goes there.

Used by every view of a notebook: by the live panel, and by itself as the view of a run that has ended before a panel
was there. Such a run gets its summary only: to make widgets for nobody takes longer than a short run.
"""

from __future__ import annotations

import contextvars
import functools
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernel_ext import render
from kernel_ext.output_log import OutputLog
from notebook_accel.errors import RankFailedError
from notebook_accel.launching.views.view import line_prefix
from notebook_accel.protocol import events

if TYPE_CHECKING:
    from notebook_accel.launching.kernel.job import Job

__all__ = ["ShownRun"]


class ShownRun:
    """A run, and its one place under the running cell. As a view it shows the summary when it is closed.

    Args:
        job: The run. Its events are taken by nobody else.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.output = OutputLog(job.world_size, functools.partial(line_prefix, job))
        # Another thread may draw, while a later cell is running: what is displayed belongs under this cell, which
        # ipykernel keeps in a context variable (since version 7).
        self._cell_context = contextvars.copy_context()
        self._display_id = uuid.uuid4().hex
        self._is_there = False

    def in_cell(self, act: Callable[[], None]) -> None:
        """Does something whose messages to front ends belong under the run's cell."""
        self._cell_context.copy().run(act)

    def take_events(self) -> set[type[events.Event]]:
        """Take the new events: keep output, display what ranks display. Return which kinds of events came."""
        kinds: set[type[events.Event]] = set()
        for rank, event in self._job.events():
            kinds.add(type(event))
            if isinstance(event, events.Output):
                self.output.take(rank, event)
            elif isinstance(event, events.Display):
                options = {"display_id": event.display_id or None, "update": event.is_update}
                self._display(event.data, metadata=event.metadata, **options)
        return kinds

    def facts(self, now_s: float, hint: str = "") -> render.RunFacts:
        """What is shown besides what the ranks say."""
        job = self._job
        end_s = now_s if job.ended_s is None else job.ended_s
        error = job.error
        traceback = error.remote_traceback if isinstance(error, RankFailedError) else ""
        return render.RunFacts(
            name=job.name,
            devices=job.devices,
            precision=job.config.mixed_precision,
            status=job.status,
            elapsed_s=end_s - job.started_s,
            hint=hint,
            failed_rank=error.rank if isinstance(error, RankFailedError) and traceback else None,
            traceback=traceback,
            is_background=job.is_background,
            log_folder="" if job.log_folder is None else str(job.log_folder),
        )

    def show(self, data: dict[str, Any]) -> None:
        """Displays a mime bundle in the run's place, instead of what is there."""
        self._display(data, display_id=self._display_id, update=self._is_there)
        self._is_there = True

    def show_summary(self, now_s: float, hint: str = "") -> None:
        """Displays how the run has ended, as HTML and text that need no kernel."""
        facts, state = self.facts(now_s, hint), self._job.state
        with self._job.state_lock:
            html = render.summary_html(facts, state, self.output, now_s)
            text = render.summary_text(facts, state, self.output, now_s)
        self.show({"text/html": html, "text/plain": text})

    def refresh(self) -> None:
        """Takes the events, so that they don't pile up."""
        self.take_events()

    def close(self) -> None:
        """Displays the summary. The run has ended."""
        self.take_events()
        self.show_summary(time.monotonic())

    def _display(self, data: dict[str, Any], **options: Any) -> None:
        from IPython.display import display

        self.in_cell(lambda: display(data, raw=True, **options))

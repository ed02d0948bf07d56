"""The live panel under a cell: a run's state in widgets that change as it does.

Only core ipywidgets, with the interface of 7.7, which Colab has. When the run has ended, what the widgets showed is
replaced by the same as plain HTML, so that a saved notebook shows it without a kernel. A page that was reloaded in the
meantime can't be told to replace it; for such a page the outermost widget stays open and shows that HTML too.
"""

from __future__ import annotations

import contextvars
import time
import uuid
from typing import TYPE_CHECKING, Any

from kernel_ext import front_end, render
from kernel_ext.chart import chart_html
from kernel_ext.run_state import RunState
from notebook_accel import events
from notebook_accel.errors import RankFailedError
from notebook_accel.launching.view import line_prefix

if TYPE_CHECKING:
    from notebook_accel.launching.job import Job

__all__ = ["PanelView", "open_view"]


def open_view(job: Job) -> PanelView | None:
    """Opens the panel of a run, or returns ``None`` where nobody would see it.

    The option ``view="panel"`` overrides that.
    """
    running = front_end.kernel()
    if running is None or (job.config.view != "panel" and not front_end.is_watched(running)):
        return None
    try:
        return PanelView(job)
    except ImportError:  # no ipywidgets
        return None


class PanelView:
    """A run's panel. Constructing it displays it under the running cell.

    Args:
        job: The run. Its events are taken by nobody else.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        # Numbers need no help, and the panel draws them in another colour.
        has_prefixes = bool(job.config.log_line_prefix_template)
        prefixes = [line_prefix(job, rank) for rank in range(job.world_size)] if has_prefixes else []
        self._state = RunState(job.world_size, prefixes)
        self._drawn_second = -1
        # Another thread may draw, while a later cell is running: what is displayed belongs under this cell, which
        # ipykernel keeps in a context variable (since version 7).
        self._cell_context = contextvars.copy_context()
        self._display_id = uuid.uuid4().hex
        self._widgets = _Widgets(job)
        self._draw(time.monotonic(), set())
        self._publish(front_end.widget_view(self._widgets.root, f"{job.name}: running on {job.devices}"))

    def refresh(self) -> None:
        """Draws what is new. Without events, only the clock moves, once a second."""
        kinds = self._take_events()
        now_s = time.monotonic()
        if kinds or int(now_s - self._job.started_s) != self._drawn_second:
            self._draw(now_s, kinds)

    def close(self) -> None:
        """Replaces what is displayed by the final state as plain HTML and text. The run has ended."""
        self._take_events()
        self._state.close()
        now_s = time.monotonic()
        facts = self._facts(now_s)
        summary = {
            "text/html": render.summary_html(facts, self._state, now_s),
            "text/plain": render.summary_text(facts, self._state, now_s),
        }
        self._publish(summary, update=True)
        self._widgets.close(render.summary_parts_html(facts, self._state, now_s))

    def _take_events(self) -> set[type[events.Event]]:
        """Brings the state up to date; returns which kinds of events came."""
        kinds: set[type[events.Event]] = set()
        for rank, event in self._job.events():
            kinds.add(type(event))
            self._state.apply(rank, event)
            if isinstance(event, events.Display):
                options = {"display_id": event.display_id or None, "update": event.is_update}
                self._publish(event.data, metadata=event.metadata, **options)
        return kinds

    def _draw(self, now_s: float, kinds: set[type[events.Event]]) -> None:
        # A widget sends nothing when it is given the value that it has.
        widgets, state = self._widgets, self._state
        widgets.header.value = render.header_html(self._facts(now_s), state, now_s)
        widgets.table.value = render.table_html(state, now_s)
        if events.Output in kinds or not widgets.output.value:
            widgets.output.value = render.output_html(state)
        if events.Metrics in kinds:
            widgets.chart.value = chart_html(state)
        self._drawn_second = int(now_s - self._job.started_s)

    def _facts(self, now_s: float) -> render.RunFacts:
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
            hint="" if job.is_background or job.done else "interrupt the kernel to stop",
            failed_rank=error.rank if isinstance(error, RankFailedError) and traceback else None,
            traceback=traceback,
            is_background=job.is_background,
            log_folder="" if job.log_folder is None else str(job.log_folder),
        )

    def _publish(self, data: dict[str, Any], **options: Any) -> None:
        from IPython.display import display

        options = {"display_id": self._display_id, **options}
        self._cell_context.copy().run(display, data, raw=True, **options)


class _Widgets:
    """The panel's widgets. Each part is one widget, so that only what has changed is sent."""

    def __init__(self, job: Job) -> None:
        import ipywidgets  # not above: plain scripts import this module too, to be told that they have no panel

        style = ipywidgets.HTML(render.style_html())
        self.header, self.table, self.output, self.chart = (ipywidgets.HTML() for _ in range(4))
        top = [self.header]
        if job.is_background:
            # Only then can a click be delivered for certain: a running cell keeps the kernel from reading messages.
            self._stop = ipywidgets.Button(description="Stop", tooltip="Stop every rank of this run")
            self._stop.on_click(lambda _: self._on_stop(job))
            self._stop.add_class("nba-stop")
            top.append(self._stop)
        header_row = ipywidgets.HBox(top)
        bottom = ipywidgets.HBox([self.output, self.chart])
        self.root = ipywidgets.VBox([style, header_row, self.table, bottom])
        for widget, name in (
            (self.root, "nba-panel"),
            (style, "nba-style"),
            (header_row, "nba-top"),
            (bottom, "nba-bottom"),
            (self.output, "nba-output-pane"),
            (self.chart, "nba-chart-pane"),
        ):
            widget.add_class(name)

    def _on_stop(self, job: Job) -> None:
        self._stop.disabled = True
        self._stop.description = "Stopping …"
        job.stop()

    def close(self, summary: str) -> None:
        """Leaves the final state as the only thing in the root and closes everything else."""
        import ipywidgets

        parts = self.root.children
        self.root.children = [ipywidgets.HTML(summary)]
        self.root.add_class("nba-ended")
        for part in parts:
            _close(part)


def _close(widget: Any) -> None:
    """Closes a widget and what is in it, with the models of their layouts and styles, so that no comm stays open."""
    for part in (*getattr(widget, "children", ()), getattr(widget, "style", None), widget.layout):
        if part is not None:
            _close(part) if hasattr(part, "layout") else part.close()
    widget.close()

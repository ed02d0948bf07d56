"""The live panel under a cell: a run's state in widgets that change as it does.

Only core ipywidgets, with the interface of 7.7, which Colab has. When the run has ended, what the widgets showed is
replaced by the same as plain HTML, so that a saved notebook shows it without a kernel. A page that was reloaded in the
meantime can't be told to replace it; for such a page the outermost widget stays open and shows that HTML too.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Literal

from kernel_ext import front_end, output_pane, render
from kernel_ext.asked_stacks import AskedStacks
from kernel_ext.chart import chart_html
from kernel_ext.live_clicks import LiveClicks
from kernel_ext.panel_widgets import PanelWidgets
from kernel_ext.shown_run import ShownRun
from kernel_ext.table import table_html
from notebook_accel.errors import NotebookAccelError
from notebook_accel.protocol import events

if TYPE_CHECKING:
    from notebook_accel.launching.kernel.job import Job

__all__ = ["PanelView", "open_view"]

_SLOW_PERIOD_S = 1.0  # for what costs more to draw, or to read
_LOG_LINES = 200
_ENDED_BY = {"": "", "stop": "by the button Stop", "interrupt": "by the button Interrupt"}


def open_view(job: Job) -> PanelView | ShownRun | None:
    """Opens the panel of a run, or returns ``None`` where nobody would see it.

    The option ``view="panel"`` overrides that. A run that has ended already gets no widgets, only its summary.
    """
    running = front_end.kernel()
    if running is None or (job.config.view != "panel" and not front_end.is_watched(running)):
        return None
    if job.done:
        return ShownRun(job)
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
        self._shown = ShownRun(job)
        self._state = job.state
        self._stacks = AskedStacks(job, self._on_change)
        self._drawn = _Drawn()
        self._has_changed = False  # what people have chosen
        self._clicked: Literal["", "stop", "interrupt"] = ""
        self._widgets = PanelWidgets(
            job.world_size,
            on_stop=self._on_stop,
            on_interrupt=self._on_interrupt,
            on_ask=self._stacks.ask,
            on_change=self._on_change,
        )
        self._clicks = LiveClicks(front_end.kernel())
        for widget in self._widgets.clickable:
            self._clicks.attend(widget)
        self._draw(time.monotonic(), set())
        self._shown.show(front_end.widget_view(self._widgets.root, f"{job.name}: running on {job.devices}"))

    def refresh(self) -> None:
        """Draws what is new. Without events, only the clock moves, once a second."""
        self._shown.in_cell(self._refresh)

    def close(self) -> None:
        """Replaces what is displayed by the final state as plain HTML and text. The run has ended."""
        self._shown.in_cell(self._close)

    def _refresh(self) -> None:
        kinds = self._shown.take_events()
        now_s = time.monotonic()
        if kinds or self._has_changed or int(now_s - self._job.started_s) != self._drawn.second:
            self._draw(now_s, kinds)

    def _close(self) -> None:
        self._shown.take_events()
        now_s = time.monotonic()
        self._shown.show_summary(now_s, self._hint())
        facts = self._shown.facts(now_s, self._hint())
        with self._job.state_lock:
            html = render.summary_parts_html(facts, self._state, self._shown.output, now_s)
        self._widgets.close(html)

    def _draw(self, now_s: float, kinds: set[type[events.Event]]) -> None:
        facts = self._shown.facts(now_s, self._hint())  # before the lock, since the job's error takes another
        with self._job.state_lock:
            self._draw_state(facts, now_s, kinds)
        self._drawn.second = int(now_s - self._job.started_s)

    def _draw_state(self, facts: render.RunFacts, now_s: float, kinds: set[type[events.Event]]) -> None:
        # A widget sends nothing when it is given the value that it has.
        widgets, state, drawn = self._widgets, self._state, self._drawn
        has_changed, self._has_changed = self._has_changed, False
        widgets.header.value = render.header_html(facts, state, now_s)
        widgets.table.value = table_html(state, now_s, is_folded=widgets.is_folded)
        drawn.output |= events.Output in kinds
        drawn.metrics |= events.Metrics in kinds
        if has_changed or not widgets.body.value or self._is_body_due(now_s):
            drawn.output, drawn.body_s = False, now_s
            widgets.errors.value = output_pane.errors_html(self._shown.output, widgets.choice)
            widgets.body.value = self._body_html()
        is_chart_due = drawn.metrics and now_s - drawn.chart_s >= _SLOW_PERIOD_S
        widgets.show_controls(
            are_live=self._is_clickable(),
            metrics=tuple(name for name in state.metric_names if name in state.history),
            clicked=self._clicked,
            has_chart=bool(widgets.chart.value) or is_chart_due,
        )
        if has_changed or is_chart_due:
            drawn.metrics, drawn.chart_s = False, now_s
            widgets.chart.value = chart_html(
                state, widgets.metric, of_ranks=widgets.has_each_rank, is_titled=not widgets.names_chart
            )

    def _is_body_due(self, now_s: float) -> bool:
        """Return whether what is below the table has changed by itself. A file isn't read five times a second."""
        period_s = _SLOW_PERIOD_S if self._widgets.choice.view == "log" else 0.0
        return self._drawn.output and now_s - self._drawn.body_s >= period_s

    def _body_html(self) -> str:
        choice = self._widgets.choice
        if choice.view == "stacks":
            return output_pane.stacks_html(self._stacks.texts, self._stacks.said, choice)
        if choice.view == "output":
            return output_pane.output_html(self._shown.output, choice)
        text = ""
        if choice.rank is not None and self._job.log_files:
            try:
                text = self._job.logs(choice.rank, _LOG_LINES)
            except NotebookAccelError as error:
                text = str(error)
        return output_pane.log_html([str(path) for path in self._job.log_files], text, choice)

    def _hint(self) -> str:
        job = self._job
        if job.done:
            return _ENDED_BY[self._clicked] if job.status == "stopped" else ""
        if self._clicked == "stop":
            return "stopping …"
        if job.on_death == "keep":
            return job.doing()
        if self._clicked == "interrupt":
            return f"interrupting …; what goes on is ended after {job.config.grace_s:g} s"
        return "" if self._is_clickable() else "interrupt the kernel to stop"

    def _is_clickable(self) -> bool:
        """Whether something happens on a click: a cell that waits for the run may keep the kernel from hearing of it.

        A run of this very process can't be stopped from outside.
        """
        job = self._job
        return job.run_here is None and (job.is_background or self._clicks.are_delivered)

    # Called in whatever thread a click comes in: nothing is drawn there.

    def _on_stop(self) -> None:
        self._clicked, self._has_changed = "stop", True
        self._job.stop()

    def _on_interrupt(self) -> None:
        if self._job.on_death == "keep":  # a session: what its ranks do now ends, and they stay
            self._has_changed = True
            self._job.interrupt(escalate=False)
        elif not self._clicked:
            self._clicked, self._has_changed = "interrupt", True
            self._job.interrupt()

    def _on_change(self) -> None:
        self._has_changed = True


@dataclasses.dataclass
class _Drawn:
    """What was drawn when, and what has come since: whether there was output, and metrics."""

    second: int = -1
    body_s: float = -_SLOW_PERIOD_S
    chart_s: float = -_SLOW_PERIOD_S
    output: bool = False
    metrics: bool = False

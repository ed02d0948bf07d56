"""The live panel under a cell: a run's state in widgets that follow it.

Only core ipywidgets, with the interface of 7.7, which Colab has. When the run has ended, plain HTML replaces the
widgets, so that a saved notebook shows the run without a kernel. A page that was reloaded during the run can't replace
them, so the outermost widget stays open and shows the same HTML.
"""

from __future__ import annotations

import contextvars
import functools
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from kernel_ext import charts, front_end, output, render, step_view, timeline
from kernel_ext.front_end import STYLE, LiveClicks
from kernel_ext.output import Choice, OutputLog
from notebook_accel.errors import NotebookAccelError, RankFailedError
from notebook_accel.formatting import format_clock
from notebook_accel.launching.kernel import detached
from notebook_accel.launching.kernel.detached_job import DetachedJob
from notebook_accel.launching.state.diagnosis import Diagnosis
from notebook_accel.launching.state.profiles import Profile
from notebook_accel.launching.state.run import RunState
from notebook_accel.launching.views.view import KERNEL_INTERRUPT, describe_interrupt, line_prefix
from notebook_accel.protocol import events

if TYPE_CHECKING:
    from notebook_accel.launching.kernel.job import Job

_SLOW_PERIOD_S = 1.0  # for parts that are expensive to draw or to read
_LOG_LINES = 200
_VIEWS = {  # with their tooltips
    "Output": "What the ranks print",
    "Step": "Where the time of a step goes",
    "Stacks": "Where every rank stands now",
    "Log file": "The ranks' log files",
}
_DIAGNOSIS_PERIOD_S = 2.0
_EXPENSIVE_SHARE = 0.01  # of a core, for the diagnosis and for the chart: with many ranks they are made less often
_PROFILED_STEPS = 5
_MEAN, _EACH = "Mean", "Each rank"


def open_view(job: Job) -> PanelView | _SummaryView | None:
    """Open the panel of a run. Return ``None`` if no user watches the front end.

    The option ``view="panel"`` skips this check. A run that has ended already gets no widgets, only its summary.
    """
    running = front_end.kernel()
    if running is None or (job.config.view != "panel" and not front_end.is_watched(running)):
        return None
    if job.done:
        return _SummaryView(job)
    try:
        return PanelView(job)
    except ImportError:  # no ipywidgets
        return None


def _period_s(shortest_s: float, began_s: float) -> float:
    """Return the time until something that this thread began at ``began_s`` of its CPU time may be made again."""
    return max(shortest_s, (time.thread_time() - began_s) / _EXPENSIVE_SHARE)


class _SummaryView:
    """The view of a run that ended before a panel opened: its summary, in one place under the run's cell.

    Making widgets would take longer than a short run. Nobody else may take the job's events.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._output = OutputLog(job.world_size, functools.partial(line_prefix, job))
        # Another thread may draw while a later cell runs. Displays belong under this cell, which ipykernel keeps in
        # a context variable (since version 7).
        self._cell_context = contextvars.copy_context()
        self._display_id = uuid.uuid4().hex
        self._is_there = False
        self._diagnosis = Diagnosis()
        self._diagnosis_due_s = 0.0
        self._profile: Profile | None = None

    def refresh(self) -> None:
        """Handle new events, so that they don't pile up."""
        self._cell_context.copy().run(self._refresh)

    def close(self) -> None:
        """Display the summary. The run has ended."""
        self._cell_context.copy().run(self._close)

    def _refresh(self) -> None:
        self._take_events()

    def _close(self) -> None:
        self._take_events()
        self._show_summary()

    def _hint(self) -> str:
        """Return why the run has ended, unless the header or a rank's row says it anyway."""
        job = self._job
        return "" if job.status == "succeeded" or isinstance(job.error, RankFailedError) else job.ending.why

    def _take_events(self) -> set[type[events.Event]]:
        """Handle new events: keep output, and show the ranks' displays. Return the kinds of events."""
        kinds: set[type[events.Event]] = set()
        for rank, event in self._job.events():
            kinds.add(type(event))
            if isinstance(event, events.Output):
                self._output.take(rank, event)
            elif isinstance(event, events.Display):
                options = {"display_id": event.display_id or None, "update": event.is_update}
                self._display(event.data, metadata=event.metadata, **options)
        return kinds

    def _facts(self, now_s: float) -> render.RunFacts:
        """Return the facts that are shown besides the ranks' own state."""
        job = self._job
        end_s = now_s if job.ended_s is None else job.ended_s
        error = job.error
        failure = error if isinstance(error, RankFailedError) else None
        return render.RunFacts(
            name=job.name,
            devices=job.devices,
            precision=job.config.mixed_precision,
            status=job.status,
            elapsed_s=end_s - job.started_s,
            hint=self._hint(),
            failed_rank=None if failure is None else failure.rank,
            traceback="" if failure is None else failure.remote_traceback,
            is_background=job.is_background,
            log_folder="" if job.log_folder is None else str(job.log_folder),
            diagnosis=self._diagnose(now_s),
            profile=self._profile,
        )

    def _diagnose(self, now_s: float) -> Diagnosis:
        """Return the reason why steps are slow, found anew every two seconds or less often, and at the end."""
        if now_s >= self._diagnosis_due_s or self._job.done:
            began_s = time.thread_time()
            self._diagnosis = self._job.diagnosis()
            self._diagnosis_due_s = now_s + _period_s(_DIAGNOSIS_PERIOD_S, began_s)
        return self._diagnosis

    def _show(self, data: dict[str, Any]) -> None:
        """Display a mime bundle in the run's place under its cell, replacing the previous one."""
        self._display(data, display_id=self._display_id, update=self._is_there)
        self._is_there = True

    def _show_summary(self) -> str:
        """Display the run's end as HTML and text that need no kernel. Return the HTML, without the panel's own tag."""
        now_s = time.monotonic()
        facts, state = self._facts(now_s), self._job.state  # before the lock: the job's error takes another one
        with self._job.state_lock:
            html = render.summary_html(facts, state, self._output, now_s)
            text = render.summary_text(facts, state, self._output, now_s)
        self._show({"text/html": f'<div class="nba-panel">{html}</div>', "text/plain": text})
        return html

    def _display(self, data: dict[str, Any], **options: Any) -> None:
        from IPython.display import display

        display(data, raw=True, **options)


class PanelView(_SummaryView):
    """A run's panel, which follows the run until plain HTML and text replace it.

    Constructing it displays it under the running cell.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._has_changed = False  # True if a control was used since the last drawing
        self._clicked: Literal["", "stop", "interrupt"] = ""
        self._stacks: tuple[str, ...] = ()
        self._threads: dict[str, threading.Thread] = {}
        self._said = {"stacks": "not asked yet", "profile": "", "detach": ""}
        self._can_detach = not (isinstance(job, DetachedJob) or job.on_death == "keep" or detached.why_not(job.config))
        # When parts were last drawn or may be drawn again, and whether there is something new for them since.
        self._second, self._body_s, self._chart_due_s = -1, -_SLOW_PERIOD_S, 0.0
        self._is_body_stale = self._is_chart_stale = False
        self._widgets = widgets = _PanelWidgets(job.world_size)
        widgets.stop.on_click(lambda _: self._on_stop())
        widgets.interrupt.on_click(lambda _: self._on_interrupt())
        widgets.ask_again.on_click(lambda _: self._ask())
        widgets.profile.on_click(lambda _: self._profile_steps())
        widgets.detach.on_click(lambda _: self._detach())
        widgets.view.observe(lambda change: self._ask() if change["new"] == "Stacks" else None, "value")
        for widget in widgets.choices:
            widget.observe(lambda _: self._on_change(), "value")
        self._clicks = LiveClicks(front_end.kernel())
        for widget in (*widgets.buttons, *widgets.choices):
            self._clicks.attend(widget)
        self._draw(time.monotonic(), set())
        self._show(front_end.widget_view(widgets.root, f"{job.name}: running on {job.devices}"))

    def _refresh(self) -> None:
        """Draw changes. Without events only the clock moves, once a second."""
        kinds = self._take_events()
        now_s = time.monotonic()
        if kinds or self._has_changed or int(now_s - self._job.started_s) != self._second:
            self._draw(now_s, kinds)

    def _close(self) -> None:
        self._take_events()
        self._widgets.close(self._show_summary())

    def _draw(self, now_s: float, kinds: set[type[events.Event]]) -> None:
        facts = self._facts(now_s)  # before the lock: the job's error takes another one
        with self._job.state_lock:
            self._draw_state(facts, now_s, kinds)
        self._second = int(now_s - self._job.started_s)

    def _draw_state(self, facts: render.RunFacts, now_s: float, kinds: set[type[events.Event]]) -> None:
        # Setting a widget to its present value sends nothing.
        widgets, state = self._widgets, self._job.state
        has_changed, self._has_changed = self._has_changed, False
        widgets.header.value = render.header_html(facts, state, now_s)
        steps = facts.diagnosis.steps
        widgets.table.value = render.table_html(state, now_s, steps, is_folded=not widgets.fold.value)
        self._is_body_stale |= events.Output in kinds
        self._is_chart_stale |= events.Metrics in kinds
        period_s = _SLOW_PERIOD_S if widgets.view.value == "Log file" else 0.0  # a log is read from a file
        self._is_body_stale |= events.StepTimes in kinds and widgets.view.value == "Step"
        is_body_due = self._is_body_stale and now_s - self._body_s >= period_s
        if has_changed or is_body_due or not widgets.body.value:
            self._is_body_stale, self._body_s = False, now_s
            widgets.errors.value = output.errors_html(self._output, widgets.choice)
            widgets.body.value = self._body_html()
        is_chart_due = self._is_chart_stale and now_s >= self._chart_due_s
        has_chart = bool(widgets.chart.value) or is_chart_due
        widgets.show_controls(
            state, self._clicked, are_live=self._is_clickable(), can_detach=self._can_detach, has_chart=has_chart
        )
        if has_changed or is_chart_due:
            self._is_chart_stale, began_s = False, time.thread_time()
            of_ranks, is_titled = widgets.curves.value == _EACH, not widgets.names_chart
            metric = widgets.metric.value or ""
            widgets.chart.value = charts.chart_html(state, metric, of_ranks=of_ranks, is_titled=is_titled)
            self._chart_due_s = now_s + _period_s(_SLOW_PERIOD_S, began_s)

    def _body_html(self) -> str:
        view, choice = self._widgets.view.value, self._widgets.choice
        if view == "Stacks":
            return output.stacks_html(self._stacks, self._said["stacks"], choice)
        if view == "Step":
            return f"{timeline.latest_html(self._profile, self._said['profile'])}{step_view.step_html(self._diagnosis)}"
        if view == "Output":
            return output.output_html(self._output, choice)
        text = ""
        if choice.rank is not None and self._job.log_files:
            try:
                text = self._job.logs(self._job.first_rank + choice.rank, _LOG_LINES)
            except NotebookAccelError as error:
                text = str(error)
        return output.log_html([str(path) for path in self._job.log_files], text, choice, self._job.first_rank)

    def _hint(self) -> str:
        job = self._job
        if job.done:
            return super()._hint()
        if self._said["detach"]:
            return self._said["detach"]
        if self._clicked == "stop":
            return "stopping …"
        if job.on_death == "keep":
            return job.doing()
        if self._clicked == "interrupt" or job.ended_by == KERNEL_INTERRUPT:
            return describe_interrupt(job)
        return "" if self._is_clickable() else "interrupt the kernel to stop"

    def _is_clickable(self) -> bool:
        """Return whether a click has an effect: a cell that waits for the run may keep the kernel from reading it.

        A run in the kernel's own process can't be stopped from outside.
        """
        job = self._job
        return job.run_here is None and (job.is_background or self._clicks.are_delivered)

    # Called in the thread in which a click arrives, where nothing may be drawn.

    def _on_stop(self) -> None:
        self._clicked, self._has_changed = "stop", True
        self._job.ended_by = "the button Stop"
        self._job.stop()

    def _on_interrupt(self) -> None:
        if self._job.on_death == "keep":  # a session: interrupt its request, keep its ranks
            self._has_changed = True
            self._job.interrupt(escalate=False)
        elif not self._clicked:
            self._clicked, self._has_changed = "interrupt", True
            self._job.ended_by = "the button Interrupt"
            self._job.interrupt()

    def _on_change(self) -> None:
        self._has_changed = True

    def _ask(self) -> None:
        def ask() -> str:
            self._stacks = tuple(map(str, self._job.stacks()))
            return f"as of {format_clock(time.monotonic() - self._job.started_s)}"

        self._in_background("stacks", "asking every rank …", ask)

    def _profile_steps(self) -> None:
        def profile() -> str:
            self._profile = self._job.profile(_PROFILED_STEPS)
            return ""

        self._in_background("profile", f"profiling the next {_PROFILED_STEPS} steps …", profile)

    def _detach(self) -> None:
        def detach() -> str:
            detached.let_go(self._job)
            return "detaching …"  # until the run's status says more

        self._in_background("detach", "detaching …", detach)

    def _in_background(self, name: str, said: str, act: Callable[[], str]) -> None:
        """Call ``act`` in a thread, unless its last call goes on. Drawing never waits.

        Meanwhile the panel says ``said``, and afterwards what ``act`` returns, or its error.
        """
        if name in self._threads and self._threads[name].is_alive():
            return

        def run() -> None:
            try:
                self._said[name] = act()
            except NotebookAccelError as error:
                self._said[name] = str(error)
            self._on_change()

        self._said[name] = said
        self._threads[name] = threading.Thread(target=run, name=f"notebook-accel-{name}", daemon=True)
        self._threads[name].start()
        self._on_change()


class _PanelWidgets:
    """The panel's widgets.

    Each part is one widget, so that only changes are sent. Handlers of clicks may run in any thread and only set flags.
    Widgets change when the panel is drawn, in one thread.
    """

    def __init__(self, world_size: int) -> None:
        import ipywidgets  # not above: plain scripts import this module too, to find that they need no panel

        self.header, self.table, self.errors, self.body, self.chart = (ipywidgets.HTML() for _ in range(5))
        self.stop = ipywidgets.Button(description="Stop", tooltip="End every rank of this run now")
        self.interrupt = ipywidgets.Button(
            description="Interrupt", tooltip="Raise KeyboardInterrupt in every rank, so that each can clean up"
        )
        self.detach = ipywidgets.Button(
            description="Detach", tooltip="Let this run continue when the notebook's kernel ends"
        )
        self.fold = ipywidgets.ToggleButton(description=f"Show all {world_size} ranks", tooltip="A row for every rank")
        self.view = ipywidgets.ToggleButtons(options=list(_VIEWS), tooltips=list(_VIEWS.values()))
        self.rank = ipywidgets.Dropdown(description="Rank", options=[("all ranks", -1)])
        self.search = ipywidgets.Text(description="Search", placeholder="search")
        self.ask_again = ipywidgets.Button(description="Ask again", tooltip="Ask every rank again where it stands")
        self.profile = ipywidgets.Button(
            description=f"Profile {_PROFILED_STEPS} steps", tooltip="A timeline of the next steps of all ranks"
        )
        self.metric = ipywidgets.Dropdown(description="Metric", options=[])
        self.curves = ipywidgets.ToggleButtons(options=[_MEAN, _EACH], tooltips=["Mean of the ranks", "A curve a rank"])
        self.buttons = (self.stop, self.interrupt, self.detach, self.ask_again, self.profile)
        self.choices = (self.fold, self.view, self.rank, self.search, self.metric, self.curves)
        self.root = self._laid_out()

    def _laid_out(self) -> Any:
        from ipywidgets import HTML, HBox, VBox

        def named(widget: Any, name: str) -> Any:
            widget.add_class(name)
            return widget

        for button in (*self.buttons, self.fold):
            button.add_class("nba-button")
        for button in (self.ask_again, self.profile, self.fold):
            button.add_class("nba-small")
        self.stop.add_class("nba-stop")
        self.fold.add_class("nba-fold")
        self.view.add_class("nba-tabs")
        self.curves.add_class("nba-tabs")
        self._tools = named(HBox([self.view, self.ask_again, self.profile, self.rank, self.search]), "nba-tools")
        self._chart_tools = named(HBox([self.metric, self.curves]), "nba-tools")
        scroll = named(VBox([self.body]), "nba-scrollback")
        output = named(VBox([self._tools, self.errors, scroll]), "nba-output-pane")
        chart = named(VBox([self._chart_tools, self.chart]), "nba-chart-pane")
        top = named(HBox([self.header, self.detach, self.interrupt, self.stop]), "nba-top")
        bottom = named(HBox([output, chart]), "nba-bottom")
        style = named(HTML(f"<style>{STYLE}</style>"), "nba-style")
        return named(VBox([style, top, self.table, self.fold, bottom]), "nba-panel")

    @property
    def choice(self) -> Choice:
        """The user's choice of a rank and of a text to search."""
        rank = None if self.rank.value == -1 else self.rank.value
        return Choice(rank, self.search.value.strip())

    @property
    def names_chart(self) -> bool:
        """True if the visible controls already name the chart's metric."""
        return bool(self._chart_tools.layout.display == "")

    def show_controls(
        self, state: RunState, clicked: str, *, are_live: bool, can_detach: bool, has_chart: bool
    ) -> None:
        """Show the controls that have an effect now.

        Args:
            state: The run's state.
            clicked: ``stop`` or ``interrupt`` after such a click; else empty.
            are_live: Whether clicks arrive.
            can_detach: Whether the run may go on without the kernel.
            has_chart: Whether there is a chart.
        """
        ranks = (("all ranks", -1), *((f"rank {rank.number}", rank.rank) for rank in state.ranks))
        metrics, are_several = tuple(state.chart_names), len(state.ranks) > 1
        if self.rank.options != ranks:  # several nodes agree on the ranks' numbers after the start
            _set_options(self.rank, ranks, self.rank.value)
        if self.metric.options != metrics:
            chosen = self.metric.value
            _set_options(self.metric, metrics, chosen if chosen in metrics else next(iter(metrics), None))
        self.stop.disabled = clicked == "stop"
        self.interrupt.disabled = bool(clicked)
        shown = {
            self.stop: are_live,
            self.interrupt: are_live,
            self.detach: are_live and can_detach and not clicked,
            self.fold: are_live and len(state.ranks) > render.MOST_ROWS,
            self._tools: are_live,
            self.rank: are_several,
            self.ask_again: self.view.value == "Stacks",
            self.profile: self.view.value == "Step",
            self._chart_tools: are_live and has_chart and (len(metrics) > 1 or are_several),
            self.curves: are_several,
        }
        for widget, is_shown in shown.items():
            widget.layout.display = "" if is_shown else "none"

    def close(self, summary: str) -> None:
        """Leave the final state as the root's only content, and close all other widgets."""
        import ipywidgets

        parts = self.root.children
        self.root.children = [ipywidgets.HTML(summary)]
        self.root.add_class("nba-ended")
        for part in parts:
            _close(part)


def _set_options(dropdown: Any, options: tuple[Any, ...], chosen: Any) -> None:
    dropdown.options = options
    dropdown.value = chosen


def _close(widget: Any) -> None:
    """Close a widget, its children, and their layouts' and styles' models, so that no comm stays open."""
    for part in (*getattr(widget, "children", ()), getattr(widget, "style", None), widget.layout):
        if part is not None:
            _close(part) if hasattr(part, "layout") else part.close()
    widget.close()

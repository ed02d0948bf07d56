"""The live panel's widgets, and what people choose and click in them.

Each part is one widget, so that only what has changed is sent. Clicks may come in any thread: here they are only noted,
and told to whoever has given the panel its actions. Widgets change when the panel is drawn, in one thread.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

from kernel_ext import render
from kernel_ext.output_pane import Choice
from kernel_ext.table import MOST_ROWS

__all__ = ["PanelWidgets", "warm"]

_VIEWS = {"Output": "output", "Stacks": "stacks", "Log file": "log"}
_MEAN, _EACH = "Mean", "Each rank"


def warm() -> None:
    """Imports ipywidgets where there is one, so that the first panel need not wait for it."""
    with contextlib.suppress(ImportError):
        importlib.import_module("ipywidgets")


class PanelWidgets:
    """The panel's widgets.

    Args:
        world_size: Number of ranks.
        on_stop: What the button Stop does.
        on_interrupt: What the button Interrupt does.
        on_ask: Asks the ranks where they stand.
        on_change: Called after every other choice. In these threads nothing may take long.
    """

    def __init__(
        self,
        world_size: int,
        *,
        on_stop: Callable[[], None],
        on_interrupt: Callable[[], None],
        on_ask: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        import ipywidgets  # not above: plain scripts import the panel too, to be told that they have none

        self.header, self.table, self.errors, self.body, self.chart = (ipywidgets.HTML() for _ in range(5))
        self._stop = ipywidgets.Button(description="Stop", tooltip="End every rank of this run now")
        self._stop.on_click(lambda _: on_stop())
        self._interrupt = ipywidgets.Button(
            description="Interrupt", tooltip="Raise KeyboardInterrupt in every rank, so that each can clean up"
        )
        self._interrupt.on_click(lambda _: on_interrupt())
        self._fold = ipywidgets.ToggleButton(description=f"Show all {world_size} ranks", tooltip="A row for every rank")
        self._view = ipywidgets.ToggleButtons(
            options=list(_VIEWS),
            tooltips=["What the ranks print", "Where every rank stands now", "The ranks' log files"],
        )
        self._rank = ipywidgets.Dropdown(
            description="Rank", options=[("all ranks", -1), *((f"rank {rank}", rank) for rank in range(world_size))]
        )
        self._search = ipywidgets.Text(description="Search", placeholder="search")
        self._again = ipywidgets.Button(description="Ask again", tooltip="Ask every rank again where it stands")
        self._again.on_click(lambda _: on_ask())
        self._metric = ipywidgets.Dropdown(description="Metric", options=[])
        self._curves = ipywidgets.ToggleButtons(
            options=[_MEAN, _EACH], tooltips=["Mean of the ranks", "A curve a rank"]
        )
        self._view.observe(lambda change: on_ask() if change["new"] == "Stacks" else None, "value")
        for widget in (self._fold, self._view, self._rank, self._search, self._metric, self._curves):
            widget.observe(lambda _: on_change(), "value")
        self.clickable = (
            *(self._stop, self._interrupt, self._fold, self._view, self._rank, self._search, self._again),
            *(self._metric, self._curves),
        )
        self._has_many, self._has_some = world_size > MOST_ROWS, world_size > 1
        self.root = self._laid_out()

    def _laid_out(self) -> Any:
        from ipywidgets import HTML, HBox, VBox

        def named(widget: Any, *names: str) -> Any:
            for name in names:
                widget.add_class(name)
            return widget

        named(self._stop, "nba-button", "nba-stop")
        named(self._again, "nba-button", "nba-small")
        named(self._fold, "nba-button", "nba-small", "nba-fold")
        named(self._view, "nba-tabs")
        named(self._curves, "nba-tabs")
        named(self._interrupt, "nba-button")
        self._tools = named(HBox([self._view, self._again, self._rank, self._search]), "nba-tools")
        self._chart_tools = named(HBox([self._metric, self._curves]), "nba-tools")
        scroll = named(VBox([self.body]), "nba-scrollback")
        output = named(VBox([self._tools, self.errors, scroll]), "nba-output-pane")
        chart = named(VBox([self._chart_tools, self.chart]), "nba-chart-pane")
        top = named(HBox([self.header, self._interrupt, self._stop]), "nba-top")
        bottom = named(HBox([output, chart]), "nba-bottom")
        style = named(HTML(render.style_html()), "nba-style")
        return named(VBox([style, top, self.table, self._fold, bottom]), "nba-panel")

    @property
    def choice(self) -> Choice:
        """What is to be seen below the table."""
        rank = None if self._rank.value == -1 else self._rank.value
        return Choice(_VIEWS[self._view.value], rank, self._search.value.strip())  # type: ignore[arg-type]

    @property
    def is_folded(self) -> bool:
        """True if ranks may share rows."""
        return not self._fold.value

    @property
    def metric(self) -> str:
        """The metric of the chart, empty for the first one."""
        return self._metric.value or ""

    @property
    def has_each_rank(self) -> bool:
        """True if the chart has a curve for each rank."""
        return bool(self._curves.value == _EACH)

    @property
    def names_chart(self) -> bool:
        """True if what people choose from says already what the chart shows."""
        return bool(self._chart_tools.layout.display == "")

    def show_controls(self, *, are_live: bool, metrics: tuple[str, ...], clicked: str, has_chart: bool) -> None:
        """Shows those that do something now.

        Args:
            are_live: Whether a click arrives.
            metrics: What the chart can show.
            clicked: ``stop`` or ``interrupt`` after such a click; empty before.
            has_chart: Whether there is a chart.
        """
        if self._metric.options != metrics:
            chosen = self._metric.value
            self._metric.options = metrics
            self._metric.value = chosen if chosen in metrics else next(iter(metrics), None)
        self._stop.disabled = clicked == "stop"
        self._interrupt.disabled = bool(clicked)
        shown = {
            self._stop: are_live,
            self._interrupt: are_live,
            self._fold: are_live and self._has_many,
            self._tools: are_live,
            self._rank: self._has_some,
            self._again: self._view.value == "Stacks",
            self._chart_tools: are_live and has_chart and (len(metrics) > 1 or self._has_some),
            self._curves: self._has_some,
        }
        for widget, is_shown in shown.items():
            widget.layout.display = "" if is_shown else "none"

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

"""Turn a run's state into HTML and plain text. Pure functions; everything that a rank said is escaped.

Sanitizers may remove the style sheet, so the HTML reads well without it: a real table, words for states, text beside
every bar. The live panel shows the parts (header, table, output, chart) in widgets; the summary that stays in the
notebook has the same parts in one piece.
"""

from __future__ import annotations

import dataclasses
import html

from kernel_ext.chart import chart_html
from kernel_ext.markup import STYLE, badge, counted, faint
from kernel_ext.output import OutputLog, output_lines, traceback_html, whole_output_html
from kernel_ext.table import MOST_ROWS, notes, table_html, table_lines
from notebook_accel.formatting import format_clock, format_duration
from notebook_accel.launching.state.run import RunState

__all__ = ["RunFacts", "header_html", "style_html", "summary_html", "summary_parts_html", "summary_text"]


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Facts about a run that aren't in its ranks' state.

    Attributes:
        name: Its name.
        devices: What it runs on, such as ``2 CPUs``.
        precision: Its mixed precision, ``no`` if it has none.
        status: ``starting``, ``running``, ``succeeded``, ``failed`` or ``stopped``.
        elapsed_s: Its running time so far, or in all.
        hint: A hint for the reader, such as how to stop it; may be empty.
        failed_rank: The rank whose traceback is shown, ``None`` if no rank has one.
        traceback: That traceback.
        is_background: Whether no cell waits for the run, so that only the panel reports a failure.
        log_folder: Folder of the ranks' whole output, empty if there is none.
    """

    name: str
    devices: str
    precision: str
    status: str
    elapsed_s: float
    hint: str = ""
    failed_rank: int | None = None
    traceback: str = ""
    is_background: bool = False
    log_folder: str = ""

    @property
    def has_ended(self) -> bool:
        """True if nothing will change any more."""
        return self.status not in ("starting", "running")

    @property
    def state(self) -> str:
        """The run's status in the words for ranks' states."""
        return "finished" if self.status == "succeeded" else self.status


def style_html() -> str:
    """Return the style sheet for everything below an element of class ``nba-panel``."""
    return f"<style>{STYLE}</style>"


def header_html(facts: RunFacts, state: RunState, now_s: float) -> str:
    """Return the line above the table: state, name, devices, epoch and times; below it the reasons of restarts."""
    times = [f"<span>{_time(facts)} {faint('in all' if facts.has_ended else 'elapsed')}</span>"]
    left_s = None if facts.has_ended else state.left_s(now_s)
    if left_s is not None:
        are_epochs_known = all(rank.epoch is None or rank.epochs is not None for rank in state.ranks)
        of = "left" if are_epochs_known else "left in this epoch"
        times.append(f"<span>{format_clock(left_s)} {faint(of)}</span>")
    hint = f'<span class="nba-faint" role="status">{html.escape(facts.hint)}</span>' if facts.hint else ""
    return (
        f'<div class="nba-header">{badge(facts.state)} <span class="nba-name">{html.escape(facts.name)}</span> '
        f"{faint(' · '.join(_about(facts, state)))} "
        f'<span class="nba-times">{hint} {" ".join(times)}</span>{_lines_html(state)}</div>'
    )


def summary_html(facts: RunFacts, state: RunState, output: OutputLog, now_s: float) -> str:
    """Return the summary that stays in the notebook: the whole panel in one piece that needs no kernel."""
    return f'<div class="nba-panel">{summary_parts_html(facts, state, output, now_s)}</div>'


def summary_parts_html(facts: RunFacts, state: RunState, output: OutputLog, now_s: float) -> str:
    """Return the content of ``summary_html``, for an element that is a panel already."""
    chart = chart_html(state)
    beside = f'<div class="nba-chart-pane">{chart}</div>' if chart else ""
    bottom = ""
    if output.count or beside:  # the chart stays in the live panel's place
        pane = f'<div class="nba-output-pane">{whole_output_html(output, facts.log_folder)}</div>'
        bottom = f'<div class="nba-bottom">{pane}{beside}</div>'
    return (
        f'{style_html()}<div class="nba-top">{header_html(facts, state, now_s)}</div>'
        f"{table_html(state, now_s)}{_every_rank_html(state, now_s)}{_traceback_html(facts)}{bottom}"
    )


def summary_text(facts: RunFacts, state: RunState, output: OutputLog, now_s: float) -> str:
    """Return the summary as plain text, for where HTML isn't shown."""
    first = f"{facts.name}: {', '.join([facts.state, *_about(facts, state), _time(facts)])}"
    lines = [first, *state.restarts_why, *state.nodes, *table_lines(state, now_s), *notes(state, now_s)]
    return "\n".join([*lines, *output_lines(output, facts.log_folder)])


def _time(facts: RunFacts) -> str:
    return (format_duration if facts.has_ended else format_clock)(facts.elapsed_s)


def _about(facts: RunFacts, state: RunState) -> list[str]:
    about = [facts.devices]
    if facts.precision != "no":
        about.append(facts.precision)
    epochs = [(rank.epoch, rank.epochs) for rank in state.ranks if rank.epoch is not None]
    if epochs:
        epoch, of = min(epochs, key=lambda pair: pair[0])  # the slowest rank's
        about.append(f"epoch {epoch}" if of is None else f"epoch {epoch} of {of}")
    if state.restarts:
        about.append(counted(state.restarts, "restart"))
    return about


def _lines_html(state: RunState) -> str:
    """List the reasons of the last restarts, and the other nodes' states."""
    return "".join(f'<p class="nba-said">{html.escape(line)}</p>' for line in (*state.restarts_why, *state.nodes))


def _every_rank_html(state: RunState, now_s: float) -> str:
    """Fold a row for every rank below a table in which ranks share rows."""
    count = len(state.ranks)
    if count <= MOST_ROWS:
        return ""
    table = table_html(state, now_s, is_folded=False)
    return f'<details class="nba-every-rank"><summary>all {count} ranks</summary>{table}</details>'


def _traceback_html(facts: RunFacts) -> str:
    """Show the failure's traceback; unfolded where no cell raises it."""
    if facts.failed_rank is None:
        return ""
    said = " · job.results() raises it" if facts.is_background else ""
    return traceback_html(facts.failed_rank, facts.traceback, is_open=facts.is_background, said=said)

"""From a run's state to HTML and to plain text. Pure functions; everything that a rank said is escaped.

The HTML reads well without its style sheet too, as sanitizers leave it: a real table, words for states, text beside
every bar. The live panel shows its parts (header, table, output, chart) in widgets of their own; the summary that stays
in the notebook is the same parts in one piece.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Iterable

from kernel_ext.chart import chart_html
from kernel_ext.run_state import OutputLine, RankState, RunState, plain_lines, plain_text
from kernel_ext.style import STYLE

__all__ = [
    "RunFacts",
    "header_html",
    "output_html",
    "style_html",
    "summary_html",
    "summary_parts_html",
    "summary_text",
    "table_html",
]

_LIVE_LINES = 100
_MOST_UNFOLDED_LINES = 30
_OPEN_LINES = 12  # of output that is folded
_TRACEBACK_LINES = 200
_MOST_METRIC_COLUMNS = 4
_LARGEST_COUNT = 1e12
_UNKNOWN = "\N{EN DASH}"
_MIB, _GIB = 1 << 20, 1 << 30


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What is shown of a run besides what its ranks say.

    Attributes:
        name: Its name.
        devices: What it runs on, such as ``2 CPUs``.
        precision: Its mixed precision, ``no`` if it has none.
        status: ``starting``, ``running``, ``succeeded``, ``failed`` or ``stopped``.
        elapsed_s: How long it has been running, or ran.
        hint: A word for the reader, such as how to stop it; may be empty.
        failed_rank: The rank whose traceback is shown, ``None`` if no rank has one.
        traceback: That traceback.
        is_background: Whether nobody waits for the run, so that only the panel says why it failed.
        log_folder: Where the ranks' whole output is, empty if it is nowhere.
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
        """Whether nothing will change any more."""
        return self.status not in ("starting", "running")

    @property
    def state(self) -> str:
        """The status in the words that ranks have too."""
        return "finished" if self.status == "succeeded" else self.status


def style_html() -> str:
    """The style sheet for everything below an element of class ``nba-panel``."""
    return f"<style>{STYLE}</style>"


def header_html(facts: RunFacts, state: RunState, now_s: float) -> str:
    """The line above the table: state, name, devices, epoch, times."""
    times = [f"<span>{_time(facts.elapsed_s)} {_faint('in all' if facts.has_ended else 'elapsed')}</span>"]
    left_s = None if facts.has_ended else state.left_s(now_s)
    if left_s is not None:
        are_epochs_known = all(rank.epoch is None or rank.epochs is not None for rank in state.ranks)
        times.append(f"<span>{_time(left_s)} {_faint('left' if are_epochs_known else 'left in this epoch')}</span>")
    hint = _faint(facts.hint) if facts.hint else ""
    return (
        f'<div class="nba-header">{_badge(facts.state)} <span class="nba-name">{html.escape(facts.name)}</span> '
        f"{_faint(' · '.join(_about(facts, state)))} "
        f'<span class="nba-times">{hint} {" ".join(times)}</span></div>'
    )


def table_html(state: RunState, now_s: float) -> str:
    """One row a rank, and below it a row with what happened to it, if something did."""
    columns = _columns(state, now_s)
    heads = "".join(f'<th scope="col" class="{column.kind}">{html.escape(column.head)}</th>' for column in columns)
    rows = []
    for rank in state.ranks:
        cells = "".join(f'<td class="{column.kind}">{column.cell(rank)}</td>' for column in columns)
        waits = f"waits in {rank.silent.waits_in}" if rank.silent is not None and rank.silent.waits_in else ""
        about = html.escape(", ".join(filter(None, (rank.device, rank.label, waits))))
        rows.append(f'<tr title="{about}"><th scope="row">{rank.rank}</th>{cells}</tr>')
        note_text = _note(rank, now_s)
        if note_text:
            kind = rank.state if rank.note else "silent"
            note = f'<td class="nba-note nba-{kind}" colspan="{len(columns)}">{html.escape(note_text)}</td>'
            rows.append(f"<tr><td></td>{note}</tr>")
    return (
        '<div class="nba-scroll"><table class="nba-ranks"><caption>Ranks</caption>'
        f'<thead><tr><th scope="col">rank</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def output_html(state: RunState) -> str:
    """The last lines of output, the newest in view."""
    lines = state.output.last(_LIVE_LINES)
    earlier = state.output.count - len(lines)
    note = f"{_faint(_count(earlier, 'earlier line'))}\n" if earlier else ""
    body = _lines_html(lines, state) if lines else _faint("no output yet")
    return _scrolled(f'<pre class="nba-output" aria-label="Output">{note}{body}</pre>')


def summary_html(facts: RunFacts, state: RunState, now_s: float) -> str:
    """What stays in the notebook: the whole panel as it is now, in one piece that needs no kernel."""
    return f'<div class="nba-panel">{summary_parts_html(facts, state, now_s)}</div>'


def summary_parts_html(facts: RunFacts, state: RunState, now_s: float) -> str:
    """What ``summary_html`` has inside, for an element that is a panel already."""
    chart = chart_html(state)
    beside = f'<div class="nba-chart-pane">{chart}</div>' if chart else ""
    bottom = ""
    if state.output.count or beside:  # the chart stays where the live panel had it
        output = f'<div class="nba-output-pane">{_whole_output_html(facts, state)}</div>'
        bottom = f'<div class="nba-bottom">{output}{beside}</div>'
    return (
        f'{style_html()}<div class="nba-top">{header_html(facts, state, now_s)}</div>'
        f"{table_html(state, now_s)}{_traceback_html(facts)}{bottom}"
    )


def summary_text(facts: RunFacts, state: RunState, now_s: float) -> str:
    """The same facts in plain text, for where HTML isn't shown."""
    columns = _columns(state, now_s)
    rows = [["rank", *(column.head for column in columns)]]
    rows += [[str(rank.rank), *(column.text(rank) for column in columns)] for rank in state.ranks]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [f"rank {rank.rank}: {note}" for rank in state.ranks if (note := _note(rank, now_s))]
    first = f"{facts.name}: {', '.join([facts.state, *_about(facts, state), _time(facts.elapsed_s)])}"
    return "\n".join([first, *table, *notes, *_output_lines(facts, state)])


@dataclasses.dataclass(frozen=True)
class _Column:
    """One column of the table.

    Attributes:
        head: Its head.
        text: A rank's cell as text.
        kind: The CSS class of its cells.
        html: A rank's cell as HTML, where it is more than its text.
    """

    head: str
    text: Callable[[RankState], str]
    kind: str = ""
    html: Callable[[RankState], str] | None = None

    def cell(self, rank: RankState) -> str:
        return self.html(rank) if self.html is not None else html.escape(self.text(rank))


def _columns(state: RunState, now_s: float) -> list[_Column]:
    """The columns that some rank has something for."""
    columns = [_Column("state", _state_word, html=lambda rank: _badge(_state_word(rank)))]
    if any(rank.step is not None for rank in state.ranks):
        columns.append(_Column("step", _step_text, html=_step_html))
        columns.append(_Column("steps/s", lambda rank: _rate(rank.steps_per_s(now_s)), "nba-number"))
        if not all(rank.has_ended for rank in state.ranks):
            columns.append(_Column("left", lambda rank: _time(rank.left_s(now_s)), "nba-number"))
    names = state.metric_names
    columns += [_metric_column(name) for name in names[:_MOST_METRIC_COLUMNS]]
    if others := names[_MOST_METRIC_COLUMNS:]:
        columns.append(_Column("other metrics", lambda rank: _metrics_text(rank, others)))
    if any(rank.memory_used_bytes is not None for rank in state.ranks):
        columns.append(_Column("memory", _memory_text, html=_memory_html))
    # Always there: it takes the width that the others leave, so that they don't move when one comes.
    columns.append(_Column("last output", lambda rank: rank.last_line, "nba-last"))
    return columns


def _metric_column(name: str) -> _Column:
    return _Column(name, lambda rank: _metric(rank.metrics.get(name)), "nba-number")


def _metrics_text(rank: RankState, names: Iterable[str]) -> str:
    return ", ".join(f"{name} {_metric(rank.metrics[name])}" for name in names if name in rank.metrics)


def _step_text(rank: RankState) -> str:
    if rank.step is None:
        return _UNKNOWN
    return f"{rank.step:,} / {rank.total:,}" if rank.total is not None else f"{rank.step:,}"


def _state_word(rank: RankState) -> str:
    if rank.silent is None:
        return rank.state
    return "waiting" if rank.silent.waits_in else "silent"


def _note(rank: RankState, now_s: float) -> str:
    """What happened to it; of a rank that the others wait for, where it stands."""
    if rank.note or rank.silent is None or rank.silent.waits_in:
        return rank.note
    at = f", at {plain_text(rank.silent.at)}" if rank.silent.at else ""
    return f"no step for {_time(now_s - rank.silent.since_s)}{at}; others wait for it"


def _step_html(rank: RankState) -> str:
    if rank.step is None or not rank.total:
        return html.escape(_step_text(rank))
    bar = _bar(rank.step, rank.total, f'role="progressbar" aria-label="Steps of rank {rank.rank}"')
    total = f"{rank.total:,}"
    return f'{bar}<span class="nba-count" style="min-width:{len(total)}ch">{rank.step:,}</span> {_faint(f"/ {total}")}'


def _memory_text(rank: RankState) -> str:
    if rank.memory_used_bytes is None:
        return _UNKNOWN
    return " / ".join(_sizes(rank.memory_used_bytes, rank.memory_total_bytes))


def _memory_html(rank: RankState) -> str:
    if rank.memory_used_bytes is None or not rank.memory_total_bytes:
        return html.escape(_memory_text(rank))
    of = "Host memory" if rank.memory_kind == "host" else "Device memory"
    percent = round(100 * rank.memory_used_bytes / rank.memory_total_bytes)
    label = f'role="meter" aria-label="{of} of rank {rank.rank}" aria-valuetext="{_memory_text(rank)}"'
    bar = _bar(percent, 100, label, "nba-memory")
    used, total = _sizes(rank.memory_used_bytes, rank.memory_total_bytes)
    return f"{bar}{used} {_faint(f'/ {total}')}"


def _about(facts: RunFacts, state: RunState) -> list[str]:
    about = [facts.devices]
    if facts.precision != "no":
        about.append(facts.precision)
    epochs = [(rank.epoch, rank.epochs) for rank in state.ranks if rank.epoch is not None]
    if epochs:
        epoch, of = min(epochs, key=lambda pair: pair[0])  # the slowest rank's
        about.append(f"epoch {epoch}" if of is None else f"epoch {epoch} of {of}")
    return about


def _traceback_html(facts: RunFacts) -> str:
    """Why the run failed; open where no cell raises it."""
    if facts.failed_rank is None:
        return ""
    is_open, raised = (" open", " · job.results() raises it") if facts.is_background else ("", "")
    lines = list(plain_lines(facts.traceback.strip()))
    left_out = len(lines) - _TRACEBACK_LINES
    # The last lines are kept: they say what was raised, and where.
    gap = [f"… {_count(left_out, 'line')} left out …"] if left_out > 0 else []
    text = html.escape("\n".join([*gap, *lines[-_TRACEBACK_LINES:]]))
    body = _scrolled(f'<pre class="nba-output" aria-label="Traceback">{text}</pre>')
    return (
        f'<details class="nba-traceback"{is_open}><summary>traceback of rank {facts.failed_rank}{raised}</summary>'
        f"{body}</details>"
    )


def _whole_output_html(facts: RunFacts, state: RunState) -> str:
    """The kept output. Of much, the last lines are in view, and the ones before them folded away."""
    if not state.output.count:
        return f'<pre class="nba-output" aria-label="Output">{_faint("no output")}</pre>'
    last = state.output.last(_MOST_UNFOLDED_LINES if state.output.count <= _MOST_UNFOLDED_LINES else _OPEN_LINES)
    shown = f'<pre class="nba-output" aria-label="Output">{_lines_html(last, state)}</pre>'
    earlier = state.output.count - len(last)
    if not earlier:
        return shown
    folded = html.escape("\n".join(_output_lines(facts, state)[: -len(last)]))
    scrolled = _scrolled(f'<pre class="nba-output">{folded}</pre>')
    left_out = f", {state.output.left_out:,} of them left out" if state.output.left_out else ""
    return f"<details><summary>{_count(earlier, 'earlier line')}{left_out}</summary>{scrolled}</details>{shown}"


def _output_lines(facts: RunFacts, state: RunState) -> list[str]:
    output = state.output
    whole = f"; the whole output is in {facts.log_folder}" if facts.log_folder else ""
    gap = [f"… {_count(output.left_out, 'line')} left out{whole} …"] if output.left_out else []
    return [_line_text(line, state) for line in output.head] + gap + [_line_text(line, state) for line in output.tail]


def _line_text(line: OutputLine, state: RunState) -> str:
    return f"{_margin(line, state)}{line.text}"


def _lines_html(lines: Iterable[OutputLine], state: RunState) -> str:
    return "\n".join(f"{_faint(_margin(line, state))}{html.escape(line.text)}" for line in lines)


def _margin(line: OutputLine, state: RunState) -> str:
    if state.prefixes:
        return state.prefixes[line.rank]
    return f"{line.rank:>{len(str(len(state.ranks) - 1))}} │ "


def _scrolled(body: str) -> str:
    return f'<div class="nba-scrollback" tabindex="0">{body}</div>'


def _bar(value: float, total: float, label: str, kind: str = "") -> str:
    share = min(max(value / total, 0.0), 1.0)
    return (
        f'<div class="nba-bar {kind}" {label} aria-valuemin="0" aria-valuenow="{value}" aria-valuemax="{total}">'
        f'<div style="width:{share:.1%}"></div></div>'
    )


def _badge(word: str) -> str:
    return f'<span class="nba-badge nba-{html.escape(word)}">{html.escape(word)}</span>'


def _faint(text: str) -> str:
    return f'<span class="nba-faint">{html.escape(text)}</span>'


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _rate(steps_per_s: float | None) -> str:
    if steps_per_s is None:
        return _UNKNOWN
    if steps_per_s >= 1:
        return f"{steps_per_s:,.0f}" if steps_per_s >= 100 else f"{steps_per_s:.1f}"
    return f"{steps_per_s:.2g}"


def _metric(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    # Counts are exact, and no large number that people can read gets an exponent.
    if value.is_integer() and abs(value) < _LARGEST_COUNT:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.4g}"


def _sizes(used_bytes: int, total_bytes: int) -> list[str]:
    """Both sizes, with the unit once if it is the same; the total only if it is known."""
    used, total = _size(used_bytes), _size(total_bytes)
    if not total_bytes:
        return [used]
    number, _, unit = used.partition(" ")
    return [number if total.endswith(unit) else used, total]


def _size(size_bytes: int) -> str:
    if size_bytes >= 10 * _GIB:
        return f"{size_bytes / _GIB:.0f} GiB"
    return f"{size_bytes / _GIB:.1f} GiB" if size_bytes >= _GIB else f"{size_bytes / _MIB:.0f} MiB"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return _UNKNOWN
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"

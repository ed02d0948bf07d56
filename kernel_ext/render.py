"""Draw a run's state as HTML and plain text. Pure functions; all text from ranks is escaped.

Sanitizers may remove the style sheet, so the HTML reads well without it: a real table, words for states, text beside
every bar. The live panel shows the parts (header, table, output, chart) in widgets; the summary that stays in the
notebook has the same parts in one piece.
"""

from __future__ import annotations

import dataclasses
import html
import statistics
from collections.abc import Callable, Mapping, Sequence

from kernel_ext.charts import chart_html, shortened
from kernel_ext.front_end import STYLE
from kernel_ext.output import OutputLog, faint, folded, output_lines, pre, scrolled, whole_output_html
from kernel_ext.step_view import bar_html, step_html, step_text, verdict_html
from kernel_ext.timeline import body_html
from notebook_accel.formatting import (
    OutputWindow,
    aligned,
    format_clock,
    format_count,
    format_duration,
    format_size,
    plain_lines,
    plain_text,
    rank_spans,
)
from notebook_accel.launching.state.diagnosis import Diagnosis
from notebook_accel.launching.state.profiles import Profile
from notebook_accel.launching.state.rank import RankState
from notebook_accel.launching.state.run import RunState
from notebook_accel.launching.state.step_times import Phases, mean_of
from notebook_accel.protocol import events

MOST_ROWS = 16
"""Of more ranks than this, those in one state share a row, unless all are asked for."""
_MOST_SINGLE = 3
_MOST_METRIC_COLUMNS = 3
_MOST_METRICS_BESIDE_OUTPUT = 2  # with more, too little of a line would be left to read
_MOST_NAME_CHARACTERS = 24
_TRACEBACK_LINES = 200
_ALIVE_S = 3.0
_LARGEST_COUNT = 1e12
_UNKNOWN = "\N{EN DASH}"
_SIGNS = {"failed": "✗", "killed": "✗", "lost": "✗", "finished": "✓", "silent": "!", "behind": "▼"}
_ALARMING = ("failed", "killed", "lost", "silent", "behind")


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Facts about a run that aren't in its ranks' state."""

    name: str
    devices: str  # that it runs on, such as ``2 CPUs``
    precision: str  # the mixed precision, ``no`` if there is none
    status: str  # ``starting``, ``running``, ``succeeded``, ``failed``, ``stopped`` or ``detached``
    elapsed_s: float  # the running time so far, or in all
    hint: str = ""  # for the reader, such as how to stop the run
    failed_rank: int | None = None  # the rank that failed first
    traceback: str = ""  # that rank's; empty if there is none
    is_background: bool = False  # whether no cell waits for the run, so that only the panel reports a failure
    log_folder: str = ""  # of the ranks' whole output, empty if there is none
    diagnosis: Diagnosis = dataclasses.field(default_factory=Diagnosis)
    profile: Profile | None = None  # the latest that was made with the panel's button

    @property
    def has_ended(self) -> bool:
        """True once the run has ended or was detached."""
        return self.status not in ("starting", "running")

    @property
    def state(self) -> str:
        """The run's status in the words for ranks' states."""
        return "finished" if self.status == "succeeded" else self.status


# Header and summary ---------------------------------------------------------------------------------------------------


def header_html(facts: RunFacts, state: RunState, now_s: float) -> str:
    """Return the line above the table: state, name, devices, epoch and times; below it restarts and other nodes."""
    of = "until then" if facts.status == "detached" else "in all" if facts.has_ended else "elapsed"
    times = [f"<span>{_time(facts)} {faint(of)}</span>"]
    left_s = None if facts.has_ended else state.left_s(now_s)
    if left_s is not None:
        are_epochs_known = all(rank.epoch is None or rank.epochs is not None for rank in state.ranks)
        of = "left" if are_epochs_known else "left in this epoch"
        times.append(f"<span>{format_clock(left_s)} {faint(of)}</span>")
    hint = f'<span class="nba-faint" role="status">{html.escape(facts.hint)}</span>' if facts.hint else ""
    below = "".join(f'<p class="nba-said">{html.escape(line)}</p>' for line in (*state.restarts_why, *state.nodes))
    return (
        f'<div class="nba-header">{_badge(facts.state)} <span class="nba-name">{html.escape(facts.name)}</span> '
        f"{faint(' · '.join(_about_run(facts, state)))} "
        f'<span class="nba-times">{hint} {" ".join(times)}</span>{below}{verdict_html(facts.diagnosis)}</div>'
    )


def summary_html(facts: RunFacts, state: RunState, output: OutputLog, now_s: float) -> str:
    """Return the whole panel in one piece that needs no kernel, for an element of class ``nba-panel``."""
    chart = chart_html(state)
    beside = f'<div class="nba-chart-pane">{chart}</div>' if chart else ""
    every_rank = phases = profile = bottom = ""
    if len(state.ranks) > MOST_ROWS:
        table = table_html(state, now_s, facts.diagnosis.steps, is_folded=False)
        every_rank = folded(f"all {len(state.ranks)} ranks", table, 'class="nba-every-rank"')
    if facts.diagnosis.steps:
        phases = folded("where the time of a step went", step_html(facts.diagnosis))
    if facts.profile is not None:
        profile = folded(facts.profile.title, body_html(facts.profile))
    if output.count or beside:  # the chart stays in the live panel's place
        pane = f'<div class="nba-output-pane">{whole_output_html(output, facts.log_folder)}</div>'
        bottom = f'<div class="nba-bottom">{pane}{beside}</div>'
    return (
        f'<style>{STYLE}</style><div class="nba-top">{header_html(facts, state, now_s)}</div>'
        f"{table_html(state, now_s, facts.diagnosis.steps)}{every_rank}{phases}{profile}"
        f"{_traceback_html(facts)}{bottom}"
    )


def summary_text(facts: RunFacts, state: RunState, output: OutputLog, now_s: float) -> str:
    """Return the summary as plain text, for front ends that show no HTML."""
    first = f"{facts.name}: {', '.join([facts.state, *_about_run(facts, state), _time(facts)])}"
    table = _Table(state, now_s, facts.diagnosis.steps)
    rows = [["rank", *(column.head for column in table.columns)]]
    rows += [[str(rank.number), *(column.text(rank) for column in table.columns)] for rank in state.ranks]
    notes = [f"rank {rank.number}: {note}" for rank in state.ranks if (note := table.note(rank))]
    sharded = _largest_share(state)
    if sharded is not None:
        notes.append(f"Each rank holds at most {sharded.in_words}")
    why = list(filter(None, (facts.diagnosis.sentence, facts.diagnosis.cost)))
    lines = [first, *state.restarts_why, *state.nodes, *why, *aligned(rows), *notes]
    return "\n".join([*lines, *output_lines(output, facts.log_folder)])


def _time(facts: RunFacts) -> str:
    return (format_duration if facts.has_ended else format_clock)(facts.elapsed_s)


def _about_run(facts: RunFacts, state: RunState) -> list[str]:
    about = [facts.devices]
    if facts.precision != "no":
        about.append(facts.precision)
    epochs = [(rank.epoch, rank.epochs) for rank in state.ranks if rank.epoch is not None]
    if epochs:
        epoch, of = min(epochs, key=lambda pair: pair[0])  # the slowest rank's
        about.append(f"epoch {epoch}" if of is None else f"epoch {epoch} of {of}")
    sharded = _largest_share(state)
    if sharded is not None:
        about.append(f"{sharded.share} a rank")
    if state.restarts:
        about.append(format_count(state.restarts, "restart"))
    if facts.status == "succeeded" and state.early_end:
        about.append(state.early_end)
    return about


def _largest_share(state: RunState) -> events.ModelMemory | None:
    """Return the memory of the rank that holds most of the models, ``None`` if nothing is sharded."""
    known = [rank.model_memory for rank in state.ranks if rank.model_memory is not None]
    if not any(memory.is_sharded for memory in known):
        return None
    return max(known, key=lambda memory: memory.held_parameters)


def _traceback_html(facts: RunFacts) -> str:
    """Show the failure's traceback; unfolded where no cell raises it."""
    if not facts.traceback:
        return ""
    window = OutputWindow[str](0, _TRACEBACK_LINES)  # the last lines, which show the exception and its place
    window.add(list(plain_lines(facts.traceback.strip())))
    body = scrolled(pre(html.escape("\n".join([*window.gap(), *window.tail])), "Traceback"))
    is_open, said = (" open", " · job.results() raises it") if facts.is_background else ("", "")
    return folded(f"traceback of rank {facts.failed_rank}{said}", body, f'class="nba-traceback"{is_open}')


# The table of ranks ---------------------------------------------------------------------------------------------------


def table_html(state: RunState, now_s: float, steps: Mapping[int, Phases] = {}, *, is_folded: bool = True) -> str:
    """Draw a row for each rank, and below it a row with what happened to the rank, if anything.

    Up to a screenful of ranks have a row each. With more ranks, all ranks in one state (on several nodes, of one node)
    share a row, which shows their common values and their spread; below the table is a small cell for each rank. Ranks
    in a rare state, such as a failed rank, keep a row of their own. ``steps`` has the phases of each measured rank.
    """
    table = _Table(state, now_s, steps)
    groups = table.groups() if is_folded and len(state.ranks) > MOST_ROWS else [[rank] for rank in state.ranks]
    heads = "".join(
        f'<th scope="col" class="{column.kind}" title="{html.escape(column.head)}">{html.escape(column.head)}</th>'
        for column in table.columns
    )
    rows = "".join(table.row_html(group) for group in groups)
    cells = "".join(map(table.cell_html, state.ranks)) if len(groups) < len(state.ranks) else ""
    return (
        '<div class="nba-scroll" tabindex="0"><table class="nba-ranks"><caption>Ranks</caption>'
        f'<thead><tr><th scope="col">rank</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        + (f'<ul class="nba-cells" aria-label="All ranks">{cells}</ul>' if cells else "")
    )


@dataclasses.dataclass(frozen=True)
class _TableColumn:
    """A column of the table."""

    head: str
    text: Callable[[RankState], str]  # returns a rank's cell as text
    kind: str = ""  # the CSS class of the cells
    # Returns the cell of one rank, or of several that share a row, as HTML. Without it, only one rank's has its text.
    html: Callable[[Sequence[RankState]], str] | None = None

    def cell(self, ranks: Sequence[RankState]) -> str:
        if self.html is not None:
            return self.html(ranks)
        return html.escape(self.text(ranks[0])) if len(ranks) == 1 else ""


def _number_column(
    head: str, value: Callable[[RankState], float | None], written: Callable[[float], str], kind: str = ""
) -> _TableColumn:
    """Make a column of numbers, of which ranks that share a row show the mean."""

    def mean(ranks: Sequence[RankState]) -> str:
        known = [number for rank in ranks if (number := value(rank)) is not None]
        return written(statistics.fmean(known)) if known else _UNKNOWN

    return _TableColumn(head, lambda rank: mean([rank]), f"nba-number {kind}".strip(), mean)


class _Table:
    """A run's table at one moment."""

    def __init__(self, state: RunState, now_s: float, steps: Mapping[int, Phases] = {}) -> None:
        self._state = state
        self._steps = steps
        self._now_s = now_s
        self._behind = state.behind(now_s)
        self._is_by_node = 1 < len({rank.node for rank in state.ranks}) <= MOST_ROWS
        self.columns = self._columns()

    def groups(self) -> list[list[RankState]]:
        """Return the ranks that share a row, by their lowest rank; alarming states first."""
        found: dict[tuple[str, int], list[RankState]] = {}
        for rank in self._state.ranks:
            found.setdefault((self._word(rank), rank.node if self._is_by_node else 0), []).append(rank)
        groups: list[list[RankState]] = []
        for _, group in sorted(found.items(), key=lambda item: item[0][0] not in _ALARMING):
            groups += [[rank] for rank in group] if len(group) <= _MOST_SINGLE else [group]
        return groups

    def row_html(self, ranks: Sequence[RankState]) -> str:
        """Draw the row of a rank or of several, with a row below it for what happened to them."""
        first = ranks[0]
        if len(ranks) == 1:
            who, about, note = str(first.number), self._about(first), self.note(first)
        else:
            who = f"node {first.node}: {len(ranks)} ranks" if self._is_by_node else f"{len(ranks)} ranks"
            spans = ", ".join(rank_spans(rank.number for rank in ranks))
            about, note = f"ranks {spans}".replace("-", "\N{EN DASH}"), self._shared_note(ranks)
        word = self._word(first)
        kind = f' class="nba-{word}-row"' if word in _ALARMING else ""
        cells = "".join(f'<td class="{column.kind}">{column.cell(ranks)}</td>' for column in self.columns)
        row = f'<tr{kind} title="{html.escape(about)}"><th scope="row">{who}</th>{cells}</tr>'
        if note:
            color = first.state if first.note else "silent"
            cell = f'<td class="nba-note nba-{color}" colspan="{len(self.columns)}">{html.escape(note)}</td>'
            row += f"<tr{kind}><td></td>{cell}</tr>"
        return row

    def note(self, rank: RankState) -> str:
        """Return what happened to a rank, or where it is if others wait for it or all ranks wait; else empty."""
        silent = rank.silent
        if rank.note or silent is None or (silent.waits_in and not self._state.is_deadlocked):
            return rank.note
        why = f"in {silent.waits_in}, and no other rank does a step" if silent.waits_in else "others wait for it"
        at = f", at {plain_text(silent.at)}" if silent.at else ""
        return f"no step for {format_clock(self._now_s - silent.since_s)}{at}; {why}"

    def _shared_note(self, ranks: Sequence[RankState]) -> str:
        """Return the first note among several ranks, and the number of ranks that share it if not all do."""
        found = list(filter(None, map(self.note, ranks)))
        if not found:
            return ""
        same = found.count(found[0])
        return found[0] if same == len(ranks) else f"{same} of them: {found[0]}"

    def cell_html(self, rank: RankState) -> str:
        """Draw a small cell for a rank: its number, a sign for its state, and its progress."""
        word = self._word(rank)
        about = html.escape(f"rank {rank.number}: {word}, {_step_text(rank)}")
        share = min(rank.step / rank.total, 1.0) if rank.step is not None and rank.total else 0.0
        return (
            f'<li class="nba-cell nba-{word}" title="{about}" aria-label="{about}"><b>{rank.number}</b>'
            f'<span>{_SIGNS.get(word, "")}</span><i style="width:{share:.0%}"></i></li>'
        )

    def _columns(self) -> list[_TableColumn]:
        """Return the columns for which some rank has a value."""
        ranks, names = self._state.ranks, self._state.metric_names
        columns = [_TableColumn("state", self._word, html=lambda ranks: _badge(self._word(ranks[0])))]
        if any(rank.step is not None for rank in ranks):
            columns.append(_TableColumn("step", _step_text, html=_steps_html))
            columns.append(_number_column("steps/s", lambda rank: rank.steps_per_s(self._now_s), _rate))
        if self._steps:
            columns.append(_TableColumn("time of a step", self._phases_text, html=self._phases_html))
        for name in names[:_MOST_METRIC_COLUMNS]:
            head = shortened(name, _MOST_NAME_CHARACTERS)
            columns.append(_number_column(head, _metric(name), _in_digits, "nba-metric"))
        if any(rank.memory_used_bytes is not None for rank in ranks):
            columns.append(_TableColumn("memory", _memory_text, html=_memory_html))
        if any(rank.utilisation is not None for rank in ranks):
            columns.append(_number_column("busy", lambda rank: rank.utilisation, "{:.0f} %".format))
        if not all(rank.has_ended or rank.last_event_s is None for rank in ranks):
            columns.append(_TableColumn("seen", self._seen, "nba-seen", self._seen_longest_ago))
        # The last column takes the remaining width. It is there from the start, so that other columns don't move when
        # one is added.
        if others := names[_MOST_METRIC_COLUMNS:]:
            columns.append(self._other_metrics_column(others))
        elif len(names) <= _MOST_METRICS_BESIDE_OUTPUT:
            columns.append(_TableColumn("last output", lambda rank: rank.last_line, "nba-last"))
        return columns

    def _phases_text(self, rank: RankState) -> str:
        return step_text(self._steps.get(rank.number))

    def _phases_html(self, ranks: Sequence[RankState]) -> str:
        """Draw the phases of the ranks' mean step as a thin bar."""
        return bar_html(mean_of([self._steps[rank.number] for rank in ranks if rank.number in self._steps]))

    def _other_metrics_column(self, names: Sequence[str]) -> _TableColumn:
        def text(rank: RankState) -> str:
            known = ((shortened(name, _MOST_NAME_CHARACTERS), rank.metrics.get(name)) for name in names)
            return ", ".join(f"{name} {_in_digits(value)}" for name, value in known if value is not None)

        def titled(ranks: Sequence[RankState]) -> str:  # the end may be cut off
            shown = html.escape(text(ranks[0]))
            return f'<span title="{shown}">{shown}</span>' if len(ranks) == 1 else ""

        return _TableColumn("other metrics", text, "nba-last nba-others", titled)

    def _word(self, rank: RankState) -> str:
        return "behind" if rank.silent is None and rank.rank in self._behind else rank.word

    def _seen(self, rank: RankState) -> str:
        """Return how long ago the rank last sent an event."""
        if rank.has_ended or rank.last_event_s is None:
            return _UNKNOWN
        ago_s = self._now_s - rank.last_event_s
        return "now" if ago_s < _ALIVE_S else f"{format_clock(ago_s)} ago"

    def _seen_longest_ago(self, ranks: Sequence[RankState]) -> str:
        running = [rank for rank in ranks if rank.last_event_s is not None and not rank.has_ended]
        return self._seen(min(running, key=lambda rank: rank.last_event_s or 0.0, default=ranks[0]))

    def _about(self, rank: RankState) -> str:
        waits = f"waits in {rank.silent.waits_in}" if rank.silent is not None and rank.silent.waits_in else ""
        behind = f"{self._behind[rank.rank]:,} steps behind the others" if rank.rank in self._behind else ""
        model = "" if rank.model_memory is None else rank.model_memory.in_words
        return ", ".join(filter(None, (shortened(rank.device, 100), shortened(rank.label, 100), waits, behind, model)))


def _badge(word: str) -> str:
    """Return a word as a badge in the colour of the state of that name."""
    return f'<span class="nba-badge nba-{html.escape(word)}">{html.escape(word)}</span>'


def _bar(value: float, total: float, attributes: str, kind: str = "") -> str:
    """Draw a bar filled to ``value`` of ``total``."""
    share = min(max(value / total, 0.0), 1.0)
    return (
        f'<div class="nba-bar {kind}" {attributes} aria-valuemin="0" aria-valuenow="{value}" aria-valuemax="{total}">'
        f'<div style="width:{share:.1%}"></div></div>'
    )


def _rate(steps_per_s: float) -> str:
    """Return steps a second with about three digits."""
    if steps_per_s >= 1:
        return f"{steps_per_s:,.0f}" if steps_per_s >= 100 else f"{steps_per_s:.1f}"
    return f"{steps_per_s:.2g}"


def _in_digits(value: float) -> str:
    """Format a metric in about 8 characters. Counts are exact, and large readable numbers get no exponent."""
    if value.is_integer() and abs(value) < _LARGEST_COUNT:
        return f"{int(value):,}"
    if 1e3 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    text = f"{value:.4g}"
    return f"{value:.2g}" if "e" in text else text


def _metric(name: str) -> Callable[[RankState], float | None]:
    return lambda rank: rank.metrics.get(name)


def _step_text(rank: RankState) -> str:
    if rank.step is None:
        return _UNKNOWN
    of_total = "" if rank.total is None else f" / {rank.total:,}"
    return f"{rank.step:,}{of_total}{_evaluating(rank)}"


def _evaluating(rank: RankState) -> str:
    return f" {events.EVALUATION}" if rank.is_evaluating else ""


def _step_html(rank: RankState) -> str:
    if rank.step is None or not rank.total:
        return html.escape(_step_text(rank))
    steps = _bar(rank.step, rank.total, f'role="progressbar" aria-label="Steps of rank {rank.number}"')
    total = f"{rank.total:,}"
    of_total = faint(f"/ {total}{_evaluating(rank)}")
    return f'{steps}<span class="nba-count" style="min-width:{len(total)}ch">{rank.step:,}</span> {of_total}'


def _steps_html(ranks: Sequence[RankState]) -> str:
    """Return a rank's step with a bar, or the slowest and the fastest rank's with the slowest rank's bar."""
    if len(ranks) == 1:
        return _step_html(ranks[0])
    slowest, fastest = (choose(ranks, key=lambda rank: rank.step or 0) for choose in (min, max))
    if slowest.step is None or fastest.step is None:
        return html.escape(_step_text(fastest))
    steps = f"{slowest.step:,}" if slowest.step == fastest.step else f"{slowest.step:,}\N{EN DASH}{fastest.step:,}"
    if not slowest.total:
        return steps
    attributes = f'role="progressbar" aria-label="Steps of the slowest of {len(ranks)} ranks"'
    return f"{_bar(slowest.step, slowest.total, attributes)}{steps} {faint(f'/ {slowest.total:,}')}"


def _memory_sizes(rank: RankState) -> list[str]:
    """Return the used and the total memory, naming a shared unit once; without the total if that is unknown."""
    used, total = format_size(rank.memory_used_bytes or 0), format_size(rank.memory_total_bytes)
    if not rank.memory_total_bytes:
        return [used]
    number, _, unit = used.partition(" ")
    return [number if total.endswith(unit) else used, total]


def _memory_text(rank: RankState) -> str:
    return _UNKNOWN if rank.memory_used_bytes is None else " / ".join(_memory_sizes(rank))


def _memory_html(ranks: Sequence[RankState]) -> str:
    """Return the memory of the rank that uses most."""
    rank = max(ranks, key=lambda rank: rank.memory_used_bytes or 0)
    if rank.memory_used_bytes is None or not rank.memory_total_bytes:
        return html.escape(_memory_text(rank))
    of = "Host memory" if rank.memory is None or rank.memory.kind == "host" else "Device memory"
    percent = round(100 * rank.memory_used_bytes / rank.memory_total_bytes)
    attributes = f'role="meter" aria-label="{of} of rank {rank.number}" aria-valuetext="{_memory_text(rank)}"'
    used, total = _memory_sizes(rank)
    return f"{_bar(percent, 100, attributes, 'nba-memory')}{used} {faint(f'/ {total}')}"

"""The table of a run's ranks, as HTML and as text.

Up to a screenful of ranks have a row each. Of more ranks, those in one state share a row (on several nodes, those of
one node), which shows their common values and their spread; a small cell below the table stands for each. Ranks in a
rare state, such as the one that failed, keep a row of their own.
"""

from __future__ import annotations

import dataclasses
import html
import statistics
from collections.abc import Callable, Iterable, Sequence

from kernel_ext.markup import (
    UNKNOWN,
    badge,
    bar,
    faint,
    in_digits,
    rate,
    shortened,
    sizes_in_words,
)
from notebook_accel.formatting import format_clock, plain_text
from notebook_accel.launching.state.rank import RankState
from notebook_accel.launching.state.run import RunState

__all__ = ["MOST_ROWS", "notes", "table_html", "table_lines"]

MOST_ROWS = 16
"""Of more ranks than this, those in one state share a row, unless all are asked for."""
_MOST_SINGLE = 3
_MOST_METRIC_COLUMNS = 4
_MOST_METRICS_BESIDE_OUTPUT = 2  # with more, too little of a line would be left to read
_MOST_NAME_CHARACTERS = 24
_ALIVE_S = 3.0
_SIGNS = {"failed": "✗", "killed": "✗", "lost": "✗", "finished": "✓", "silent": "!", "behind": "▼"}
_ALARMING = ("failed", "killed", "lost", "silent", "behind")


def table_html(state: RunState, now_s: float, *, is_folded: bool = True) -> str:
    """Draw a row for each rank, or group of ranks, and below it a row that says what happened to it.

    Args:
        state: The run.
        now_s: The current time.
        is_folded: Whether many ranks may share rows.
    """
    table = _Table(state, now_s)
    groups = table.groups() if is_folded else [[rank] for rank in state.ranks]
    heads = "".join(
        f'<th scope="col" class="{column.kind}">{html.escape(column.head)}</th>' for column in table.columns
    )
    rows = "".join(table.row_html(group) for group in groups)
    cells = table.cells_html() if len(groups) < len(state.ranks) else ""
    return (
        '<div class="nba-scroll" tabindex="0"><table class="nba-ranks"><caption>Ranks</caption>'
        f'<thead><tr><th scope="col">rank</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{cells}'
    )


def table_lines(state: RunState, now_s: float) -> list[str]:
    """Return the table as aligned text, with a row for every rank."""
    table = _Table(state, now_s)
    rows = [["rank", *(column.head for column in table.columns)]]
    rows += [[str(rank.number), *(column.text(rank) for column in table.columns)] for rank in state.ranks]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def notes(state: RunState, now_s: float) -> list[str]:
    """Return a line for each rank to which something has happened."""
    return [f"rank {rank.number}: {note}" for rank in state.ranks if (note := _note(rank, now_s))]


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column of the table.

    Attributes:
        head: Its heading.
        text: Returns a rank's cell as text.
        kind: The CSS class of its cells.
        html: Returns a rank's cell as HTML, where that is more than its text.
        together: Returns several ranks' common cell as HTML; empty if they have nothing in common.
    """

    head: str
    text: Callable[[RankState], str]
    kind: str = ""
    html: Callable[[RankState], str] | None = None
    together: Callable[[Sequence[RankState]], str] = lambda _: ""

    def cell(self, ranks: Sequence[RankState]) -> str:
        if len(ranks) > 1:
            return self.together(ranks)
        return self.html(ranks[0]) if self.html is not None else html.escape(self.text(ranks[0]))


class _Table:
    """A run's table at one moment."""

    def __init__(self, state: RunState, now_s: float) -> None:
        self._state = state
        self._now_s = now_s
        self._behind = state.behind(now_s)
        self._is_by_node = 1 < len({rank.node for rank in state.ranks}) <= MOST_ROWS
        self.columns = self._columns()

    def groups(self) -> list[list[RankState]]:
        """Return the ranks that share a row, by their lowest rank; alarming states first."""
        ranks = self._state.ranks
        if len(ranks) <= MOST_ROWS:
            return [[rank] for rank in ranks]
        found: dict[tuple[str, int], list[RankState]] = {}
        for rank in ranks:
            found.setdefault((self._word(rank), rank.node if self._is_by_node else 0), []).append(rank)
        groups: list[list[RankState]] = []
        for word, node in sorted(found, key=lambda key: key[0] not in _ALARMING):
            group = found[word, node]
            groups += [[rank] for rank in group] if len(group) <= _MOST_SINGLE else [group]
        return groups

    def row_html(self, ranks: Sequence[RankState]) -> str:
        first = ranks[0]
        word = self._word(first)
        cells = "".join(f'<td class="{column.kind}">{column.cell(ranks)}</td>' for column in self.columns)
        about = html.escape(self._about(first) if len(ranks) == 1 else _numbers(ranks))
        who = first.number if len(ranks) == 1 else self._together(ranks)
        kind = f' class="nba-{word}-row"' if word in _ALARMING else ""
        row = f'<tr{kind} title="{about}"><th scope="row">{who}</th>{cells}</tr>'
        note = _note(first, self._now_s) if len(ranks) == 1 else _shared_note(ranks, self._now_s)
        if note:
            color = first.state if first.note else "silent"
            cell = f'<td class="nba-note nba-{color}" colspan="{len(self.columns)}">{html.escape(note)}</td>'
            row += f"<tr{kind}><td></td>{cell}</tr>"
        return row

    def _together(self, ranks: Sequence[RankState]) -> str:
        return f"node {ranks[0].node}: {len(ranks)} ranks" if self._is_by_node else f"{len(ranks)} ranks"

    def cells_html(self) -> str:
        """Draw a small cell for each rank: its number, a sign for its state, and its progress."""
        return f'<ul class="nba-cells" aria-label="All ranks">{"".join(map(self._cell_html, self._state.ranks))}</ul>'

    def _cell_html(self, rank: RankState) -> str:
        word = self._word(rank)
        about = html.escape(f"rank {rank.number}: {word}, {_step_text(rank)}")
        share = min(rank.step / rank.total, 1.0) if rank.step is not None and rank.total else 0.0
        return (
            f'<li class="nba-cell nba-{word}" title="{about}" aria-label="{about}"><b>{rank.number}</b>'
            f'<span>{_SIGNS.get(word, "")}</span><i style="width:{share:.0%}"></i></li>'
        )

    def _columns(self) -> list[_Column]:
        """Return the columns for which some rank has a value."""
        ranks = self._state.ranks
        columns = [
            _Column(
                "state", self._word, html=lambda rank: badge(self._word(rank)),
                together=lambda ranks: badge(self._word(ranks[0])),
            )
        ]  # fmt: skip
        if any(rank.step is not None for rank in ranks):
            columns.append(_Column("step", _step_text, html=_step_html, together=_steps_html))
            columns.append(
                _Column(
                    "steps/s", lambda rank: rate(rank.steps_per_s(self._now_s)), "nba-number",
                    together=lambda ranks: rate(_mean(rank.steps_per_s(self._now_s) for rank in ranks)),
                )
            )  # fmt: skip
        names = self._state.metric_names
        columns += [_metric_column(name) for name in names[:_MOST_METRIC_COLUMNS]]
        if others := names[_MOST_METRIC_COLUMNS:]:
            columns.append(_Column("other metrics", lambda rank: _metrics_text(rank, others)))
        if any(rank.memory_used_bytes is not None for rank in ranks):
            columns.append(_Column("memory", _memory_text, html=_memory_html, together=_memories_html))
        if any(rank.utilisation is not None for rank in ranks):
            columns.append(
                _Column(
                    "busy", lambda rank: _percent(rank.utilisation), "nba-number",
                    together=lambda ranks: _percent(_mean(rank.utilisation for rank in ranks)),
                )
            )  # fmt: skip
        if not all(rank.has_ended or rank.last_event_s is None for rank in ranks):
            columns.append(
                _Column(
                    "seen", self._seen, "nba-seen", together=lambda ranks: self._seen(min(ranks, key=_last_event_s))
                )
            )
        # There from the start, since it takes the remaining width: other columns don't move when one is added.
        if len(names) <= _MOST_METRICS_BESIDE_OUTPUT:
            columns.append(_Column("last output", lambda rank: rank.last_line, "nba-last"))
        return columns

    def _word(self, rank: RankState) -> str:
        return "behind" if rank.silent is None and rank.rank in self._behind else rank.word

    def _seen(self, rank: RankState) -> str:
        """Return how long ago the rank last sent an event."""
        if rank.has_ended or rank.last_event_s is None:
            return UNKNOWN
        ago_s = self._now_s - rank.last_event_s
        return "now" if ago_s < _ALIVE_S else f"{format_clock(ago_s)} ago"

    def _about(self, rank: RankState) -> str:
        waits = f"waits in {rank.silent.waits_in}" if rank.silent is not None and rank.silent.waits_in else ""
        behind = f"{self._behind[rank.rank]:,} steps behind the others" if rank.rank in self._behind else ""
        return ", ".join(filter(None, (shortened(rank.device, 100), shortened(rank.label, 100), waits, behind)))


def _metric_column(name: str) -> _Column:
    return _Column(
        shortened(name, _MOST_NAME_CHARACTERS), lambda rank: in_digits(rank.metrics.get(name)), "nba-number",
        together=lambda ranks: in_digits(_mean(rank.metrics.get(name) for rank in ranks)),
    )  # fmt: skip


def _numbers(ranks: Sequence[RankState]) -> str:
    """Return ``ranks 0-3`` or ``ranks 0, 2-7``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank.number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], rank.number]
        else:
            parts.append([rank.number])
    shown = ["\N{EN DASH}".join(map(str, part)) for part in parts]
    return f"ranks {', '.join(shown)}"


def _last_event_s(rank: RankState) -> float:
    return rank.last_event_s if rank.last_event_s is not None and not rank.has_ended else float("inf")


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f} %"


def _metrics_text(rank: RankState, names: Iterable[str]) -> str:
    shown = (f"{shortened(name, _MOST_NAME_CHARACTERS)} {in_digits(rank.metrics[name])}" for name in names
             if name in rank.metrics)  # fmt: skip
    return ", ".join(shown)


def _step_text(rank: RankState) -> str:
    if rank.step is None:
        return UNKNOWN
    return f"{rank.step:,} / {rank.total:,}" if rank.total is not None else f"{rank.step:,}"


def _step_html(rank: RankState) -> str:
    if rank.step is None or not rank.total:
        return html.escape(_step_text(rank))
    steps = bar(rank.step, rank.total, f'role="progressbar" aria-label="Steps of rank {rank.number}"')
    total = f"{rank.total:,}"
    return f'{steps}<span class="nba-count" style="min-width:{len(total)}ch">{rank.step:,}</span> {faint(f"/ {total}")}'


def _steps_html(ranks: Sequence[RankState]) -> str:
    """Return the slowest and the fastest rank's step, with the slowest rank's bar."""
    slowest, fastest = (choose(ranks, key=lambda rank: rank.step or 0) for choose in (min, max))
    if slowest.step is None or fastest.step is None:
        return html.escape(_step_text(fastest))
    steps = f"{slowest.step:,}" if slowest.step == fastest.step else f"{slowest.step:,}\N{EN DASH}{fastest.step:,}"
    if not slowest.total:
        return steps
    label = f'role="progressbar" aria-label="Steps of the slowest of {len(ranks)} ranks"'
    return f"{bar(slowest.step, slowest.total, label)}{steps} {faint(f'/ {slowest.total:,}')}"


def _memory_text(rank: RankState) -> str:
    if rank.memory_used_bytes is None:
        return UNKNOWN
    return " / ".join(sizes_in_words(rank.memory_used_bytes, rank.memory_total_bytes))


def _memory_html(rank: RankState) -> str:
    if rank.memory_used_bytes is None or not rank.memory_total_bytes:
        return html.escape(_memory_text(rank))
    of = "Host memory" if rank.memory is None or rank.memory.kind == "host" else "Device memory"
    percent = round(100 * rank.memory_used_bytes / rank.memory_total_bytes)
    label = f'role="meter" aria-label="{of} of rank {rank.number}" aria-valuetext="{_memory_text(rank)}"'
    used, total = sizes_in_words(rank.memory_used_bytes, rank.memory_total_bytes)
    return f"{bar(percent, 100, label, 'nba-memory')}{used} {faint(f'/ {total}')}"


def _memories_html(ranks: Sequence[RankState]) -> str:
    """Return the memory of the rank that uses most."""
    known = [rank for rank in ranks if rank.memory_used_bytes is not None]
    return _memory_html(max(known, key=lambda rank: rank.memory_used_bytes or 0)) if known else UNKNOWN


def _note(rank: RankState, now_s: float) -> str:
    """Say what happened to a rank; of a silent rank that others wait for, say where it is."""
    if rank.note or rank.silent is None or rank.silent.waits_in:
        return rank.note
    at = f", at {plain_text(rank.silent.at)}" if rank.silent.at else ""
    return f"no step for {format_clock(now_s - rank.silent.since_s)}{at}; others wait for it"


def _shared_note(ranks: Sequence[RankState], now_s: float) -> str:
    """Say what happened to the first rank of a group, and to how many of them."""
    found = [note for rank in ranks if (note := _note(rank, now_s))]
    if not found:
        return ""
    same = found.count(found[0])
    return found[0] if same == len(ranks) else f"{same} of them: {found[0]}"

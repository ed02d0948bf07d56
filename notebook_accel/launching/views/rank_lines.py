"""Text lines for a run's ranks: their progress, their output with equal lines joined, and rank 0's displays."""

from __future__ import annotations

import bisect
import builtins
import collections
import contextvars
import dataclasses
import operator
import string
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from notebook_accel.formatting import aligned, format_clock, format_size, rank_spans
from notebook_accel.launching.state.rank import RankState, metric_names
from notebook_accel.protocol import events

_MOST_LINES = 4  # more ranks are folded into one line
_MOST_METRICS = 6


def lines(ranks: Sequence[RankState], now_s: float) -> list[str]:
    """Return a line for each rank in columns, or one line for many ranks; nothing before the first step or metric."""
    if not any(rank.steps is not None or rank.metrics for rank in ranks):
        return []
    if len(ranks) > _MOST_LINES:
        return [folded(ranks, now_s)]
    columns = [[f"rank {rank.number}" for rank in ranks], [_activity(rank) for rank in ranks]]
    columns += [[column.text([rank]) for rank in ranks] for column in _columns(ranks, now_s)]
    return aligned(list(zip(*filter(any, columns), strict=True)))


def folded(ranks: Sequence[RankState], now_s: float) -> str:
    """Return one line for all ranks, with the range of each value, and the slowest rank."""
    states = collections.Counter(word for rank in ranks if (word := _activity(rank)))
    words = [f"{len(ranks)} ranks", ", ".join(f"{count} {state}" for state, count in states.items())]
    words += [column.text(ranks) for column in _columns(ranks, now_s)]
    behind = min(ranks, key=_place)
    if not _word(behind) and _place(behind) < max(map(_place, ranks)):
        words.append(f"slowest: rank {behind.number}")
    return "  ".join(filter(None, words))


@dataclasses.dataclass(frozen=True)
class _RankValue:
    """A value that each rank may have, the texts around it, and the total that it counts up to, if that is known."""

    value: Callable[[RankState], float | None]
    written: Callable[[float], str]
    before: str = ""
    after: str = ""
    total: Callable[[RankState], int | None] = lambda _: None

    def text(self, ranks: Sequence[RankState]) -> str:
        """Return a rank's value, or the least and the largest of several ranks'; empty if it isn't known."""
        values = [value for rank in ranks if (value := self.value(rank)) is not None]
        if not values:
            return ""
        least, most = self.written(min(values)), self.written(max(values))
        span = least if least == most else f"{least}..{most}"
        totals = [total for total in map(self.total, ranks) if total]
        return f"{self.before}{span}{f'/{max(totals)}' if totals else ''}{self.after}"


def _columns(ranks: Sequence[RankState], now_s: float) -> list[_RankValue]:
    columns = [
        _RankValue(lambda rank: rank.epoch, "{:.0f}".format, "epoch ", total=lambda rank: rank.epochs),
        _RankValue(lambda rank: rank.step, "{:.0f}".format, "step ", total=lambda rank: rank.total),
        _RankValue(lambda rank: _rate(rank, now_s), "{:.1f}".format, "", " steps/s"),
    ]
    if not any(rank.silent for rank in ranks):  # the wait for a silent rank may take any time
        columns.append(_RankValue(lambda rank: rank.left_s(now_s), format_clock, "", " left"))
    columns += [_RankValue(_metric(name), "{:.4g}".format, f"{name} ") for name in metric_names(ranks)[:_MOST_METRICS]]
    columns.append(_RankValue(lambda rank: rank.memory_used_bytes, lambda size: format_size(int(size)), "memory "))
    return columns


def _word(rank: RankState) -> str:
    """Return a word for a rank's state; empty while it starts or runs."""
    if rank.is_compiling and not rank.has_ended:
        return "compiling"
    return rank.word if rank.has_ended else ""


def _activity(rank: RankState) -> str:
    """Return the word for a rank's state, or ``evaluating``; empty while it trains."""
    return _word(rank) or ("evaluating" if rank.is_evaluating and not rank.has_ended else "")


def _rate(rank: RankState, now_s: float) -> float | None:
    """Return a rank's steps per second; ``None`` if it is stalled, so that its line stays unchanged."""
    return None if _word(rank) or rank.is_stalled(now_s) else rank.steps_per_s(now_s)


def _metric(name: str) -> Callable[[RankState], float | None]:
    return lambda rank: rank.metrics.get(name)


def _place(rank: RankState) -> tuple[int, int]:
    return rank.epoch or 0, rank.step or 0


_MOST_UNSETTLED = 500  # lines that other ranks may still join
_MOST_SPANS = 5  # in the margin
_ROLE = "default_role"  # torch elastic's name of the role


def margin(ranks: Iterable[int], total: int, *, first: int = 0, template: str = "") -> str:
    """Return the prefix of a line that these ranks print.

    Args:
        ranks: The ranks' numbers on this node.
        total: Number of ranks on all nodes. The prefix is as wide as the prefix of a line from all of them.
        first: The number of this node's first rank among all.
        template: The option ``log_line_prefix_template``; empty for ``0-7 │``.
    """
    local = _label(ranks)
    label = _label(first + rank for rank in ranks) if first else local
    if not template:
        return f"{label:>{len(_label(range(total)))}} │ "
    return string.Template(template).substitute(role_name=_ROLE, rank=label, local_rank=local)


def _label(ranks: Iterable[int]) -> str:
    spans = rank_spans(ranks)
    left_out = len(spans) - _MOST_SPANS
    return ",".join([*spans[:_MOST_SPANS], *([f"+{left_out}"] if left_out > 0 else [])])


@dataclasses.dataclass(slots=True, eq=False)
class RankLine:
    """One shown line, and the ranks that printed it, by their numbers on this node."""

    ranks: set[int]
    text: str
    due_s: float  # time after which no other rank can join it
    number: int  # its position among all lines


@dataclasses.dataclass
class AlikeLines:
    """Joins equal lines of several ranks into one, in the order in which they arrived.

    A rank's line joins an equal line of other ranks that came a moment before, if that stands below all lines of this
    rank. So no line is lost or moved, and each rank's lines keep their order.
    """

    _world_size: int  # number of ranks on this node
    _moment_s: float  # in which other ranks may still join a line
    _settle: Callable[[RankLine], object]  # takes each line in order, once no rank can join it any more
    _unsettled: collections.deque[RankLine] = dataclasses.field(default_factory=collections.deque)
    _by_text: dict[str, list[RankLine]] = dataclasses.field(default_factory=dict)  # in order, as the numbers are
    _last: dict[int, int] = dataclasses.field(default_factory=dict)  # the number of each rank's last line
    _next: int = 0

    @property
    def unsettled(self) -> list[RankLine]:
        """The lines that other ranks may still join, in order."""
        return list(self._unsettled)

    def add(self, rank: int, texts: Sequence[str], now_s: float) -> list[RankLine]:
        """Add the lines that a rank has printed at ``now_s``.

        Returns:
            For each text the line that shows it, which has several ranks if the text joined an existing line.
        """
        self.settle(now_s)
        if len(texts) > _MOST_UNSETTLED:  # nobody reads such a flood line by line
            self.settle()
            lines = [RankLine({rank}, text, now_s, 0) for text in texts]
            for line in lines:
                self._settle(line)
            return lines
        lines = []
        for text in texts:
            line = self._joinable(rank, text) or self._append(text, now_s + self._moment_s)
            line.ranks.add(rank)
            self._last[rank] = line.number
            lines.append(line)
            if len(self._unsettled) > _MOST_UNSETTLED:
                self._settle_first()
        self.settle(now_s)
        return lines

    def settle(self, now_s: float = float("inf")) -> None:
        """Settle the lines that no rank can join any more at ``now_s``; without it, all lines."""
        while self._unsettled:
            first = self._unsettled[0]
            if first.due_s > now_s and len(first.ranks) < self._world_size:
                break
            self._settle_first()

    def _settle_first(self) -> None:
        line = self._unsettled.popleft()
        equal = self._by_text[line.text]
        del equal[0]
        if not equal:
            del self._by_text[line.text]
        self._settle(line)

    def _append(self, text: str, due_s: float) -> RankLine:
        line, self._next = RankLine(set(), text, due_s, self._next), self._next + 1
        self._unsettled.append(line)
        self._by_text.setdefault(text, []).append(line)
        return line

    def _joinable(self, rank: int, text: str) -> RankLine | None:
        """Return the first line with this text below all lines of the rank."""
        equal = self._by_text.get(text, [])
        below = bisect.bisect_right(equal, self._last.get(rank, -1), key=operator.attrgetter("number"))
        return equal[below] if below < len(equal) else None


class KernelDisplay:
    """Shows rank 0's displays under the cell that created this object, or that last called ``begin_cell``."""

    def __init__(self) -> None:
        self._shown: set[str] = set()
        self.begin_cell()

    def begin_cell(self) -> None:
        """Show all further displays under the running cell, from any thread."""
        self._context = contextvars.copy_context()

    def show(self, event: events.Display) -> bool:
        """Show a display if it is more than text and this process is a kernel. Return whether it was shown."""
        display = _display_of_kernel()
        has_place = event.display_id in self._shown
        if display is None or not (has_place or event.data.keys() - {"text/plain"}):
            return False
        if event.display_id:
            self._shown.add(event.display_id)
        options: dict[str, Any] = {"metadata": event.metadata, "display_id": event.display_id or None}
        if event.is_update and has_place:
            options["update"] = True
        self._context.copy().run(display, event.data, raw=True, **options)
        return True


def _display_of_kernel() -> Callable[..., Any] | None:
    """Return IPython's ``display``, which IPython adds to the builtins; ``None`` outside of kernels."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(builtins, "display", None) if hasattr(shell, "kernel") else None

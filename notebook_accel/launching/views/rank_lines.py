"""Text lines for a run's ranks: their progress, their output with equal lines joined, and rank 0's displays."""

from __future__ import annotations

import bisect
import builtins
import collections
import contextvars
import dataclasses
import itertools
import operator
import string
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from notebook_accel.formatting import aligned, format_clock, format_count, format_size, rank_spans
from notebook_accel.launching.state.rank import RankState, metric_names
from notebook_accel.protocol import events

_Line = TypeVar("_Line")
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
_MOST_PASSED = 64  # lines that one line may be moved past, so that a flood stays cheap
# The agent reads one log after the other, about ten times a second. So lines of different ranks that arrive within this
# time have no meaningful order.
_TOGETHER_S = 0.1
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
    came_s: float  # time at which the first rank printed it
    due_s: float  # time after which no other rank can join it
    number: int  # its position among the unsettled lines


@dataclasses.dataclass
class AlikeLines:
    """Orders the ranks' lines for showing, and joins equal lines of several ranks into one.

    A rank's line joins an equal line of other ranks that came a moment before. No line is lost, and each rank's lines
    keep their order. Otherwise lines of different ranks keep their order of arrival, unless they arrived so close
    together that this order means nothing.
    """

    _world_size: int  # number of ranks on this node
    _moment_s: float  # in which other ranks may still join a line
    _settle: Callable[[RankLine], object]  # takes each line in order, once no rank can join it any more
    _unsettled: collections.OrderedDict[int, RankLine] = dataclasses.field(default_factory=collections.OrderedDict)
    _by_text: dict[str, list[RankLine]] = dataclasses.field(default_factory=dict)  # in order, as the numbers are
    _last: dict[int, int] = dataclasses.field(default_factory=dict)  # the number of each rank's last line
    _next: int = 0

    @property
    def unsettled(self) -> list[RankLine]:
        """The lines that other ranks may still join, in order."""
        return list(self._unsettled.values())

    def add(self, rank: int, texts: Sequence[str], now_s: float) -> list[RankLine]:
        """Add the lines that a rank has printed at ``now_s``.

        Returns:
            For each text the line that shows it, which has several ranks if the text joined an existing line.
        """
        self.settle(now_s)
        if len(texts) > _MOST_UNSETTLED:  # nobody reads such a flood line by line
            self.settle()
            lines = [RankLine({rank}, text, now_s, now_s, 0) for text in texts]
            for line in lines:
                self._settle(line)
            return lines
        lines = []
        for index, text in enumerate(texts):
            joined = self._joinable(rank, texts, index, now_s) if text in self._by_text else None
            if joined is None:
                joined = RankLine(set(), text, now_s, now_s + self._moment_s, 0)
                self._append(joined)
            joined.ranks.add(rank)
            self._last[rank] = joined.number
            lines.append(joined)
            if len(self._unsettled) > _MOST_UNSETTLED:
                self._settle_first()
        self.settle(now_s)
        return lines

    def settle(self, now_s: float = float("inf")) -> None:
        """Settle the lines that no rank can join any more at ``now_s``; without it, all lines."""
        while self._unsettled:
            first = next(iter(self._unsettled.values()))
            if first.due_s > now_s and len(first.ranks) < self._world_size:
                break
            self._settle_first()

    def _settle_first(self) -> None:
        _, line = self._unsettled.popitem(last=False)
        self._forget_text(line)
        self._settle(line)

    def _append(self, line: RankLine) -> None:
        line.number, self._next = self._next, self._next + 1
        self._unsettled[line.number] = line
        self._by_text.setdefault(line.text, []).append(line)

    def _forget_text(self, line: RankLine) -> None:
        equal = self._by_text[line.text]
        equal.remove(line)
        if not equal:
            del self._by_text[line.text]

    def _joinable(self, rank: int, texts: Sequence[str], index: int, now_s: float) -> RankLine | None:
        """Return the line that this rank can join with the text at ``index``, moved below the rank's earlier lines."""
        equal = self._by_text[texts[index]]
        below = bisect.bisect_right(equal, self._last.get(rank, -1), key=operator.attrgetter("number"))
        if below < len(equal):
            return equal[below]
        oldest = self._next - _MOST_PASSED
        above = itertools.takewhile(lambda line: rank not in line.ranks and line.number >= oldest, reversed(equal))
        line = next(iter(collections.deque(above, maxlen=1)), None)  # the topmost one
        if line is not None and self._move_to_end(line, rank, texts[index + 1 : index + _MOST_PASSED], now_s):
            return line
        return None

    def _move_to_end(self, line: RankLine, rank: int, coming: Sequence[str], now_s: float) -> bool:
        """Move a line to the end, with all later lines of its ranks, and return whether that was possible.

        It is possible if this rank joins each of these later lines next, or other ranks have joined it, or it arrived
        together with the lines that it passes.
        """
        from_line = itertools.takewhile(lambda other: other.number >= line.number, reversed(self._unsettled.values()))
        moved, passed, ranks = [line], [], set(line.ranks)
        matched = 0
        for other in list(from_line)[-2::-1]:
            if ranks.isdisjoint(other.ranks):
                passed.append(other)
                continue
            moved.append(other)
            ranks |= other.ranks
            if matched < len(coming) and other.text == coming[matched]:
                matched += 1
            elif len(other.ranks) == 1 and now_s - other.came_s > _TOGETHER_S:
                return False
        if rank in ranks:
            return False
        for other in passed:
            other.due_s = min(other.due_s, line.due_s)  # so that the moved lines need not wait for the passed ones
        for other in moved:
            del self._unsettled[other.number]
            self._forget_text(other)
            self._append(other)
            self._last.update(dict.fromkeys(other.ranks, other.number))
        return True


class LineLimit(Generic[_Line]):
    """Passes on a rank's first lines, ``most`` of them, and keeps the ``last`` ones for the end of the run.

    ``log_file`` has the whole output; it is empty if there is none.
    """

    def __init__(self, log_file: str, most: int, last: int) -> None:
        self._log_file = log_file
        self._free = most
        self._left_out = 0
        self.kept = collections.deque[_Line](maxlen=last)

    def add(self, lines: Sequence[_Line]) -> Sequence[_Line]:
        """Add lines, and return those to show now."""
        shown, others = lines[: self._free], lines[self._free :]
        self._free -= len(shown)
        self._left_out += max(len(self.kept) + len(others) - (self.kept.maxlen or 0), 0)
        self.kept.extend(others)
        return shown

    def leave_out(self, count: int) -> None:
        """Count lines that the sender has left out. From then on, lines are kept for the end."""
        if count:
            self._left_out += count + len(self.kept)
            self.kept.clear()
            self._free = 0

    @property
    def note(self) -> list[str]:
        """A line with the number of lines that are never shown; empty list if there are none."""
        where = f"; the whole output is in {self._log_file}" if self._log_file else ""
        return [f"[{format_count(self._left_out, 'line')} left out here{where}]"] if self._left_out else []


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

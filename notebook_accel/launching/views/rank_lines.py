"""The states of ranks as lines of text: a line for each rank, or one for all of many."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from notebook_accel import durations
from notebook_accel.launching.state.rank import RankState
from notebook_accel.sizes import in_words

__all__ = ["folded", "lines"]

_MOST_LINES = 4  # of ranks, before they are folded into one
_MOST_METRICS = 6


def lines(ranks: Sequence[RankState], now_s: float) -> list[str]:
    """Return a line for each rank, with what belongs together below each other; of many ranks one line for all.

    Nothing is returned as long as no rank has counted or measured anything.
    """
    if not any(rank.steps is not None or rank.metrics for rank in ranks):
        return []
    if len(ranks) > _MOST_LINES:
        return [folded(ranks, now_s)]
    columns = [[f"rank {rank.number}" for rank in ranks], [_word(rank) for rank in ranks]]
    columns += [[column.of_rank(rank) for rank in ranks] for column in _columns(ranks, now_s)]
    widths = [max(map(len, cells)) for cells in columns]
    rows = zip(*columns, strict=True)
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip() for row in rows
    ]


def folded(ranks: Sequence[RankState], now_s: float) -> str:
    """Return one line for all ranks: of what differs, the least and the most, and which rank is behind."""
    states = collections.Counter(word for rank in ranks if (word := _word(rank)))
    words = [f"{len(ranks)} ranks", ", ".join(f"{count} {state}" for state, count in states.items())]
    words += [column.of_all(ranks) for column in _columns(ranks, now_s)]
    behind = min(ranks, key=_place)
    if not _word(behind) and _place(behind) < max(map(_place, ranks)):
        words.append(f"slowest: rank {behind.number}")
    return "  ".join(filter(None, words))


@dataclasses.dataclass(frozen=True)
class _Column:
    """One fact about the ranks.

    Attributes:
        value: A rank's, ``None`` if it has none.
        written: How a value is written.
        before: What stands before it.
        after: What stands after it.
    """

    value: Callable[[RankState], float | None]
    written: Callable[[float], str]
    before: str = ""
    after: str = ""

    def of_rank(self, rank: RankState) -> str:
        value = self.value(rank)
        return "" if value is None else f"{self.before}{self.written(value)}{self.after}"

    def of_all(self, ranks: Sequence[RankState]) -> str:
        values = [value for rank in ranks if (value := self.value(rank)) is not None]
        if not values:
            return ""
        least, most = self.written(min(values)), self.written(max(values))
        return f"{self.before}{least if least == most else f'{least}..{most}'}{self.after}"


def _columns(ranks: Sequence[RankState], now_s: float) -> list[_Column]:
    columns = [
        _Column(lambda rank: rank.epoch, "{:.0f}".format, "epoch ", _of(rank.epochs for rank in ranks)),
        _Column(lambda rank: rank.step, "{:.0f}".format, "step ", _of(rank.total for rank in ranks)),
        _Column(lambda rank: _rate(rank, now_s), "{:.1f}".format, "", " steps/s"),
    ]
    if not any(rank.silent for rank in ranks):  # nobody knows how long others will still wait for a silent one
        columns.append(_Column(lambda rank: rank.left_s(now_s), durations.in_minutes, "", " left"))
    names = dict.fromkeys(name for rank in ranks for name in rank.metrics)
    shown = sorted(names, key=lambda name: "loss" not in name.lower())[:_MOST_METRICS]
    columns += [_Column(_metric(name), "{:.4g}".format, f"{name} ") for name in shown]
    columns.append(_Column(lambda rank: rank.memory_used_bytes, lambda size: in_words(int(size)), "memory "))
    return columns


def _word(rank: RankState) -> str:
    """Return a word for a rank's state; empty while it runs or is about to."""
    if rank.is_compiling and not rank.has_ended:
        return "compiling"
    return rank.word if rank.has_ended else ""


def _rate(rank: RankState, now_s: float) -> float | None:
    """Return a rank's steps a second; ``None`` for one that stands still, so that its line doesn't change either."""
    return None if _word(rank) or rank.is_stalled(now_s) else rank.steps_per_s(now_s)


def _metric(name: str) -> Callable[[RankState], float | None]:
    return lambda rank: rank.metrics.get(name)


def _of(totals: Iterable[int | None]) -> str:
    """Return ``/50``, where the ranks know how many there will be."""
    known = [total for total in totals if total]
    return f"/{max(known)}" if known else ""


def _place(rank: RankState) -> tuple[int, int]:
    return rank.epoch or 0, rank.step or 0

"""Where the ranks of a run stand, as lines of text: a line for each, or one for all of many."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from notebook_accel import durations, events
from notebook_accel.sizes import in_words

__all__ = ["Standing", "described", "folded"]

_MOST_LINES = 4  # of ranks, before they are folded into one
_MOST_METRICS = 6
_COMPILING = "compiling"


class Standing:
    """Where one rank stands, from its events.

    Attributes:
        rank: Its number.
        state: A word for how it is; empty while it runs.
        metrics: The latest value of each metric.
        memory_bytes: Memory in use, ``None`` if it has not said.
        is_silent: Whether others wait for it, or it for them, and nothing goes on.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.state = ""
        self.metrics: dict[str, float] = {}
        self.memory_bytes: int | None = None
        self.is_silent = False
        self._now: events.Progress | None = None
        self._before: events.Progress | None = None

    @property
    def has_reported(self) -> bool:
        """Whether it has counted or measured anything."""
        return self._now is not None or bool(self.metrics)

    @property
    def steps(self) -> int:
        """Steps that it has done, over all epochs."""
        return 0 if self._now is None else self._now.steps

    @property
    def progress(self) -> events.Progress | None:
        """What it last counted."""
        return self._now

    @property
    def steps_per_s(self) -> float | None:
        """Since the period began, ``None`` if it has not counted in it."""
        now, before = self._now, self._before
        if now is None or before is None or now.time_s <= before.time_s:
            return None
        return (now.steps - before.steps) / (now.time_s - before.time_s)

    @property
    def left_s(self) -> float | None:
        """Seconds until its last step at that rate, of the running epoch if it isn't known how many there will be.

        ``None`` if nobody can know.
        """
        now, rate = self._now, self.steps_per_s
        if self.state or self.is_silent or now is None or now.total is None or not rate:
            return None
        steps = now.total - now.step
        if now.epoch is not None and now.epochs is not None:
            steps += (now.epochs - now.epoch) * now.total
        return max(steps, 0) / rate

    def begin_period(self) -> None:
        """From now on the rate is that of what comes."""
        self._before = None if self.state == _COMPILING else self._now

    def add(self, event: events.Event) -> None:
        """Takes one event of the rank."""
        if isinstance(event, events.Progress):
            self.is_silent = self.is_silent and event.steps == self.steps
            self._count(event)
        elif isinstance(event, events.Metrics):
            self.metrics.update(event.values)
        elif isinstance(event, events.Memory):
            self.memory_bytes = event.used_bytes
        elif isinstance(event, events.Silent):
            self.is_silent = True
        elif isinstance(event, events.Started):
            self.state = ""
        elif isinstance(event, (events.Finished, events.Failed)):
            self.state = "finished" if isinstance(event, events.Finished) else "failed"
        elif isinstance(event, events.Ended):
            self.state = "stopped" if self.state in ("", _COMPILING) else self.state

    def _count(self, event: events.Progress) -> None:
        self._now = event
        if event.compiling:  # which takes long, and says nothing of the steps that follow
            self.state, self._before = _COMPILING, None
        else:
            self.state = "" if self.state == _COMPILING else self.state
            self._before = self._before or event


def described(ranks: Sequence[Standing]) -> list[str]:
    """A line for each rank, with what belongs together below each other; of many ranks one line for all."""
    if len(ranks) > _MOST_LINES:
        return [folded(ranks)]
    columns = [[f"rank {standing.rank}" for standing in ranks], [standing.state for standing in ranks]]
    columns += [[column.of_rank(standing) for standing in ranks] for column in _columns(ranks)]
    widths = [max(map(len, cells)) for cells in columns]
    rows = zip(*columns, strict=True)
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip() for row in rows
    ]


def folded(ranks: Sequence[Standing]) -> str:
    """One line for all ranks: of what differs, the least and the most, and which rank is behind."""
    states = collections.Counter(standing.state for standing in ranks if standing.state)
    words = [f"{len(ranks)} ranks", ", ".join(f"{count} {state}" for state, count in states.items())]
    words += [column.of_all(ranks) for column in _columns(ranks)]
    behind = min(ranks, key=_place)
    if not behind.state and _place(behind) < max(map(_place, ranks)):
        words.append(f"slowest: rank {behind.rank}")
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

    value: Callable[[Standing], float | None]
    written: Callable[[float], str]
    before: str = ""
    after: str = ""

    def of_rank(self, standing: Standing) -> str:
        value = self.value(standing)
        return "" if value is None else f"{self.before}{self.written(value)}{self.after}"

    def of_all(self, ranks: Sequence[Standing]) -> str:
        values = [value for standing in ranks if (value := self.value(standing)) is not None]
        if not values:
            return ""
        least, most = self.written(min(values)), self.written(max(values))
        return f"{self.before}{least if least == most else f'{least}..{most}'}{self.after}"


def _columns(ranks: Sequence[Standing]) -> list[_Column]:
    epochs = _of(standing.progress.epochs for standing in ranks if standing.progress is not None)
    total = _of(standing.progress.total for standing in ranks if standing.progress is not None)
    columns = [
        _Column(_epoch, "{:.0f}".format, "epoch ", epochs),
        _Column(_step, "{:.0f}".format, "step ", total),
        _Column(lambda standing: None if standing.state else standing.steps_per_s, "{:.1f}".format, "", " steps/s"),
    ]
    if not any(standing.is_silent for standing in ranks):  # nobody knows how long one will still be waited for
        columns.append(_Column(lambda standing: standing.left_s, durations.in_minutes, "", " left"))
    names = dict.fromkeys(name for standing in ranks for name in standing.metrics)
    shown = sorted(names, key=lambda name: "loss" not in name.lower())[:_MOST_METRICS]
    columns += [_Column(_metric(name), "{:.4g}".format, f"{name} ") for name in shown]
    columns.append(_Column(lambda standing: standing.memory_bytes, lambda size: in_words(int(size)), "memory "))
    return columns


def _epoch(standing: Standing) -> int | None:
    return None if standing.progress is None else standing.progress.epoch


def _step(standing: Standing) -> int | None:
    return None if standing.progress is None else standing.progress.step


def _metric(name: str) -> Callable[[Standing], float | None]:
    return lambda standing: standing.metrics.get(name)


def _of(totals: Iterable[int | None]) -> str:
    """``/50``, where the ranks know how many there will be."""
    known = [total for total in totals if total]
    return f"/{max(known)}" if known else ""


def _place(standing: Standing) -> tuple[int, int]:
    progress = standing.progress
    return (0, 0) if progress is None else (progress.epoch or 0, progress.step)

"""What is known about a run, from the events of its ranks. Pure: no input or output, no widgets, no clock.

``RunState.apply`` takes events in the order in which they come. What it holds is bounded, however long the run is and
however much it says. Times are the seconds of ``time.monotonic()`` that events carry; functions that depend on the
present take it as ``now_s``.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from notebook_accel import events
from notebook_accel.errors import signal_name

__all__ = ["OutputLine", "OutputLog", "RankState", "RunState", "Series", "plain_lines", "plain_text"]

StateWord = Literal["starting", "running", "finished", "failed", "stopped", "killed"]

_RATE_WINDOW_S = 5.0
_RATE_STALE_S = 1.0
_HEAD_LINES = 200
_TAIL_LINES = 800
_LINE_CHARACTERS = 2000
_SERIES_POINTS = 256
_LARGEST_VALUE = 1e90  # of a curve: sums and differences of such values are numbers still
_MOST_METRICS = 32

# ECMA-48 control sequences (colours, cursor movements) and operating system commands (titles, links).
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclasses.dataclass
class RankState:
    """What is known about one rank.

    Attributes:
        rank: Its number.
        state: One word for how it is.
        step: Steps done in the running epoch, ``None`` before anything was counted.
        total: Steps of the epoch, ``None`` if not known.
        epoch: The running epoch from 1, ``None`` if not known.
        epochs: How many epochs there will be, ``None`` if not known.
        label: What is counted.
        device: The device it computes on, empty if not known.
        metrics: The latest value of each metric.
        memory_used_bytes: Memory in use, ``None`` before it was measured.
        memory_total_bytes: What the device or the host has.
        memory_kind: Which memory that is.
        last_line: The last line that it wrote.
        note: Why it failed or ended early, in one line; else empty.
        silent: What was found out when it had done no step for long; ``None`` again after its next one.
        last_event_s: When it last gave a sign of life.
    """

    rank: int
    state: StateWord = "starting"
    step: int | None = None
    total: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    label: str = ""
    device: str = ""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    memory_used_bytes: int | None = None
    memory_total_bytes: int = 0
    memory_kind: Literal["host", "device"] = "host"
    last_line: str = ""
    note: str = ""
    silent: events.Silent | None = None
    last_event_s: float | None = None
    _samples: collections.deque[tuple[float, int]] = dataclasses.field(default_factory=collections.deque)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come from it."""
        return self.state not in ("starting", "running")

    def steps_per_s(self, now_s: float) -> float | None:
        """Steps a second over the last few seconds; of an ended rank, over its last few seconds of counting.

        ``None`` until two counts are known.
        """
        if len(self._samples) < 2:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        # A rank that counts nothing says nothing, so after some silence the time since its last word counts too.
        if not self.has_ended and now_s - last_s > _RATE_STALE_S:
            last_s = now_s
        return (last - first) / (last_s - first_s)

    def left_s(self, now_s: float) -> float | None:
        """Seconds until its last step at the present rate, ``None`` if that can't be known.

        Where the number of epochs isn't known, this is the time to the end of the running one.
        """
        rate = self.steps_per_s(now_s)
        if self.has_ended or not rate or self.step is None or self.total is None:
            return None
        steps = self.total - self.step
        if self.epoch is not None and self.epochs is not None:
            steps += (self.epochs - self.epoch) * self.total
        return max(steps, 0) / rate

    def apply(self, event: events.Event) -> None:
        """Takes in one event of this rank."""
        if isinstance(event, events.Silent):  # which is said about it, and not by it
            self.silent = None if self.has_ended else event
            return
        self.last_event_s = event.time_s
        if isinstance(event, events.Failed):
            self._fail(event)
        elif isinstance(event, events.Finished):
            self.state = "finished"
        elif isinstance(event, events.Ended):
            self._end(event)
        elif isinstance(event, events.Started):
            self.state, self.note = "running", ""  # also where an earlier process of this rank has died
        else:
            if self.state == "starting":
                self.state = "running"
            self._take_report(event)
        if self.has_ended:
            self.silent = None

    def _take_report(self, event: events.Event) -> None:
        if isinstance(event, events.Progress):
            self._count(event)
        elif isinstance(event, events.Metrics):
            for name, value in event.values.items():
                if name in self.metrics or len(self.metrics) < _MOST_METRICS:
                    self.metrics[name] = value
        elif isinstance(event, events.Memory):
            self.memory_used_bytes = event.used_bytes
            self.memory_total_bytes = event.total_bytes
            self.memory_kind = event.kind

    def _count(self, event: events.Progress) -> None:
        if not self._samples or event.steps != self._samples[-1][1]:
            self.silent = None
        # Another loader or bar has counts of its own. Labels are no sign of it: many change with every step.
        if self._samples and (event.total != self.total or event.steps < self._samples[-1][1]):
            self._samples.clear()
        if not self._samples or event.time_s > self._samples[-1][0]:
            self._samples.append((event.time_s, event.steps))
        while len(self._samples) > 2 and self._samples[1][0] <= event.time_s - _RATE_WINDOW_S:
            self._samples.popleft()
        # A bar over the epochs that has closed after the last one doesn't make their number unknown.
        epochs = event.epochs or (self.epochs if event.epoch == self.epoch else None)
        self.step, self.total = event.step, event.total
        self.epoch, self.epochs = event.epoch, epochs
        self.label, self.device = event.label, event.device or self.device

    def _fail(self, event: events.Failed) -> None:
        where = f" ({event.line})" if event.line else ""
        if event.lost_peer or event.kind == "KeyboardInterrupt":
            # It was not this rank's fault, so it isn't the one to look at.
            self.state = "stopped"
            self.note = ("another rank has gone" if event.lost_peer else "interrupted") + where
            return
        self.state = "failed"
        message = plain_text(event.message.strip().split("\n", 1)[0])
        self.note = _clipped(f"{event.kind}: {message}" if message else event.kind) + where

    def _end(self, event: events.Ended) -> None:
        if self.has_ended:
            return
        if event.stopped:
            self.state = "stopped"
        elif event.signal is not None:
            self.state, self.note = "killed", f"killed by {signal_name(event.signal)}"
        else:
            self.state, self.note = "failed", f"exited with status {event.exit_code} before its end"


@dataclasses.dataclass(frozen=True)
class OutputLine:
    """One line that a rank wrote."""

    rank: int
    text: str


class OutputLog:
    """Lines of all ranks in the order in which they came: the first ones and the last ones.

    Attributes:
        count: How many lines there were in all.
    """

    def __init__(self) -> None:
        self.count = 0
        self._head: list[OutputLine] = []
        self._tail: collections.deque[OutputLine] = collections.deque(maxlen=_TAIL_LINES)

    @property
    def head(self) -> list[OutputLine]:
        """The first lines; what came after them is in ``tail``."""
        return list(self._head)

    @property
    def tail(self) -> list[OutputLine]:
        """The last lines that are not in ``head``."""
        return list(self._tail)

    @property
    def left_out(self) -> int:
        """How many lines between ``head`` and ``tail`` were not kept."""
        return self.count - len(self._head) - len(self._tail)

    def pass_over(self, count: int) -> None:
        """Lines that are in a log only came here. There is one gap: what is before it and not in ``head`` goes too."""
        self.count += count
        self._tail.clear()

    def add(self, line: OutputLine) -> None:
        """Appends a line."""
        self.count += 1
        if len(self._head) < _HEAD_LINES and self.count == len(self._head) + 1:
            self._head.append(line)
        else:
            self._tail.append(line)

    def last(self, count: int) -> list[OutputLine]:
        """The last ``count`` lines that were kept without a gap between them."""
        from_tail = list(itertools.islice(reversed(self._tail), count))
        missing = count - len(from_tail)
        from_head = self._head[-missing:] if missing > 0 and self.left_out == 0 else []
        return from_head + from_tail[::-1]


class Series:
    """A curve over steps that keeps at most a few hundred points, spread over its whole length, and always the last.

    Attributes:
        unit: What its steps are: ``steps``, or ``reports`` where nothing counts steps.
    """

    def __init__(self, unit: Literal["steps", "reports"] = "steps") -> None:
        self.unit = unit
        self._kept: list[tuple[int, float]] = []
        self._last: tuple[int, float] | None = None
        self._spacing = 1

    @property
    def points(self) -> list[tuple[int, float]]:
        """``(step, value)`` by rising step."""
        return [] if self._last is None else [*self._kept, self._last]

    def add(self, step: int, value: float) -> None:
        """Adds a point, or replaces the last one if it has the same step. Leaves out what can't be drawn."""
        # Not a number and infinity fail the comparison too.
        if not abs(value) <= _LARGEST_VALUE or (self._last is not None and step < self._last[0]):
            return
        if self._last is not None and self._last[0] < step:
            self._keep(self._last)
        self._last = (step, value)

    def _keep(self, point: tuple[int, float]) -> None:
        if self._kept and point[0] - self._kept[-1][0] < self._spacing:
            return
        self._kept.append(point)
        if len(self._kept) >= _SERIES_POINTS:
            self._kept = self._kept[::2]
            self._spacing = max(2 * self._spacing, (self._kept[-1][0] - self._kept[0][0]) // _SERIES_POINTS)


class RunState:
    """What is known about a run.

    Args:
        world_size: Number of ranks.
        prefixes: What stands before the ranks' lines; empty for their numbers.

    Attributes:
        ranks: One state a rank.
        output: What all ranks wrote.
        history: For each metric, the mean of the ranks' latest values over steps, or over reports as long as no rank
            counts steps.
    """

    def __init__(self, world_size: int, prefixes: Sequence[str] = ()) -> None:
        self.prefixes = prefixes
        self.ranks = [RankState(rank) for rank in range(world_size)]
        self.output = OutputLog()
        self.history: dict[str, Series] = {}
        self._reported: dict[str, set[int]] = {}
        self._reports: collections.Counter[str] = collections.Counter()

    @property
    def metric_names(self) -> list[str]:
        """The reported metrics; losses first, else in the order in which they came."""
        names = dict.fromkeys(name for rank in self.ranks for name in rank.metrics)
        return sorted(names, key=lambda name: "loss" not in name.lower())

    def apply(self, rank: int, event: events.Event) -> None:
        """Takes in one event of one rank."""
        self.ranks[rank].apply(event)
        if isinstance(event, events.Output):
            if event.left_out:
                self.output.pass_over(event.left_out)
            for text in plain_lines(event.text):
                self.output.add(OutputLine(rank, text))
                self.ranks[rank].last_line = text or self.ranks[rank].last_line
        elif isinstance(event, events.Metrics):
            for name in event.values.keys() & self.ranks[rank].metrics.keys():
                self._extend_history(name, rank, event.step)

    def close(self) -> None:
        """The run is over: a rank whose end nobody could report is a stopped one."""
        for rank in self.ranks:
            if not rank.has_ended:
                rank.state = "stopped"

    def left_s(self, now_s: float) -> float | None:
        """Seconds until the slowest rank's last step, ``None`` if that can't be known."""
        return max((left for rank in self.ranks if (left := rank.left_s(now_s)) is not None), default=None)

    def _extend_history(self, name: str, rank: int, step: int) -> None:
        """Adds a point as soon as each rank that has the metric reported it again: one by one, means would jump."""
        values = [other.metrics[name] for other in self.ranks if name in other.metrics]
        reported = self._reported.setdefault(name, set())
        is_again = rank in reported  # before another one has: that one may have stopped reporting
        reported.add(rank)
        if is_again or len(reported) == len(values):
            self._add_point(name, step, sum(values) / len(values))
            reported.clear()

    def _add_point(self, name: str, step: int, value: float) -> None:
        self._reports[name] += 1
        are_steps_counted = any(rank.step is not None for rank in self.ranks)
        series = self.history.get(name)
        # A curve over reports that came before the first step can't go on over steps.
        if series is None or (series.unit == "reports" and are_steps_counted):
            series = self.history[name] = Series("steps" if are_steps_counted else "reports")
        series.add(step if are_steps_counted else self._reports[name], value)


def plain_lines(text: str) -> Iterator[str]:
    """The lines of a text as ``plain_text`` leaves them, none longer than a screen or two."""
    return (_clipped(plain_text(line)) for line in text.split("\n"))


def plain_text(line: str) -> str:
    """A line as a terminal would leave it, without colours: what a carriage return overwrites is left out."""
    line = _ESCAPE_SEQUENCE.sub("", line).rstrip("\r")
    return _CONTROL_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", line.rpartition("\r")[2])


def _clipped(line: str) -> str:
    if len(line) <= _LINE_CHARACTERS:
        return line
    return f"{line[:_LINE_CHARACTERS]} … and {len(line) - _LINE_CHARACTERS:,} more characters"

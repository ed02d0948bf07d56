"""What is known about a run, from the events of its ranks. Pure: no input or output, no widgets, no clock.

``RunState.apply`` takes events in the order in which they come. What it holds is bounded, however long the run is and
however much it says. Times are the seconds of ``time.monotonic()`` that events carry; functions that depend on the
present take it as ``now_s``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable
from typing import Literal

from kernel_ext.history import Curves
from kernel_ext.output_log import OutputLog
from notebook_accel import events
from notebook_accel.errors import signal_name
from notebook_accel.plain_text import clipped, line_prefix, plain_lines, plain_text

__all__ = ["RankState", "RunState"]

StateWord = Literal["starting", "running", "finished", "failed", "stopped", "killed"]

_RATE_WINDOW_S = 5.0
_RATE_STALE_S = 1.0
_COMPILING = "compiling: steps are counted, and timed from when it is done"
_STALLED_S = 5.0
_STALLED_STEPS = 10  # so many times the usual step
_MOST_METRICS = 32
_MOST_RESTARTS = 3
# How far a rank has to be behind the others to be called so: ranks say where they are five times a second, each at its
# own time, and so seem apart even where they wait for each other.
_BEHIND_STEPS = 3
_BEHIND_S = 1.0
_BEHIND_SHARE = 0.02


@dataclasses.dataclass
class RankState:
    """What is known about one rank.

    Attributes:
        rank: Its number here, from 0.
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
        utilisation: Per cent of the last second in which its device computed, ``None`` if that isn't known.
        last_line: The last line that it wrote.
        note: Why it failed or ended early, in one line; else empty.
        silent: What was found out when it had done no step for long; ``None`` again after its next one.
        last_event_s: When it last gave a sign of life.
        starts: How often a process of it has started.
        node: Which of the run's nodes it is on, from 0.
        first: The number among all of the first rank here, which isn't 0 where there are several nodes.
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
    utilisation: float | None = None
    last_line: str = ""
    note: str = ""
    silent: events.Silent | None = None
    last_event_s: float | None = None
    starts: int = 0
    node: int = 0
    first: int = 0
    _samples: collections.deque[tuple[float, int]] = dataclasses.field(default_factory=collections.deque)
    _stepped_s: float | None = None

    @property
    def number(self) -> int:
        """Its number among all."""
        return self.first + self.rank

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come from it."""
        return self.state not in ("starting", "running")

    @property
    def steps(self) -> int | None:
        """Steps done over all epochs and loaders, ``None`` before anything was counted."""
        return self._samples[-1][1] if self._samples else None

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

    def is_stalled(self, now_s: float) -> bool:
        """Whether it has begun to count and has now done no step for long, by its own measure."""
        if self.has_ended or not self._samples or self._stepped_s is None:
            return False
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        usual_s = (last_s - first_s) / (last - first) if last > first else 0.0
        return self.silent is not None or now_s - self._stepped_s > max(_STALLED_S, _STALLED_STEPS * usual_s)

    def left_s(self, now_s: float) -> float | None:
        """Seconds until its last step at the present rate, ``None`` if that can't be known.

        Where the number of epochs isn't known, this is the time to the end of the running one. What isn't getting on
        has no rate to guess from.
        """
        rate = None if self.is_stalled(now_s) else self.steps_per_s(now_s)
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
            self.node = event.node
            self.state, self.note = "running", ""  # also where an earlier process of this rank has died
            self.starts += 1
        else:
            if self.state == "starting":
                self.state = "running"
            self._take_report(event)
        if self.has_ended:
            self.silent, self.note = None, self.note.replace(_COMPILING, "")

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
            self.utilisation = event.utilisation

    def _count(self, event: events.Progress) -> None:
        if not self._samples or event.steps != self._samples[-1][1]:
            self.silent = None
            self._stepped_s = event.time_s
        # Another loader or bar has counts of its own. Labels are no sign of it: many change with every step.
        if self._samples and (event.total != self.total or event.steps < self._samples[-1][1]):
            self._samples.clear()
        if event.compiling:  # which takes long, and says nothing of the steps that follow
            self._samples.clear()
        elif not self._samples or event.time_s > self._samples[-1][0]:
            self._samples.append((event.time_s, event.steps))
        while len(self._samples) > 2 and self._samples[1][0] <= event.time_s - _RATE_WINDOW_S:
            self._samples.popleft()
        # A bar over the epochs that has closed after the last one doesn't make their number unknown.
        epochs = event.epochs or (self.epochs if event.epoch == self.epoch else None)
        self.step, self.total = event.step, event.total
        self.epoch, self.epochs = event.epoch, epochs
        self.label, self.device = clipped(event.label), event.device or self.device
        self.note = _COMPILING if event.compiling else self.note.replace(_COMPILING, "")

    def _fail(self, event: events.Failed) -> None:
        where = f" ({event.line})" if event.line else ""
        if event.lost_peer or event.kind == "KeyboardInterrupt":
            # It was not this rank's fault, so it isn't the one to look at.
            self.state = "stopped"
            self.note = ("another rank has gone" if event.lost_peer else "interrupted") + where
            return
        self.state = "failed"
        message = plain_text(event.message.strip().split("\n", 1)[0])
        self.note = clipped(f"{event.kind}: {message}" if message else event.kind) + where

    def _end(self, event: events.Ended) -> None:
        if self.has_ended:
            return
        if event.stopped:
            self.state = "stopped"
        elif event.signal is not None:
            self.state, self.note = "killed", f"killed by {signal_name(event.signal)}"
        else:
            self.state, self.note = "failed", f"exited with status {event.exit_code} before its end"


class RunState:
    """What is known about a run.

    Args:
        world_size: Number of ranks.
        prefix: Gives what stands before a line of these ranks. Default: their numbers.

    Attributes:
        ranks: One state a rank.
        output: What all ranks wrote.
        history: The curves of each metric over steps, or over reports as long as no rank counts steps.
        nodes: How the other nodes stand, a line for each, or whom this one waits for.
        restarts_why: Of the last times that all ranks were started again, which time it was and why, in a line each.
    """

    def __init__(self, world_size: int, prefix: Callable[[Iterable[int]], str] | None = None) -> None:
        self.prefix = prefix or functools.partial(line_prefix, total=world_size)
        self.ranks = [RankState(rank) for rank in range(world_size)]
        self.output = OutputLog(world_size)
        self.history: dict[str, Curves] = {}
        self._restarts = 0
        self.nodes: list[str] = []
        self.restarts_why = collections.deque[str](maxlen=_MOST_RESTARTS)

    @property
    def metric_names(self) -> list[str]:
        """The reported metrics; losses first, else in the order in which they came."""
        names = dict.fromkeys(name for rank in self.ranks for name in rank.metrics)
        return sorted(names, key=lambda name: "loss" not in name.lower())

    def number_from(self, first: int) -> None:
        """The first rank here has this number among all."""
        for rank in self.ranks:
            rank.first = first

    def apply(self, rank: int, event: events.Event) -> None:
        """Takes in one event of one rank."""
        if isinstance(event, events.Restarting):
            self._start_over(event)
            return
        if isinstance(event, events.Nodes):
            self.nodes = [clipped(plain_text(line)) for line in event.lines]
            return
        self.ranks[rank].apply(event)
        if isinstance(event, events.Output):
            if event.left_out:
                self.output.pass_over(rank, event.left_out)
            texts = list(plain_lines(event.text))
            self.output.add(rank, texts, event.time_s)
            self.ranks[rank].last_line = next(filter(None, reversed(texts)), self.ranks[rank].last_line)
        elif isinstance(event, events.Metrics):
            for name in event.values.keys() & self.ranks[rank].metrics.keys():
                self._extend_history(name, rank, event.step)

    def _start_over(self, event: events.Restarting) -> None:
        self.restarts_why.append(clipped(event.in_words))
        self._restarts = event.number or self._restarts
        self.ranks = [RankState(rank.rank, first=rank.first) for rank in self.ranks]

    def close(self) -> None:
        """The run is over: a rank whose end nobody could report is a stopped one."""
        for rank in self.ranks:
            if not rank.has_ended:
                rank.state = "stopped"

    @property
    def restarts(self) -> int:
        """How often all ranks were started anew, and then that of them which was started most often."""
        return self._restarts + max(0, *(rank.starts - 1 for rank in self.ranks))

    def left_s(self, now_s: float) -> float | None:
        """Seconds until the slowest rank's last step, ``None`` if that can't be known: no run ends before all ranks."""
        if any(rank.is_stalled(now_s) for rank in self.ranks):
            return None
        return max((left for rank in self.ranks if (left := rank.left_s(now_s)) is not None), default=None)

    def behind(self, now_s: float) -> dict[int, int]:
        """The ranks that are behind the others, and by how many steps."""
        counting = {rank.rank: rank.steps for rank in self.ranks if not rank.has_ended and rank.steps is not None}
        if len(counting) < 2:
            return {}
        middle = statistics.median_high(counting.values())
        rates = [rate for rank in counting if (rate := self.ranks[rank].steps_per_s(now_s)) is not None]
        apart = max(_BEHIND_STEPS, _BEHIND_SHARE * middle, _BEHIND_S * statistics.median_high(rates) if rates else 0.0)
        return {rank: middle - steps for rank, steps in counting.items() if middle - steps >= apart}

    def _extend_history(self, name: str, rank: int, step: int) -> None:
        unit: Literal["steps", "reports"] = (
            "steps" if any(other.step is not None for other in self.ranks) else "reports"
        )
        curves = self.history.get(name)
        if curves is None and len(self.history) >= _MOST_METRICS:
            return
        # A curve over reports that came before the first step can't go on over steps.
        if curves is None or (curves.unit, unit) == ("reports", "steps"):
            latest = {number: other.metrics[name] for number, other in enumerate(self.ranks) if name in other.metrics}
            curves = self.history[name] = Curves(len(self.ranks), unit, latest)
        curves.add(rank, step, self.ranks[rank].metrics[name])

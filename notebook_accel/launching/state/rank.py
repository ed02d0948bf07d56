"""The state of one rank, reduced from its events.

Every view uses the words of ``StateWord``. docs/panel.md has a table of their meanings and colours.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Literal

from notebook_accel.errors import signal_name
from notebook_accel.formatting import clipped, plain_lines, plain_text
from notebook_accel.launching.state.step_times import StepHistory
from notebook_accel.protocol import events

StateWord = Literal[
    "starting", "running", "waiting", "silent", "finished", "failed", "killed", "stopped", "detached", "lost"
]

CRASH = "Fatal Python error: "
"""The beginning of a report of Python's fault handler."""

_RATE_WINDOW_S = 5.0
_RATE_STALE_S = 1.0
_STALLED_S = 10.0
_STALLED_STEPS = 10  # a multiple of the usual duration of a step
_REMEMBERED_STEPS = 20
_LAST_LINES = 10
_MOST_CRASH_CHARACTERS = 50_000
_COMPILING = "compiling: steps are counted now, and timed once it is done"


@dataclasses.dataclass
class LastSteps:
    """The times of a rank's last steps, for its rate and for noticing that it has stalled.

    Times are seconds of ``time.monotonic()``.
    """

    stepped_s: float | None = None  # time of the last step
    _count: int = 0
    _samples: collections.deque[tuple[float, int]] = dataclasses.field(default_factory=collections.deque)
    _step_times_s: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_REMEMBERED_STEPS)
    )

    def add(self, event: events.Progress, *, is_another_loop: bool) -> None:
        """Add a count. With ``is_another_loop`` it comes from another loop or bar, which has a rate of its own."""
        if self.stepped_s is None or event.steps != self._count:
            if self.stepped_s is not None and event.steps > self._count:
                self._step_times_s.append((event.time_s - self.stepped_s) / (event.steps - self._count))
            self._count, self.stepped_s = event.steps, event.time_s
        if is_another_loop or event.compiling:  # the duration of a compilation says nothing about later steps
            self._samples.clear()
        if not event.compiling and (not self._samples or event.time_s > self._samples[-1][0]):
            self._samples.append((event.time_s, event.steps))
        while len(self._samples) > 2 and self._samples[1][0] <= event.time_s - _RATE_WINDOW_S:
            self._samples.popleft()

    def since(self, began_s: float) -> LastSteps:
        """Return a copy, which later events don't change, without the counts from before ``began_s``."""
        samples = collections.deque(sample for sample in self._samples if sample[0] >= began_s)
        return dataclasses.replace(self, _samples=samples, _step_times_s=self._step_times_s.copy())

    def per_s(self, now_s: float | None) -> float | None:
        """Return the steps a second over the last few seconds, ``None`` until two counts are known.

        Args:
            now_s: The present; ``None`` for a rank that has ended or is idle, to take its last seconds of counting.
        """
        if len(self._samples) < 2:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        # A rank that does no step reports none, so after a while the time since its last report counts too.
        if now_s is not None and now_s - last_s > _RATE_STALE_S:
            last_s = now_s
        return (last - first) / (last_s - first_s)

    def is_stalled(self, now_s: float, since_s: float = 0.0, shortest_s: float = _STALLED_S) -> bool:
        """Return whether no step was done since ``since_s`` for at least ``shortest_s`` and many usual steps."""
        usual_s = sorted(self._step_times_s)[len(self._step_times_s) // 2] if self._step_times_s else 0.0
        return now_s - max(since_s, self.stepped_s or 0.0) > max(shortest_s, _STALLED_STEPS * usual_s)


@dataclasses.dataclass
class RankState:
    """The state of one rank.

    Attributes:
        rank: Its number on this node, from 0. ``number`` is the one among all ranks.
        state: The state of its process; ``word`` adds ``waiting`` and ``silent``.
        pid: The id of its process, ``None`` before it has started.
        step: Steps done in the running epoch, ``None`` before anything was counted.
        total: Steps of the epoch, ``None`` if not known.
        epoch: The running epoch from 1, ``None`` if not known.
        epochs: Total number of epochs, ``None`` if not known.
        steps: Steps done over all epochs and loaders, ``None`` before anything was counted.
        label: The name of the counted items.
        device: The device that it computes on, such as ``cuda:0``; empty if not known.
        is_compiling: Whether the device's compiler works on the running step.
        metrics: The latest value of each metric.
        reported_s: The time of each metric's latest report, as ``last_event_s``.
        memory: The memory that it last reported, ``None`` before.
        model_memory: The memory that its models last took, ``None`` before.
        last_line: The last non-empty line of its output.
        last_lines: The last few lines of its output, up to a crash of native code.
        crash: The report of Python's fault handler after a crash of native code; else empty.
        reason: The reason of a failure or an early end, in one line; else empty.
        is_idle: Whether it waits for the next cell of its session.
        silent: The event that reports a long time without a step; ``None`` again after the next step.
        last_event_s: Time of the last event, in seconds of ``time.monotonic()``.
        starts: Number of its processes so far.
        node: The number of its node, from 0.
        first: The number of this node's first rank among all.
        has_result: Whether the user's code has returned and its result was sent.
        time_limit: The time limit before which it was told to stop, in seconds since the epoch; ``None`` before that.
        failed: The exception of the user's code.
        ended: The end of its process.
        step_history: The times of its steps by phase.
        cell: The request that a detached session's rank works on, such as ``In[7]``; empty while it waits.
        cell_since_s: The time at which ``cell`` last changed, ``None`` for the rank of another run.
    """

    rank: int
    first: int = 0
    state: StateWord = "starting"
    pid: int | None = None
    step: int | None = None
    total: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    steps: int | None = None
    label: str = ""
    device: str = ""
    is_compiling: bool = False
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    reported_s: dict[str, float] = dataclasses.field(default_factory=dict)
    memory: events.Memory | None = None
    model_memory: events.ModelMemory | None = None
    last_line: str = ""
    last_lines: collections.deque[str] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_LAST_LINES)
    )
    crash: str = ""
    reason: str = ""
    is_idle: bool = False
    silent: events.Silent | None = None
    last_event_s: float | None = None
    starts: int = 0
    node: int = 0
    has_result: bool = False
    time_limit: float | None = None
    failed: events.Failed | None = None
    ended: events.Ended | None = None
    last_steps: LastSteps = dataclasses.field(default_factory=LastSteps)
    step_history: StepHistory = dataclasses.field(default_factory=StepHistory)
    cell: str = ""
    cell_since_s: float | None = None

    @property
    def number(self) -> int:
        """The rank's number among all ranks of the run."""
        return self.first + self.rank

    @property
    def word(self) -> StateWord:
        """The rank's state in one word; see the table of states."""
        if self.silent is None:
            return self.state
        return "waiting" if self.silent.waits_in else "silent"

    @property
    def note(self) -> str:
        """A remark in one line on why the rank ended, or that it compiles; else empty."""
        return self.reason or (_COMPILING if self.is_compiling and not self.has_ended else "")

    @property
    def is_evaluating(self) -> bool:
        """True if the counted loop is an evaluation."""
        return self.label == events.EVALUATION

    @property
    def has_ended(self) -> bool:
        """True if the rank will send no more events."""
        return self.state not in ("starting", "running")

    @property
    def is_dead(self) -> bool:
        """True if its process is gone without a result."""
        return self.ended is not None and not self.has_result

    @property
    def memory_used_bytes(self) -> int | None:
        """Memory in use, on the rank's device if it has one; ``None`` before it was measured."""
        return None if self.memory is None else self.memory.used_bytes

    @property
    def memory_total_bytes(self) -> int:
        """Total memory of the device, or of the host; 0 before it was measured."""
        return 0 if self.memory is None else self.memory.total_bytes

    @property
    def utilisation(self) -> float | None:
        """Percentage of the last second in which the device computed, ``None`` if not known."""
        return None if self.memory is None else self.memory.utilisation

    def steps_per_s(self, now_s: float) -> float | None:
        """Return the steps a second over the last seconds of counting, ``None`` until two counts are known."""
        return self.last_steps.per_s(None if self.has_ended or self.is_idle else now_s)

    def is_stalled(self, now_s: float) -> bool:
        """Return whether the rank has begun to count and has now done no step for long."""
        if self.has_ended or self.steps is None:
            return False
        return self.silent is not None or self.last_steps.is_stalled(now_s)

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds until its last step at the present rate, ``None`` if that can't be known.

        Where the number of epochs isn't known, this is the time to the end of the running one.
        """
        rate = None if self.is_stalled(now_s) else self.steps_per_s(now_s)
        if self.has_ended or not rate or self.step is None or self.total is None:
            return None
        steps = self.total - self.step
        if self.epoch is not None and self.epochs is not None:
            steps += (self.epochs - self.epoch) * self.total
        return max(steps, 0) / rate

    def copy(self) -> RankState:
        """Return a copy that later events don't change."""
        return dataclasses.replace(
            self,
            metrics=dict(self.metrics),
            reported_s=dict(self.reported_s),
            last_lines=self.last_lines.copy(),
            last_steps=self.last_steps.since(float("-inf")),
            step_history=self.step_history.copy(),
        )

    def since(self, before: RankState, began_s: float) -> RankState:
        """Return this rank's counts and metrics since an earlier copy, made at ``began_s``, as for a session's cell."""
        metrics = {name: value for name, value in self.metrics.items() if self.reported_s[name] >= began_s}
        stepped_s = self.last_steps.stepped_s
        # An earlier step may have been reported late.
        if self.steps is None or self.steps == before.steps or stepped_s is None or stepped_s <= began_s:
            return RankState(self.rank, self.first, metrics=metrics)
        return dataclasses.replace(
            self,
            metrics=metrics,
            memory=None,
            last_steps=self.last_steps.since(began_s),
            step_history=StepHistory(),
        )

    def apply(self, event: events.Event) -> None:
        """Update the state from one event of this rank."""
        if isinstance(event, events.Silent):  # the kernel, not the rank, has found this
            self.silent = None if self.has_ended else event
            return
        if isinstance(event, events.Respawning):
            self.state, self.failed, self.ended, self.reason, self.silent = "starting", None, None, "", None
            return
        self.last_event_s = event.time_s
        if isinstance(event, events.Started):
            self._start(event)
        elif isinstance(event, events.Finished):
            self.state, self.has_result = "finished", True
        elif isinstance(event, events.Failed):
            self._fail(event)
        elif isinstance(event, events.Ended):
            self._end(event)
        else:
            if self.state == "starting":
                self.state = "running"
            self._take_report(event)
        if self.has_ended:
            self.silent = None

    def _start(self, event: events.Started) -> None:
        """Mark the rank as running, and reset the values of its earlier process."""
        self.state, self.pid, self.node, self.reason = "running", event.pid, event.node, ""
        self.failed, self.ended, self.crash, self.time_limit = None, None, "", None
        self.cell, self.cell_since_s = "", None
        self.starts += 1

    def _take_report(self, event: events.Event) -> None:
        if isinstance(event, events.Progress):
            self._count(event)
        elif isinstance(event, events.StepTimes):
            self.step_history.add(event)
        elif isinstance(event, events.Metrics):
            for name, value in event.values.items():
                if name not in self.metrics and len(self.metrics) == events.MOST_METRICS:
                    # One of a session's earlier cell.
                    oldest = min(self.metrics, key=lambda known: (known in event.values, self.reported_s[known]))
                    del self.metrics[oldest], self.reported_s[oldest]
                self.metrics[name], self.reported_s[name] = value, event.time_s
        elif isinstance(event, events.Memory):
            self.memory = event
        elif isinstance(event, events.ModelMemory):
            self.model_memory = event
        elif isinstance(event, events.Output):
            self._take_output(event.text)
        elif isinstance(event, events.TimeLimitReached):
            self.time_limit = event.limit
        elif isinstance(event, events.Serving):
            self.cell, self.cell_since_s = clipped(plain_text(event.cell)), event.time_s

    def _take_output(self, text: str) -> None:
        before_crash = "" if self.crash else text.partition(CRASH)[0]
        if self.crash or CRASH in text:
            self.crash = f"{self.crash}{text}\n"[-_MOST_CRASH_CHARACTERS:]
        if before_crash:
            self.last_lines.extend(list(plain_lines(before_crash.removesuffix("\n")))[-_LAST_LINES:])
        self.last_line = next(filter(None, reversed(list(plain_lines(text)))), self.last_line)

    def _count(self, event: events.Progress) -> None:
        if event.steps != self.steps:
            self.silent = None
        # Another loader or bar has counts of its own. A new label doesn't show it: many change with every step.
        is_another_loop = self.steps is not None and (event.total != self.total or event.steps < self.steps)
        self.last_steps.add(event, is_another_loop=is_another_loop)
        # The number of epochs stays known after the bar over them has closed.
        epochs = event.epochs or (self.epochs if event.epoch == self.epoch else None)
        self.step, self.total, self.steps = event.step, event.total, event.steps
        self.epoch, self.epochs = event.epoch, epochs
        self.label, self.device = clipped(event.label), event.device or self.device
        self.is_compiling = event.compiling

    def _fail(self, event: events.Failed) -> None:
        self.failed = event
        where = f" ({event.line})" if event.line else ""
        if event.lost_peer or event.kind == "KeyboardInterrupt":
            self.state = "stopped"
            self.reason = ("another rank has gone" if event.lost_peer else "interrupted") + where
            return
        self.state, self.reason = "failed", event.in_words + where

    def _end(self, event: events.Ended) -> None:
        self.ended = event
        if self.has_ended:
            return
        if event.stopped:
            self.state = "stopped"
        elif event.signal is not None:
            self.state, self.reason = "killed", f"killed by {signal_name(event.signal)}"
        else:
            self.state, self.reason = "failed", f"exited with status {event.exit_code} before its end"


def metric_names(ranks: Iterable[RankState]) -> list[str]:
    """Return the names of the metrics that ranks have reported, losses first, then in the order of arrival."""
    names = dict.fromkeys(name for rank in ranks for name in rank.metrics)
    return sorted(names, key=lambda name: "loss" not in name.lower())

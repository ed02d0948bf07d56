"""The times of a rank's steps: sums over the last steps and over the whole run, and running sums over time."""

from __future__ import annotations

import collections
import dataclasses

import msgspec

from notebook_accel.launching.state.curves import Series
from notebook_accel.protocol import events

_RECENT_STEPS = 50
_RECENT_S = 10.0
_MOST_EVENTS = 100
_MOST_LINES = 100
_MOST_POINTS = 64
_GAP_MS = 2000

Sums = tuple[float, ...]
"""Number of steps so far, and the seconds so far of each phase in ``events.PHASES``."""
Line = tuple[str, str, str, str]
"""Phase, activity, place and text, as in ``events.SampledLine``."""


@dataclasses.dataclass
class StepTimes:
    """Sums over some training steps of one rank.

    Attributes:
        seconds: The time of each phase.
        collecting_s: Time of Python's garbage collections.
        compilations: Number of graphs that ``torch.compile`` has compiled.
        smallest_batch: Fewest elements of a batch, 0 if unknown.
        largest_batch: Most elements of a batch.
        samples: Number of samples of the main thread.
        lines: Number of samples of each line.
        last: The latest event, for values that can't be added.
    """

    steps: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(events.PHASES, 0.0))
    evaluations: int = 0
    collecting_s: float = 0.0
    compilations: int = 0
    smallest_batch: int = 0
    largest_batch: int = 0
    samples: int = 0
    lines: collections.Counter[Line] = dataclasses.field(default_factory=collections.Counter)
    last: events.StepTimes | None = None

    @property
    def wall_s(self) -> float:
        """The wall time of the steps."""
        return sum(self.seconds.values())

    @property
    def step_s(self) -> float:
        """The mean time of a step, 0 without one."""
        return self.wall_s / self.steps if self.steps else 0.0

    def per_step_s(self, phase: str) -> float:
        """Return the mean time of a phase in a step."""
        return self.seconds.get(phase, 0.0) / self.steps if self.steps else 0.0

    def share(self, phase: str) -> float:
        """Return a phase's share of the wall time, from 0 to 1."""
        wall_s = self.wall_s
        return self.seconds.get(phase, 0.0) / wall_s if wall_s else 0.0

    def add(self, event: events.StepTimes) -> None:
        """Add the steps of an event."""
        self.steps += event.steps
        self.evaluations += event.evaluations
        self.collecting_s += event.collecting_s
        self.compilations += event.compilations
        self.samples += event.samples
        for phase, seconds in event.seconds.items():
            if phase in self.seconds:
                self.seconds[phase] += seconds
        for line in event.lines:
            key = (line.phase, line.activity, line.place, line.text)
            if key in self.lines or len(self.lines) < _MOST_LINES:
                self.lines[key] += line.samples
        if event.smallest_batch:
            self.smallest_batch = min(self.smallest_batch or event.smallest_batch, event.smallest_batch)
            self.largest_batch = max(self.largest_batch, event.largest_batch)
        self.last = event

    def to_event(self) -> events.StepTimes | None:
        """Return one event that has these sums; ``None`` without a step."""
        if self.last is None:
            return None
        return msgspec.structs.replace(
            self.last,
            steps=self.steps,
            seconds=self.seconds,
            evaluations=self.evaluations,
            collecting_s=self.collecting_s,
            compilations=self.compilations,
            smallest_batch=self.smallest_batch,
            largest_batch=self.largest_batch,
            samples=self.samples,
            lines=[events.SampledLine(*line, samples) for line, samples in self.lines.items()],
        )

    def copy(self) -> StepTimes:
        """Return a copy that later events don't change."""
        return dataclasses.replace(self, seconds=dict(self.seconds), lines=collections.Counter(self.lines))


@dataclasses.dataclass
class StepHistory:
    """The times of one rank's steps.

    Attributes:
        total: Sums over the whole run.
        sums: Running sums over the whole run, by the milliseconds of the events' clock. The difference between any two
            points is exact, also where points between them were left out.
    """

    total: StepTimes = dataclasses.field(default_factory=StepTimes)
    sums: Series[Sums] = dataclasses.field(default_factory=lambda: Series(_MOST_POINTS))
    _kept: collections.deque[events.StepTimes] = dataclasses.field(default_factory=collections.deque)
    _counted_ms: int = 0  # the last point's time

    @property
    def recent(self) -> StepTimes:
        """Sums over the last steps: at least 50 of them and ten seconds, or as many as there were."""
        times = StepTimes()
        for event in self._kept:
            times.add(event)
        return times

    def add(self, event: events.StepTimes) -> None:
        """Add the steps of an event."""
        end_ms = max(int(event.time_s * 1000), self._counted_ms)
        begin_ms = end_ms - int(sum(event.seconds.values()) * 1000)
        # The first event isn't recent: compilation, first allocations and the start of workers say little about later
        # steps.
        if self.total.last is not None:
            self._keep(event)
            if begin_ms > self._counted_ms + _GAP_MS:  # no step was done meanwhile
                self.sums.add(begin_ms, self._sums())
        self.total.add(event)
        self.sums.add(end_ms, self._sums())
        self._counted_ms = end_ms

    def _sums(self) -> Sums:
        return (self.total.steps, *(self.total.seconds[phase] for phase in events.PHASES))

    def _keep(self, event: events.StepTimes) -> None:
        self._kept.append(event)
        steps = sum(kept.steps for kept in self._kept)
        wall_s = sum(sum(kept.seconds.values()) for kept in self._kept)
        while len(self._kept) > 1:
            steps -= self._kept[0].steps
            wall_s -= sum(self._kept[0].seconds.values())
            if (steps < _RECENT_STEPS or wall_s < _RECENT_S) and len(self._kept) <= _MOST_EVENTS:
                break
            self._kept.popleft()

    def to_events(self) -> list[events.StepTimes]:
        """Return events that recreate this history, one for each point. The last one has all lines."""
        whole = self.total.to_event()
        if whole is None:
            return []
        found: list[events.StepTimes] = []
        before: Sums = (0,) * (1 + len(events.PHASES))
        for time_ms, sums in self.sums.points:
            steps, *seconds = (now - earlier for earlier, now in zip(before, sums, strict=True))
            if steps or not found:
                parts = {"steps": int(steps), "seconds": dict(zip(events.PHASES, seconds, strict=True))}
                found.append(msgspec.structs.replace(whole, time_s=time_ms / 1000, samples=0, lines=[], **parts))
                before = sums
        # Only the first event, which isn't recent, has these counts: they are of the whole run, not of few steps.
        rest = {"evaluations": 0, "collecting_s": 0.0, "compilations": 0}
        found[1:] = [msgspec.structs.replace(event, **rest) for event in found[1:]]
        found[-1] = msgspec.structs.replace(found[-1], samples=whole.samples, lines=whole.lines)
        return found

    def copy(self) -> StepHistory:
        """Return a copy that later events don't change."""
        return StepHistory(self.total.copy(), self.sums.copy(), self._kept.copy(), self._counted_ms)

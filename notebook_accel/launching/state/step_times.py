"""The times of a rank's steps: sums over the last steps and over the whole run, and running sums over time."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import msgspec

from notebook_accel.launching.state.curves import Series
from notebook_accel.protocol import events

_RECENT_STEPS = 50
_RECENT_S = 10.0
_MOST_EVENTS = 100
_MOST_POINTS = 64
_GAP_MS = 2000

Sums = tuple[float, ...]
"""Number of steps so far, and the seconds so far of each phase in ``events.PHASES``."""


@dataclasses.dataclass
class StepHistory:
    """The times of one rank's steps.

    Attributes:
        total: The steps of the whole run as one event, ``None`` before the first.
        sums: Running sums over the whole run, by the milliseconds of the events' clock. The difference between any two
            points is exact, also where points between them were left out.
    """

    total: events.StepTimes | None = None
    sums: Series[Sums] = dataclasses.field(default_factory=lambda: Series(_MOST_POINTS))
    _kept: collections.deque[events.StepTimes] = dataclasses.field(default_factory=collections.deque)
    _counted_ms: int = 0  # the last point's time

    @property
    def recent(self) -> events.StepTimes | None:
        """The last steps as one event: at least 50 of them and ten seconds, or as many as there were."""
        return _merged(self._kept)

    @property
    def without_longest(self) -> events.StepTimes | None:
        """The last steps without their longest event and the one before it, in which a long pause may have begun."""
        if not self._kept:
            return None
        walls_s = [sum(event.seconds.values()) for event in self._kept]
        longest = walls_s.index(max(walls_s))
        return _merged(event for number, event in enumerate(self._kept) if number not in (longest - 1, longest))

    @property
    def halves(self) -> tuple[events.StepTimes, events.StepTimes] | None:
        """The earlier and the later half of the last steps, ``None`` if they are one event."""
        kept = list(self._kept)
        earlier, later = _merged(kept[: len(kept) // 2]), _merged(kept[len(kept) // 2 :])
        return None if earlier is None or later is None else (earlier, later)

    def add(self, event: events.StepTimes) -> None:
        """Add the steps of an event."""
        end_ms = max(int(event.time_s * 1000), self._counted_ms)
        begin_ms = end_ms - int(sum(event.seconds.values()) * 1000)
        before = self.total
        if before is None:
            self.total = event
        else:
            # The first step isn't recent, however many seconds it takes: compilation, first allocations and the start
            # of workers say little about later steps.
            if before.steps > 1:
                self._keep(event)
            if begin_ms > self._counted_ms + _GAP_MS:  # no step was done meanwhile
                self.sums.add(begin_ms, _sums(before))
            self.total = before.followed_by(event)
        self.sums.add(end_ms, _sums(self.total))
        self._counted_ms = end_ms

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
        whole = self.total
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
        rest = dict.fromkeys(events.SUMMED, 0)
        found[1:] = [msgspec.structs.replace(event, **rest) for event in found[1:]]
        found[-1] = msgspec.structs.replace(found[-1], samples=whole.samples, lines=whole.lines)
        return found

    def copy(self) -> StepHistory:
        """Return a copy that later events don't change."""
        return StepHistory(self.total, self.sums.copy(), self._kept.copy(), self._counted_ms)


def _merged(times: Iterable[events.StepTimes]) -> events.StepTimes | None:
    parts = list(times)
    return parts[0].followed_by(*parts[1:]) if parts else None


def _sums(times: events.StepTimes) -> Sums:
    return (times.steps, *(times.seconds.get(phase, 0.0) for phase in events.PHASES))

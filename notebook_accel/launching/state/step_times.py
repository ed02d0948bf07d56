"""The times of steps: a rank's sums over its last steps and its whole run, and the ranks' phases side by side."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

from notebook_accel.launching.state.curves import Series
from notebook_accel.protocol import events
from notebook_accel.protocol.events import PHASES, WAITING

_RECENT_STEPS = 50
_RECENT_S = 10.0
_MOST_EVENTS = 100
_MOST_POINTS = 64
_GAP_MS = 2000

Sums = tuple[float, ...]
"""Number of steps so far, and the seconds so far of each phase in ``PHASES``."""


@dataclasses.dataclass
class StepHistory:
    """The times of one rank's steps."""

    total: events.StepTimes | None = None  # the steps of the whole run as one event
    # Running sums over the whole run, by the milliseconds of the events' clock. The difference between any two points
    # is exact, also where points between them were left out.
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

    def copy(self) -> StepHistory:
        """Return a copy that later events don't change."""
        return StepHistory(self.total, self.sums.copy(), self._kept.copy(), self._counted_ms)


def _merged(times: Iterable[events.StepTimes]) -> events.StepTimes | None:
    parts = list(times)
    return parts[0].followed_by(*parts[1:]) if parts else None


def _sums(times: events.StepTimes) -> Sums:
    return (times.steps, *(times.seconds.get(phase, 0.0) for phase in PHASES))


# The ranks side by side -----------------------------------------------------------------------------------------------

Phases = Mapping[str, float]
"""The seconds of a step by phase."""

_FEW_RANKS = 4
_MOST_MOMENTS = 40
_FEWEST_MOMENTS = 3
_SHORTEST_MS = 2000  # ranks report about once a second


@dataclasses.dataclass(frozen=True)
class Moment:
    """The phases of the steps in an interval of a run."""

    begin_s: float  # since the first steps of the run were measured
    end_s: float
    mean: Phases | None  # over all ranks; ``None`` if no rank has done a step
    ranks: Mapping[int, Phases]  # of each rank that is shown by itself and has done a step


def split_waiting(steps: Mapping[int, Phases]) -> dict[int, Phases]:
    """Move waiting for a late rank out of communication: the last rank to arrive only communicates.

    A rank itself tells only how long it waits for ranks that are late in turns.

    Args:
        steps: The seconds of a step by phase in ``PHASES``, for each rank.
    """
    least_s = min((phases["communication"] for phases in steps.values()), default=0.0)
    if len(steps) == 1:  # it waits for nobody: its exchanges take unequal times
        least_s += sum(phases.get(WAITING, 0.0) for phases in steps.values())
    return {
        rank: {
            **{name: phases.get(name, 0.0) for name in PHASES},
            "communication": least_s,
            WAITING: phases.get(WAITING, 0.0) + phases["communication"] - least_s,
        }
        for rank, phases in steps.items()
    }


def mean_of(steps: Collection[Phases]) -> Phases | None:
    """Return the mean over several ranks, ``None`` if none was measured."""
    return {name: statistics.fmean(phases.get(name, 0.0) for phases in steps) for name in PHASES} if steps else None


def shown_ranks(steps: Mapping[int, Phases]) -> list[int]:
    """Return the ranks to show by themselves: all if they are few, else the last to arrive, which waits least."""
    if len(steps) <= _FEW_RANKS:
        return list(steps)
    return [min(steps, key=lambda rank: steps[rank].get(WAITING, 0.0))]


def steps_between(sums: Mapping[int, list[tuple[int, Sums]]], begin_ms: int, end_ms: int) -> dict[int, Phases]:
    """Return the phases of a step in an interval, for each rank that was measured from its begin on.

    Args:
        sums: For each rank the points of ``StepHistory.sums``.
        begin_ms: The begin of the interval, by the clock of the points.
        end_ms: Its end.
    """
    measured = {rank: points for rank, points in sums.items() if points and points[0][0] <= begin_ms}
    return _side_by_side({rank: _interpolated(points, (begin_ms, end_ms)) for rank, points in measured.items()})


def over_time(sums: Mapping[int, list[tuple[int, Sums]]], shown: Collection[int]) -> tuple[Moment, ...]:
    """Return the phases of steps over the time of a run, in equal intervals; empty for the first few seconds.

    Args:
        sums: For each rank the points of ``StepHistory.sums``.
        shown: The ranks that are shown by themselves.
    """
    known = [points for points in sums.values() if points]
    if not known:
        return ()
    begin_ms, end_ms = min(points[0][0] for points in known), max(points[-1][0] for points in known)
    count = min((end_ms - begin_ms) // _SHORTEST_MS, _MOST_MOMENTS)
    if count < _FEWEST_MOMENTS:
        return ()
    edges_ms = [begin_ms + (end_ms - begin_ms) * number / count for number in range(count + 1)]
    at_edges = {rank: _interpolated(points, edges_ms) for rank, points in sums.items() if points}
    moments = []
    for number in range(count):
        steps = _side_by_side({rank: rows[number : number + 2] for rank, rows in at_edges.items()})
        begin_s, end_s = ((edge_ms - begin_ms) / 1000 for edge_ms in edges_ms[number : number + 2])
        of_shown = {rank: steps[rank] for rank in shown if rank in steps}
        moments.append(Moment(begin_s, end_s, mean_of(steps.values()), of_shown))
    return tuple(moments)


def _side_by_side(sums: Mapping[int, Sequence[Sums]]) -> dict[int, Phases]:
    """Return the phases of a step between two sums of each rank, of the ranks that have done a step."""
    found = {rank: _of_a_step(before, after) for rank, (before, after) in sums.items()}
    return split_waiting({rank: phases for rank, phases in found.items() if phases is not None})


def _interpolated(points: list[tuple[int, Sums]], times_ms: Iterable[float]) -> list[Sums]:
    """Return a rank's sums at these times."""
    at_ms = [time_ms for time_ms, _ in points]
    found = []
    for time_ms in times_ms:
        after = bisect.bisect_right(at_ms, time_ms)
        before_ms, before = points[max(after - 1, 0)]
        after_ms, later = points[min(after, len(points) - 1)]
        share = (time_ms - before_ms) / (after_ms - before_ms) if after_ms > before_ms else 0.0
        found.append(tuple(low + share * (high - low) for low, high in zip(before, later, strict=True)))
    return found


def _of_a_step(before: Sums, after: Sums) -> Phases | None:
    """Return the mean seconds of the steps between two sums; ``None`` if there was none."""
    steps, *seconds = (late - early for early, late in zip(before, after, strict=True))
    if steps <= 0:
        return None
    return {name: phase_s / steps for name, phase_s in zip(PHASES, seconds, strict=True)}

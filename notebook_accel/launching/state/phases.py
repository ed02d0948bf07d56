"""The phases of the ranks' steps side by side, in the last steps and over the time of the run."""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Collection, Iterable, Mapping

from notebook_accel.launching.state.step_times import Sums
from notebook_accel.protocol.events import PHASES, WAITING

Phases = Mapping[str, float]
"""The seconds of a step by phase."""

_FEW_RANKS = 4
_MOST_MOMENTS = 40
_FEWEST_MOMENTS = 3
_SHORTEST_MS = 2000  # ranks report about once a second


@dataclasses.dataclass(frozen=True)
class Moment:
    """The phases of the steps in an interval of a run.

    Attributes:
        begin_s: Its start, in seconds since the first steps of the run were measured.
        end_s: Its end.
        mean: The mean over all ranks of the seconds of a step by phase; ``None`` if no rank has done a step.
        ranks: The seconds of a step by phase, for each rank that is shown by itself and has done a step.
        first_step: The number of steps that a rank had done before the interval.
    """

    begin_s: float
    end_s: float
    mean: Phases | None
    ranks: Mapping[int, Phases]
    first_step: int = 0


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
    found = {rank: _of_a_step(*_interpolated(points, (begin_ms, end_ms))) for rank, points in measured.items()}
    return split_waiting({rank: phases for rank, phases in found.items() if phases is not None})


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
        found = {rank: _of_a_step(rows[number], rows[number + 1]) for rank, rows in at_edges.items()}
        steps = split_waiting({rank: phases for rank, phases in found.items() if phases is not None})
        begin_s, end_s = ((edge_ms - begin_ms) / 1000 for edge_ms in edges_ms[number : number + 2])
        of_shown = {rank: steps[rank] for rank in shown if rank in steps}
        first_step = int(max(rows[number][0] for rows in at_edges.values()))
        moments.append(Moment(begin_s, end_s, mean_of(steps.values()), of_shown, first_step))
    return tuple(moments)


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

"""Two runs side by side: their phases, their throughput, and why more ranks aren't faster."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from notebook_accel.errors import RunError
from notebook_accel.formatting import aligned, format_count, format_milliseconds
from notebook_accel.launching.state.diagnosis import Diagnosis
from notebook_accel.launching.state.step_times import Phases, mean_of
from notebook_accel.protocol.events import PHASES, WAITING

_NEARLY = 0.9  # of the speed that so many ranks can have at best
_ALIKE = 1.05
_COMPUTING = "computing"
_LATE = "waiting for a rank that is late"
# The causes of a long step, each with its phases and advice.
_CAUSES = {
    "waiting for data": (("data",), "Loaders share the disk and the cores: try more or fewer num_workers."),
    _COMPUTING: (
        ("copy", "forward", "backward", "optimizer"),
        "On CPUs the ranks share the cores, and more ranks gain little; on GPUs a larger batch uses them better.",
    ),
    "exchanging gradients": (
        ("communication",),
        "Try a larger gradient_accumulation_steps, gradients in bf16, or a larger batch.",
    ),
    _LATE: ((WAITING,), ""),
    "evaluation": (("evaluation",), "Evaluate less often, or on all ranks with a part of the data each."),
    "code around the training": (("other",), "Do it on one rank, or less often."),
}


class Measured(Protocol):
    """A run whose steps were measured, such as a ``Job``."""

    name: str

    def diagnosis(self) -> Diagnosis:
        """Return where the time of its steps goes."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One of two runs that are compared."""

    name: str
    diagnosis: Diagnosis

    @property
    def phases(self) -> Phases:
        """The seconds of a step by phase, as the mean of the ranks."""
        return mean_of(self.diagnosis.steps.values()) or {}

    @property
    def step_s(self) -> float:
        """The mean seconds of a step."""
        return sum(self.phases.values())

    @property
    def ranks(self) -> str:
        """The number of ranks in words."""
        return format_count(self.diagnosis.world_size, "rank")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs side by side. Printed, it is text; ``to_dict`` gives plain data.

    Attributes:
        first: The first run.
        second: The second run.

    Raises:
        RunError: Too few steps of a run were measured.
    """

    first: Side
    second: Side

    def __post_init__(self) -> None:
        for side in (self.first, self.second):
            if not side.diagnosis.steps:
                raise RunError(
                    f"Too few steps of {side.name!r} were measured for a comparison.",
                    fix="let it train for some seconds and more than ten steps, without --profile off",
                )

    @property
    def has_rows(self) -> bool:
        """True if the rows of both runs' batches are known, so that throughput is rows a second, and not steps."""
        return bool(self.first.diagnosis.rows and self.second.diagnosis.rows)

    def per_s(self, side: Side) -> float:
        """Return the rows that all ranks of a run do in a second, or their steps where rows aren't known."""
        return self._work(side) * side.diagnosis.world_size / side.step_s

    def _work(self, side: Side) -> float:
        return side.diagnosis.rows if self.has_rows else 1.0

    @property
    def cause(self) -> str:
        """The cause that takes most of the extra time of the run with more ranks, or else of the slower one."""
        base, other = self._ordered
        if any(verdict.cause == "straggler" for verdict in other.diagnosis.verdicts[:1]):
            return _LATE
        return max(_CAUSES, key=lambda cause: self._seconds(other, cause) - self._seconds(base, cause, as_in=other))

    def _seconds(self, side: Side, cause: str, as_in: Side | None = None) -> float:
        """Return the seconds that a cause takes in a step, or for as many rows as a step of another run has."""
        seconds = sum(side.phases[phase] for phase in _CAUSES[cause][0])
        return seconds if as_in is None else seconds * self._work(as_in) / self._work(side)

    @property
    def _ordered(self) -> tuple[Side, Side]:
        """The run with fewer ranks, or the faster one of two with as many; and the other run."""
        sides = sorted((self.first, self.second), key=lambda side: (side.diagnosis.world_size, -self.per_s(side)))
        return sides[0], sides[1]

    @property
    def sentence(self) -> str:
        """How much faster more ranks are, or which run is faster, with the main reason."""
        base, other = self._ordered
        speed = self.per_s(other) / self.per_s(base)
        if base.diagnosis.world_size == other.diagnosis.world_size:
            if 1 / speed < _ALIKE:
                return f"{base.name!r} and {other.name!r} are about as fast."
            return f"{base.name!r} is {1 / speed:.2f} times as fast as {other.name!r}. {self._reason(base, other)}"
        most = other.diagnosis.world_size / base.diagnosis.world_size
        what = f"{other.ranks} do {speed:.2f} times the work of {base.ranks} in the same time; {most:.2f} is the most."
        return what if speed >= _NEARLY * most else f"{what} {self._reason(base, other)}"

    def _reason(self, base: Side, other: Side) -> str:
        took_s, before_s = self._seconds(other, self.cause), self._seconds(base, self.cause, as_in=other)
        work = "as many rows" if self.has_rows else "a step"
        reason = (
            f"Most of the difference is {self.cause}: {format_milliseconds(took_s)} of a step of "
            f"{format_milliseconds(other.step_s)} in {other.name!r}, where {base.name!r} needs "
            f"{format_milliseconds(before_s)} for {work}."
        )
        verdict = next((verdict.what for verdict in other.diagnosis.verdicts[:1] if self.cause == _LATE), "")
        has_more_ranks = other.diagnosis.world_size > base.diagnosis.world_size
        advice = "" if self.cause == _COMPUTING and not has_more_ranks else _CAUSES[self.cause][1]
        return " ".join(filter(None, (reason, verdict, advice)))

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data, as JSON can hold it."""
        sides = {
            name: {
                "name": side.name,
                "world_size": side.diagnosis.world_size,
                "phases": side.phases,
                "rows_per_s" if self.has_rows else "steps_per_s": self.per_s(side),
            }
            for name, side in (("first", self.first), ("second", self.second))
        }
        return {**sides, "cause": self.cause, "sentence": self.sentence}

    def __str__(self) -> str:
        sides = (self.first, self.second)
        rows = [("", *(side.name for side in sides)), ("ranks", *(f"{side.diagnosis.world_size}" for side in sides))]
        rows.append(
            ("rows a second" if self.has_rows else "steps a second", *(f"{self.per_s(side):,.1f}" for side in sides))
        )
        rows.append(("step", *(format_milliseconds(side.step_s) for side in sides)))
        for phase in PHASES:
            if any(side.phases[phase] >= 5e-5 for side in sides):
                rows.append((f"  {phase}", *(format_milliseconds(side.phases[phase]) for side in sides)))
        return "\n".join([self.sentence, *aligned(rows)])

    __repr__ = __str__


def compare(first: Measured, second: Measured) -> Comparison:
    """Compare two runs, such as one with one rank and one with two, and explain why the second isn't faster.

    Args:
        first: A job, which may have ended.
        second: Another job.

    Raises:
        RunError: Too few steps of a run were measured.
    """
    return Comparison(Side(first.name, first.diagnosis()), Side(second.name, second.diagnosis()))

"""Curves of a bounded size, however long the run is."""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

_SERIES_POINTS = 256
_POINTS_OF_ALL_RANKS = 4096
_FEWEST_POINTS = 32
_LARGEST_VALUE = 1e90  # sums and differences of such values are still finite

_Value = TypeVar("_Value")


@dataclasses.dataclass
class Series(Generic[_Value]):
    """A curve of at most ``most_points`` points, spread over its whole length, always with the last point.

    The horizontal axis has whole numbers, such as steps.
    """

    most_points: int = _SERIES_POINTS
    _kept: list[tuple[int, _Value]] = dataclasses.field(default_factory=list)
    _last: tuple[int, _Value] | None = None
    _spacing: int = 1

    @property
    def points(self) -> list[tuple[int, _Value]]:
        """The points ``(step, value)`` in the order of steps."""
        return [] if self._last is None else [*self._kept, self._last]

    @property
    def is_line(self) -> bool:
        """True once there are two points, which a line can connect."""
        return bool(self._kept)

    def add(self, step: int, value: _Value) -> None:
        """Add a point, or replace the last one if it has the same step. Ignore numbers that can't be drawn."""
        if isinstance(value, float) and not abs(value) <= _LARGEST_VALUE:  # as with NaN and infinity
            return
        if self._last is not None and step < self._last[0]:
            return
        if self._last is not None and self._last[0] < step:
            self._keep(self._last)
        self._last = (step, value)

    def copy(self) -> Series[_Value]:
        """Return a copy that later points don't change."""
        return dataclasses.replace(self, _kept=[*self._kept])

    def _keep(self, point: tuple[int, _Value]) -> None:
        if self._kept and point[0] - self._kept[-1][0] < self._spacing:
            return
        self._kept.append(point)
        if len(self._kept) >= self.most_points:
            self._kept = self._kept[::2]
            self._spacing = max(2 * self._spacing, (self._kept[-1][0] - self._kept[0][0]) // self.most_points)


class Curves:
    """One metric over steps, or over its reports where nothing counts steps (``unit``)."""

    def __init__(self, world_size: int, unit: Literal["steps", "reports"]) -> None:
        self.unit = unit
        self.ranks: dict[int, Series[float]] = {}  # the curve of each rank that has reported the metric
        self._rank_points = min(max(_POINTS_OF_ALL_RANKS // world_size, _FEWEST_POINTS), _SERIES_POINTS)
        self._reports: dict[int, int] = {}

    def add(self, rank: int, step: int, value: float) -> None:
        """Add the value that a rank has reported at its step."""
        reports = self._reports[rank] = self._reports.get(rank, 0) + 1
        series = self.ranks.setdefault(rank, Series(self._rank_points))
        series.add(step if self.unit == "steps" else reports, value)

    @property
    def mean(self) -> list[tuple[int, float]]:
        """The mean of the ranks that have reported the metric, over the steps that the curves of all of them cover.

        Each rank reports at steps of its own, so its value at another step is on the line between two of its points.
        """
        curves = [series.points for series in self.ranks.values() if series.points]
        first = max((points[0][0] for points in curves), default=0)
        last = min((points[-1][0] for points in curves), default=-1)
        if first > last:
            return []
        steps = {first, last, *(step for step, _ in max(curves, key=len) if first < step < last)}
        return [(step, statistics.fmean(_value_at(step, points) for points in curves)) for step in sorted(steps)]


def _value_at(step: int, points: Sequence[tuple[int, float]]) -> float:
    """Return a curve's value at a step that it covers."""
    index = bisect.bisect_left(points, (step,))
    right, right_value = points[index]
    if right == step:
        return right_value
    left, left_value = points[index - 1]
    return left_value + (right_value - left_value) * (step - left) / (right - left)

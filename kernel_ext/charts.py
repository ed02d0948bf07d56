"""Charts as SVG: a metric over steps, and the parts of a time, stacked, over the time of a run.

Pure functions. The texts in a chart are complete without the style sheet, as in ``render``.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from notebook_accel.formatting import format_milliseconds
from notebook_accel.launching.state.run import RunState

_WIDTH, _HEIGHT = 280, 132
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 8, 8, 20
_MOST_TITLE_CHARACTERS = 40
_MOST_LABELS = 8
_LABEL_WIDTH, _LABEL_HEIGHT = 12, 10

_Point: TypeAlias = tuple[int, float]


def chart_html(state: RunState, metric: str = "", *, of_ranks: bool = False, is_titled: bool = True) -> str:
    """Draw a metric over steps, by default the first one, a loss if there is one; nothing until one has two points.

    The mean of the ranks is drawn, and a curve for each rank behind it with ``of_ranks``, or where the mean covers less
    than half of the steps because a rank has stopped reporting.
    """
    names = state.chart_names
    if not names:
        return ""
    name = metric if metric in names else names[0]
    curves = state.history[name]
    ranks = {state.ranks[rank].number: each.points for rank, each in sorted(curves.ranks.items()) if each.is_line}
    mean, longest = curves.mean, max(ranks.values(), key=_length)
    is_mean_partial = 2 * _length(mean) < _length(longest)
    shown = ranks if of_ranks or is_mean_partial else {}
    title = html.escape(shortened(name, _MOST_TITLE_CHARACTERS))
    of_shown = "each rank, and their mean" if len(mean) > 1 else "each rank"
    of = "" if len(state.ranks) == 1 else of_shown if shown else "mean of ranks"
    (_, before), *_, (last, after) = longest if is_mean_partial else mean
    description = f"{title} over {last:,} {curves.unit}: from {before:.4g} to {after:.4g}"
    head = f'<div class="nba-chart-title"><span>{title}</span> <span>{of}</span></div>' if is_titled else ""
    return (
        f'<div class="nba-chart">{head}'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{description}">{_Drawing(mean, shown, curves.unit).svg()}</svg></div>'
    )


def _length(points: Sequence[_Point]) -> int:
    """Return the number of steps that a curve covers."""
    return points[-1][0] - points[0][0] if points else 0


class _Drawing:
    """The axes of a chart, the curve of the mean, and behind it those of ranks, with their numbers if they are few."""

    def __init__(self, mean: Sequence[_Point], ranks: Mapping[int, Sequence[_Point]], unit: str) -> None:
        self._mean = mean
        self._ranks = ranks
        self._unit = unit
        points = [point for curve in (mean, *ranks.values()) for point in curve]
        values = [value for _, value in points]
        self._marks = ticks(min(values), max(values))
        self._low, self._high = min(self._marks[0], *values), max(self._marks[-1], *values)
        self._first, self._last = min(step for step, _ in points), max(step for step, _ in points)
        self._has_labels = 0 < len(ranks) <= _MOST_LABELS
        self._right = _RIGHT + (_LABEL_WIDTH if self._has_labels else 0)

    def svg(self) -> str:
        behind = "".join(self._path(points, f"nba-rank-curve nba-c{rank % _MOST_LABELS}", f"rank {rank}")
                         for rank, points in self._ranks.items())  # fmt: skip
        mean = self._path(self._mean, "nba-curve", "mean") if self._mean else ""
        return f"{self._axes()}{behind}{mean}{self._labels()}"

    def _x(self, step: float) -> float:
        return _LEFT + (step - self._first) / (self._last - self._first) * (_WIDTH - _LEFT - self._right)

    def _y(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def _axes(self) -> str:
        grid = _grid(_LEFT, _WIDTH - self._right, [(self._y(mark), f"{mark:.6g}") for mark in self._marks])
        return (
            f'<g font-size="10.5" fill="currentColor">{grid} '
            f'<text x="{_LEFT}" y="{_HEIGHT - 5}">{self._first:,}</text> '
            f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 5}" text-anchor="end">{self._last:,} {self._unit}</text></g>'
        )

    def _path(self, points: Sequence[_Point], kind: str, title: str) -> str:
        path = "M" + "L".join(f"{self._x(step):.1f} {self._y(value):.1f}" for step, value in points)
        width = 1.6 if kind == "nba-curve" else 1
        return (
            f'<path class="{kind}" d="{path}" fill="none" stroke="currentColor" '
            f'stroke-width="{width}" stroke-linejoin="round"><title>{title}</title></path>'
        )

    def _labels(self) -> str:
        """Write the ranks' numbers at the ends of their curves, spread out where the ends are close together."""
        if not self._has_labels:
            return ""
        ends = sorted((self._y(points[-1][1]), rank) for rank, points in self._ranks.items())
        lowest = _HEIGHT - _BOTTOM - _LABEL_HEIGHT * (len(ends) - 1)
        shown, below = [], float(_TOP)
        for index, (y, rank) in enumerate(ends):
            at = min(max(y, below), lowest + _LABEL_HEIGHT * index)
            below = at + _LABEL_HEIGHT
            shown.append(
                f'<text class="nba-c{rank % _MOST_LABELS}" x="{_WIDTH - _LABEL_WIDTH}" y="{at + 3:.1f}">{rank}</text>'
            )
        return f'<g font-size="9.5" fill="currentColor">{" ".join(shown)}</g>'


def _grid(left: int, right: int, lines: Iterable[tuple[float, str]]) -> str:
    """Draw horizontal lines at these heights, each with its label on the left."""
    # Spaces between the texts: some sanitizers leave nothing of an SVG but its texts.
    return " ".join(
        f'<line class="nba-grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
        f'stroke-opacity="0.15"/><text x="{left - 6}" y="{y + 3.5:.1f}" text-anchor="end">{label}</text>'
        for y, label in lines
    )


def ticks(low: float, high: float, most_intervals: int = 4) -> list[float]:
    """Return a few round numbers that span most of ``low`` to ``high``, from 0 where the curve comes near it."""
    if low >= 0 and low < 0.4 * high:
        low = 0.0
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-90):  # a flat curve
        low, high = low - max(abs(low), 1.0) / 2, low + max(abs(low), 1.0) / 2
    rough = (high - low) / most_intervals
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10, 20) if (high - low) / (factor * unit) <= most_intervals)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Multiples of a step such as 0.1 aren't exact in binary.
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


# Times, stacked -------------------------------------------------------------------------------------------------------

_AREA_WIDTH, _AREA_HEIGHT = 200, 92
_AREA_LEFT, _AREA_RIGHT, _AREA_TOP, _AREA_BOTTOM = 48, 14, 8, 18
_MOST_TIMES = 4
_LEAST_SHARE = 0.01
_APART_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))

_Part: TypeAlias = tuple[float, float, Mapping[str, float] | None]


def stacked_html(title: str, names: Sequence[str], parts: Sequence[_Part], limit_s: float) -> str:
    """Draw the parts of a duration over the time of a run, as stacked areas of the classes ``nba-p-NAME``.

    Args:
        title: The title above it.
        names: Names of the areas, the lowest first.
        parts: The parts of the run's time: begin, end, and the seconds by name; ``None`` leaves a gap.
        limit_s: The seconds at the top. Higher areas are cut off.
    """
    end_s = parts[-1][1]
    marks = [mark for mark in ticks(0.0, limit_s) if mark <= limit_s]
    labelled = marks[:: 2 if len(marks) > 4 else 1]
    lines = [(_area_y(mark / limit_s), _milliseconds(mark) if mark else "0") for mark in labelled]
    grid = _grid(_AREA_LEFT, _AREA_WIDTH - _AREA_RIGHT, lines)
    times = " ".join(
        f'<text x="{_area_x(time_s / end_s)}" y="{_AREA_HEIGHT - 4}" text-anchor="middle">{label}</text>'
        for time_s, label in time_ticks(end_s)
    )
    latest = next((seconds for _, _, seconds in reversed(parts) if seconds), {})
    about = html.escape(f"{title}: {format_milliseconds(sum(latest.values()))} a step at the end")
    return (
        f'<figure class="nba-area"><figcaption>{html.escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {_AREA_WIDTH} {_AREA_HEIGHT}" width="{_AREA_WIDTH}" height="{_AREA_HEIGHT}" role="img" '
        f'aria-label="{about}">{_areas(names, parts, limit_s)}'
        f'<g font-size="10.5" fill="currentColor">{grid} {times}</g></svg></figure>'
    )


def time_ticks(end_s: float) -> list[tuple[float, str]]:
    """Return up to five round times from 0 to ``end_s``, each with its label: ``0``, ``5 min``, ``10 min``."""
    days = math.ceil(end_s / _MOST_TIMES / 86_400)
    apart_s = next((apart for apart in _APART_S if end_s / apart <= _MOST_TIMES), 86_400 * days)
    size_s, unit = next((size, unit) for size, unit in _UNITS if apart_s % size == 0)
    times = range(0, int(end_s) + 1, apart_s)
    return [(float(time_s), f"{time_s // size_s} {unit}" if time_s else "0") for time_s in times]


def _areas(names: Sequence[str], parts: Sequence[_Part], limit_s: float) -> str:
    """Draw an area for each name that can be seen somewhere: a rectangle for each part, on those of earlier names."""
    end_s = parts[-1][1]
    drawn = []
    for index, name in enumerate(names):
        if not any(seconds and seconds.get(name, 0.0) >= _LEAST_SHARE * limit_s for *_, seconds in parts):
            continue
        path = ""
        for begin_s, part_end_s, seconds in parts:
            if seconds:
                below_s = sum(seconds.get(other, 0.0) for other in names[:index])
                edges_s = (below_s, below_s + seconds.get(name, 0.0))
                low, high = (_area_y(min(edge_s / limit_s, 1.0)) for edge_s in edges_s)
                path += f"M{_area_x(begin_s / end_s)} {low}V{high}H{_area_x(part_end_s / end_s)}V{low}Z"
        drawn.append(
            f'<path class="nba-p-{name}" shape-rendering="crispEdges" d="{path}">'
            f"<title>{html.escape(name)}</title></path>"
        )
    return "".join(drawn)


def _area_x(share: float) -> float:
    return round(_AREA_LEFT + share * (_AREA_WIDTH - _AREA_LEFT - _AREA_RIGHT), 1)


def _area_y(share: float) -> float:
    return round(_AREA_HEIGHT - _AREA_BOTTOM - share * (_AREA_HEIGHT - _AREA_TOP - _AREA_BOTTOM), 1)


def _milliseconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"


def shortened(text: str, characters: int) -> str:
    """Cut off the end of a long text."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"

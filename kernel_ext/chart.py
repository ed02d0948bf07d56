"""A line chart of one metric as inline SVG: no script, no library, readable in a saved notebook."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from kernel_ext.run_state import RunState

__all__ = ["chart_html", "ticks"]

_WIDTH, _HEIGHT = 280, 132
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 8, 8, 20
_MOST_INTERVALS = 4


def chart_html(state: RunState) -> str:
    """The first metric, a loss if there is one, over steps; empty until it has two points."""
    name = next(iter(state.metric_names), "")
    series = state.history.get(name)
    points = [] if series is None else series.points
    if series is None or len(points) < 2:
        return ""
    title = html.escape(name)
    of = "mean of ranks" if len(state.ranks) > 1 else ""
    description = f"{title} over {points[-1][0]:,} {series.unit}: from {points[0][1]:.4g} to {points[-1][1]:.4g}"
    return (
        f'<div class="nba-chart"><div class="nba-chart-title"><span>{title}</span> <span>{of}</span></div>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{description}">{_drawing(points, series.unit)}</svg></div>'
    )


def _drawing(points: Sequence[tuple[int, float]], unit: str) -> str:
    values = [value for _, value in points]
    marks = ticks(min(values), max(values))
    low, high = min(marks[0], *values), max(marks[-1], *values)
    first, last = points[0][0], points[-1][0]

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    # Spaces between the texts, since some sanitizers leave nothing of an SVG but those.
    grid = " ".join(
        f'<line class="nba-grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}" '
        f'stroke="currentColor" stroke-opacity="0.15"/>'
        f'<text x="{_LEFT - 6}" y="{y(mark) + 3.5:.1f}" text-anchor="end">{mark:.6g}</text>'
        for mark in marks
    )
    path = "M" + "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in points)
    return (
        f'<g font-size="10.5" fill="currentColor">{grid} '
        f'<text x="{_LEFT}" y="{_HEIGHT - 5}">{first:,}</text> '
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 5}" text-anchor="end">{last:,} {unit}</text></g>'
        f'<path class="nba-curve" d="{path}" fill="none" stroke="currentColor" '
        f'stroke-width="1.6" stroke-linejoin="round"/>'
    )


def ticks(low: float, high: float) -> list[float]:
    """Up to five round numbers that span most of ``low`` to ``high``, starting at 0 where the curve comes near it."""
    if low >= 0 and low < 0.4 * high:
        low = 0.0
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-90):  # flat, as far as can be drawn
        low, high = low - max(abs(low), 1.0) / 2, low + max(abs(low), 1.0) / 2
    rough = (high - low) / _MOST_INTERVALS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10, 20) if (high - low) / (factor * unit) <= _MOST_INTERVALS)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Multiples of a step such as 0.1 aren't round in binary.
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]

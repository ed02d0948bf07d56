"""Curves over steps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notebook_accel.launching.state.curves import Curves, Series


def test_a_series_stays_small_and_keeps_its_ends() -> None:
    series = Series()
    for step in range(100_000):
        series.add(step, float(step))
    points = series.points
    assert 100 < len(points) < 400
    assert points[0] == (0, 0.0)
    assert points[-1] == (99_999, 99_999.0)
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(points[:-1])]
    assert max(gaps) <= 2 * min(gaps)


def test_a_series_leaves_out_what_cannot_be_drawn() -> None:
    series = Series()
    for step, value in [(1, 1.0), (2, float("nan")), (3, 3.0), (2, 2.0), (4, float("inf"))]:
        series.add(step, value)
    assert series.points == [(1, 1.0), (3, 3.0)]


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats()), max_size=200))
def test_a_series_rises_and_ends_with_the_newest_point(points: list[tuple[int, float]]) -> None:
    series = Series()
    for step, value in points:
        series.add(step, value)
    steps = [step for step, _ in series.points]
    assert steps == sorted(set(steps))


def test_mean_of_ranks_that_report_at_different_steps_mixes_no_steps() -> None:
    constant, rising = Curves(world_size=2, unit="steps"), Curves(world_size=2, unit="steps")
    for step in range(300):
        rank = step % 7 % 2
        constant.add(rank, step, 1.0 + 2.0 * rank)
        rising.add(rank, step, step + 10.0 * rank)
        assert {value for _, value in constant.mean} <= ({1.0} if step == 0 else {2.0})
        if step:
            assert all(value == pytest.approx(at + 5.0) for at, value in rising.mean)
    assert len(rising.mean) > 50
    assert rising.mean[-1][0] >= 298


def test_mean_is_over_the_steps_of_all_ranks_that_have_the_metric() -> None:
    curves = Curves(world_size=3, unit="steps")
    assert curves.mean == []
    for rank, step, value in [(0, 1, 1.0), (0, 2, 1.0), (1, 2, 3.0), (1, 4, 5.0), (0, 5, 1.0), (2, 5, float("nan"))]:
        curves.add(rank, step, value)
    assert curves.mean == [(2, 2.0), (4, 3.0)]
    curves.add(2, 5, 1.0)
    assert curves.mean == []


def test_curves_of_many_ranks_are_as_small_together_as_those_of_few() -> None:
    def kept(world_size: int) -> int:
        curves = Curves(world_size, unit="steps")
        for step in range(2000):
            for rank in range(world_size):
                curves.add(rank, step, 1.0)
        return sum(len(series.points) for series in curves.ranks.values())

    assert kept(64) <= 2 * kept(16) <= 10_000

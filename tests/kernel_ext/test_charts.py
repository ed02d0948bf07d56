"""Charts of metrics and of times."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kernel_ext.charts import chart_html, stacked_html, ticks, time_ticks
from notebook_accel.launching.state.run import RunState
from notebook_accel.protocol import events
from tests.kernel_ext.fake_runs import Document


def test_chart_needs_two_points_and_says_what_it_shows() -> None:
    state = RunState(1)
    state.apply(0, events.Progress(step=0, steps=0))
    state.apply(0, events.Metrics(step=0, values={"loss": 2.0}))
    assert chart_html(state) == ""
    state.apply(0, events.Metrics(step=50, values={"loss": 0.5, "accuracy": 0.1}))
    assert chart_html(state, "accuracy") == chart_html(state)
    assert "nba-chart-title" in chart_html(state) and "nba-chart-title" not in chart_html(state, is_titled=False)
    chart = Document(chart_html(state))
    assert chart.having(role="img")[0]["aria-label"] == "loss over 50 steps: from 2 to 0.5"
    assert "50 steps" in chart.text


def test_chart_of_a_run_without_steps_is_over_its_reports() -> None:
    state = RunState(1)
    for loss in (2.0, 1.0, 0.5):
        state.apply(0, events.Metrics(step=0, values={"loss": loss}))
    chart = Document(chart_html(state))
    assert chart.having(role="img")[0]["aria-label"] == "loss over 3 reports: from 2 to 0.5"
    assert "3 reports" in chart.text


@given(st.lists(st.floats(), min_size=2, max_size=20))
@example([0.0, 5e-324])
@example([-1.7e308, 1.7e308])
@example([1.0, 1.0 + 1e-15])
def test_a_curve_stays_inside_its_drawing(values: list[float]) -> None:
    state = RunState(1)
    for step, value in enumerate(values):
        state.apply(0, events.Metrics(step=step, values={"loss": value}))
    path = re.search(r'class="nba-curve" d="M([^"]*)"', chart_html(state))
    if path is None:
        assert len(state.history["loss"].mean) < 2
        return
    for point in path[1].split("L"):
        x, y = map(float, point.split())
        assert 0 <= x <= 280
        assert 0 <= y <= 132


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0.28, 2.4, [0, 1, 2]),
        (0.0, 1.0, [0, 0.5, 1.0]),
        (90.1, 97.5, [92, 94, 96]),
        (-3.0, 5.0, [-2, 0, 2, 4]),
    ],
)
def test_ticks_are_round_and_few(low: float, high: float, marks: list[float]) -> None:
    assert ticks(low, high) == marks


@given(st.floats(-1e90, 1e90), st.floats(-1e90, 1e90))
def test_ticks_of_any_range_are_few(one: float, other: float) -> None:
    assert 1 <= len(ticks(min(one, other), max(one, other))) <= 5


@pytest.mark.parametrize(("world_size", "labels"), [(2, 2), (8, 8), (20, 0)])
def test_few_curves_of_ranks_have_their_number_at_their_end(world_size: int, labels: int) -> None:
    state = RunState(world_size)
    for step in range(1, 4):
        for rank in range(world_size):
            state.apply(rank, events.Metrics(step=step, values={"loss": 1.0 + rank / 100 / step}))
    chart = chart_html(state, of_ranks=True)
    document = Document(chart)
    assert sum(tag == "path" for tag, _ in document.elements) == world_size + 1
    found = [attributes for tag, attributes in document.elements if tag == "text" and "class" in attributes]
    assert len(found) == labels
    heights = sorted(float(attributes["y"] or 0) for attributes in found)
    assert all(after - before >= 9.9 for before, after in itertools.pairwise(heights))  # none covers another
    assert all(0 < height < 132 for height in heights)
    assert 'class="nba-c0"' not in chart_html(state)


def test_chart_goes_on_with_the_other_ranks_when_one_stops_reporting() -> None:
    state = RunState(2)
    state.apply(0, events.Numbered(first_rank=2, world_size=4))
    for step in range(1, 10):
        for rank in (0, 1) if step < 4 else (1,):
            state.apply(rank, events.Progress(step=step, steps=step))
            state.apply(rank, events.Metrics(step=step, values={"loss": 1.0 * step}))
    chart = Document(chart_html(state))
    assert chart.having(role="img")[0]["aria-label"] == "loss over 9 steps: from 1 to 9"
    assert sum(tag == "path" for tag, _ in chart.elements) == 3
    assert "rank 2" in chart.text
    assert "rank 3" in chart.text


@pytest.mark.parametrize(("others_first", "of"), [(3, "each rank"), (2, "each rank, and their mean")])
def test_chart_names_the_mean_of_ranks_only_if_it_is_a_line(others_first: int, of: str) -> None:
    state = RunState(2)
    for rank, steps in ((0, range(1, 4)), (1, range(others_first, 10))):
        for step in steps:
            state.apply(rank, events.Metrics(step=step, values={"loss": 1.0}))
            state.apply(rank, events.Progress(step=step, steps=step))
    assert f"<span>{of}</span>" in chart_html(state, of_ranks=True)


@pytest.mark.parametrize(
    ("end_s", "labels"),
    [
        (6.0, ["0", "2 s", "4 s", "6 s"]),
        (41.0, ["0", "20 s", "40 s"]),
        (150.0, ["0", "1 min", "2 min"]),
        (5500.0, ["0", "30 min", "60 min", "90 min"]),
        (20_000.0, ["0", "2 h", "4 h"]),
        (1_000_000.0, ["0", "3 d", "6 d", "9 d"]),
    ],
)
def test_times_below_a_chart_are_round_and_few(end_s: float, labels: list[str]) -> None:
    found = time_ticks(end_s)
    assert [label for _, label in found] == labels
    assert all(time_s <= end_s for time_s, _ in found)


@given(st.floats(0.001, 1e9))
def test_times_of_any_length_are_few(end_s: float) -> None:
    assert 1 <= len(time_ticks(end_s)) <= 5


def rectangles(drawn: str, name: str) -> list[tuple[float, ...]]:
    """Return left, bottom, top and right of each part of an area."""
    found = re.search(rf'class="nba-p-{name}"[^>]* d="([^"]*)"', drawn)
    assert found is not None
    corners = re.findall(r"M([\d.]+) ([\d.]+)V([\d.]+)H([\d.]+)V\2Z", found[1])
    return [tuple(map(float, each)) for each in corners]


def test_areas_lie_on_each_other_and_are_as_high_as_their_times() -> None:
    parts = [(0.0, 10.0, {"data": 0.010, "forward": 0.030}), (10.0, 20.0, {"data": 0.020, "forward": 0.020})]
    drawn = stacked_html("rank <0>", ["data", "forward", "optimizer"], parts, 0.040)
    document = Document(drawn)
    assert document.having(role="img")[0]["aria-label"] == "rank <0>: 40 ms a step at the end"
    assert [tag for tag, _ in document.elements].count("path") == 2  # no optimizer
    assert "20 s" in document.text
    data, forward = rectangles(drawn, "data"), rectangles(drawn, "forward")
    (left, bottom, _, between), (also_between, also_bottom, middle, right) = data
    assert (bottom, between) == (also_bottom, also_between)
    assert left < between < right
    assert [y for _, _, y, _ in forward] == pytest.approx([2 * middle - bottom] * 2, abs=0.1)
    assert [y for _, _, y, _ in data] == pytest.approx([bottom - (bottom - middle) / 2, middle], abs=0.1)
    assert [y for _, y, _, _ in forward] == [y for _, _, y, _ in data]


def test_areas_have_gaps_and_end_at_the_top() -> None:
    parts = [(0.0, 1.0, {"data": 0.010}), (1.0, 2.0, None), (2.0, 3.0, {"data": 5.0})]
    first, last = rectangles(stacked_html("rank 0", ["data"], parts, 0.040), "data")
    assert first[3] < last[0]
    assert last[2] == 8

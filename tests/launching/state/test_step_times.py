"""Times of steps, summed over the last steps and the whole run."""

from __future__ import annotations

import pytest

from notebook_accel.launching.state.step_times import StepHistory
from notebook_accel.protocol import events


def times(
    steps: int, *, seconds: float = 1.0, place: str = "In[1], line 1", size: int = 8, at: float = 0.0
) -> events.StepTimes:
    return events.StepTimes(
        time_s=at,
        steps=steps,
        seconds={"data": seconds / 4, "forward": seconds * 3 / 4},
        smallest_batch=size,
        largest_batch=2 * size,
        samples=4,
        lines=[events.SampledLine("forward", "", place, "x", 4)],
    )


def test_first_steps_count_in_the_whole_run_only() -> None:
    history = StepHistory()
    for seconds in (60.0, 1.0, 1.0):
        history.add(times(10, seconds=seconds))
    assert (history.total.steps, history.total.wall_s) == (30, pytest.approx(62))
    assert (history.recent.steps, history.recent.wall_s) == (20, pytest.approx(2))
    assert history.recent.step_s == pytest.approx(0.1)
    assert history.recent.share("data") == pytest.approx(0.25)


def test_recent_steps_are_the_last_ones_with_their_lines_and_sizes() -> None:
    history = StepHistory()
    history.add(times(10))
    for _ in range(20):
        history.add(times(10, place="In[1], line 1", size=8))
    for _ in range(20):
        history.add(times(10, place="In[1], line 2", size=100))
    assert history.recent.steps == 100  # ten seconds of them
    assert history.recent.wall_s == pytest.approx(10)
    assert [place for _, _, place, _ in history.recent.lines] == ["In[1], line 2"]
    assert (history.recent.smallest_batch, history.recent.largest_batch) == (100, 200)
    assert (history.total.smallest_batch, history.total.steps) == (8, 410)


def test_fifty_slow_steps_are_recent_however_long_they_took() -> None:
    history = StepHistory()
    for _ in range(90):
        history.add(times(1, seconds=60.0))
    assert history.recent.steps == 50


def test_copy_stays_as_it_is() -> None:
    history = StepHistory()
    for at in range(5):
        history.add(times(10, at=float(at)))
    copied = history.copy()
    history.add(times(10, at=9.0))
    assert (copied.recent.steps, copied.total.steps) == (40, 50)
    copied.add(times(10))
    assert history.total.steps == 60

"""Times of steps, summed over the last steps and the whole run."""

from __future__ import annotations

import msgspec
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


def recent(history: StepHistory) -> events.StepTimes:
    assert history.recent is not None
    return history.recent


def total(history: StepHistory) -> events.StepTimes:
    assert history.total is not None
    return history.total


def test_first_steps_count_in_the_whole_run_only() -> None:
    history = StepHistory()
    for seconds in (60.0, 1.0, 1.0):
        history.add(times(10, seconds=seconds))
    assert (total(history).steps, sum(total(history).seconds.values())) == (30, pytest.approx(62))
    assert (recent(history).steps, recent(history).seconds) == (20, {"data": 0.5, "forward": 1.5})


def test_recent_steps_are_the_last_ones_with_their_lines_and_sizes() -> None:
    history = StepHistory()
    history.add(times(10))
    for _ in range(20):
        history.add(times(10, place="In[1], line 1", size=8))
    for _ in range(20):
        history.add(times(10, place="In[1], line 2", size=100))
    assert recent(history).steps == 100  # ten seconds of them
    assert sum(recent(history).seconds.values()) == pytest.approx(10)
    assert [line.place for line in recent(history).lines] == ["In[1], line 2"]
    assert (recent(history).smallest_batch, recent(history).largest_batch) == (100, 200)
    assert (total(history).smallest_batch, total(history).steps) == (8, 410)


def test_batches_of_unknown_size_leave_the_mean_of_the_known_ones() -> None:
    history = StepHistory()
    for rows in (0.0, 6.0, 0.0, 6.0, 0.0):
        history.add(msgspec.structs.replace(times(10), rows=rows))
    assert (recent(history).rows, total(history).rows) == (6.0, 6.0)


def test_fifty_slow_steps_are_recent_however_long_they_took() -> None:
    history = StepHistory()
    for _ in range(90):
        history.add(times(1, seconds=60.0))
    assert recent(history).steps == 50


def test_copy_stays_as_it_is() -> None:
    history = StepHistory()
    for at in range(5):
        history.add(times(10, at=float(at)))
    copied = history.copy()
    history.add(times(10, at=9.0))
    assert (recent(copied).steps, total(copied).steps) == (40, 50)
    copied.add(times(10))
    assert total(history).steps == 60

"""Times of steps: summed over the last steps and the whole run, and the ranks' phases over the time of the run."""

from __future__ import annotations

import pytest

from notebook_accel.launching.state.diagnosis import diagnose
from notebook_accel.launching.state.run import RunState
from notebook_accel.launching.state.step_times import Moment, StepHistory, split_waiting
from notebook_accel.protocol import events
from tests.launching.state.strategies import replay


def times(steps: int, *, seconds: float = 1.0, place: str = "In[1], line 1", at: float = 0.0) -> events.StepTimes:
    return events.StepTimes(
        time_s=at,
        steps=steps,
        seconds={"data": seconds / 4, "forward": seconds * 3 / 4},
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


def test_recent_steps_are_the_last_ones_with_their_lines() -> None:
    history = StepHistory()
    history.add(times(10))
    for _ in range(20):
        history.add(times(10, place="In[1], line 1"))
    for _ in range(20):
        history.add(times(10, place="In[1], line 2"))
    assert recent(history).steps == 100  # ten seconds of them
    assert sum(recent(history).seconds.values()) == pytest.approx(10)
    assert [line.place for line in recent(history).lines] == ["In[1], line 2"]
    assert total(history).steps == 410


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


_STEPS_PER_S = 20


def reported(*, at_s: float, **milliseconds: float) -> events.StepTimes:
    """The times of one second of steps of these phases."""
    seconds = {name: milliseconds.get(name, 0.0) * _STEPS_PER_S / 1000 for name in events.PHASES}
    return events.StepTimes(time_s=at_s, steps=_STEPS_PER_S, seconds=seconds)


def run_with_straggler(world_size: int, *, seconds: int = 60, late_from: int = 30) -> RunState:
    """A run whose last rank computes longer from some second on. Ranks report at times of their own."""
    state = RunState(world_size)
    for second in range(seconds):
        for rank in range(world_size):
            is_late = second >= late_from
            is_slow = is_late and rank == world_size - 1
            state.apply(rank, events.Progress(time_s=1000.0 + second, step=second, steps=second * _STEPS_PER_S))
            event = reported(
                at_s=1000.0 + second + rank / world_size,
                forward=40.0 if is_slow else 20.0,
                backward=15.0,
                communication=5.0 if is_slow or not is_late else 25.0,
            )
            state.apply(rank, event)
    return state


def course(state: RunState) -> tuple[Moment, ...]:
    return diagnose(state).over_time


def test_rank_that_is_alone_waits_for_nobody() -> None:
    steps = {"communication": 0.002, "waiting": 0.003, "forward": 0.1}
    [alone] = split_waiting({0: steps}).values()
    assert (alone["communication"], alone["waiting"], alone["forward"]) == pytest.approx((0.005, 0.0, 0.1))
    assert [each["waiting"] for each in split_waiting({0: steps, 1: steps}).values()] == pytest.approx([0.003] * 2)


def test_course_shows_from_when_on_the_others_wait_for_a_rank() -> None:
    moments = course(run_with_straggler(2))
    assert len(moments) == 29  # of about two seconds
    assert [moment.begin_s for moment in moments[1:]] == [moment.end_s for moment in moments[:-1]]
    early, late = moments[5], moments[25]
    assert early.ranks[0] == pytest.approx(
        {**dict.fromkeys(events.PHASES, 0.0), "forward": 0.020, "backward": 0.015, "communication": 0.005}
    )
    assert (late.ranks[0]["waiting"], late.ranks[1]["waiting"]) == pytest.approx((0.020, 0.0))
    assert late.mean is not None
    assert (late.mean["waiting"], late.mean["forward"]) == pytest.approx((0.010, 0.030))
    assert early.mean is not None
    assert early.mean["waiting"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(("world_size", "shown"), [(1, [0]), (4, [0, 1, 2, 3]), (8, [7])])
def test_course_of_many_ranks_is_their_mean_and_that_of_the_last_to_arrive(world_size: int, shown: list[int]) -> None:
    assert list(course(run_with_straggler(world_size))[-1].ranks) == shown


def test_course_of_a_long_run_stays_small_and_loses_no_time() -> None:
    state = run_with_straggler(2, seconds=5000, late_from=2500)
    history = state.ranks[0].step_history
    assert len(history.sums.points) <= 64
    assert history.sums.points[-1][1] == pytest.approx((history.total.steps, *history.total.seconds.values()))
    moments = course(state)
    assert len(moments) == 40
    assert moments[-1].end_s == pytest.approx(5000, rel=0.01)
    assert moments[5].ranks[0]["waiting"] == pytest.approx(0.0, abs=1e-9)
    assert moments[35].ranks[0]["waiting"] == pytest.approx(0.020)


def test_course_has_a_gap_where_no_step_was_done() -> None:
    state = RunState(1)
    for second in (*range(20), *range(80, 100)):
        state.apply(0, events.Progress(time_s=second, step=second, steps=second * _STEPS_PER_S))
        state.apply(0, reported(at_s=float(second), forward=50.0))
    found = [moment.mean is not None for moment in course(state)]
    assert found[:7] == [True] * 7
    assert found[10:30] == [False] * 20
    assert found[-7:] == [True] * 7


def test_course_leaves_out_the_first_second_and_a_short_run() -> None:
    state = RunState(1)
    state.apply(0, events.Progress(time_s=0.0, step=0, steps=0))
    for at_s in range(5):
        state.apply(0, reported(at_s=30.0 + at_s, forward=1500.0 if at_s == 0 else 50.0))
    assert course(state) == ()
    for at_s in range(5, 12):
        state.apply(0, reported(at_s=30.0 + at_s, forward=50.0))
    assert [moment.mean["forward"] for moment in course(state) if moment.mean] == pytest.approx([0.05] * 5)


def test_course_is_told_again_by_events() -> None:
    state = run_with_straggler(8, seconds=300, late_from=150)
    known, told = course(state), course(replay(8, state.to_events()))
    assert len(told) == len(known) == 40
    for before, after in zip(known, told, strict=True):
        assert after.mean == pytest.approx(before.mean, abs=1e-6)


def test_copy_of_a_rank_keeps_its_course() -> None:
    state = run_with_straggler(1)
    copied = state.ranks[0].copy()
    before = copied.step_history.sums.points
    state.apply(0, reported(at_s=2000.0, forward=50.0))
    assert copied.step_history.sums.points == before != state.ranks[0].step_history.sums.points

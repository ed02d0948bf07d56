"""The reducer: what a run's events come to."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notebook_accel import time_limit
from notebook_accel.launching.state.run import RunState
from notebook_accel.protocol import events
from tests.launching.state import strategies

_OF_ALL = (events.Restarting, events.Numbered, events.Nodes, events.Working)


def _progress(time_s: float, steps: int, **more: Any) -> events.Progress:
    return events.Progress(**{"time_s": time_s, "step": steps, "steps": steps, "total": 100, **more})


def _raised(kind: str, *, lost_peer: bool = False) -> events.Failed:
    text = "" if kind == "KeyboardInterrupt" else "boom\nsecond line"
    return events.Failed(kind=kind, message=text, traceback="", line="In[7], line 12", lost_peer=lost_peer)


def _reduced(*sequence: events.Event, world_size: int = 1) -> RunState:
    state = RunState(world_size)
    for event in sequence:
        state.apply(0, event)
    return state


@pytest.mark.parametrize(
    ("sequence", "word", "note"),
    [
        ([], "starting", ""),
        ([events.Started(pid=1)], "running", ""),
        ([events.Started(pid=1), events.Finished()], "finished", ""),
        ([events.Finished(), events.Ended(exit_code=0)], "finished", ""),
        ([events.Started(pid=1), events.Ended(signal=15, stopped=True)], "stopped", ""),
        ([events.Started(pid=1), events.Ended(signal=9)], "killed", "killed by SIGKILL"),
        ([events.Started(pid=1), events.Ended(exit_code=3)], "failed", "exited with status 3 before its end"),
        ([events.Started(pid=1), events.Ended(exit_code=0)], "failed", "exited with status 0 before its end"),
        ([events.Started(pid=1), events.Ended(signal=9), events.Started(pid=2)], "running", ""),
        # What it raised and where outlives the end of the process.
        ([_raised("ValueError"), events.Ended(exit_code=1)], "failed", "ValueError: boom (In[7], line 12)"),
        # It isn't the one to look at.
        ([_raised("RuntimeError", lost_peer=True)], "stopped", "another rank has gone (In[7], line 12)"),
        ([_raised("KeyboardInterrupt")], "stopped", "interrupted (In[7], line 12)"),
    ],
)
def test_state_word(sequence: list[events.Event], word: str, note: str) -> None:
    rank = _reduced(*sequence).ranks[0]
    assert (rank.state, rank.note) == (word, note)
    assert rank.has_ended == (word not in ("starting", "running"))


def test_ranks_that_were_told_to_stop_at_the_time_limit_say_so_until_they_start_again() -> None:
    limit = 1e9
    state = _reduced(events.Started(pid=1), world_size=2)
    assert state.early_end == ""
    state.apply(1, events.TimeLimitReached(limit=limit))
    state.apply(1, events.Finished())
    assert state.early_end == f"stopped at its time limit ({time_limit.in_words(limit)}): launch it again to go on"
    state.apply(1, events.Started(pid=2))
    assert state.early_end == ""


def test_ranks_whose_end_nobody_reported_are_lost_when_the_run_is_over() -> None:
    state = RunState(3)
    state.apply(0, events.Finished())
    state.apply(1, events.Started(pid=1))
    state.close()
    assert [rank.state for rank in state.ranks] == ["finished", "lost", "stopped"]


def test_ranks_of_a_run_that_was_detached_go_on_unseen() -> None:
    state = RunState(2)
    state.apply(0, events.Finished())
    state.close(is_detached=True)
    assert [rank.state for rank in state.ranks] == ["finished", "detached"]


def test_rate_of_a_session_waits_between_its_cells() -> None:
    state = RunState(1)
    state.apply(0, events.Working(ranks=[0], time_s=0.0))
    for second in range(6):
        state.apply(0, _progress(second, 10 * second))
    state.apply(0, events.Working(ranks=[], time_s=5.0))
    assert state.ranks[0].steps_per_s(600.0) == 10.0
    state.apply(0, events.Working(ranks=[0], time_s=600.0))
    for second in range(600, 603):
        state.apply(0, _progress(second, 50 + 20 * (second - 599)))
    assert state.ranks[0].steps_per_s(602.0) == 20.0


def test_rate_is_of_the_last_seconds() -> None:
    slow = [_progress(second, second) for second in range(20)]
    fast = [_progress(20 + second, 20 + 10 * second) for second in range(10)]
    rank = _reduced(*slow, *fast).ranks[0]
    assert rank.steps_per_s(29.0) == pytest.approx(10.0)


def test_rate_falls_when_a_rank_stands_still_and_stays_when_it_has_ended() -> None:
    sequence = [_progress(second, 10 * second) for second in range(6)]
    assert _reduced(*sequence).ranks[0].steps_per_s(5.5) == pytest.approx(10.0)
    stuck = _reduced(*sequence).ranks[0].steps_per_s(105.0)
    assert stuck is not None
    assert stuck < 1.0
    assert _reduced(*sequence, events.Finished()).ranks[0].steps_per_s(105.0) == pytest.approx(10.0)


def test_rate_starts_anew_with_another_loader() -> None:
    training = [_progress(second, 100 * second, total=1000) for second in range(5)]
    evaluation = [_progress(5.0, 0, total=50), _progress(6.0, 7, total=50)]
    assert _reduced(*training, *evaluation).ranks[0].steps_per_s(6.0) == pytest.approx(7.0)


def test_steps_that_compile_are_shown_as_such_and_not_timed() -> None:
    state = RunState(1)
    [rank] = state.ranks
    for time_s, steps in ((0.0, 0), (30.0, 1)):
        state.apply(0, _progress(time_s, steps, compiling=True))
    assert rank.note.startswith("compiling")
    assert rank.steps_per_s(30.0) is None
    for time_s, steps in ((31.0, 2), (33.0, 12)):
        state.apply(0, _progress(time_s, steps))
    assert rank.steps_per_s(33.0) == 5.0
    assert rank.note == ""
    state.apply(0, _progress(34.0, 13, compiling=True))
    state.apply(0, events.Finished())
    assert rank.note == ""


def test_rate_and_time_left_are_unknown_before_two_counts() -> None:
    rank = _reduced(_progress(1.0, 10)).ranks[0]
    assert rank.steps_per_s(1.0) is None
    assert rank.left_s(1.0) is None


def test_time_left_counts_the_epochs_to_come() -> None:
    sequence = [_progress(second, 10 * second, epoch=2, epochs=4) for second in range(6)]
    assert _reduced(*sequence).ranks[0].left_s(5.0) == pytest.approx((50 + 2 * 100) / 10)
    without = [_progress(second, 10 * second, epoch=2) for second in range(6)]
    assert _reduced(*without).ranks[0].left_s(5.0) == pytest.approx(50 / 10)


def test_the_number_of_epochs_outlives_the_bar_that_gave_it_but_not_the_epoch() -> None:
    last = _progress(1.0, 100, epoch=4, epochs=4)
    assert _reduced(last, _progress(2.0, 100, epoch=4)).ranks[0].epochs == 4
    assert _reduced(last, _progress(2.0, 110, epoch=1)).ranks[0].epochs is None


def test_time_left_of_the_run_is_the_slowest_ranks() -> None:
    state = RunState(3)
    for second in range(6):
        state.apply(0, _progress(second, 10 * second))
        state.apply(1, _progress(second, 5 * second))
    assert state.left_s(5.0) == pytest.approx(75 / 5)


def test_point_of_a_curve_is_at_the_step_of_its_report() -> None:
    state = RunState(1)
    state.apply(0, _progress(0.0, 0))
    state.apply(0, events.Metrics(step=107, values={"loss": 1.0, "accuracy": 0.5}, earlier={"accuracy": 100}))
    state.apply(0, events.Metrics(step=214, values={"loss": 0.5}))
    assert state.history["loss"].ranks[0].points == [(107, 1.0), (214, 0.5)]
    assert state.history["accuracy"].ranks[0].points == [(100, 0.5)]
    assert state.chart_names == ["loss"]  # the other one is no curve yet
    assert state.ranks[0].metrics == {"loss": 0.5, "accuracy": 0.5}


def test_cell_that_reports_the_value_of_an_earlier_one_has_it_too() -> None:
    state = RunState(1)
    state.apply(0, events.Metrics(time_s=1.0, step=1, values={"loss": 0.5, "accuracy": 0.9}))
    before = state.ranks[0].copy()
    state.apply(0, events.Metrics(time_s=3.0, step=2, values={"loss": 0.5}))
    assert before.since(before, began_s=2.0).metrics == {}
    assert state.ranks[0].since(before, began_s=2.0).metrics == {"loss": 0.5}


def test_each_of_many_ranks_has_curves_of_its_own_metrics() -> None:
    state = RunState(8)
    names = {rank: [f"loss_{rank}_{number}" for number in range(8)] for rank in range(8)}
    for step, (rank, of_rank) in itertools.product((1, 2), names.items()):
        state.apply(rank, events.Metrics(step=step, values=dict.fromkeys(of_rank, 0.5)))
    assert state.chart_names == list(itertools.chain.from_iterable(names.values()))


def test_metrics_of_a_later_cell_or_restart_take_the_place_of_the_oldest() -> None:
    state = RunState(2)
    for rank in range(2):
        state.apply(rank, events.Metrics(step=1, values={"loss": 1.0}))
    for number in range(3 * events.MOST_METRICS):
        state.apply(1, events.Metrics(step=number, values={f"m{number}": 0.5}))
    state.apply(1, events.Metrics(step=number + 1, values={"accuracy": 0.25, "loss": 0.5}))
    last = [f"m{number}" for number in range(2 * events.MOST_METRICS + 2, 3 * events.MOST_METRICS)]
    assert [*state.ranks[1].metrics] == [*last, "accuracy", "loss"]
    assert len(state.history) == 2 * events.MOST_METRICS
    assert {"loss", *last, "accuracy"} <= state.history.keys()


def test_history_is_over_reports_as_long_as_nothing_counts_steps() -> None:
    state = RunState(1)
    for loss in (4.0, 3.0, 2.0):
        state.apply(0, events.Metrics(step=0, values={"loss": loss}))
    assert state.history["loss"].unit == "reports"
    assert state.history["loss"].mean == [(1, 4.0), (2, 3.0), (3, 2.0)]
    state.apply(0, _progress(0.0, 1))
    for step in (1, 2):
        state.apply(0, events.Metrics(step=step, values={"loss": 1.0}))
    assert state.history["loss"].unit == "steps"
    assert state.history["loss"].mean == [(1, 1.0), (2, 1.0)]


def test_losses_come_first_among_the_metrics() -> None:
    state = _reduced(events.Metrics(step=1, values={"accuracy": 0.5, "train_loss": 1.0, "lr": 0.1}))
    assert state.metric_names == ["train_loss", "accuracy", "lr"]


@given(st.lists(st.tuples(st.integers(0, 2), strategies.any_event), max_size=60))
def test_a_ranks_state_depends_on_its_own_events_and_restarts_of_all_only(
    sequence: list[tuple[int, events.Event]],
) -> None:
    together = RunState(3)
    for rank, event in sequence:
        together.apply(rank, event)
    for alone in range(3):
        state = RunState(3)
        for rank, event in sequence:
            if rank == alone or isinstance(event, _OF_ALL):
                state.apply(rank, event)
        assert repr(state.ranks[alone]) == repr(together.ranks[alone])


def _all_of(state: RunState) -> str:
    curves = {
        name: (of.unit, of.mean, {rank: series.points for rank, series in of.ranks.items()})
        for name, of in state.history.items()
    }
    return repr({**vars(state), "history": curves})  # as text, in which two values that are no numbers are equal


@given(st.lists(st.tuples(st.integers(0, 2), strategies.any_event), max_size=60))
def test_a_state_is_made_again_from_stored_events(sequence: list[tuple[int, events.Event]]) -> None:
    state = RunState(3)
    stored = []
    for rank, event in sequence:
        state.apply(rank, event)
        stored.append((rank, events.encode(event)))
    again = strategies.replay(3, ((rank, events.decode(data)) for rank, data in stored))
    assert _all_of(again) == _all_of(state)


@given(st.lists(strategies.any_event, max_size=60), strategies.times)
def test_whatever_a_rank_says_has_a_rate_and_a_time_left(sequence: list[events.Event], now_s: float) -> None:
    rank = _reduced(*sequence).ranks[0]
    rate, left_s = rank.steps_per_s(now_s), rank.left_s(now_s)
    assert rate is None or rate >= 0
    assert left_s is None or left_s >= 0


def test_silence_ends_with_the_next_step_and_with_the_rank() -> None:
    silent = events.Silent(time_s=30.0, since_s=10.0, at="In[7], line 12 in evaluate")
    state = _reduced(_progress(1.0, 5), silent)
    assert state.ranks[0].silent == silent
    assert state.ranks[0].last_event_s == 1.0  # what is said about a rank is no sign of its life
    state.apply(0, _progress(31.0, 5, label="the same step"))
    assert state.ranks[0].silent == silent
    state.apply(0, _progress(32.0, 6))
    assert state.ranks[0].silent is None
    assert _reduced(silent, events.Finished()).ranks[0].silent is None
    assert _reduced(events.Finished(), silent).ranks[0].silent is None


def test_time_left_is_not_guessed_while_a_rank_stands_still() -> None:
    state = RunState(2)
    for second in range(6):
        for rank in range(2):
            state.apply(rank, _progress(second, 10 * second))
    assert state.left_s(6.0) is not None
    for second in range(6, 20):
        state.apply(0, _progress(second, 10 * second, total=1000))
    assert state.ranks[1].is_stalled(19.0)
    assert state.ranks[1].left_s(19.0) is None
    assert state.left_s(19.0) is None  # though the other one's is known
    state.apply(1, events.Finished())
    assert state.left_s(19.0) == pytest.approx((1000 - 190) / 10)


def test_slow_steps_are_no_standstill() -> None:
    slow = _reduced(*(_progress(60.0 * step, step) for step in range(3))).ranks[0]
    assert slow.left_s(180.0) is not None
    assert slow.left_s(120.0 + 1000.0) is None


def test_time_left_is_not_guessed_of_a_rank_that_was_found_silent() -> None:
    counted = [_progress(second, 10 * second) for second in range(6)]
    assert _reduced(*counted, events.Silent(time_s=5.5, since_s=5.0)).left_s(5.5) is None


@pytest.mark.parametrize(
    ("steps", "behind"),
    [
        ([1000, 1000, 1000], {}),
        ([1000, 999, 990], {}),  # less than they do in a second: they say where they are at different times
        ([1000, 1000, 800], {2: 200}),
        ([1000, 800], {1: 200}),
        ([3, 1], {}),
    ],
)
def test_ranks_far_behind_the_others_are_found(steps: list[int], behind: dict[int, int]) -> None:
    state = RunState(len(steps))
    for rank, count in enumerate(steps):
        for second in range(11):
            state.apply(rank, _progress(float(second), count * second // 10))
    assert state.behind(10.0) == behind


def test_a_rank_that_has_ended_is_not_behind() -> None:
    state = RunState(3)
    for rank, count in enumerate([1000, 1000, 10]):
        state.apply(rank, _progress(1.0, count))
    assert state.behind(1.0) == {2: 990}
    state.apply(2, events.Finished())
    assert state.behind(1.0) == {}


def test_restarts_are_counted() -> None:
    state = RunState(2)
    for rank in range(2):
        state.apply(rank, events.Started(pid=1))
    assert state.restarts == 0
    state.apply(1, events.Ended(signal=9))
    state.apply(1, events.Started(pid=2))
    assert state.restarts == 1


def test_restart_of_all_ranks_begins_with_nothing_and_says_why() -> None:
    state = RunState(2)
    for number in range(1, 6):
        for rank in range(2):
            state.apply(rank, events.Started(pid=1))
            state.apply(rank, _progress(1.0, 7))
        state.apply(1, events.Failed(kind="ValueError", message="boom", traceback=""))
        state.apply(0, events.Ended(signal=15, stopped=True))
        assert [rank.state for rank in state.ranks] == ["stopped", "failed"]
        state.apply(1, events.Restarting(number=number, of=5, why="rank 1: ValueError: boom"))
        assert [(rank.state, rank.steps, rank.note) for rank in state.ranks] == 2 * [("starting", None, "")]
        assert state.restarts == number
    assert list(state.restarts_why) == [f"restart {number} of 5: rank 1: ValueError: boom" for number in (3, 4, 5)]


def test_what_is_kept_does_not_grow_with_what_is_said() -> None:
    """A day of a chatty run is more of what comes here in a moment."""

    def size() -> int:
        return len(pickle.dumps(state))

    state = RunState(4)
    for step in range(40_000):
        rank = step % 4
        state.apply(rank, _progress(step / 100, step // 4, label="x" * 5000))
        state.apply(rank, events.Metrics(time_s=step / 100, step=step, values={f"m{step % 50}": 1.0, "loss": 1.0}))
        state.apply(rank, events.Output(time_s=step / 100, text=f"ERROR {step:06} of 40,000"))
        if step == 10_000:
            early = size()
    assert size() < 2 * early  # four times as much was said
    assert len(state.history) == 51

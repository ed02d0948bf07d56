"""KeyboardInterrupt in ranks: it is always raised, in the right place, and ranks can survive it."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import pytest

from notebook_accel.launching.kernel import foreground
from notebook_accel.launching.kernel.job import Job
from notebook_accel.protocol import events
from tests import processes
from tests.launching import functions

Launch = Callable[..., Job]


def both(folder: pathlib.Path, what: str) -> bool:
    return {f"0 {what}", f"1 {what}"} <= set(os.listdir(folder))


@pytest.mark.parametrize(
    ("how", "method"),
    [
        ("all_reduce", "spawn"),
        pytest.param("store", "fork", marks=pytest.mark.slow),
        *(pytest.param(how, "spawn", marks=pytest.mark.slow) for how in ("backward", "recv", "joining")),
    ],
)
def test_rank_that_waits_for_another_is_brought_out_of_it(
    launch: Launch, tmp_path: pathlib.Path, how: str, method: str
) -> None:
    job = launch(functions.interrupted_in, how, str(tmp_path), grace_s=20.0, start_method=method)
    processes.wait_until(lambda: both(tmp_path, "waits"), "both wait")
    job.interrupt()
    assert job.wait(60)
    assert both(tmp_path, "finally") and both(tmp_path, "except")  # and the rank's own connection stayed open
    assert [rank.failed and rank.failed.kind for rank in job.ranks] == 2 * ["KeyboardInterrupt"]
    ended = {rank: event.exit_code for rank, event in job.events() if isinstance(event, events.Ended)}
    assert ended == {0: 1, 1: 1}  # the ranks ended by themselves, without a stronger signal


@pytest.mark.parametrize("method", ["spawn", pytest.param("fork", marks=pytest.mark.slow)])
def test_rank_that_computes_is_interrupted(launch: Launch, tmp_path: pathlib.Path, method: str) -> None:
    job = launch(functions.computes_until_it_is_interrupted, str(tmp_path), start_method=method)
    processes.wait_until(lambda: both(tmp_path, "computes"), "both compute")
    job.interrupt(escalate=False)
    assert job.results(timeout_s=30) == ["KeyboardInterrupt", "KeyboardInterrupt"]


def test_interrupt_in_a_finalizer_is_raised_behind_it(launch: Launch, tmp_path: pathlib.Path) -> None:
    job = launch(functions.finalizes_until_it_is_interrupted, str(tmp_path))
    processes.wait_until(lambda: both(tmp_path, "finalizes"), "both are in the finalizer")
    job.interrupt(escalate=False)
    assert job.results(timeout_s=30) == ["KeyboardInterrupt", "KeyboardInterrupt"]


def test_interrupt_that_does_not_escalate_leaves_ranks_alive_and_able_to_meet_again(
    launch: Launch, tmp_path: pathlib.Path
) -> None:
    job = launch(functions.goes_on_after_an_interrupt, str(tmp_path), grace_s=0.1)
    processes.wait_until(lambda: both(tmp_path, "waits"), "both wait")
    job.interrupt(escalate=False)
    assert job.results(timeout_s=60) == [3.0, 3.0]


def test_users_own_handler_is_asked_and_its_collective_goes_on(launch: Launch, tmp_path: pathlib.Path) -> None:
    job = launch(functions.handles_it_itself, str(tmp_path))
    processes.wait_until(lambda: both(tmp_path, "waits"), "both wait")
    job.interrupt(escalate=False)
    assert job.results(timeout_s=60) == [7.0, 0.0]


def test_interrupt_that_comes_while_ranks_are_being_made_is_not_lost(launch: Launch) -> None:
    for _ in range(5):
        job = launch(functions.says_whether_it_was_interrupted)
        job.interrupt(escalate=False)
        assert job.wait(30)
        said = job.events()
        failed = {rank: event.kind for rank, event in said if isinstance(event, events.Failed)}
        # The interrupt may come before the function begins, which fails the run, or inside the function.
        assert {*(job.results() if job.status == "succeeded" else failed.values())} == {"KeyboardInterrupt"}
        assert [event for _, event in said if isinstance(event, events.Output)] == []  # no traceback of ours


def test_run_that_does_not_end_in_time_leaves_others_alone(
    launch: Launch, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stands for one whose rank is in a call that the system can't end: here nothing waits for it."""
    monkeypatch.setattr(foreground, "_INTERRUPT_DEADLINE_S", 0.0)
    other = launch(functions.waits, str(tmp_path))
    processes.wait_until(lambda: len(os.listdir(tmp_path)) == 2, "the other run is there")
    mine = launch(functions.waits, grace_s=0)
    foreground._end_interrupted(mine, None)
    assert mine.wait(20)
    assert not other.done and other.stacks()[0].condition == "answered"

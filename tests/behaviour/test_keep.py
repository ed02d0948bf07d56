"""Runs that keep the other ranks when one dies: what a session stands on."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Callable

import pytest

from notebook_accel.errors import LaunchError, RunStoppedError
from notebook_accel.launching.kernel.job import Job
from notebook_accel.protocol import events
from tests import processes
from tests.launches import pids_of
from tests.launching import functions

Launch = Callable[..., Job]


def heard_of(job: Job, kind: type[events.Event]) -> Callable[[], list[int]]:
    """The ranks that have said this kind of event so far."""
    said: list[int] = []

    def look() -> list[int]:
        said.extend(rank for rank, event in job.events() if isinstance(event, kind))
        return said

    return look


@pytest.mark.parametrize(("who", "how"), [(0, "exit"), (1, "raise")])
def test_dead_rank_is_told_of_and_comes_back_into_the_same_run(
    launch: Launch, tmp_path: pathlib.Path, who: int, how: str
) -> None:
    job = launch(functions.dies_the_first_time, str(tmp_path), who, how, on_death="keep")
    deaths = heard_of(job, events.Ended)
    processes.wait_until(deaths, "a rank's death is told")
    assert (deaths(), job.status) == ([who], "running")
    job.respawn(who)
    results = job.results(timeout_s=60)
    assert [total for _, total in results] == [3.0, 3.0]  # rank 0 serves the store, and does again
    assert results[0][0] != results[1][0]


def test_run_without_any_rank_waits_for_one_to_be_started_again(launch: Launch) -> None:
    job = launch(functions.waits, on_death="keep", num_processes=1)
    before = pids_of(job)
    os.kill(before[0], signal.SIGKILL)
    processes.wait_until(heard_of(job, events.Ended), "its death is told")
    assert job.status == "running"
    job.respawn(0)
    assert pids_of(job) != before
    job.stop()
    assert job.wait(20)
    with pytest.raises(RunStoppedError):
        job.results()


def test_rank_that_cannot_be_started_again_says_why(launch: Launch) -> None:
    kept = launch(functions.waits, on_death="keep")
    pids_of(kept)
    with pytest.raises(LaunchError, match="It is running"):
        kept.respawn(1)
    kept.stop()
    assert kept.wait(20)
    with pytest.raises(LaunchError, match="The run has ended"):
        kept.respawn(1)
    with pytest.raises(LaunchError, match="on_death='stop'"):
        launch(functions.waits).respawn(1)

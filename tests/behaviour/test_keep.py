"""Runs that keep the other ranks when one dies: what a session stands on."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from notebook_accel.launching.kernel.job import Job
from tests import processes
from tests.launching import functions

Launch = Callable[..., Job]


@pytest.mark.parametrize(("who", "how"), [(0, "exit"), (1, "raise")])
def test_dead_rank_is_told_of_and_comes_back_into_the_same_run(
    launch: Launch, tmp_path: pathlib.Path, who: int, how: str
) -> None:
    job = launch(functions.dies_the_first_time, str(tmp_path), who, how, on_death="keep")
    processes.wait_until(lambda: job.ranks[who].is_dead, "a rank's death is told")
    assert (job.ranks[1 - who].is_dead, job.status) == (False, "running")
    job.respawn(who)
    results = job.results(timeout_s=60)
    assert [total for _, total in results] == [3.0, 3.0]  # rank 0 serves the store, and does again
    assert results[0][0] != results[1][0]

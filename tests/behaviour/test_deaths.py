"""Ranks that die in the middle of training: who is blamed, and what is left."""

from __future__ import annotations

import os
import pathlib
import signal
from collections.abc import Callable

import pytest

from notebook_accel.errors import RankFailedError
from notebook_accel.launching.kernel.job import Job
from tests import processes
from tests.launches import pids_of
from tests.launching import functions

Launch = Callable[..., Job]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit", "rank 1 of 3 exited with status 5"),
        pytest.param("raise", "rank 1 of 3 failed: ValueError: its own reason", marks=pytest.mark.slow),
    ],
)
def test_who_dies_is_blamed_and_not_who_loses_its_connection(launch: Launch, how: str, message: str) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(functions.one_dies_while_all_train, how, num_processes=3).results(timeout_s=60)
    assert str(caught.value).startswith(message)
    assert all(end.rank != 1 for end in caught.value.others)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "end"), [("spawn", "kill"), ("forkserver", "stop")])
def test_workers_semaphores_go_with_a_rank_that_is_ended(
    launch: Launch, tmp_path: pathlib.Path, method: str, end: str
) -> None:
    job = launch(functions.has_workers, method, str(tmp_path), num_processes=1)
    processes.wait_until(lambda: os.listdir(tmp_path), "it has workers", timeout_s=60)
    pid = pids_of(job)[0]
    mapped = {line.split()[4] for line in pathlib.Path("/proc", str(pid), "maps").read_text().splitlines()}
    semaphores = [path for path in pathlib.Path("/dev/shm").glob("sem.mp-*") if str(path.stat().st_ino) in mapped]
    assert semaphores
    if end == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        job.stop()
    assert job.wait(20)
    processes.wait_until(lambda: not any(path.exists() for path in semaphores), "its semaphores are gone")


def test_fork_leaves_the_garbage_of_its_rank_alone(launch: Launch) -> None:
    assert launch(functions.collects_in_a_fork, num_processes=2).results(timeout_s=60) == [(0, True, True)] * 2


def test_fork_that_is_not_ended_does_not_answer_for_its_rank_and_says_what_it_raised(launch: Launch) -> None:
    job = launch(functions.forgets_to_end_forks, num_processes=1)
    assert job.results(timeout_s=60) == [[job.ranks[0].pid]]
    said = job.logs(0).splitlines()
    assert [line for line in said if line.isdecimal()] == ["0", "1", "7", "1"]
    assert "in forgets_to_end_forks" in said[said.index("ValueError: raised in a fork") - 2]
    assert said[-2:] == ["said at its exit", "1"]

"""Runs that are started again when a rank fails."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import re
import signal
import socket
from collections.abc import Callable, Iterator

import pytest

from notebook_accel import notebook_launcher
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import (
    ConfigError,
    PreflightError,
    ProcessStartError,
    RankFailedError,
    RunStoppedError,
)
from notebook_accel.launching.kernel import launcher, local
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.views.view import LinesView
from tests import kernels, processes
from tests.launching import functions
from tests.launching.elastic import restarted
from tests.training.ranks import free_port

Launch = Callable[..., Job]


@pytest.fixture(scope="module")
def engine(engine: local.LocalEngine) -> Iterator[local.LocalEngine]:
    """No other module gets the template, which has imported what only these tests want."""
    yield engine
    engine.close()


def below_template() -> list[processes.Process]:
    """The ranks and elastic processes of this process's runs."""
    agents = [process for process in processes.children(os.getpid()) if processes.is_agent(process)]
    templates = [process for agent in agents for process in processes.children(agent.pid)]
    return [process for template in templates for process in processes.children(template.pid) if process.state != "Z"]


def runs(folder: pathlib.Path, attempt: int, count: int = 2) -> None:
    marks = [folder / f"{rank} runs in attempt {attempt}" for rank in range(count)]
    processes.wait_until(lambda: all(mark.exists() for mark in marks), f"attempt {attempt} runs", timeout_s=60)


def test_rank_that_fails_twice_and_then_succeeds_is_a_success(launch: Launch) -> None:
    port = free_port()  # which is used each time
    job = launch(restarted.fails_at_first, 2, max_restarts=3, rdzv_id="the run", main_process_port=port)
    shown = io.StringIO()
    view = LinesView(job, shown)
    assert job.wait(60)
    view.close()
    results = job.results()
    said = [f"rank 1: ValueError: failure {number}" for number in range(2)]
    assert [(attempts, total) for attempts, total, _ in results] == [(2, 4.0), (2, 4.0)]
    assert [re.sub(" at .*", "", why) for why in job.restarts] == said
    assert job.status == "succeeded" and job.error is None
    assert results[1][2] == {
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "the run",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default_role",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    lines = shown.getvalue().splitlines()
    assert [line.partition(" at ")[0].rstrip("]") for line in lines if line.startswith("[restart")] == [
        f"[restart 1 of 3: {said[0]}",
        f"[restart 2 of 3: {said[1]}",
    ]
    each = kernels.unfolded(shown.getvalue())
    assert [each.count(f"0 │ attempt {attempt}") for attempt in range(3)] == [1, 1, 1]


def test_last_failure_is_raised_and_says_what_came_before(launch: Launch) -> None:
    job = launch(restarted.prints_and_fails, max_restarts=2, num_processes=1)
    with pytest.raises(RankFailedError, match="rank 0 of 1 failed: RuntimeError: attempt 2") as caught:
        job.results(timeout_s=60)
    error = caught.value
    assert type(error.__cause__) is RuntimeError and error.__cause__.args == ("attempt 2",)
    assert "prints_and_fails" in error.remote_traceback
    assert error.last_output == ("before the failure of attempt 2",)
    assert error.restarts == ("rank 0: RuntimeError: attempt 0", "rank 0: RuntimeError: attempt 1")
    assert "started again 2 times before:\n  1. rank 0: RuntimeError: attempt 0\n  2. rank 0" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    log = job.logs(0)
    assert [f"attempt {number}" in log for number in range(3)] == [True, True, True]


def test_result_of_a_failed_attempt_is_not_in_the_way(launch: Launch, tmp_path: pathlib.Path) -> None:
    results = launch(restarted.has_a_large_result_at_first, str(tmp_path), max_restarts=1).results(timeout_s=60)
    assert results == ["short", "short"]


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["localhost:0", "localhost", ""])
def test_one_node_is_elastic_as_torchruns_documentation_has_it(launch: Launch, endpoint: str) -> None:
    job = launch(restarted.fails_at_first, 1, max_restarts=1, rdzv_backend="c10d", rdzv_endpoint=endpoint)
    assert [(attempts, total) for attempts, total, _ in job.results(timeout_s=60)] == [(1, 4.0), (1, 4.0)]


def test_nothing_is_started_again_after_a_stop(launch: Launch, tmp_path: pathlib.Path) -> None:
    job = launch(restarted.runs_until_it_is_ended, str(tmp_path), max_restarts=9)
    runs(tmp_path, 0)
    assert len(below_template()) == 2  # one node needs no elastic process
    job.stop()
    with pytest.raises(RunStoppedError):
        job.results(timeout_s=60)
    assert job.restarts == () and below_template() == []


@pytest.mark.slow
def test_template_that_is_lost_while_ranks_end_ends_that_run_alone(launch: Launch, tmp_path: pathlib.Path) -> None:
    other = launch(functions.waits)
    job = launch(restarted.ends_slowly, str(tmp_path), max_restarts=9, grace_s=60.0, preload=("wave",))
    processes.wait_until(lambda: (tmp_path / "0 was told to end").exists(), "rank 0 is being ended", timeout_s=60)
    # Its file may be there before this process has heard of its start.
    rank = processes.read(processes.wait_until(lambda: job.ranks[0].pid, "rank 0 has said who it is"))
    assert rank is not None
    os.kill(rank.parent, signal.SIGKILL)
    with pytest.raises(RankFailedError, match="ValueError: fails"):
        job.results(timeout_s=60)
    assert job.restarts == () and other.status == "running"


def test_what_cannot_be_started_again_is_refused(launch: Launch) -> None:
    for method in ("inline", "fork"):
        with pytest.raises(PreflightError, match=f"max_restarts=1 was asked for, and the start method is {method}"):
            notebook_launcher(functions.rank, num_processes=1, use_cpu=True, start_method=method, max_restarts=1)
    config = LaunchConfig(num_processes=1, use_cpu=True, max_restarts=1)
    with pytest.raises(ConfigError, match="A session can't have restarts"):
        launcher.launch_function(functions.rank, (), {}, config, on_death="keep")


def test_port_in_use_is_no_reason_to_start_again(launch: Launch) -> None:
    job = launch(restarted.fails_at_first, 1, max_restarts=1)
    job.results(timeout_s=60)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises((PreflightError, ProcessStartError), match=f"The port {port} for the ranks' store"):
            launch(restarted.fails_at_first, 1, max_restarts=9, main_process_port=port).results(timeout_s=60)

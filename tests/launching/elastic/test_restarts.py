"""Runs that are started again when a rank fails."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Callable, Iterator

import pytest

from notebook_accel import notebook_launcher
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import (
    ConfigError,
    PreflightError,
    ProcessStartError,
)
from notebook_accel.launching.kernel import launcher, local
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.views.view import LinesView
from tests import kernels
from tests.launching import functions
from tests.launching.elastic import restarted
from tests.training.ranks import free_port

Launch = Callable[..., Job]


@pytest.fixture(scope="module")
def engine(engine: local.LocalEngine) -> Iterator[local.LocalEngine]:
    """No other module gets the template, which has imported what only these tests want."""
    yield engine
    engine.close()


@pytest.mark.parametrize("how", ["raise", pytest.param("kill", marks=pytest.mark.slow)])
def test_rank_that_fails_twice_and_then_succeeds_is_a_success(launch: Launch, how: str) -> None:
    port = free_port()  # which is used each time
    job = launch(restarted.fails_at_first, 2, how, max_restarts=3, rdzv_id="the run", main_process_port=port)
    shown = io.StringIO()
    view = LinesView(job, shown)
    assert job.wait(60)
    view.close()
    results = job.results()
    said = [f"rank 1: ValueError: failure {n}" if how == "raise" else "rank 1 was killed by SIGKILL" for n in (0, 1)]
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


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["localhost:0", "localhost", ""])
def test_one_node_is_elastic_as_torchruns_documentation_has_it(launch: Launch, endpoint: str) -> None:
    job = launch(restarted.fails_at_first, 1, "raise", max_restarts=1, rdzv_backend="c10d", rdzv_endpoint=endpoint)
    assert [(attempts, total) for attempts, total, _ in job.results(timeout_s=60)] == [(1, 4.0), (1, 4.0)]


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

"""The agent's process: its start, its end, and the ends of ranks that it has to wait for."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import subprocess
import threading
from collections.abc import Callable

import pytest

from notebook_accel.errors import ProcessStartError, RunStoppedError
from notebook_accel.launching.kernel import agent_process, local
from notebook_accel.launching.kernel.job import Job
from tests import processes
from tests.launching import functions


@pytest.mark.slow
def test_torchs_table_of_compile_times_appears_if_it_is_asked_for(launch: Callable[..., Job]) -> None:
    jobs = [launch(functions.shows_compile_times, shows, num_processes=1) for shows in (True, False)]
    for job, shows in zip(jobs, (True, False), strict=True):
        job.results(timeout_s=60)
        assert ("TorchDynamo compilation metrics" in job.logs(0)) is shows


def test_exit_functions_run_with_a_torch_that_has_no_such_table(
    launch: Callable[..., Job], tmp_path: pathlib.Path
) -> None:
    job = launch(functions.lacks_compile_times, num_processes=1, log_dir=str(tmp_path))
    job.results(timeout_s=60)
    [folder] = tmp_path.iterdir()
    assert "left" in job.logs(0) == (folder / "rank_0.log").read_text()


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (subprocess, "Popen", OSError(errno.EAGAIN, "no process is left")),
        (threading.Thread, "start", RuntimeError("no process is left")),
    ],
)
def test_agent_that_the_system_refuses_to_start_is_reported(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, error: Exception
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(owner, name, refuses)
    with pytest.raises(ProcessStartError, match=r"^The agent process could not be started: .*no process is left"):
        agent_process.LocalAgent()


def test_ranks_can_save_when_the_whole_run_is_told_to_end(launch: Callable[..., Job], tmp_path: pathlib.Path) -> None:
    """By a signal to all its processes, as Slurm sends it."""
    job = launch(functions.saves_at_sigterm, str(tmp_path), grace_s=60.0)

    def have(what: str) -> bool:
        return all((tmp_path / f"{rank} {what}").exists() for rank in range(2))

    processes.wait_until(lambda: have("trains") or job.done, "both ranks train", 60)
    [agent] = [child for child in processes.children(os.getpid()) if processes.is_agent(child)]
    everything = [agent, *processes.descendants(agent.pid)]
    for process in everything:
        os.kill(process.pid, signal.SIGTERM)
    processes.wait_until(lambda: have("was asked") or job.done, "both ranks save", 60)
    assert not job.done, job.error
    assert not have("has saved")
    (tmp_path / "go").touch()
    assert job.wait(60)
    assert have("has saved")
    assert (job.status, type(job.error)) == ("stopped", RunStoppedError)
    assert "SIGTERM" in str(job.error)
    processes.wait_until(lambda: not any(process.is_alive for process in everything), "all have gone")
    local.engine().close()  # so that the next launch has an agent

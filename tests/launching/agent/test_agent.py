"""The agent between what a template says of a rank and what the rank says itself; and when it is told to end."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from notebook_accel.errors import ProcessStartError, RunStoppedError
from notebook_accel.launching.kernel import agent_process, local
from notebook_accel.launching.kernel.job import Job
from tests import processes
from tests.launching import functions

_AGENT_WITH_A_RUN = """
import os, subprocess
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import Connection, Message
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.launching.agent import agent, runs

launch = messages.Launch(
    job_id="1", world_size=1, port=0, grace_s=60.0, timeout_s=None, log_folder=""
)
kernel, theirs = Connection.pair()
kernel.set_receive_deadline(5.0)
made = agent.Agent(agent.Kernel(theirs, os.getpid()))
run = runs.Run(launch, [])
made._runs["1"] = run
"""


@pytest.mark.parametrize(
    ("happens", "printed"),
    [
        (
            """
rank, line, _ = runs.open_rank(launch, 0, lambda _: None)
run.put(rank)
process = subprocess.Popen(["sleep", "60"])
line.send(events.encode(events.Started(pid=process.pid)))
made._read_rank(run, rank)
run.end("interrupt", "interrupted")
print(process.wait(20))
""",
            f"{-signal.SIGINT}\n",
        ),
        (
            """
run.ended = lambda: print([type(messages.decode_for_kernel(frame.body)).__name__ for frame in kernel.receive()])
made._run_ended(run)
""",
            "['RunEnded']\n",
        ),
        (
            """
made._handle_order(messages.Broken(text=''), Message(b'', [], is_whole=True))
print(made._is_leaving, run.policy.reason)
""",
            "False \n",
        ),
        (
            """
made._handle_order(messages.Detach(job_id="1", folder="/nowhere"), Message(b"", [], is_whole=False))
made._audience.flush()
print([messages.decode_for_kernel(frame.body).why for frame in kernel.receive()], [*made._runs])
""",
            "['Too many open files'] ['1']\n",
        ),
    ],
    ids=[
        "a rank is interrupted in its code also if its template has not said yet that it is there",
        "the kernel hears of the end of a run before its logs are tidied up",
        "a message that the agent does not know, since it is for the kernel, ends no run",
        "without room for more files it refuses to detach and goes on",
    ],
)
def test_agent_with_a_run(happens: str, printed: str) -> None:
    command = [sys.executable, "-c", f"{_AGENT_WITH_A_RUN}{happens}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == printed, done.stderr


def test_end_of_a_short_run_is_not_kept_waiting_by_what_it_has_reported(
    launch: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = time.sleep

    def noted(seconds: float) -> None:
        if threading.current_thread().name == "notebook-accel-agent":
            pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(agent_process.time, "sleep", noted)
    for _ in range(6):  # on a busy machine, a rank may say more than its loss
        pauses.clear()
        assert launch(functions.reports_once, num_processes=1).results(timeout_s=60) == [0]
        if not pauses:
            break
    assert not pauses


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


@pytest.mark.parametrize(
    "how",
    [
        "all",  # a signal to all processes of the run, as Slurm sends it
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("agent", "kernel")),
    ],
)
def test_ranks_can_save_when_the_agent_is_told_to_end(
    launch: Callable[..., Job], tmp_path: pathlib.Path, how: str
) -> None:
    job = launch(functions.saves_at_sigterm, str(tmp_path), grace_s=60.0, max_restarts=int(how == "agent"))

    def have(what: str) -> bool:
        return all((tmp_path / f"{rank} {what}").exists() for rank in range(2))

    processes.wait_until(lambda: have("trains") or job.done, "both ranks train", 60)
    [agent] = [child for child in processes.children(os.getpid()) if processes.is_agent(child)]
    everything = [agent, *processes.descendants(agent.pid)]
    closing = threading.Thread(target=local.engine().close)
    if how == "kernel":
        closing.start()
    else:
        for process in everything if "all" in how else [agent]:
            os.kill(process.pid, signal.SIGTERM)
    processes.wait_until(lambda: have("was asked") or job.done, "both ranks save", 60)
    assert not job.done, job.error
    assert not have("has saved")
    (tmp_path / "go").touch()
    assert job.wait(60)
    assert have("has saved")
    assert (job.status, type(job.error)) == ("stopped", RunStoppedError)
    assert ("SIGTERM" in str(job.error)) is (how != "kernel")
    processes.wait_until(lambda: not any(process.is_alive for process in everything), "all have gone")
    if how == "kernel":
        closing.join(30)
    local.engine().close()  # so that the next launch has an agent

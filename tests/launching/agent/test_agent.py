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

_RANK_SAYS_IT_FIRST = """
import os, subprocess
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import Connection
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.launching.agent import agent, runs

launch = messages.Launch(
    job_id="1", world_size=1, port=0, grace_s=60.0, timeout_s=None, log_folder=""
)
kernel, theirs = Connection.pair()
made = agent.Agent(agent.Kernel(theirs, os.getpid()))
run = runs.Run(launch, [])
rank, line, _ = runs.open_rank(launch, 0, lambda _: None)
run.put(rank)
process = subprocess.Popen(["sleep", "60"])
line.send(events.encode(events.Started(pid=process.pid)))
made._read_rank(run, rank)
run.end_ranks("interrupt")
print(process.wait(20))
"""


def test_rank_is_interrupted_in_its_code_also_if_its_template_has_not_said_yet_that_it_is_there() -> None:
    command = [sys.executable, "-c", _RANK_SAYS_IT_FIRST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"{-signal.SIGINT}\n", done.stderr


_AGENT_WITH_A_RUN = """
import os
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

_RUN_ENDS = f"""{_AGENT_WITH_A_RUN}
run.ended = lambda: print([messages.decode_for_kernel(frame.body) for frame in kernel.receive()])
made._run_ended(run)
"""


def test_kernel_hears_of_the_end_of_a_run_before_its_logs_are_tidied_up() -> None:
    done = subprocess.run([sys.executable, "-c", _RUN_ENDS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("[RunEnded(job_id='1'"), (done.stdout, done.stderr)


def test_message_that_the_agent_does_not_know_ends_no_run() -> None:
    unknown = "messages.Broken(text='')"  # is for the kernel
    heard = f"made._handle_order({unknown}, Message(b'', [], is_whole=True))\nprint(made._is_leaving, run.reason)"
    command = [sys.executable, "-c", f"{_AGENT_WITH_A_RUN}{heard}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "False \n", done.stderr


_DETACH_WITHOUT_ROOM = f"""{_AGENT_WITH_A_RUN}
made._handle_order(messages.Detach(job_id="1", folder="/nowhere"), Message(b"", [], is_whole=False))
made._audience.flush()
print([messages.decode_for_kernel(frame.body).why for frame in kernel.receive()], [*made._runs])
"""


def test_agent_without_room_for_more_files_refuses_to_detach_and_goes_on() -> None:
    command = [sys.executable, "-c", _DETACH_WITHOUT_ROOM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "['Too many open files'] ['1']\n", done.stderr


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


@pytest.mark.parametrize("shows", [True, False])
def test_torchs_table_of_compile_times_appears_if_it_is_asked_for(launch: Callable[..., Job], shows: bool) -> None:
    job = launch(functions.shows_compile_times, shows, num_processes=1)
    job.results(timeout_s=60)
    assert ("TorchDynamo compilation metrics" in job.logs(0)) is shows


def test_exit_functions_run_with_a_torch_that_has_no_such_table(launch: Callable[..., Job]) -> None:
    job = launch(functions.lacks_compile_times, num_processes=1)
    job.results(timeout_s=60)
    assert "left" in job.logs(0)


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


def test_ranks_can_save_when_the_agent_is_told_to_end(launch: Callable[..., Job], tmp_path: pathlib.Path) -> None:
    # By a signal to it alone; to all processes of the run, as Slurm does; also to one that restarts ranks; by the
    # kernel. Each launch but the first gets the agent that follows an ended one.
    for how in ("agent", "all", "all with restarts", "kernel"):
        (tmp_path / how).mkdir()
        assert_ranks_can_save(launch, tmp_path / how, how)
    assert launch(functions.rank).results(timeout_s=60) == [0, 1]
    local.engine().close()  # the last agent, which wasn't there before


def assert_ranks_can_save(launch: Callable[..., Job], folder: pathlib.Path, how: str) -> None:
    job = launch(functions.saves_at_sigterm, str(folder), grace_s=60.0, max_restarts=int("restarts" in how))

    def have(what: str) -> bool:
        return all((folder / f"{rank} {what}").exists() for rank in range(2))

    processes.wait_until(lambda: have("trains") or job.done, f"both ranks train ({how})", 60)
    [agent] = [child for child in processes.children(os.getpid()) if processes.is_agent(child)]
    everything = [agent, *processes.descendants(agent.pid)]
    closing = threading.Thread(target=local.engine().close)
    if how == "kernel":
        closing.start()
    else:
        for process in everything if "all" in how else [agent]:
            os.kill(process.pid, signal.SIGTERM)
    processes.wait_until(lambda: have("was asked") or job.done, f"both ranks save ({how})", 60)
    assert not job.done, (how, job.error)
    assert not have("has saved"), how
    (folder / "go").touch()
    assert job.wait(60), how
    assert have("has saved"), how
    assert (job.status, type(job.error)) == ("stopped", RunStoppedError), how
    assert ("SIGTERM" in str(job.error)) is (how != "kernel"), how
    processes.wait_until(lambda: not any(process.is_alive for process in everything), f"all have gone ({how})")
    if how == "kernel":
        closing.join(30)

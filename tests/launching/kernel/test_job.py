"""The handle of a run: which failure is the one reported, and what results are."""

from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Iterator

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import (
    NotebookAccelError,
    RankFailedError,
    RunError,
    RunTimeoutError,
)
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.results import write_result_file
from notebook_accel.launching.spec import JobSpec, Source
from notebook_accel.payload import memory_files
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.agent_messages import RankDump

BOUND: dict[str, object] = {}


def make_job(world_size: int = 2, log_folder: pathlib.Path | None = None, **options: object) -> Job:
    spec = JobSpec(name="train", world_size=world_size, environment={}, working_directory="/", sys_path=[])
    files = [memory_files.memory_file("result") for _ in range(world_size)]
    config = LaunchConfig().replace(**options)
    request = LaunchRequest(Target({}), {}, spec, config, "2 CPUs", set_variables=BOUND.update)
    return Job(request, result_files=files, log_folder=log_folder)


@pytest.fixture
def job() -> Iterator[Job]:
    made = make_job()
    yield made
    if not made.done:
        made.end("stopped")


def write_result(job: Job, rank: int, value: object, pulled: dict[str, object] | None = None) -> None:
    write_result_file(job.result_files.descriptors[rank], {"": value, **(pulled or {})}, rank=rank, advice="")
    job.deliver(rank, events.Finished())
    job.deliver(rank, events.Ended(exit_code=0))


def test_results_and_pulled_names(job: Job) -> None:
    descriptors = list(job.result_files.descriptors)
    write_result(job, 1, "one")
    write_result(job, 0, "zero", {"model": 3})
    assert (job.done, job.status) == (False, "starting")
    job.end("")
    assert job.results() == ["zero", "one"]
    assert (job.status, job.error, BOUND) == ("succeeded", None, {"model": 3})
    job.results().clear()
    assert job.results() == ["zero", "one"]  # read once, and each caller's list is its own
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize("rank", [-1, 2])
def test_logs_are_of_ranks_that_there_are(job: Job, rank: int, tmp_path: pathlib.Path) -> None:
    job.log_files = (tmp_path / "rank_0.log", tmp_path / "rank_1.log")
    with pytest.raises(IndexError, match=f"no rank {rank}: this run has ranks 0 to 1"):
        job.logs(rank)
    job.deliver(0, events.Numbered(first_rank=2, world_size=4))
    with pytest.raises(IndexError, match="no rank 1: this node has ranks 2 to 3"):
        job.logs(1)


def test_result_that_is_not_there_yet(job: Job) -> None:
    with pytest.raises(RunTimeoutError, match=r"has not ended after 0\.01 s"):
        job.results(timeout_s=0.01)


def failed(message: str, at_s: float, *, lost_peer: bool = False) -> events.Failed:
    return events.Failed(time_s=at_s, kind="ValueError", message=message, traceback="", lost_peer=lost_peer)


def reported(job: Job) -> RankFailedError:
    job.end("failed")
    with pytest.raises(RankFailedError) as caught:
        job.results()
    return caught.value


def test_first_failure_in_time_is_reported_whatever_came_first(job: Job) -> None:
    job.deliver(0, failed("second", 20.0))
    job.deliver(1, failed("first", 10.0))
    for rank in range(2):
        job.deliver(rank, events.Ended(exit_code=1))
    error = reported(job)
    assert (error.rank, "first" in str(error)) == (1, True)
    assert str(error.others[0]) == "rank 0: ValueError: second"


def test_a_death_counts_before_the_peer_that_noticed_it(job: Job) -> None:
    job.deliver(0, failed("Connection closed by peer", 10.0, lost_peer=True))
    job.deliver(0, events.Ended(time_s=10.1, exit_code=1))
    job.deliver(1, events.Ended(time_s=10.2, signal=11))
    error = reported(job)
    assert (error.rank, error.signal) == (1, 11)
    assert "killed by SIGSEGV" in str(error)


def test_last_lines_belong_to_the_rank_that_failed(job: Job) -> None:
    job.deliver(0, events.Output(text="of rank 0"))
    for number in range(30):
        job.deliver(1, events.Output(text=f"a {number}\nb {number}"))
    job.deliver(1, failed("x", 1.0))
    error = reported(job)
    assert error.last_output == tuple(f"{letter} {number}" for number in range(25, 30) for letter in "ab")


def test_what_rank_0_sent_is_bound_though_another_rank_failed(job: Job) -> None:
    BOUND.clear()
    write_result(job, 0, "zero", {"model": 4})
    job.deliver(1, failed("x", 1.0))
    job.deliver(1, events.Ended(exit_code=1))
    error = reported(job)
    assert (error.rank, error.pulled, BOUND) == (1, ("model",), {"model": 4})
    with pytest.raises(RankFailedError):
        job.results()


def test_failure_names_its_ranks_log(tmp_path: pathlib.Path) -> None:
    job = make_job(log_folder=tmp_path)
    assert job.log_files == (tmp_path / "rank_0.log", tmp_path / "rank_1.log")
    job.deliver(1, failed("x", 1.0))
    error = reported(job)
    assert error.log_file == str(tmp_path / "rank_1.log")
    assert f"Its whole output: {tmp_path}/rank_1.log" in str(error)


def test_logs_are_text(tmp_path: pathlib.Path, job: Job) -> None:
    logged = make_job(log_folder=tmp_path)
    (tmp_path / "rank_1.log").write_text("a\nb\n")
    assert (logged.logs(1), logged.logs(1, tail=1)) == ("a\nb\n", "b\n")
    assert logged.logs(0) == ""  # the rank is about to be started
    logged.deliver(0, events.Numbered(first_rank=2, world_size=4))
    assert logged.logs(3) == "a\nb\n"  # by its number among all nodes' ranks
    with pytest.raises(NotebookAccelError, match="has no log files"):
        job.logs(0)
    logged.end("stopped")
    assert (logged.logs(2), logged.logs(3, tail=1)) == ("", "b\n")


def test_ranks_are_described_by_what_they_said(job: Job) -> None:
    job.deliver(0, events.Started(pid=7))
    job.deliver(0, events.Progress(step=3, steps=13, device="cuda:0"))
    job.deliver(0, events.Memory(used_bytes=5, total_bytes=9, kind="device"))
    job.deliver(0, events.Silent(since_s=1.0, at="In[7], line 3 in f"))
    job.deliver(1, events.Finished())
    described = job.ranks
    first, second = described
    assert (first.word, first.pid, first.device, first.step, first.steps) == ("silent", 7, "cuda:0", 3, 13)
    assert (first.memory_used_bytes, first.memory_total_bytes) == (5, 9)
    assert first.silent is not None and first.silent.at == "In[7], line 3 in f"
    assert (second.word, second.pid, second.steps) == ("finished", None, None)
    job.deliver(0, events.Progress(step=4, steps=14))
    assert (first.steps, job.ranks[0].steps, job.ranks[0].silent) == (13, 14, None)
    job.deliver(0, events.Ended(signal=9))
    assert job.ranks[0].word == "killed"


class Told:
    """Notes how often it is asked for stacks."""

    def __init__(self) -> None:
        self.inspections = 0

    def __call__(self, order: messages.RunOrder) -> None:
        self.inspections += isinstance(order, messages.Inspect)


def test_stacks_that_nobody_answers_for_are_an_error_and_later_ones_no_old_news(job: Job) -> None:
    told = Told()
    job.send_order = told
    job.take_dumps([RankDump(rank=0, pid=1, condition="unresponsive")])
    with pytest.raises(RunError, match=r"within 0\.01 s"):
        job.stacks(timeout_s=0.01)
    threading.Timer(0.05, job.take_dumps, [[RankDump(rank=1, pid=2, condition="stopped")]]).start()
    assert [stack.condition for stack in job.stacks(timeout_s=30)] == ["not_ready", "stopped"]
    assert told.inspections == 2
    job.end("stopped")
    assert [stack.condition for stack in job.stacks()] == ["ended", "ended"]


def test_end_of_the_run_ends_waiting_for_stacks(job: Job) -> None:
    job.send_order = Told()
    threading.Timer(0.05, job.end, ["stopped"]).start()
    assert str(job.stacks(timeout_s=60)) == "rank 0 has ended\nrank 1 has ended"


def test_silence_is_asked_about_once_and_its_answer_is_among_the_events(job: Job) -> None:
    told = Told()
    job.send_order = told
    for rank in range(2):
        job.deliver(rank, events.Progress(time_s=100.0, step=1, steps=1))
    for now_s in (105.0, 111.0, 112.0):
        job.notice_silence(now_s)
    assert told.inspections == 1
    text = 'Current thread 0x01 (most recent call first):\n  File "/home/me/train.py", line 4 in train'
    job.take_dumps(
        [RankDump(rank=0, pid=1, condition="answered", text=text), RankDump(rank=1, pid=2, condition="stopped")]
    )
    silent = [(rank, event.at) for rank, event in job.events() if isinstance(event, events.Silent)]
    assert silent == [(0, "/home/me/train.py, line 4 in train"), (1, "the process is stopped")]


def test_events_are_given_out_once_in_order(job: Job) -> None:
    said = [(0, events.Started(pid=1)), (1, events.Started(pid=2)), (0, events.Output(text="x"))]
    for rank, event in said:
        job.deliver(rank, event)
    assert job.status == "running"
    assert job.events() == said
    assert job.events() == []


def test_spec_survives_the_way() -> None:
    spec = JobSpec(
        name="x", world_size=2, environment={"A": "b"}, working_directory="/", sys_path=["/p"],
        sources={"f": Source("In[1]", "code")}, cell="1", cell_filename="In[1]", calls="f", pull=("a",),
    )  # fmt: skip
    assert JobSpec.decode(spec.encode()) == spec


def test_result_that_was_lost_on_its_way_does_not_hide_why(job: Job) -> None:
    for rank in (0, 1):
        job.deliver(rank, events.Finished())
    job.end("", RunError("The node has gone."))
    with pytest.raises(RunError, match=r"^The node has gone\.$"):
        job.results()

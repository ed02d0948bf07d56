"""The handle of a run: which failure is the one reported, and what results are."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from notebook_accel import events, serialization
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import RankFailedError, RunStoppedError, RunTimeoutError
from notebook_accel.launching.job import Job
from notebook_accel.launching.results import Results
from notebook_accel.launching.spec import JobSpec, Source

BOUND: dict[str, object] = {}


def make_job(world_size: int = 2, **options: object) -> Job:
    spec = JobSpec(name="train", world_size=world_size, environment={}, working_directory="/", sys_path=[])
    files = [serialization.memory_file("result") for _ in range(world_size)]
    return Job(
        "1",
        spec,
        LaunchConfig().replace(**options),
        devices="2 CPUs",
        is_background=False,
        shipped=(),
        result_files=files,
        bind=BOUND.update,
    )


@pytest.fixture
def job() -> Iterator[Job]:
    made = make_job()
    yield made
    if not made.done:
        made.end("stopped")


def write_result(job: Job, rank: int, value: object, pulled: dict[str, object] | None = None) -> None:
    pickled = serialization.pickle_by_value((value, pulled or {}), roots={})
    serialization.seal(job._result_files[rank], pickled)
    job.deliver(rank, events.Finished(result_bytes=1))
    job.deliver(rank, events.Ended(exit_code=0))


def test_results_and_pulled_names(job: Job) -> None:
    descriptors = list(job._result_files)
    write_result(job, 1, "one")
    write_result(job, 0, "zero", {"model": 3})
    assert (job.done, job.status) == (False, "starting")
    job.end("")
    assert job.results() == ["zero", "one"]
    assert (job.status, job.error, BOUND) == ("succeeded", None, {"model": 3})
    assert job.results() is job.results()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


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


def test_a_rank_that_was_stopped_is_not_to_blame(job: Job) -> None:
    job.deliver(0, events.Ended(time_s=5.0, signal=15, stopped=True))
    job.deliver(1, failed("the cause", 10.0))
    job.deliver(1, events.Ended(exit_code=1))
    assert reported(job).rank == 1


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


def test_stopped_run_says_so() -> None:
    job = make_job()
    job.end("stopped")
    assert job.status == "stopped"
    with pytest.raises(RunStoppedError):
        job.results()


def test_timeout_names_its_limit() -> None:
    job = make_job(timeout_s=1.5)
    job.end("timeout")
    with pytest.raises(RunTimeoutError, match=r"timeout_s of 1\.5 s"):
        job.results()
    assert job.status == "failed"


def test_failed_run_holds_no_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    job = make_job()
    job.end("failed")
    assert len(os.listdir("/proc/self/fd")) == before


def test_events_are_given_out_once_in_order(job: Job) -> None:
    said = [(0, events.Started(pid=1)), (1, events.Started(pid=2)), (0, events.Output(text="x"))]
    for rank, event in said:
        job.deliver(rank, event)
    assert job.status == "running"
    assert job.events() == said
    assert job.events() == []


def test_results_are_a_sequence() -> None:
    results = Results([1, 2, 3])
    assert (results[0], results[-1], results[1:], len(results), list(results)) == (1, 3, [2, 3], 3, [1, 2, 3])
    assert results == [1, 2, 3] and results == Results([1, 2, 3]) and results != [1]
    assert repr(results) == "[1, 2, 3]"


def test_spec_survives_the_way() -> None:
    spec = JobSpec(
        name="x", world_size=2, environment={"A": "b"}, working_directory="/", sys_path=["/p"],
        sources={"f": Source("In[1]", "code")}, cell="1", cell_filename="In[1]", calls="f", pull=("a",),
    )  # fmt: skip
    assert JobSpec.decode(spec.encode()) == spec

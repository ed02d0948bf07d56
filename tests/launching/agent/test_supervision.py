"""What the agent does with a run whose ranks fail, die or are told to end. Template and ranks are scripts."""

from __future__ import annotations

import errno
import os
import pathlib
import select
from signal import SIGINT, SIGKILL, SIGSEGV, SIGTERM

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import (
    LaunchError,
    ProcessStartError,
    RankFailedError,
    RunError,
    RunStoppedError,
    RunTimeoutError,
)
from notebook_accel.launching import logs
from notebook_accel.launching.kernel import local
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.spec import JobSpec
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import Message
from tests.loopback import Loopback, Rank

DEAF = {SIGINT, SIGTERM}


def failure(job: Job) -> RankFailedError:
    with pytest.raises(RankFailedError) as caught:
        job.results(1.0)
    return caught.value


def restarted(loopback: Loopback, job: Job, reason: BaseException) -> list[Rank]:
    """Return the ranks that have taken the place of those of which one has failed."""
    before = loopback.ranks_of(job)
    before[1].fail(reason)
    loopback.settle()
    after = loopback.ranks_of(job)
    assert len(after) == 2 and not set(before) & set(after)
    return after


def test_first_failure_stops_the_others_at_once_and_is_the_one_reported(loopback: Loopback) -> None:
    other, job = loopback.launch(name="other"), loopback.launch()
    first, second = loopback.ranks_of(job)
    before_s = loopback.now_s
    second.fail(ValueError("boom"))
    error = failure(job)
    assert str(error).startswith("rank 1 of 2 failed: ValueError: boom") and loopback.now_s == before_s
    assert [str(end) for end in error.others] == ["rank 0: stopped"] and first.signals == [SIGTERM]
    assert (other.status, len(loopback.ranks)) == ("running", 2)


def test_failed_rank_that_takes_its_time_to_exit_delays_nothing(loopback: Loopback) -> None:
    """Its threads may go on."""
    job = loopback.launch(grace_s=5.0)
    first, second = loopback.ranks_of(job)
    second.raise_error(ValueError("boom"))
    loopback.settle()
    assert (first.signals, second.signals) == ([SIGTERM], [])
    loopback.advance(5.5)
    assert second.signals == [SIGKILL] and failure(job).rank == 1


@pytest.mark.parametrize("tells_why", [True, False])
def test_peer_of_a_rank_that_lost_it_has_a_moment_to_say_why(loopback: Loopback, tells_why: bool) -> None:
    job = loopback.launch()
    first, second = loopback.ranks_of(job)
    first.fail(RuntimeError("Connection closed by peer"), lost_peer=True)
    loopback.advance(0.5)
    assert second.signals == []
    if tells_why:
        second.fail(ValueError("boom"))
    else:
        loopback.advance(1.0)
        assert second.signals == [SIGTERM]
    assert failure(job).rank == int(tells_why)


def test_rank_that_has_ended_by_itself_was_not_stopped(loopback: Loopback) -> None:
    job = loopback.launch()
    first, second = loopback.ranks_of(job)
    [template] = loopback.templates
    template.holds_reports = True
    second.exit(-SIGSEGV)  # and isn't reaped
    first.fail(ValueError("boom"), lost_peer=True)
    loopback.advance(2.0)
    template.report()
    error = failure(job)
    assert (error.rank, error.signal) == (1, SIGSEGV)


def test_rank_is_signalled_though_its_template_has_not_reported_it_yet(loopback: Loopback) -> None:
    loopback.delays_ranks = True
    job = loopback.launch(ranks=1)
    loopback.templates[0].holds_reports = True
    loopback.ranks[0].start()
    job.interrupt()
    loopback.settle()
    loopback.templates[0].report()
    assert "KeyboardInterrupt" in [rank.failed.kind for rank in job.ranks if job.wait(1.0) and rank.failed is not None]


def test_run_whose_ranks_take_an_interrupt_and_return_has_its_results(loopback: Loopback) -> None:
    job = loopback.launch()
    for rank in loopback.ranks:
        rank.ignores = DEAF
    job.interrupt()
    loopback.settle()
    for rank in loopback.ranks:
        rank.finish(rank.number)
    assert (job.results(1.0), job.status, job.ending.why) == ([0, 1], "succeeded", "interrupted")


@pytest.mark.parametrize(("how", "signals"), [("interrupt", [SIGINT, SIGTERM, SIGKILL]), ("stop", [SIGTERM, SIGKILL])])
def test_deaf_rank_gets_a_stronger_signal_after_each_grace_however_often_it_is_ended(
    loopback: Loopback, how: str, signals: list[int]
) -> None:
    job = loopback.launch(ranks=1, grace_s=60.0)
    [rank] = loopback.ranks
    rank.ignores = DEAF
    for number in range(1, len(signals) + 1):
        for _ in range(59):
            getattr(job, how)()
            loopback.advance(1.0)
        assert rank.signals == signals[:number]
        loopback.advance(1.5)
    assert (job.status, type(job.error)) == ("stopped", RunStoppedError)
    assert [rank.word for rank in job.ending.ranks] == [rank.word for rank in job.ranks] == ["stopped"]


def test_rank_that_goes_on_after_the_grace_is_named_as_that(loopback: Loopback) -> None:
    job = loopback.launch(grace_s=5.0)
    first, second = loopback.ranks_of(job)
    first.ignores = DEAF
    second.fail(ValueError("boom"))
    assert not job.wait(4.9) and job.wait(1.0)
    assert "rank 0: stopped by SIGKILL, since it went on after the grace" in str(failure(job))


def test_rank_0_is_asked_for_its_variables_before_it_is_stopped(loopback: Loopback) -> None:
    config = LaunchConfig(num_processes=2, use_cpu=True, grace_s=5.0)
    spec = JobSpec(name="night", world_size=2, pull=("trained",))
    job = local.engine().launch(LaunchRequest(Target(names={}), {}, spec, config))
    loopback.settle()
    first, second = loopback.ranks_of(job)
    first.ignores = DEAF
    second.fail(ValueError("boom"))
    loopback.settle()
    assert first.signals == [SIGINT]
    assert job.wait(11.0) and first.signals == [SIGINT, SIGTERM, SIGKILL]
    assert "trained: rank 0 was ended before it could send them" in str(failure(job).not_pulled)


def test_timeout_interrupts_the_ranks_and_says_where_they_stood(loopback: Loopback) -> None:
    job = loopback.launch(timeout_s=30.0, max_restarts=9)
    first, second = loopback.ranks_of(job)
    loopback.advance(29.0)
    assert first.signals == second.signals == []
    with pytest.raises(RunTimeoutError, match=r"timeout_s of 30 s(.|\n)*rank 0 was at In\[1\], line 2"):
        job.results(2.0)
    assert first.signals == second.signals == [SIGINT] and (job.status, job.restarts) == ("failed", ())


def test_finished_ranks_stay_until_all_have_finished(loopback: Loopback) -> None:
    job = loopback.launch(ranks=3)
    ranks = loopback.ranks_of(job)
    ranks[1].finish("one")
    loopback.settle()
    assert [rank.told for rank in ranks] == [
        [messages.PeersFinished(ranks=[1])], [], [messages.PeersFinished(ranks=[1])]
    ]  # fmt: skip
    assert len(loopback.ranks) == 3
    ranks[0].finish("zero")
    ranks[2].finish("two")
    assert job.results(1.0) == ["zero", "one", "two"]


def test_template_that_is_killed_is_replaced_and_a_run_that_has_not_begun_gets_the_next(loopback: Loopback) -> None:
    loopback.delays_ranks = True
    job = loopback.launch(ranks=1)
    loopback.templates[0].kill()
    loopback.settle()
    assert len(loopback.templates) == 2
    loopback.ranks[0].start()
    loopback.ranks[0].finish("begun again")
    assert job.results(1.0) == ["begun again"]
    loopback.templates[1].kill()  # while nobody uses it
    loopback.delays_ranks = False
    job = loopback.launch()
    assert len(loopback.templates) == 3 and job.status == "running"
    loopback.templates[2].kill()
    with pytest.raises(RunError, match="has died"):
        job.results(1.0)
    assert loopback.launch().status == "running"


def test_variable_that_imports_depend_on_gets_a_new_template(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = loopback.launch()
    loopback.launch()
    assert len(loopback.templates) == 1
    monkeypatch.setenv("PYTORCH_JIT", "1")
    other = loopback.launch()
    first, second = loopback.templates
    assert [rank.job_id for rank in second.ranks] == [other.id] * 2
    for rank in list(first.ranks):
        rank.finish()
    assert job.wait(1.0) and first.returncode is not None  # nobody needs it any more
    assert other.status == "running"


def test_template_that_is_never_ready_is_killed_in_the_end(loopback: Loopback) -> None:
    loopback.delays_templates = True
    job = loopback.launch()
    loopback.advance(170.0)
    assert job.status == "starting"
    with pytest.raises(ProcessStartError, match="could not be started"):
        job.results(20.0)


def test_agent_that_is_told_to_end_lets_the_ranks_save_and_restarts_nothing(loopback: Loopback) -> None:
    job = loopback.launch(grace_s=60.0, max_restarts=1)
    first, second = loopback.ranks_of(job)
    first.ignores = second.ignores = DEAF
    [process] = loopback.agents
    process.agent._leave("terminated")
    loopback.advance(30.0)
    assert first.signals == second.signals == [SIGTERM] and not job.done
    first.exit(0)
    second.exit(0)
    with pytest.raises(RunStoppedError, match="SIGTERM"):
        job.results(1.0)
    assert process.returncode == 0
    assert loopback.launch().status == "running"  # with another agent


# Restarts --------------------------------------------------------------------------------------------------------


def test_ranks_are_restarted_together_until_they_succeed(loopback: Loopback) -> None:
    job = loopback.launch(max_restarts=3)
    ports = {rank.fork.place.master_port for rank in loopback.ranks}
    for number in (1, 2):
        ranks = restarted(loopback, job, ValueError(f"failure {number}"))
        assert [rank.fork.variables["TORCHELASTIC_RESTART_COUNT"] for rank in ranks] == [str(number)] * 2
        ports |= {rank.fork.place.master_port for rank in ranks}
    assert len(ports) == 3
    for rank in ranks:
        rank.finish(rank.number)
    assert job.results(1.0) == [0, 1]
    assert job.restarts == ("rank 1: ValueError: failure 1", "rank 1: ValueError: failure 2")


def test_last_failure_is_raised_and_says_what_came_before(loopback: Loopback) -> None:
    job = loopback.launch(max_restarts=1)
    loopback.ranks_of(job)[1].print("before the first")
    ranks = restarted(loopback, job, RuntimeError("attempt 0"))
    ranks[1].print("before the last")
    ranks[1].fail(RuntimeError("attempt 1"))
    error = failure(job)
    assert type(error.__cause__) is RuntimeError and error.__cause__.args == ("attempt 1",)
    assert (error.last_output, error.restarts) == (("before the last",), ("rank 1: RuntimeError: attempt 0",))
    assert "started again once before" in str(error)
    assert job.logs(1) == "before the first\nbefore the last\n"


def test_result_of_a_failed_attempt_is_not_in_the_way(loopback: Loopback) -> None:
    job = loopback.launch(max_restarts=1)
    loopback.ranks_of(job)[0].finish("long" * 1000)
    for rank in restarted(loopback, job, ValueError("boom")):
        rank.finish("short")
    assert job.results(1.0) == ["short", "short"]


@pytest.mark.parametrize("end", ["stop", "interrupt", "timeout", "template"])
def test_nothing_is_restarted_once_the_run_is_to_end(loopback: Loopback, end: str) -> None:
    other = loopback.launch(name="other", preload=())
    job = loopback.launch(max_restarts=9, grace_s=60.0, timeout_s=50.0 if end == "timeout" else None)
    first, second = loopback.ranks_of(job)
    first.ignores = DEAF
    second.fail(ValueError("boom"))
    loopback.settle()
    assert first.signals == [SIGTERM]
    if end == "template":
        loopback.templates[0].kill()
    elif end != "timeout":
        getattr(job, end)()
    loopback.advance(55.0)
    if end != "template":
        first.exit(0)
    assert job.wait(10.0) and job.restarts == () and loopback.ranks_of(job) == []
    assert other.status == ("failed" if end == "template" else "running")


def test_interrupt_in_a_rank_is_no_failure_to_restart_after(loopback: Loopback) -> None:
    job = loopback.launch(max_restarts=9)
    loopback.ranks_of(job)[1].fail(KeyboardInterrupt("0"))
    assert "KeyboardInterrupt: 0" in str(failure(job)) and job.restarts == ()


# Runs that keep the other ranks when one dies -------------------------------------------------------------------


@pytest.fixture
def kept(loopback: Loopback) -> Job:
    """A session's run, of two ranks."""
    config = LaunchConfig(num_processes=2, use_cpu=True)
    request = LaunchRequest(Target(names={}), {}, JobSpec(name="kept", world_size=2), config, on_death="keep")
    job = local.engine().launch(request)
    loopback.settle()
    return job


def test_run_that_keeps_its_ranks_goes_on_without_any_and_restarts_them(loopback: Loopback, kept: Job) -> None:
    first, second = loopback.ranks_of(kept)
    with pytest.raises(LaunchError, match="It is running"):
        kept.respawn(1)
    second.exit(3)
    loopback.settle()
    assert (kept.ranks[1].word, first.signals, kept.status) == ("failed", [], "running")
    first.exit(-SIGKILL)
    loopback.advance(100.0)
    assert (kept.ranks[0].word, kept.status) == ("killed", "running")
    for number in range(2):
        kept.respawn(number)
    loopback.settle()
    for rank in loopback.ranks_of(kept):
        rank.finish(rank.number)
    assert kept.results(1.0) == [0, 1]
    with pytest.raises(LaunchError, match="The run has ended"):
        kept.respawn(1)
    with pytest.raises(LaunchError, match="on_death='stop'"):
        loopback.launch().respawn(1)


def test_run_without_any_rank_can_be_stopped(loopback: Loopback, kept: Job) -> None:
    for rank in loopback.ranks_of(kept):
        rank.exit(3)
    kept.interrupt(escalate=False)
    loopback.settle()
    assert not kept.done
    kept.stop()
    assert kept.wait(1.0) and kept.status == "stopped"


# Messages ----------------------------------------------------------------------------------------------------------


def test_kernel_hears_of_the_end_of_a_run_before_its_logs_are_tidied_up(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = loopback.launch(ranks=1)
    connection = local.engine()._agent.process.connection  # type: ignore[union-attr]
    heard: list[bool] = []
    monkeypatch.setattr(
        logs, "remove_old", lambda **_: heard.append(bool(select.select([connection.fileno()], [], [], 0)[0]))
    )
    loopback.ranks[0].finish()
    assert job.results(1.0) == [None]
    assert heard == [True]


def test_end_of_a_short_run_is_not_kept_waiting_by_what_it_has_reported(loopback: Loopback) -> None:
    job = loopback.launch(ranks=1)
    [rank] = loopback.ranks
    rank.say(events.Metrics(step=1, values={"loss": 0.5}))
    loopback.settle()
    before_s = loopback.now_s
    rank.finish()
    assert job.results(1.0) == [None]
    assert loopback.now_s == before_s


def test_message_that_the_agent_cannot_follow_ends_no_run(loopback: Loopback, tmp_path: pathlib.Path) -> None:
    job = loopback.launch(ranks=1)
    [process] = loopback.agents
    process.agent._handle_order(messages.Broken(text=""), Message(b"", []), "")  # type: ignore[arg-type]  # for the kernel
    told = messages.Detach(job_id=job.id, folder=str(tmp_path))
    process.agent._handle_order(told, Message(b"", [], is_whole=False), "")  # there is no room for its descriptors
    loopback.advance(1.0)
    assert local.engine()._agent._answer.said.why == os.strerror(errno.EMFILE)  # type: ignore[union-attr]
    loopback.ranks[0]._connection.post(b"no event at all")
    loopback.ranks[0].finish()
    assert job.results(1.0) == [None]

"""Profiles of runs that go on: nothing in their code knows of it."""

from __future__ import annotations

import collections
import json
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from notebook_accel import attach, notebook_launcher
from notebook_accel.errors import RankFailedError, RunError
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.state.profiles import Profile, RankProfile
from tests import processes
from tests.behaviour import profiled_programs, slow_programs

_LONG_S = 100.0

pytestmark = pytest.mark.timeout(300)


def has_stepped(job: Job, steps: int = 3) -> Job:
    def do_all_step() -> bool:
        assert not job.done, job.error
        return all((rank.steps or 0) >= steps for rank in job.ranks)

    try:
        processes.wait_until(do_all_step, "all ranks step", _LONG_S)
    except AssertionError:
        print(job.stacks(), *(job.logs(rank) for rank in range(job.world_size)), sep="\n")
        job.kill()
        raise
    return job


@pytest.fixture
def running(launch: Callable[..., Job]) -> Callable[..., Job]:
    """Launches a program and waits until its ranks step."""
    return lambda *args, **options: has_stepped(launch(*args, **options))


def longest_phase(rank: RankProfile) -> str:
    times: collections.Counter[str] = collections.Counter()
    for span in rank.of_kind("phase"):
        times[span.name] += int(span.took_us)
    return times.most_common(1)[0][0]


@pytest.mark.parametrize(
    "is_prepared", [pytest.param(False, id="plain"), pytest.param(True, id="prepared", marks=pytest.mark.slow)]
)
def test_profile_shows_where_the_time_of_each_rank_goes(running: Callable[..., Job], is_prepared: bool) -> None:
    job = running(slow_programs.slow_forward_on_one_rank, is_prepared)
    profile = job.profile(3)
    assert [(rank.rank, rank.steps, rank.why) for rank in profile.ranks] == [(0, 3, ""), (1, 3, "")]
    assert longest_phase(profile.ranks[1]) == "forward"
    assert longest_phase(profile.ranks[0]) == "backward"  # in which it waits for the other one
    assert slow_programs.SLOW_S / 2 < profile.step_s < 10  # on a busy machine the first step may have begun before
    [slowest] = [line for line in profile.lines if line.text.startswith("time.sleep(")]
    assert slowest.place == f"{slow_programs.__file__}, line {slow_programs.line_of('forward')}"
    assert "aten::addmm" in [operator.name for operator in profile.costliest()]
    for rank in profile.ranks:
        assert "gloo:all_reduce" in [span.name for span in rank.of_kind("collective")]
        phases = sum(span.took_us for span in rank.of_kind("phase"))
        assert phases == pytest.approx(rank.took_us, rel=0.02)
    job.kill()
    assert profile.trace is not None
    assert {profile.trace.parent, *(rank.trace.parent for rank in profile.ranks if rank.trace)} == {job.log_folder}
    merged = json.loads(profile.trace.read_bytes())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in merged if event["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 1"]
    steps = collections.Counter(names[event["pid"]] for event in merged if event["name"].startswith("ProfilerStep#"))
    assert steps == {"rank 0": 3, "rank 1": 3}


@pytest.mark.slow
def test_ranks_are_profiled_at_the_same_time(running: Callable[..., Job]) -> None:
    job = running(slow_programs.slow_forward_on_one_rank, False)

    def are_in_step() -> bool:
        first, second = job.profile(5).ranks
        # At most one step apart, where one rank had come to its step a moment before the time for the begin.
        return abs(first.begin_us - second.begin_us) < 2 * first.took_us / 5

    processes.wait_until(are_in_step, "a profile for which both had the request in time", _LONG_S)
    job.kill()


@pytest.mark.slow
def test_run_goes_on_and_can_be_profiled_again(running: Callable[..., Job]) -> None:
    job = running(slow_programs.slow_line_between_the_steps, False)
    first = job.profile(2)
    has_stepped(job, max(rank.steps or 0 for rank in job.ranks) + 3)
    second = job.profile(2)
    assert len({rank.trace for profile in (first, second) for rank in profile.ranks}) == 4
    assert "USDT" not in job.logs(0)  # the profiler's library writes nothing into the user's output
    job.kill()


@pytest.mark.slow
def test_loop_without_a_loader_and_without_phases(running: Callable[..., Job]) -> None:
    job = running(profiled_programs.without_loader, profile="off")
    profile = job.profile(4)
    job.kill()
    assert [rank.steps for rank in profile.ranks] == [4, 4]
    assert not any(rank.of_kind("phase") for rank in profile.ranks)
    assert all(len(rank.of_kind("step")) == 4 for rank in profile.ranks)
    assert "aten::addmm" in str(profile)


@pytest.mark.slow
@pytest.mark.parametrize("is_failing", [False, True])
def test_run_that_ends_meanwhile_leaves_the_steps_so_far(running: Callable[..., Job], is_failing: bool) -> None:
    job = running(profiled_programs.ends_while_it_is_profiled, is_failing)
    profile = job.profile(100)
    done = [rank.steps for rank in profile.measured]
    assert done
    assert set(done) <= {18, 19}  # of 20, of which the first only warms the profiler up
    assert profile.measured[0].why == f"the rank's code ended after {done[0]} of 100 steps"
    assert job.wait(_LONG_S)
    assert isinstance(job.error, RankFailedError) if is_failing else job.results() == ["done", "done"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "why"),
    [
        (profiled_programs.does_no_step, "ranks 0-1: it did 0 of 2 steps in 1 s"),
        (profiled_programs.profiles_itself, "ranks 0-1: its code runs a profiler itself"),
    ],
)
def test_ranks_that_cannot_be_profiled(launch: Callable[..., Job], program: Callable[[], None], why: str) -> None:
    job = launch(program)
    processes.wait_until(lambda: all(rank.pid is not None for rank in job.ranks), "both ranks run", _LONG_S)
    if program is profiled_programs.profiles_itself:
        has_stepped(job)
    with pytest.raises(RunError, match="could be profiled") as raised:
        job.profile(2, timeout_s=1 if program is profiled_programs.does_no_step else _LONG_S)
    assert raised.value.why == why
    job.kill()


@pytest.mark.slow
def test_profiler_that_starts_slowly_holds_up_no_report(running: Callable[..., Job], tmp_path: pathlib.Path) -> None:
    may_start = tmp_path / "may start"
    job = running(profiled_programs.starts_the_profiler_slowly, str(may_start))
    profiles: list[Profile] = []
    asking = threading.Thread(target=lambda: profiles.append(job.profile(2, timeout_s=_LONG_S)))
    asking.start()
    processes.wait_until(lambda: all("starts" in rank.metrics for rank in job.ranks), "the reports", _LONG_S)
    may_start.touch()
    asking.join(_LONG_S)
    assert [rank.steps for rank in profiles[0].ranks] == [2, 2]
    job.kill()


@pytest.mark.slow
def test_attached_run(state_home: pathlib.Path) -> None:
    program: Any = slow_programs.slow_forward_on_one_rank
    notebook_launcher(program, (False,), 2, use_cpu=True, view="none", detach=True, name="night")
    job = has_stepped(attach("night", view="none"))
    profile: Profile = job.profile(2)
    assert [rank.steps for rank in profile.ranks] == [2, 2]
    job.stop()
    assert job.wait(_LONG_S)


def test_stopped_run_has_no_profile(launch: Callable[..., Job]) -> None:
    job = launch(profiled_programs.does_no_step)
    processes.wait_until(lambda: all(rank.pid is not None for rank in job.ranks), "both ranks run", _LONG_S)
    raised: list[RunError] = []

    def ask() -> None:
        try:
            job.profile(2, timeout_s=1000)
        except RunError as error:
            raised.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    processes.wait_until(lambda: job._profile_request is not None, "the request", _LONG_S)
    with pytest.raises(RunError, match="Another profile is being made"):
        job.profile(2)
    job.stop()
    asking.join(_LONG_S)
    assert "it ended meanwhile" in raised[0].why
    with pytest.raises(RunError, match="It has ended"):
        job.profile(2)

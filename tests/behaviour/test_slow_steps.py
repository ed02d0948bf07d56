"""Programs with a planted cause of slowness: the verdict names the cause, the rank and the user's line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.state.diagnosis import Verdict
from notebook_accel.protocol import events
from tests import processes
from tests.behaviour import healthy_programs, slow_programs

_VERDICT_S = 100.0
_HEALTHY_S = 12.0
_QUIET = pytest.mark.quiet  # other work on the cores changes what is slow here
_SLOW = pytest.mark.slow


@pytest.fixture
def verdict(launch: Callable[..., Job]) -> Callable[..., Verdict]:
    """Runs a program until the run's first verdict names this cause, and returns it."""

    def found(cause: str, program: Callable[[bool], None], is_prepared: bool = False) -> Verdict:
        job = launch(program, is_prepared)

        def first() -> Verdict | None:
            assert not job.done, job.error
            named = job.diagnosis().verdicts
            return named[0] if named and named[0].cause == cause else None

        try:
            return processes.wait_until(first, f"the verdict {cause}", _VERDICT_S, poll_s=0.2)
        finally:
            print(job.diagnosis())
            job.kill()

    return found


# A verdict takes three seconds of steps, and there is no other test of one from the user's line to its words.
def test_slow_loader(verdict: Callable[..., Verdict]) -> None:
    said = verdict("data", slow_programs.slow_loader)
    assert said.ranks == (0, 1)
    assert said.place == f"{slow_programs.__file__}, line {slow_programs.line_of('data')}"
    assert "`num_workers=0`" in said.what
    assert "persistent_workers=True" in said.fix


@_SLOW
@pytest.mark.parametrize(
    ("program", "mark", "is_prepared"),
    [
        (slow_programs.slow_samples_on_one_rank, "data", False),
        (slow_programs.slow_forward_on_one_rank, "forward", False),
        (slow_programs.slow_forward_on_one_rank, "forward", True),
    ],
    ids=["samples", "forward", "forward, prepared"],
)
def test_rank_that_the_others_wait_for(
    verdict: Callable[..., Verdict], program: Callable[[bool], None], mark: str, is_prepared: bool
) -> None:
    said = verdict("straggler", program, is_prepared)
    assert said.ranks == (1,)
    assert said.place == f"{slow_programs.__file__}, line {slow_programs.line_of(mark)}"


@_SLOW
@pytest.mark.parametrize(
    ("cause", "program", "mark"),
    [
        ("evaluation", slow_programs.evaluates_each_step_with_a_new_loader, ""),
        ("other code", slow_programs.slow_line_between_the_steps, "other"),
        ("communication", slow_programs.large_gradients, ""),
        ("checkpoint", slow_programs.saves_each_step, "checkpoint"),
        ("compilation", slow_programs.compiles_for_changing_shapes, "compilation"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_planted_cause(verdict: Callable[..., Verdict], cause: str, program: Callable[[bool], None], mark: str) -> None:
    said = verdict(cause, program)
    if mark:
        assert said.place == f"{slow_programs.__file__}, line {slow_programs.line_of(mark)}"


@_QUIET
@pytest.mark.parametrize("program", healthy_programs.PROGRAMS, ids=lambda program: program.__name__)
def test_healthy_program_has_no_verdict(launch: Callable[..., Job], program: Callable[[], None]) -> None:
    job = launch(program)

    def is_seen() -> bool:
        assert not job.done, job.error
        diagnosis = job.diagnosis()
        assert not diagnosis.verdicts, str(diagnosis)
        return diagnosis.run_s > _HEALTHY_S

    try:
        processes.wait_until(is_seen, f"{_HEALTHY_S} s of steps", _VERDICT_S, poll_s=1.0)
        print(job.diagnosis())
    finally:
        job.kill()


@pytest.mark.slow
def test_nothing_is_measured_where_that_is_off(launch: Callable[..., Job]) -> None:
    job = launch(slow_programs.slow_line_between_the_steps, False, profile="off")
    processes.wait_until(lambda: all((rank.steps or 0) > 60 for rank in job.ranks), "3 s of steps", _VERDICT_S)
    job.kill()
    assert not [event for _, event in job.events() if isinstance(event, events.StepTimes)]
    assert str(job.diagnosis()) == "Too few steps have been measured yet."

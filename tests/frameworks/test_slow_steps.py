"""Planted causes of slow steps inside Transformers' ``Trainer`` and Lightning: cause, rank and line are named."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.state.diagnosis import Verdict
from tests import processes
from tests.frameworks import slow_programs

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]

_VERDICT_S = 300.0  # the import of these libraries is in it


@pytest.mark.parametrize("library", ["transformers", "lightning"])
@pytest.mark.parametrize(
    ("cause", "ranks", "marks"),
    [
        ("data", (0, 1), ["data"]),
        ("straggler", (1,), ["straggler"]),
        ("evaluation", (0, 1), ["data", "sample", "transformers", "lightning"]),
        ("checkpoint", (0,), ["transformers", "lightning"]),
    ],
)
def test_planted_cause_is_named(
    library: str,
    cause: str,
    ranks: tuple[int, ...],
    marks: list[str],
    launch: Callable[..., Job],
    tmp_path: pathlib.Path,
) -> None:
    program = getattr(slow_programs, f"with_{library}")
    job = launch(program, cause, str(tmp_path))

    def first() -> Verdict | None:
        assert not job.done, job.error
        named = job.diagnosis().verdicts[:1]
        return named[0] if named and named[0].cause == cause else None

    try:
        said = processes.wait_until(first, f"the verdict {cause}", _VERDICT_S, poll_s=0.2)
    finally:
        print(job.diagnosis())
        job.kill()
    assert said.ranks == ranks
    assert said.place in [slow_programs.line_of(mark) for mark in marks]

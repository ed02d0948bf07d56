"""Programs of the libraries that people train with, on two ranks in a real notebook. ``rows.py`` has the table."""

from __future__ import annotations

import ast
import contextlib
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import kernels
from tests.frameworks.rows import CHECKS, PRELOAD, ROWS, TRAINER, Row
from tests.frameworks.story import FAULT, VARIABLES, CannotTrainError, Run, Story, ends_by, prepare

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(900)]

_MOST_TRACEBACK_FRAMES = 8


@pytest.fixture(scope="module")
def made_kernels(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[], contextlib.AbstractContextManager[kernels.Kernel]]:
    """Makes kernels in which nothing is downloaded."""

    @contextlib.contextmanager
    def make() -> Iterator[kernels.Kernel]:
        with kernels.running(tmp_path_factory.mktemp("kernel"), VARIABLES) as kernel:
            prepare(kernel)
            yield kernel

    return make


@pytest.fixture(scope="module")
def shared_kernel(made_kernels: Callable[[], Any]) -> Iterator[kernels.Kernel]:
    """A notebook that all programs run in, one after the other."""
    with made_kernels() as kernel:
        # Some libraries set variables that torch reads, for which the next launch would get another template.
        imported = kernel.run(f"import {', '.join(PRELOAD)}", 600)
        assert imported.status == "ok", imported.traceback
        yield kernel


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: row.program)
def story(
    request: pytest.FixtureRequest, shared_kernel: kernels.Kernel, tmp_path_factory: pytest.TempPathFactory
) -> Story:
    row: Row = request.param
    try:
        told = Story(row, tmp_path_factory.mktemp(row.program), shared_kernel)
    except CannotTrainError as error:
        if row.cannot_train is not None and row.cannot_train[1] in str(error):
            pytest.xfail(row.cannot_train[0])
        raise
    assert row.cannot_train is None, "it trains now"
    return told


@pytest.fixture(autouse=True)
def _known_to_fail(request: pytest.FixtureRequest) -> None:
    if "story" not in request.fixturenames:
        return
    story: Story = request.getfixturevalue("story")
    check = request.node.originalname.removeprefix("test_")
    assert check in CHECKS
    reason = story.row.fails.get(check)
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason))


def assert_trained(run: Run) -> None:
    assert run.outcome.status == "ok", run.outcome.traceback
    assert [world_size for world_size, _ in run.ends] == [2, 2]
    [_, first], [_, second] = run.ends
    assert first == second, "the ranks end with different models"


def test_trains(story: Story) -> None:
    assert_trained(story.cell)
    assert_trained(story.launched)


def test_again(story: Story) -> None:
    assert FAULT in story.failed.outcome.traceback
    assert story.interrupted.calls() > 0, "it didn't train after the failure"
    assert_trained(story.launched)


def test_session(story: Story) -> None:
    """The runs stand before a failure, after it, and after an interrupt."""
    for run in story.session:
        assert_trained(run)


def test_progress(story: Story) -> None:
    assert story.cell.outcome.status == "ok", story.cell.outcome.traceback
    for rank in story.cell.rows["ranks"]:
        assert rank["step"], rank
        assert rank["total"] == rank["step"] if story.row.has_total else rank["total"] is None, rank
    if TRAINER in story.row.preload:  # whose bars only rank 0 has
        assert len({rank["steps"] for rank in story.cell.rows["ranks"]}) == 1, story.cell.rows
    first = story.cell.rows["ranks"][0]
    assert story.cell.rows["rate"] > 0, story.cell.rows
    assert any("loss" in name and not name.startswith("eval") for name in first["metrics"]), first
    if story.row.evaluation:
        assert story.row.evaluation in (*story.cell.rows["labels"], *first["metrics"]), story.cell.rows


def test_error(story: Story) -> None:
    outcome = story.failed.outcome
    assert outcome.error_name == "RankFailedError"
    first = outcome.error_value.splitlines()[0]
    assert re.fullmatch(rf"rank [01] of 2 failed at In\[\d+\], line \d+: ValueError: {FAULT}", first), first
    line = re.search(r"line (\d+)", first)
    assert line is not None
    shown = outcome.error_value.split("Traceback of rank ")[1]
    assert f", line {line[1]}, in " in shown
    frames = re.findall(r'^  File "(.*)", line', shown, re.MULTILINE)
    assert len(frames) <= _MOST_TRACEBACK_FRAMES, shown
    assert frames[0].startswith("In[") and frames[-1].startswith("In["), shown


def test_interrupt(story: Story) -> None:
    outcome = story.interrupted.outcome
    assert outcome.status == "error"
    assert "KeyboardInterrupt" in outcome.error_name, outcome.traceback
    assert story.left == []
    assert_trained(story.launched)
    if story.row.checkpoints:
        assert story.resume is not None, "it saved no checkpoint"
        # It trains one epoch more, and would train two if it began anew.
        assert 0 < story.launched.calls() < 1.5 * story.cell.calls()


def test_returns(story: Story) -> None:
    assert story.cell.ends, story.cell.outcome.traceback
    _, fingerprint = story.cell.ends[0]
    assert story.pulled == fingerprint
    if story.row.load:
        assert story.loaded == fingerprint


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.program)
def test_numbers(row: Row, shared_kernel: kernels.Kernel, tmp_path: pathlib.Path) -> None:
    if row.cannot_train is not None:
        pytest.xfail(row.cannot_train[0])
    theirs, ours = (
        ends_by(library, row, tmp_path / library, shared_kernel) for library in ("accelerate", "notebook_accel")
    )
    assert [end.split()[0] for end in theirs] == ["2", "2"]
    assert theirs == ours


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.program in ("transformers_trainer", "lightning_trainer")],
    ids=lambda row: row.program,
)
def test_ranks_that_import_by_themselves(made_kernels: Callable[[], Any], row: Row, tmp_path: pathlib.Path) -> None:
    """As in a first cell: nothing is preloaded, so the hooks meet the library while it is imported."""
    with made_kernels() as kernel:
        kernel.run(f"folder, epochs, resume = {str(tmp_path)!r}, 1, None")
        outcome = kernel.run(f"%%distributed --num_processes 2\n{row.source}", 300)
        assert outcome.status == "ok", outcome.traceback
        rows = json.loads(ast.literal_eval(kernel.value("spy.rows()")))
    for rank in rows["ranks"]:
        assert rank["step"] == rank["total"]
        assert "loss" in rank["metrics"]

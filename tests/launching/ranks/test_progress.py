"""Loops of any library move their rank's row, without a line for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from notebook_accel.launching.kernel.job import Job
from notebook_accel.protocol import events
from tests.launching.ranks import training_loops


def reports(job: Job) -> list[events.Progress]:
    """All that rank 0 has said about its steps, once it has returned."""
    job.results(timeout_s=60)
    return [event for rank, event in job.events() if rank == 0 and isinstance(event, events.Progress)]


def runs_one_of(loops: Sequence[Callable[[], Any]]) -> Any:
    """Each rank runs a loop of its own, as if it were alone."""
    loop = loops[int(os.environ["RANK"])]
    os.environ.update(
        dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    )
    return loop()


@pytest.mark.parametrize(
    "half", [0, pytest.param(1, marks=pytest.mark.slow)]
)  # takes over 3 s: fourteen ranks train side by side
def test_every_loop_is_counted_once(launch: Callable[..., Job], half: int) -> None:
    loops = [*training_loops.LOOPS][half::2]
    job = launch(runs_one_of, loops, num_processes=len(loops))
    job.results(timeout_s=100)
    counted = {
        loop.__name__: (rank.step, rank.total, rank.epoch, rank.steps)
        for loop, rank in zip(loops, job.ranks, strict=True)
    }
    assert counted == {loop.__name__: training_loops.LOOPS[loop] for loop in loops}
    assert not any(rank.is_evaluating for rank in job.ranks)


@pytest.mark.parametrize(("ranks", "group_size"), [(2, 0), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_ranks_that_train_without_each_other_are_warned_of(
    launch: Callable[..., Job], ranks: int, group_size: int
) -> None:
    warned, *others = launch(training_loops.two_steps, group_size, num_processes=ranks).results(timeout_s=60)
    assert others == [[]] * (ranks - 1)
    if group_size == 2:
        assert warned == []
    else:
        [(place, text)] = warned
        assert place == training_loops.__file__
        assert text.startswith("The 2 ranks aren't connected: each trains a model of its own")


@pytest.mark.slow
def test_loss_of_every_loop_is_reported(launch: Callable[..., Job]) -> None:
    job = launch(runs_one_of, training_loops.LOSSES, num_processes=len(training_loops.LOSSES))
    losses = list(job.results(timeout_s=60))
    assert [rank.metrics.get("loss") for rank in job.ranks] == losses


@pytest.mark.parametrize(
    "loop",
    [
        training_loops.epochs_and_evaluations,
        pytest.param(training_loops.gradients_off_inside_the_evaluation, marks=pytest.mark.slow),
    ],
    ids=lambda loop: loop.__name__,
)
def test_evaluation_is_told_apart_from_training(launch: Callable[..., Job], loop: Callable[[], None]) -> None:
    said = {(event.total, event.epoch) for event in reports(launch(loop, num_processes=1)) if event.label}
    assert said == {(8, None)}


@pytest.mark.slow
def test_epochs_of_a_prepared_loader_are_those_of_a_bar_over_epochs_only(launch: Callable[..., Job]) -> None:
    """While the first step runs, a bar over all steps can't be told from one over epochs."""
    for loop, epochs in (
        (training_loops.prepared_beside_a_bar_over_all_steps, {(1, None), (2, None), (3, None)}),
        (training_loops.prepared_inside_a_bar_over_epochs, {(1, 3), (2, 3), (3, 3)}),
    ):
        said = [event for event in reports(launch(loop, num_processes=1)) if event.steps > 2]
        assert {(event.epoch, event.epochs) for event in said} == epochs
        assert {event.total for event in said} == {16}


def test_bar_over_epochs_gives_their_number_and_the_loader_the_steps(launch: Callable[..., Job]) -> None:
    said = [(event.epoch, event.epochs, event.step) for event in reports(launch(training_loops.bar_over_epochs))]
    assert (2, 3, 7) in said
    assert not {(1, 3, 0), (0, 3, 0)} & {*said}  # the bar's own count


def test_bar_that_counts_the_steps_keeps_the_row(launch: Callable[..., Job]) -> None:
    assert {event.total for event in reports(launch(training_loops.bar_over_batches, num_processes=1))} == {16}


def test_bar_that_moves_has_the_row_before_one_that_was_opened_later(launch: Callable[..., Job]) -> None:
    said = reports(launch(training_loops.bars_of_phases, num_processes=1))
    assert {event.total for event in said if event.step} == {16, training_loops.EPOCHS}

"""Loops of any library move their rank's row, without a line for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from notebook_accel.launching.kernel.job import Job
from notebook_accel.protocol import events
from tests.launching.ranks import training_loops


def reports(job: Job) -> list[events.Progress]:
    """All that rank 0 has said about its steps, once it has returned."""
    job.results(timeout_s=60)
    return [event for rank, event in job.events() if rank == 0 and isinstance(event, events.Progress)]


@pytest.mark.parametrize("loop", training_loops.LOOPS, ids=lambda loop: loop.__name__)
def test_every_loop_is_counted_once(launch: Callable[..., Job], loop: Callable[[], None]) -> None:
    job = launch(loop, num_processes=1)
    job.results(timeout_s=60)
    [rank] = job.ranks
    assert (rank.step, rank.total, rank.epoch, rank.steps) == training_loops.LOOPS[loop]
    assert not rank.is_evaluating


@pytest.mark.parametrize(("ranks", "group_size"), [(2, 0), (2, 1), (2, 2), (1, 0)])
def test_ranks_that_train_without_each_other_are_warned_of(
    launch: Callable[..., Job], ranks: int, group_size: int
) -> None:
    warned, *others = launch(training_loops.two_steps, group_size, num_processes=ranks).results(timeout_s=60)
    assert others == [[]] * (ranks - 1)
    if ranks == 1 or group_size == 2:
        assert warned == []
    else:
        [(place, text)] = warned
        assert place == training_loops.__file__
        assert text.startswith("The 2 ranks aren't connected: each trains a model of its own")


@pytest.mark.parametrize("loop", training_loops.LOSSES, ids=lambda loop: loop.__name__)
def test_loss_of_every_loop_is_reported(launch: Callable[..., Job], loop: Callable[[], float | None]) -> None:
    job = launch(loop, num_processes=1)
    [loss] = job.results(timeout_s=60)
    assert job.ranks[0].metrics.get("loss") == loss


@pytest.mark.parametrize(
    "loop",
    [training_loops.epochs_and_evaluations, training_loops.gradients_off_inside_the_evaluation],
    ids=lambda loop: loop.__name__,
)
def test_evaluation_is_told_apart_from_training(launch: Callable[..., Job], loop: Callable[[], None]) -> None:
    said = {(event.total, event.epoch) for event in reports(launch(loop, num_processes=1)) if event.label}
    assert said == {(8, None)}


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


@pytest.mark.parametrize(
    ("loop", "total"),
    [(training_loops.bar_over_batches, 16), (training_loops.bar_over_all_steps, 48)],
    ids=["batches", "all_steps"],
)
def test_bar_that_counts_the_steps_keeps_the_row(launch: Callable[..., Job], loop: Any, total: int) -> None:
    assert {event.total for event in reports(launch(loop, num_processes=1))} == {total}

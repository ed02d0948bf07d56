"""Ranks draw alike until training begins and then each its own numbers, unless the program has seeded a generator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from notebook_accel.launching.kernel.job import Job
from tests.launching import functions

GENERATORS = ["python", "numpy", "torch"]


@pytest.mark.parametrize(
    ("seeds", "begins"),
    [
        ([], "prepare"),
        (["torch"], "step"),
        *(
            pytest.param(seeds, begins, marks=pytest.mark.slow)
            for seeds, begins in (
                ([], "step"),
                ([], "compiled step"),
                (["python"], "step"),
                (["numpy"], "step"),
                (GENERATORS, "prepare"),
                (["states"], "step"),
            )
        ),
    ],
    ids=str,
)
def test_ranks_draw_alike_until_training_begins(launch: Callable[..., Job], seeds: list[str], begins: str) -> None:
    first, second = launch(functions.draws, seeds, begins).results(timeout_s=60)
    assert first[:2] == second[:2]
    for name in GENERATORS:
        is_seeded = name in seeds or seeds == ["states"]
        assert all(
            (mine[name] == others[name]) == is_seeded for mine, others in zip(first[2:], second[2:], strict=True)
        )
        assert len({drawn[name] for drawn in first}) == len(first)
    if seeds in (GENERATORS, ["states"]):
        alone = launch(functions.draws, GENERATORS, begins, num_processes=1).results(timeout_s=60)[0]
        assert first == alone


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_each_run_draws_other_numbers(launch: Callable[..., Job], method: str) -> None:
    """So that ranks which split a dataset by chance have the same parts, and those of the next run others."""
    one, next_one = (
        launch(functions.draws, [], "prepare", start_method=method).results(timeout_s=60) for _ in range(2)
    )
    assert one[0][:2] == one[1][:2] and next_one[0][:2] == next_one[1][:2]
    for name in GENERATORS:
        assert one[0][0][name] != next_one[0][0][name]
        assert one[0][2][name] != one[1][2][name]


@pytest.mark.parametrize("how", [pytest.param("plain", marks=pytest.mark.slow), "prepared"])
def test_workers_differ_by_rank_and_the_order_does_not(launch: Callable[..., Job], how: str) -> None:
    first, second = launch(functions.reads, how).results(timeout_s=60)
    order = launch(functions.reads, "plain", num_processes=1).results(timeout_s=60)[0][0]
    mine, others = (order, order) if how == "plain" else (order[:2] + order[4:6], order[2:4] + order[6:])
    assert (first[0], second[0]) == (mine, others)
    assert not any(set(drawn) & set(of_other) for drawn, of_other in zip(first[1:], second[1:], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stream", "shared"])
def test_ranks_that_have_to_read_alike_do(launch: Callable[..., Job], how: str) -> None:
    """Ranks of a stream may take their shares of it, and those of tensor parallelism work on the same samples."""
    first, second = launch(functions.reads, how).results(timeout_s=60)
    assert first == second

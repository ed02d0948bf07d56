"""Runs programs with Accelerate and with this package, and compares their numbers.

The environment has ``NOTEBOOK_ACCEL_COMPAT=accelerate``. The programs avoid cases in which Accelerate is wrong or has
another order: ``adjust_scheduler`` and ``reduce(scale=...)``, which do nothing there; metrics of samples that were
dropped, or read by each rank for itself; and, with several ranks, the order of ``shuffle=True`` without a seedable
sampler, which here is that of one process in plain PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.training import programs, ranks

SPLIT, UNEVEN, DISPATCHED = {"split_batches": True}, {"even_batches": False}, {"dispatch_batches": True}
SEEDABLE = {"use_seedable_sampler": True}
OPTIONS: list[dict[str, Any]] = [{}, SPLIT, UNEVEN]

CASES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *(("samples", (kind,), options) for kind in ("numbers", "drop last", "batch sampler") for options in OPTIONS),
    *(("samples", ("shuffled",), {**SEEDABLE, **options}) for options in OPTIONS),
    *(("samples", ("stream",), options) for options in ({}, SPLIT, {"dispatch_batches": False})),
    *(("metrics", (kind,), options) for kind in ("numbers", "drop last") for options in ({}, SPLIT)),
    ("metrics", ("numbers",), DISPATCHED),
    ("metrics", ("shuffled",), SEEDABLE),
    ("metrics", ("stream",), {}),
    ("training", (24, "numbers", "StepLR"), {}),
    ("training", (24, "numbers", "StepLR"), {"num_steps": 3}),
    ("training", (23, "numbers", "OneCycleLR"), {"num_steps": 4}),
    ("training", (23, "numbers", "CosineAnnealingLR"), {"num_steps": 4, "plugin": {"sync_with_dataloader": False}}),
    ("training", (23, "numbers", "StepLR"), {"num_steps": 3, "plugin": {"sync_each_batch": True}}),
    ("training", (23, "numbers", "OneCycleLR"), {"num_steps": 2, "plugin": {"adjust_scheduler": False}}),
    ("training", (23, "numbers", "LambdaLR"), {"num_steps": 2, **SPLIT}),
    ("training", (21, "numbers", "LambdaLR"), {"num_steps": 2, **DISPATCHED}),
    ("training", (23, "shuffled", "StepLR"), {"num_steps": 2, **SEEDABLE}),
    ("training", (13, "stream", "LambdaLR"), {"num_steps": 2}),
    ("training", (24, "numbers", "StepLR"), {"num_steps": 2, "precision": "bf16"}),
    ("late_sync", (), {}),
    ("checkpoint_of_changed_lists", (), {}),
    ("collectives", (), {}),
    ("trees", (), {}),
    ("surroundings", (), {}),
    ("settings", (), {}),
    ("names", (), {}),
    ("settings_that_change", (), {}),
    ("helpers", (), {}),
]


def side_by_side(number: int, folder: str) -> tuple[Any, Any]:
    """Return the results of a case with Accelerate and with this package; an exception is a result too."""
    warnings.simplefilter("ignore")
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")  # both of them then use it
    name, args, options = CASES[number]
    given = (folder,) if name.startswith("checkpoint") else args
    return outcome("accelerate", name, given, options), outcome("notebook_accel", name, given, options)


def outcome(api: str, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    try:
        return getattr(programs, name)(api, *args, **options)
    except Exception as error:  # noqa: BLE001  the test compares it
        return error


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, ranks.Ranks]]:
    """Return ranks by their number. They stay for all cases, so that the libraries are imported once."""
    told = {"ACCELERATE_USE_CPU": "true", "NOTEBOOK_ACCEL_COMPAT": "accelerate"}
    with contextlib.ExitStack() as running:
        alone = running.enter_context(contextlib.closing(ranks.Ranks([told])))
        yield {1: alone, 2: running.enter_context(ranks.running(2, **told))}


def difference(theirs: Any, ours: Any, path: str = "") -> str:
    """Return the first difference of two structures, except for rounding; empty if there is none."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        return difference([*theirs.values()], [*ours.values()], f"{path}{list(theirs)}")
    if isinstance(theirs, (list, tuple)) and type(theirs) is type(ours) and len(theirs) == len(ours):
        pairs = enumerate(zip(theirs, ours, strict=True))
        return next((found for i, (one, other) in pairs if (found := difference(one, other, f"{path}[{i}]"))), "")
    if isinstance(theirs, float) and isinstance(ours, float) and abs(theirs - ours) <= 1e-6:
        return ""
    return "" if theirs == ours else f"{path}: {theirs!r} there, {ours!r} here"


@pytest.mark.parametrize(("number", "world"), [
    pytest.param(number, world, id=f"{'-'.join(map(str, case))}-{world}", marks=marks)
    for number, case in enumerate(CASES)
    for world, marks in ((1, pytest.mark.slow), (2, ()))
])  # fmt: skip
def test_numbers_are_the_same(groups: dict[int, ranks.Ranks], tmp_path: pathlib.Path, world: int, number: int) -> None:
    results = groups[world].run(side_by_side, number, str(tmp_path), deadline_s=100)
    assert len(results) == world
    for theirs, ours in results:
        assert not isinstance(theirs, Exception), theirs
        assert not difference(theirs, ours)


def test_a_difference_is_found() -> None:
    assert not difference([{"a": (1, 2.0)}], [{"a": (1, 2.0000001)}])
    assert difference([{"a": (1, 2.0)}], [{"a": (1, 2.1)}]) == "[0]['a'][0][1]: 2.0 there, 2.1 here"
    assert difference([1], (1,))
    assert difference([1], [1, 2])

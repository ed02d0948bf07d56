from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from notebook_accel import Accelerator
from notebook_accel.training.schedule_hint import hint
from tests.training.ranks import Ranks


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize(("scheduler", "ranks", "window", "text"), [
    (lambda: lr_scheduler.CosineAnnealingLR(sgd(), T_max=100), 1, 4, ""),
    (lambda: lr_scheduler.ReduceLROnPlateau(sgd()), 4, 1, ""),
    (
        lambda: lr_scheduler.CosineAnnealingLR(sgd(), T_max=100), 4, 1,
        (
            "With 4 ranks, each step of the optimizer advances CosineAnnealingLR by 4: "
            "its 100 steps end after 25 steps of the optimizer."
        ),
    ),
    (
        lambda: lr_scheduler.OneCycleLR(sgd(), max_lr=1.0, total_steps=25), 2, 3,
        (
            "With 2 ranks, each step of the optimizer advances OneCycleLR by 2: "
            "its 25 steps end after 13 steps of the optimizer, 39 batches of each rank."
        ),
    ),
    (
        lambda: lr_scheduler.LambdaLR(sgd(), lambda step: 1.0), 2, 1,
        "With 2 ranks, each step of the optimizer advances LambdaLR by 2.",
    ),
])  # fmt: skip
def test_what_it_says(scheduler: Any, ranks: int, window: int, text: str) -> None:
    assert hint(scheduler(), ranks=ranks, window=window) == text


def test_the_schedule_ends_where_it_is_said_to_end() -> None:
    scheduler = lr_scheduler.OneCycleLR(sgd(), max_lr=1.0, total_steps=25)
    scheduler.optimizer.step()
    for _ in range(13):
        assert scheduler.last_epoch < 25
        for _ in range(2):
            if scheduler.last_epoch < 25:
                scheduler.step()
    assert scheduler.last_epoch == 25


def said(**options: Any) -> list[str]:
    """What is logged when a scheduler is prepared twice."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("notebook_accel")
    logger.addHandler(handler)
    try:
        accelerator = Accelerator(cpu=True, **options)
        optimizer = sgd()
        for _ in range(2):
            scheduler = accelerator.prepare(lr_scheduler.LinearLR(optimizer, total_iters=8))
            accelerator.prepare(scheduler)
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in records]


def said_when_split() -> list[str]:
    return said(split_batches=True)


def test_rank_0_says_it_once_a_schedule(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(said)
    assert len(first) == 2
    assert "its 8 steps end after 4 steps" in first[0]
    assert second == []
    assert two_ranks.run(said_when_split) == [[], []]

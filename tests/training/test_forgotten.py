"""Objects that weren't prepared: training runs, and rank 0 says at its first backward pass what is wrong with it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_accel import Accelerator
from tests.training.ranks import Ranks

KINDS = ("model", "optimizer", "loader")


def said(forgotten: str, steps: int) -> list[str]:
    """The first words of each warning in a loop in which one object wasn't prepared."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = torch.nn.Linear(1, 1)
    parts: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(torch.ones(8, 1), batch_size=1),
    }
    parts |= {kind: accelerator.prepare(part) for kind, part in parts.items() if kind != forgotten}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in parts["loader"]:
            with accelerator.accumulate(parts["model"]):
                accelerator.backward(parts["model"](x).sum())
                parts["optimizer"].step()
                parts["optimizer"].zero_grad()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message).split(" has been")[0] for warning in caught]


@pytest.mark.parametrize("forgotten", [*KINDS, "nothing"])
def test_on_two_ranks(two_ranks: Ranks, forgotten: str) -> None:
    expected = [f"No {forgotten}"] if forgotten in KINDS else []
    assert two_ranks.run(said, forgotten, 2) == [expected, []]


def test_on_one_rank() -> None:
    assert [said(kind, 2) for kind in KINDS] == [[], ["No optimizer"], []]
    assert said("optimizer", 1) == []

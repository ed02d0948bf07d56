from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import pytest
import torch

from notebook_accel import Accelerator, ConfigError
from notebook_accel.local_sgd import LocalSGD
from tests.training.ranks import Ranks, on_ranks


def train(steps: int, fails_at: int | None = None) -> list[Any]:
    """Return the rank's weight after each step; its gradient is the rank plus 1."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    weight = torch.zeros(1, requires_grad=True)
    weight, optimizer = accelerator.prepare(weight, torch.optim.SGD([weight], lr=1.0))
    seen = []
    with contextlib.suppress(KeyError), LocalSGD(accelerator, weight, 2) as local:
        for step in range(steps):
            accelerator.backward((weight * (rank + 1)).sum())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            seen.append(weight.item())
            if step == fails_at:
                raise KeyError
    return [*seen, weight.item(), accelerator.reduce(torch.ones(1)).item()]


def test_weights_are_averaged_every_few_steps_and_at_the_end(two_ranks: Ranks) -> None:
    assert two_ranks.run(train, 3) == [[-1, -3, -4, -4.5, 2], [-2, -3, -5, -4.5, 2]]


def test_after_an_error_nothing_is_averaged(two_ranks: Ranks) -> None:
    assert two_ranks.run(train, 3, 0) == [[-1, -1, 2], [-2, -2, 2]]


def saved_between_averagings(folder: str, loads: str) -> list[float]:
    """Return the rank's weight after each of the last steps; its gradient is the rank plus 1."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    if loads == "before":
        accelerator.load_state(folder)
    seen = []
    with LocalSGD(accelerator, net, 3) as local:
        if loads == "inside":
            local.step()
            accelerator.load_state(folder)
        for step in range(2 if loads else 0, 6):
            accelerator.backward(net(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            seen.append(model.weight.item())
            if step == 1 and not loads:
                accelerator.save_state(folder)
    accelerator.save_state(f"{folder} later")  # averages nothing more
    return [*seen[-4:], model.weight.item()]


def test_a_checkpoint_has_the_average(two_ranks: Ranks, tmp_path: pathlib.Path) -> None:
    expected = [[-4, -5, -7.5, -8.5, -9], [-5, -7, -7.5, -9.5, -9]]  # from -3 on
    for loads in ("", "before", "inside"):
        assert two_ranks.run(saved_between_averagings, str(tmp_path / "state"), loads) == expected


@on_ranks(2)
def test_gradients_are_local_inside_only() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1, bias=False)
    net = accelerator.prepare(model)
    seen = []
    for enabled in (True, False):
        with LocalSGD(accelerator, net, 2, enabled):
            accelerator.backward(net(torch.full((1, 1), float(accelerator.process_index))).sum())
            seen.append(model.weight.grad.item())  # type: ignore[union-attr]
            net.zero_grad()
    accelerator.backward(net(torch.full((1, 1), float(accelerator.process_index))).sum())
    assert seen == [accelerator.process_index, 0.5]
    assert model.weight.grad.item() == 0.5  # type: ignore[union-attr]


def test_alone_it_is_ordinary_training() -> None:
    assert train(3) == [-1, -2, -3, -3, 1]


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_steps_that_cannot_be(steps: Any) -> None:
    with pytest.raises(ConfigError, match="local_sgd_steps"):
        LocalSGD(Accelerator(cpu=True), torch.nn.Linear(1, 1), steps)

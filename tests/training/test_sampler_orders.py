"""Tests that all ranks together draw the order that one process draws, whatever draws it, also after a resume."""

from __future__ import annotations

import math
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from notebook_accel import Accelerator
from notebook_accel.utils import set_seed
from tests.training.ranks import Ranks

_SAMPLES = 48


class Shuffled(Sampler[int]):
    """A sampler as people write it: it has no generator, and draws by Python's own."""

    def __len__(self) -> int:
        return _SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(_SAMPLES))
        random.shuffle(order)
        yield from order


class Buckets:
    """A batch sampler without a ``batch_size``, whose last batch is shorter."""

    def __init__(self, samples: int = _SAMPLES, shuffles: bool = True) -> None:
        self.samples, self.shuffles = samples, shuffles

    def __len__(self) -> int:
        return math.ceil(self.samples / 6)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.samples).tolist() if self.shuffles else list(range(self.samples))
        yield from (order[first : first + 6] for first in range(0, self.samples, 6))


_OPTIONS: dict[str, Any] = {
    "weighted": lambda: {"batch_size": 6, "sampler": WeightedRandomSampler(torch.arange(1.0, _SAMPLES + 1), _SAMPLES)},
    "subset": lambda: {"batch_size": 6, "sampler": SubsetRandomSampler(range(_SAMPLES))},
    "subset in batches": lambda: {"batch_sampler": BatchSampler(SubsetRandomSampler(range(_SAMPLES)), 6, True)},
    "own sampler": lambda: {"batch_size": 6, "sampler": Shuffled()},
    "own batch sampler": lambda: {"batch_sampler": Buckets()},
    "batches as items": lambda: {"batch_size": None, "sampler": BatchSampler(RandomSampler(range(_SAMPLES)), 6, False)},
}


def loader_of(kind: str) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    dataset = TensorDataset(torch.arange(_SAMPLES))
    return accelerator, accelerator.prepare(DataLoader(dataset, **_OPTIONS[kind]()))


def drawn(kind: str, device_specific: bool) -> list[list[int]]:
    set_seed(3, device_specific=device_specific)
    accelerator, loader = loader_of(kind)
    return [[n for (x,) in loader for n in accelerator.gather(x).tolist()] for _ in range(2)]


@pytest.mark.parametrize("kind", _OPTIONS)
def test_ranks_draw_the_order_of_one_process(one_rank: Ranks, two_ranks: Ranks, kind: str) -> None:
    [expected] = one_rank.run(drawn, kind, False)
    assert expected[0] != expected[1] != sorted(expected[1])
    assert two_ranks.run(drawn, kind, False) == [expected, expected]
    if kind != "weighted":
        for found in two_ranks.run(drawn, kind, True):  # also where each rank has random numbers of its own
            assert [sorted(epoch) for epoch in found] == [list(range(_SAMPLES))] * 2


def save(kind: str, folder: str) -> list[int]:
    set_seed(5)
    accelerator, loader = loader_of(kind)
    seen: list[int] = []
    for (x,) in loader:
        seen += accelerator.gather(x).tolist()
        if len(seen) == 24:
            accelerator.save_state(folder)
            break
    return seen


def load(kind: str, folder: str) -> list[int]:
    accelerator, loader = loader_of(kind)
    accelerator.load_state(folder)
    return [n for (x,) in loader for n in accelerator.gather(x).tolist()]


@pytest.mark.parametrize("kind", [kind for kind in _OPTIONS if kind not in ("weighted", "own batch sampler")])
def test_another_number_of_ranks_takes_what_is_left(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: pathlib.Path, kind: str
) -> None:
    for before, after in ((one_rank, two_ranks), (two_ranks, one_rank)):
        folder = str(tmp_path / f"{before is one_rank}")
        taken, rest = before.run(save, kind, folder)[0], after.run(load, kind, folder)[0]
        assert sorted(taken + rest) == list(range(_SAMPLES))


def metrics(samples: int) -> list[int]:
    accelerator = Accelerator(cpu=True)
    dataset = TensorDataset(torch.arange(samples))
    loader: Any = accelerator.prepare(DataLoader(dataset, batch_sampler=Buckets(samples, shuffles=False)))  # type: ignore[arg-type]
    return [n for (x,) in loader for n in accelerator.gather_for_metrics(x).tolist()]


@pytest.mark.parametrize("samples", [20, 26])
def test_batches_of_unknown_size_are_gathered_once(two_ranks: Ranks, samples: int) -> None:
    assert two_ranks.run(metrics, samples) == [list(range(samples))] * 2


def searched(seed: int) -> list[float]:
    """Fit by LBFGS, whose line search decides by the loss how far it goes and how often it calls the model."""
    set_seed(seed)
    accelerator = Accelerator(cpu=True, split_batches=True)
    x = torch.randn(32, 5)
    y = torch.randn(32, 1)
    model: Any = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    optimizer: Any = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=32))  # type: ignore[arg-type]
    for xs, ys in loader:
        for _ in range(3):

            def closure(xs: torch.Tensor = xs, ys: torch.Tensor = ys) -> torch.Tensor:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(xs), ys)
                accelerator.backward(loss)
                return loss

            optimizer.step(closure)
    return [parameter.sum().item() for parameter in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("seed", [2, 3])
def test_line_search_decides_alike_on_all_ranks(one_rank: Ranks, two_ranks: Ranks, seed: int) -> None:
    [expected] = one_rank.run(searched, seed)
    first, second = two_ranks.run(searched, seed)
    assert first == second == pytest.approx(expected, abs=1e-3)

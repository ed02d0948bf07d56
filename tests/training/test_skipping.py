"""Loaders that skip the first batches of an epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, skip_first_batches
from notebook_accel.errors import ConfigError
from notebook_accel.utils import GradientAccumulationPlugin
from tests.training.datasets import Numbers, SizedStream


def lists(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("loader", [
    DataLoader(Numbers(7), batch_size=2),
    DataLoader(SizedStream(7), batch_size=2),
    DataLoader(Numbers(7), batch_size=None),
])  # fmt: skip
@pytest.mark.parametrize("skipped", [0, 2, 9])
def test_any_loader(loader: DataLoader[Any], skipped: int) -> None:
    if loader.batch_size is None:
        loader = DataLoader(loader.dataset, batch_size=None, collate_fn=torch.tensor)
    whole = lists(loader)
    for given in (loader, Accelerator(cpu=True).prepare(loader)):
        rest = skip_first_batches(given, skipped)
        assert isinstance(rest, DataLoader)
        assert lists(rest) == lists(rest) == whole[skipped:]
        assert len(rest) == len(whole[skipped:])
        assert lists(given) == whole


def test_what_is_skipped_is_not_read() -> None:
    dataset = Numbers(7)
    assert lists(skip_first_batches(DataLoader(dataset, batch_size=2), 2)) == [[4, 5], [6]]
    assert dataset.read == [4, 5, 6]


def test_skips_add_up_and_can_come_before_prepare() -> None:
    loader = DataLoader(Numbers(9), batch_size=2)
    accelerator = Accelerator(cpu=True)
    twice = skip_first_batches(skip_first_batches(loader, 1), 2)
    assert lists(twice) == lists(accelerator.prepare(twice)) == [[6, 7], [8]]
    prepared = accelerator.skip_first_batches(accelerator.skip_first_batches(accelerator.prepare(loader), 1), 2)
    assert lists(prepared) == [[6, 7], [8]]


def test_epochs_count_on() -> None:
    dataset = Numbers(4)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(dataset))
    loader.set_epoch(3)
    rest = accelerator.skip_first_batches(loader, 2)
    dataset.epochs.clear()
    steps = [(rest.counter.epoch, rest.counter.step, rest.counter.total) for _ in rest]
    assert steps == [(4, 3, 4), (4, 4, 4)]
    assert len(lists(loader)) == 4
    assert dataset.epochs == [4, 5]  # each when the epoch before it was over


def test_the_last_window_is_as_long_as_it_would_have_been() -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, scale_last_window=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    weight = torch.zeros(1, requires_grad=True)
    loader, _ = accelerator.prepare(DataLoader(Numbers(6)), torch.optim.SGD([weight]))
    gradients = []
    for _ in accelerator.skip_first_batches(loader, 4):
        with accelerator.accumulate(weight):
            accelerator.backward(weight.sum())
            gradients.append(weight.grad.item())  # type: ignore[union-attr]
    assert gradients == [0.5, 1.0]


@pytest.mark.parametrize("number", [-1, 1.5, True, None])
def test_numbers_that_cannot_be(number: Any) -> None:
    with pytest.raises(ConfigError, match="num_batches is"):
        skip_first_batches(DataLoader(Numbers(3)), number)


def test_what_is_no_loader() -> None:
    with pytest.raises(ConfigError, match="DataLoader, not list"):
        skip_first_batches([1, 2], 1)  # type: ignore[arg-type]

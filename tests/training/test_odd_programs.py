"""Tests of unusual programs: they compute the right numbers or raise an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from notebook_accel import Accelerator, GradientAccumulationPlugin
from tests.training.datasets import Numbers
from tests.training.ranks import on_ranks


class Sentences(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter("abcdefg")


def with_no_label(rows: list[str]) -> dict[str, Any]:
    return {"text": rows, "label": None, "length": torch.ones(len(rows)), "is_last": "g" in rows}


@on_ranks(2)
def test_dispatched_batches_of_strings_and_none() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Sentences(), batch_size=2, collate_fn=with_no_label))
    texts = (["ab", "ef"], ["cd", "ga"])[accelerator.process_index]
    gathered = []
    for batch, text in zip(loader, texts, strict=True):
        assert {**batch, "length": len(batch["length"])} == {**with_no_label([*text]), "length": 2}
        gathered += accelerator.gather_for_metrics(batch["text"])
    assert gathered == [*"abcdefg"]


@on_ranks(2)
def test_a_rank_that_has_no_objects() -> None:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    assert accelerator.gather_for_metrics(["found"] * rank) == ["found"]
    assert accelerator.gather_for_metrics([]) == []
    assert accelerator.gather_for_metrics([torch.tensor([rank])] * rank, use_gather_object=True) == [torch.tensor([1])]


def model_of_ones() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


@on_ranks(2)
def test_an_error_inside_of_accumulate() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net, loader = accelerator.prepare(model_of_ones(), DataLoader(Numbers(12)))
    weight = accelerator.unwrap_model(net).weight
    seen = []
    for step, rows in enumerate(loader):
        with contextlib.suppress(ValueError), accelerator.accumulate(net):
            accelerator.backward(net(rows.float().view(-1, 1)).sum())
            if step == 0:
                raise ValueError("boom")
        seen.append((accelerator.sync_gradients, weight.grad.item()))
        if accelerator.sync_gradients:
            weight.grad = None
    assert [syncs for syncs, _ in seen] == [False, True] * 3
    assert [gradient for syncs, gradient in seen if syncs] == [1.5, 5.5, 9.5]
    assert seen[0][1] == accelerator.process_index / 2


@pytest.mark.parametrize("first", [pytest.param(True, marks=pytest.mark.slow), False])
@on_ranks(2)
def test_compiled_before_or_after_prepare(first: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = model_of_ones()
    if first:
        net = accelerator.prepare(torch.compile(model, backend="eager"))
    else:
        net = torch.compile(accelerator.prepare(model), backend="eager")
    seen = []
    for step in range(2):
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.tensor([[float(accelerator.process_index + step)]])).sum())
            seen.append(model.weight.grad.item())  # type: ignore[union-attr]
    assert seen == [accelerator.process_index / 2, 1.0]


@on_ranks(2)
def test_several_loaders_at_once() -> None:
    """Iterate over two loaders at once, over a nested one, and abandon an iterator in the middle."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4))
    net, one, other, test = accelerator.prepare(
        model_of_ones(), DataLoader(Numbers(12)), DataLoader(Numbers(12)), DataLoader(Numbers(5), batch_size=2)
    )
    synced, tested = [], []
    for _ in range(2):
        given_up = iter(other)
        next(given_up)
        for pair in zip(one, other, strict=True):
            with accelerator.accumulate(net):
                accelerator.backward(net(torch.stack(pair).float().view(-1, 1)).sum())
            synced.append(accelerator.sync_gradients)
            tested.append([row for rows in test for row in accelerator.gather_for_metrics(rows).tolist()])
            for rows in test:
                if accelerator.gather_for_metrics(rows).tolist() == [0, 1, 2, 3]:
                    break
    assert synced == [False, False, False, True, False, True] * 2
    assert tested == [list(range(5))] * 12
    assert len(accelerator.gather_for_metrics(torch.ones(3))) == 6

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
from tests.training.ranks import Ranks


class Sentences(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter("abcdefg")


def with_no_label(rows: list[str]) -> dict[str, Any]:
    return {"text": rows, "label": None, "length": torch.ones(len(rows)), "is_last": "g" in rows}


def dispatched_sentences() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Sentences(), batch_size=2, collate_fn=with_no_label))
    return [
        ({**batch, "length": len(batch["length"])}, accelerator.gather_for_metrics(batch["text"])) for batch in loader
    ]


def test_dispatched_batches_of_strings_and_none(two_ranks: Ranks) -> None:
    for rank, epoch in enumerate(two_ranks.run(dispatched_sentences)):
        texts = (["ab", "ef"], ["cd", "ga"])[rank]
        assert [batch for batch, _ in epoch] == [
            {"text": [*text], "label": None, "length": 2, "is_last": "g" in text} for text in texts
        ]
        assert [text for _, texts in epoch for text in texts] == [*"abcdefg"]


def objects_of_some_ranks() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    return [
        accelerator.gather_for_metrics(["found"] * rank),
        accelerator.gather_for_metrics([]),
        accelerator.gather_for_metrics([torch.tensor([rank])] * rank, use_gather_object=True),
    ]


def test_a_rank_that_has_no_objects(two_ranks: Ranks) -> None:
    assert two_ranks.run(objects_of_some_ranks) == [[["found"], [], [torch.tensor([1])]]] * 2


def model_of_ones() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


def gradients_after_an_error() -> Any:
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
    return seen


def test_an_error_inside_of_accumulate(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(gradients_after_an_error)
    assert [syncs for syncs, _ in first] == [False, True] * 3
    assert [gradient for syncs, gradient in first if syncs] == [gradient for syncs, gradient in second if syncs]
    assert [gradient for syncs, gradient in first if syncs] == [1.5, 5.5, 9.5]
    assert (first[0][1], second[0][1]) == (0.0, 0.5)


def prepare_again_and_again() -> list[float]:
    accelerator = Accelerator(cpu=True)
    model = model_of_ones()
    found = []
    for fold in range(3):
        net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(net(torch.tensor([[float(accelerator.process_index + fold)]])).sum())
        found.append(model.weight.grad.item())  # type: ignore[union-attr]
        optimizer.zero_grad()
        net, optimizer = accelerator.free_memory(net, optimizer)
    return found


def test_one_model_prepared_again_and_again(two_ranks: Ranks) -> None:
    assert two_ranks.run(prepare_again_and_again) == [[fold + 0.5 for fold in range(3)]] * 2


def compiled_gradients(first: bool) -> Any:
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
    return seen


@pytest.mark.parametrize("first", [pytest.param(True, marks=pytest.mark.slow), False])
def test_compiled_before_or_after_prepare(two_ranks: Ranks, first: bool) -> None:
    assert two_ranks.run(compiled_gradients, first) == [[0.0, 1.0], [0.5, 1.0]]


def train_on_pairs() -> Any:
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
    return synced, tested, len(accelerator.gather_for_metrics(torch.ones(3)))


def test_several_loaders_at_once(two_ranks: Ranks) -> None:
    for synced, tested, rows in two_ranks.run(train_on_pairs):
        assert synced == [False, False, False, True, False, True] * 2
        assert tested == [list(range(5))] * 12
        assert rows == 6

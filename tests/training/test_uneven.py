"""Ranks with different numbers of batches: no rank waits for a collective that another never calls."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from notebook_accel import Accelerator, DataLoaderConfiguration
from notebook_accel.errors import ConfigError, TrainingError
from tests.training.ranks import Ranks, on_ranks


class Flow(IterableDataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(len(self.data)))


def prepared(samples: int, *, flow: bool = False, steps: int = 1, compiles: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    data: Any = TensorDataset(torch.randn(samples, 3))
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=steps,
        dataloader_config=DataLoaderConfiguration(**options),
        dynamo_backend="eager" if compiles else "no",
    )
    net, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(Flow(data) if flow else data, batch_size=2)
    )
    return accelerator, net, optimizer, loader


def epoch(accelerator: Any, net: Any, optimizer: Any, loader: Any) -> list[int]:
    """Train, and return the number of samples of each batch."""
    sizes = []
    for (x,) in loader:
        sizes.append(len(x))
        with accelerator.accumulate(net):
            accelerator.backward(net(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    return sizes


def raises_on_rank_0(*texts: str) -> contextlib.AbstractContextManager[object]:
    """Return a context that expects an error with these texts on the rank that has a batch more."""
    if os.environ["RANK"] != "0":
        return contextlib.nullcontext()
    return pytest.raises(TrainingError, match="(?s)" + ".*".join(texts))


@pytest.mark.parametrize("flow", [False, True])
@pytest.mark.parametrize("dispatch", [False, True])
@on_ranks(2)
def test_training_in_a_round_that_others_do_not_have(flow: bool, dispatch: bool) -> None:
    with raises_on_rank_0("1 of the ranks have no batch", "join_uneven_inputs"):
        assert epoch(*prepared(5, even_batches=False, flow=flow, dispatch_batches=dispatch)) == [2]


@on_ranks(2)
def test_evaluation_in_which_ranks_do_not_need_each_other() -> None:
    accelerator, net, _, loader = prepared(5, even_batches=False)
    net.eval()
    with torch.no_grad():
        sizes = [len(net(x)) for (x,) in loader]
    assert accelerator.gather_for_metrics([sizes], use_gather_object=True) == [[2, 1], [2]]


@on_ranks(2)
def test_metrics_of_a_round_that_others_do_not_have() -> None:
    accelerator, _, _, loader = prepared(5, even_batches=False)
    with raises_on_rank_0("even_batches=True"):
        for (x,) in loader:
            accelerator.gather_for_metrics(x)


def train_joined(samples: int, steps: int, options: dict[str, Any], even: bool | None) -> Any:
    accelerator, net, optimizer, loader = prepared(samples, steps=steps, **options)
    with accelerator.join_uneven_inputs([net], even_batches=even):
        sizes = epoch(accelerator, net, optimizer, loader)
    after = epoch(accelerator, net, optimizer, loader) if options.get("even_batches", True) else None
    return sizes, after, [parameter.detach().clone() for parameter in net.parameters()]


def reference(samples: int, windows: list[list[list[slice]]], steps: int) -> list[torch.Tensor]:
    """Train in one process, in which a rank without a batch counts as a gradient of zero; return the weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    x = torch.randn(samples, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in windows:
        for batches in window:
            for batch in batches:
                (model(x[batch]).pow(2).mean() / 2 / steps).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


ROUNDS = [[slice(0, 2), slice(2, 4)], [slice(4, 6), slice(6, 8)], [slice(8, 10), slice(10, 12)], [slice(12, 13)]]


@pytest.mark.parametrize(("steps", "windows"), [
    (1, [[rounds] for rounds in ROUNDS]),
    (2, [ROUNDS[:2], ROUNDS[2:3], ROUNDS[3:]]),
    (4, [ROUNDS[:3], ROUNDS[3:]]),
])  # fmt: skip
@pytest.mark.parametrize("options", [
    {}, {"flow": True}, {"flow": True, "dispatch_batches": False}, {"dispatch_batches": True}, {"compiles": True},
])  # fmt: skip
def test_joined_ranks_train_to_the_end(
    two_ranks: Ranks, steps: int, windows: list[list[list[slice]]], options: dict[str, Any]
) -> None:
    first, second = two_ranks.run(train_joined, 13, steps, {"even_batches": False, **options}, None)
    assert first[0] == [2, 2, 2, 1]
    assert second[0] == [2, 2, 2]
    for ours in (first[2], second[2]):
        torch.testing.assert_close(ours, reference(13, windows, steps), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("even", "sizes"), [(None, ([2, 2], [2, 2])), (False, ([2, 1], [2]))])
@on_ranks(2)
def test_even_batches_can_be_turned_off_for_a_while(even: bool | None, sizes: tuple[list[int], list[int]]) -> None:
    joined, after, _ = train_joined(5, 1, {}, even)
    assert joined == sizes[int(os.environ["RANK"])]
    assert after == [2, 2]


@on_ranks(2)
def test_what_cannot_be_joined() -> None:
    accelerator, *_ = prepared(5)
    with (
        pytest.raises(ConfigError, match="not Linear"),
        accelerator.join_uneven_inputs([torch.nn.Linear(1, 1)], even_batches=False),
    ):
        pass


def test_alone_there_is_nothing_to_join() -> None:
    accelerator, net, optimizer, loader = prepared(5)
    with accelerator.join_uneven_inputs([net], even_batches=False):
        assert epoch(accelerator, net, optimizer, loader) == [2, 2, 1]

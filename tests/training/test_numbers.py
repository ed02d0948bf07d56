"""Tests that N ranks with k micro-batches a window compute what one process in plain PyTorch computes from them.

Models are whole or sharded, called or trained by a method, with backward passes that are missing or come twice, layers
and a bare tensor that only some micro-batches use, and layers that are frozen, unfrozen or replaced. The tests
derive the micro-batches from plain PyTorch's order and the rule of sharding, not from the ranks' reports.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from notebook_accel import (
    Accelerator,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from tests.training.datasets import LongSizedStream, Numbers, SizedStream, Stream
from tests.training.ranks import Ranks

SEED = 11
EPOCHS = 2


@dataclasses.dataclass(frozen=True)
class Action:
    """What a program does with a batch."""

    passes: str
    extra: bool  # uses the layer, the number and the bare tensor that other batches may leave out


@dataclasses.dataclass(frozen=True)
class Case:
    samples: int
    share: int  # samples in a micro-batch of one rank
    window: int
    optimizer: str
    reading: str
    even: bool
    split: bool
    dispatch: bool | None
    clip: bool
    scale_last: bool
    actions: tuple[Action, ...]  # of the batches, over and over again
    change: str  # between the two epochs
    sharded: bool

    def batch_size(self, ranks: int) -> int:
        return self.share * ranks if self.split else self.share


cases = st.builds(
    Case,
    samples=st.integers(1, 26),
    share=st.integers(1, 4),
    window=st.integers(1, 5),
    optimizer=st.sampled_from(["momentum", "adam"]),
    reading=st.sampled_from(["in order", "shuffled", "stream", "stream with a length", "stream that ends early"]),
    even=st.booleans(),
    split=st.booleans(),
    dispatch=st.sampled_from([None, True, False]),
    clip=st.booleans(),
    scale_last=st.booleans(),
    actions=st.lists(
        st.builds(
            Action,
            st.sampled_from(["one call", "a method", "two losses", "a call and a method", "no backward", "nothing"]),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ).map(tuple),
    change=st.sampled_from(["none", "freeze", "unfreeze", "replace"]),
    sharded=st.booleans(),
)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
        self.extra, self.scale = torch.nn.Linear(3, 3), torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return self.extra(y) * self.scale if extra else y

    def loss(self, x: torch.Tensor, y: torch.Tensor, extra: bool) -> torch.Tensor:
        return F.cross_entropy(self(x, extra), y)


def losses(net: Any, shift: torch.Tensor, x: torch.Tensor, y: torch.Tensor, action: Action) -> Iterator[torch.Tensor]:
    """Yield the losses of a batch, each of which has a backward pass before the next one is computed."""
    x = x + shift if action.extra else x
    if action.passes == "a method":
        yield net.loss(x, y, action.extra)
    elif action.passes != "nothing":
        outputs = net(x, action.extra)
        if action.passes != "no backward":
            yield F.cross_entropy(outputs, y)
        if action.passes == "two losses":
            yield outputs.square().mean()
        if action.passes == "a call and a method":
            yield net.loss(x / 2, y, action.extra)


def change(kind: str, net: Net, optimizer: Any) -> None:
    first, last = net.body[0], net.body[2]
    if kind in ("freeze", "unfreeze"):
        first.requires_grad_(kind == "unfreeze")
    elif kind == "replace":
        torch.manual_seed(5)
        net.body[2] = torch.nn.Linear(6, 3).double()
        new = dict(zip(map(id, last.parameters()), net.body[2].parameters(), strict=True))
        group = optimizer.param_groups[0]
        group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]


def plain_loader(case: Case, ranks: int) -> DataLoader[int]:
    datasets = {"stream": Stream, "stream with a length": SizedStream, "stream that ends early": LongSizedStream}
    dataset: Any = datasets.get(case.reading, Numbers)(case.samples)
    return DataLoader(dataset, batch_size=case.batch_size(ranks), shuffle=case.reading == "shuffled")


def materials(case: Case) -> Any:
    torch.manual_seed(0)
    model, shift = Net().double(), torch.zeros(4, dtype=torch.float64, requires_grad=True)
    model.body[0].requires_grad_(case.change != "unfreeze")
    x, y = torch.randn(case.samples, 4, dtype=torch.float64), torch.randint(0, 3, (case.samples,))
    learned = [*model.parameters(), shift]
    optimizer: Any = torch.optim.SGD(learned, lr=0.1, momentum=0.9)
    if case.optimizer == "adam":
        # With the usual eps, a gradient that is zero except for rounding moves a weight as much as any other.
        optimizer = torch.optim.Adam(learned, lr=0.01, eps=1e-3)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=31, cycle_momentum=False)
    return model, shift, optimizer, scheduler, x, y


def train(case: Case) -> Any:
    """Train as a user would; return the weights and the learning rate of each step."""
    model, shift, optimizer, scheduler, x, y = materials(case)
    some_unused = not all(action.extra for action in case.actions)
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin() if case.sharded else None,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=some_unused)],
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=case.window, scale_last_window=case.scale_last
        ),
        dataloader_config=DataLoaderConfiguration(
            split_batches=case.split, dispatch_batches=case.dispatch, even_batches=case.even
        ),
    )
    loader = plain_loader(case, accelerator.num_processes)
    net, shift, optimizer, scheduler, loader = accelerator.prepare(model, shift, optimizer, scheduler, loader)
    rates, actions = [], itertools.cycle(case.actions)
    torch.manual_seed(SEED + accelerator.process_index)  # only rank 0's seed has an effect
    for epoch in range(EPOCHS):
        if epoch:
            change(case.change, model, optimizer)
        for rows in loader:
            action = next(actions)
            with accelerator.accumulate(net, shift):
                for loss in losses(net, shift, x[rows], y[rows], action):
                    accelerator.backward(loss, retain_graph=True)
                if accelerator.sync_gradients and case.clip:
                    accelerator.clip_grad_norm_([*net.parameters(), shift], 0.3)
                optimizer.step()
                if accelerator.sync_gradients:
                    rates.append(optimizer.param_groups[0]["lr"])
                scheduler.step()
                optimizer.zero_grad()
    trained: list[Any] = [*model.parameters(), shift]
    return [getattr(each, "full_tensor", lambda each=each: each)().detach().clone() for each in trained], rates


def rounds_of(batches: list[list[int]], case: Case, ranks: int) -> list[list[list[int]]]:
    """Return the rows that each rank gets, round by round."""
    if case.split:
        rounds = [[batch[i : i + case.share] for i in range(0, len(batch), case.share)] for batch in batches]
    else:
        rounds = [batches[i : i + ranks] for i in range(0, len(batches), ranks)]
    if case.even and ranks > 1:  # a single rank reads each row once
        again = itertools.cycle(itertools.chain.from_iterable([list(share) for share in rounds[0]]))
        last = [*rounds[-1], *([] for _ in range(ranks - len(rounds[-1])))]
        rounds[-1] = [[*share, *itertools.islice(again, case.share - len(share))] for share in last]
    return rounds


def reference(case: Case, ranks: int) -> Any:
    model, shift, optimizer, scheduler, x, y = materials(case)
    rates, actions = [], itertools.cycle(case.actions)
    loader = plain_loader(case, ranks)
    torch.manual_seed(SEED)
    for epoch in range(EPOCHS):
        if epoch:
            change(case.change, model, optimizer)
        rounds = rounds_of([batch.tolist() for batch in loader], case, ranks)
        assume(len(rounds[-1]) == ranks)  # training needs a batch on every rank
        for start in range(0, len(rounds), case.window):
            window = rounds[start : start + case.window]
            length = len(window) if case.scale_last else case.window
            for shares, action in zip(window, actions, strict=False):
                for rows in shares:
                    for loss in losses(model, shift, x[rows], y[rows], action):
                        (loss / ranks / length).backward(retain_graph=True)
            if case.clip:
                torch.nn.utils.clip_grad_norm_([*model.parameters(), shift], 0.3)
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            for _ in range(1 if case.split else ranks):
                if scheduler.last_epoch < 31:
                    scheduler.step()
            optimizer.zero_grad()
    return [each.detach() for each in (*model.parameters(), shift)], rates


def assert_trained_alike(by_rank: list[Any], expected: Any) -> None:
    for weights, rates in by_rank:
        assert rates == expected[1]
        torch.testing.assert_close(weights, expected[0], rtol=0, atol=1e-6)


def drawn(examples: int) -> settings:
    return settings(deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.filter_too_much])


@drawn(25)
@given(case=cases)
def test_one_rank(case: Case) -> None:
    assert_trained_alike([train(case)], reference(case, 1))


@drawn(30)  # some seconds, for all that can be combined
@given(case=cases)
def test_two_ranks(two_ranks: Ranks, case: Case) -> None:
    expected = reference(case, 2)  # first, since it skips cases that can't be trained
    assert_trained_alike(two_ranks.run(train, case), expected)


@pytest.mark.slow
@drawn(15)
@given(case=cases)
def test_three_ranks(three_ranks: Ranks, case: Case) -> None:
    expected = reference(case, 3)
    assert_trained_alike(three_ranks.run(train, case), expected)

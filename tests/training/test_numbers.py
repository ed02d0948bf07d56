"""Tests that N ranks with k micro-batches a window compute what one process in plain PyTorch computes from them.

The tests derive the micro-batches from plain PyTorch's order and the rule of sharding, not from the ranks' reports.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from tests.training.datasets import Numbers, SizedStream, Stream
from tests.training.ranks import Ranks

SEED = 11
EPOCHS = 2


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

    def batch_size(self, ranks: int) -> int:
        return self.share * ranks if self.split else self.share


cases = st.builds(
    Case,
    samples=st.integers(1, 26),
    share=st.integers(1, 4),
    window=st.integers(1, 5),
    optimizer=st.sampled_from(["momentum", "adam"]),
    reading=st.sampled_from(["in order", "shuffled", "stream", "stream with a length"]),
    even=st.booleans(),
    split=st.booleans(),
    dispatch=st.sampled_from([None, True, False]),
    clip=st.booleans(),
    scale_last=st.booleans(),
)


def plain_loader(case: Case, ranks: int) -> DataLoader[int]:
    datasets = {"stream": Stream, "stream with a length": SizedStream}
    dataset: Any = datasets.get(case.reading, Numbers)(case.samples)
    return DataLoader(dataset, batch_size=case.batch_size(ranks), shuffle=case.reading == "shuffled")


def materials(case: Case) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    x, y = torch.randn(case.samples, 4), torch.randint(0, 3, (case.samples,))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if case.optimizer == "adam":
        # With the usual eps, a gradient that is zero except for rounding moves a weight as much as any other.
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=31, cycle_momentum=False)
    return model, optimizer, scheduler, x, y


def train(case: Case) -> Any:
    """Train as a user would; return the weights and the learning rate of each step."""
    model, optimizer, scheduler, x, y = materials(case)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=case.window, scale_last_window=case.scale_last
        ),
        dataloader_config=DataLoaderConfiguration(
            split_batches=case.split, dispatch_batches=case.dispatch, even_batches=case.even
        ),
    )
    loader = plain_loader(case, accelerator.num_processes)
    net, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    rates = []
    torch.manual_seed(SEED + accelerator.process_index)  # only rank 0's seed has an effect
    for _ in range(EPOCHS):
        for rows in loader:
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(x[rows]), y[rows]))
                if accelerator.sync_gradients and case.clip:
                    accelerator.clip_grad_norm_(net.parameters(), 0.3)
                optimizer.step()
                if accelerator.sync_gradients:
                    rates.append(optimizer.param_groups[0]["lr"])
                scheduler.step()
                optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()], rates


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
    model, optimizer, scheduler, x, y = materials(case)
    rates = []
    loader = plain_loader(case, ranks)
    torch.manual_seed(SEED)
    for _ in range(EPOCHS):
        rounds = rounds_of([batch.tolist() for batch in loader], case, ranks)
        assume(len(rounds[-1]) == ranks)  # training needs a batch on every rank
        for start in range(0, len(rounds), case.window):
            window = rounds[start : start + case.window]
            length = len(window) if case.scale_last else case.window
            for rows in itertools.chain.from_iterable(window):
                (F.cross_entropy(model(x[rows]), y[rows]) / ranks / length).backward()
            if case.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            for _ in range(1 if case.split else ranks):
                if scheduler.last_epoch < 31:
                    scheduler.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], rates


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


@drawn(25)
@given(case=cases)
def test_two_ranks(two_ranks: Ranks, case: Case) -> None:
    expected = reference(case, 2)  # first, since it skips cases that can't be trained
    assert_trained_alike(two_ranks.run(train, case), expected)


@drawn(15)
@given(case=cases)
def test_three_ranks(three_ranks: Ranks, case: Case) -> None:
    expected = reference(case, 3)
    assert_trained_alike(three_ranks.run(train, case), expected)

"""What a step costs, counted: calls of this project's Python functions, which no busy machine changes.

A check that has to run in each step belongs to what installs it, such as a second model or a sharded one.
"""

from __future__ import annotations

import collections
import contextlib
import pathlib
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import notebook_accel
from notebook_accel import Accelerator
from tests.training import ranks
from tests.training.ranks import Ranks

_ROOT = str(pathlib.Path(notebook_accel.__file__).parent)
_STEPS = 8

Calls = collections.Counter[str]


def calls_in(run: Callable[[], object]) -> Calls:
    """Return how often each function of this project is called in ``run``, by its name."""
    found: Calls = collections.Counter()

    def note(frame: types.FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_ROOT):
            found[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def calls_of_a_step(window: int, has_loader: bool) -> dict[str, float]:
    """Return the calls of a step, the mean of eight: what a loop of sixteen steps calls more than one of eight."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    net, optimizer, scheduler = accelerator.prepare(model, optimizer, LambdaLR(optimizer, lambda _: 1.0))
    world_size = accelerator.num_processes
    data = TensorDataset(
        torch.randn(2 * _STEPS * world_size, 4), torch.zeros(2 * _STEPS * world_size, dtype=torch.long)
    )
    long, short = (
        accelerator.prepare(DataLoader(torch.utils.data.Subset(data, range(count * world_size)), batch_size=1))
        for count in (2 * _STEPS, _STEPS)
    )
    preloaded = [tuple(tensor[:1] for tensor in data.tensors)]

    def train(batches: object) -> None:
        for x, y in batches:  # type: ignore[attr-defined]
            with accelerator.accumulate(net) if window > 1 else contextlib.nullcontext():
                accelerator.backward(torch.nn.functional.cross_entropy(net(x), y))
                optimizer.step()
                if has_loader:
                    scheduler.step()
                optimizer.zero_grad()

    train(long)  # what happens once is over
    more = calls_in(lambda: train(long if has_loader else preloaded * 2 * _STEPS))
    more.subtract(calls_in(lambda: train(short if has_loader else preloaded * _STEPS)))
    return {name: count / _STEPS for name, count in more.items() if count}


@pytest.fixture(scope="module")
def fresh_ranks() -> Iterator[dict[int, Ranks]]:
    """One rank and two that no other test has given a model, since a second one costs something in each step."""
    with ranks.running(1) as one, ranks.running(2) as two:
        yield {1: one, 2: two}


@pytest.mark.parametrize(
    ("size", "window", "has_loader", "most"),
    [(1, 1, False, 6), (1, 1, True, 12), (1, 4, True, 21), (2, 1, False, 15), (2, 1, True, 24), (2, 4, True, 31)],
)
def test_step_calls_few_functions(
    fresh_ranks: dict[int, Ranks], size: int, window: int, has_loader: bool, most: float
) -> None:
    for calls in fresh_ranks[size].run(calls_of_a_step, window, has_loader):
        print(sum(calls.values()), sorted(calls.items(), key=lambda item: -item[1]))
        assert 0 < sum(calls.values()) <= most

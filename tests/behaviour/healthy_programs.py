"""Training programs that nothing holds up, which run until they are stopped. Run in ranks.

Their steps take some 100 ms of computing on one core. Where a program exchanges gradients, saves, evaluates or loads,
that takes a small part of its time, as it should.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import notebook_accel

_BATCH = 256


def digits() -> TensorDataset:
    """The 1,797 digits eight times, as images of 8 x 8 pixels."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8).repeat(8, 1, 1, 1) / 16
    return TensorDataset(images, torch.tensor(labels).repeat(8))


def dense() -> nn.Sequential:
    """A narrow layer, and layers of shared weights: much to compute, few gradients to exchange."""
    shared = nn.Linear(512, 512)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), *[shared, nn.ReLU()] * 12, nn.Linear(512, 10))


class Plain:
    """A loop as PyTorch's documentation has it, with DistributedDataParallel."""

    def __init__(self, model: nn.Module, **loader: Any) -> None:
        dist.init_process_group("gloo")
        self.module = model
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        data = digits()
        self.loader = DataLoader(data, _BATCH, sampler=DistributedSampler(data), drop_last=True, **loader)

    def epochs(self, window: int = 1) -> Iterator[int]:
        """Train, and yield after each batch its number within the epoch. The optimizer steps once a window."""
        while True:
            for step, (x, y) in enumerate(self.loader):
                F.cross_entropy(self.model(x), y).backward()
                if (step + 1) % window == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                yield step


def run(steps: Iterator[Any]) -> None:
    for _ in steps:
        pass


def accumulates() -> None:
    run(Plain(dense()).epochs(window=4))


def compiles_once() -> None:
    made = Plain(dense())
    made.model = torch.compile(made.model, backend="aot_eager")  # type: ignore[assignment]
    run(made.epochs())


def loads_in_workers_evaluates_and_saves() -> None:
    """The evaluation and the file come after each epoch."""
    made = Plain(dense(), num_workers=1, persistent_workers=True)
    images, labels = (tensor[:200] for tensor in digits().tensors)
    with tempfile.TemporaryFile() as file:
        for step in made.epochs():
            if step == len(made.loader) - 1:
                made.model.eval()
                with torch.no_grad():
                    (made.module(images).argmax(1) == labels).float().mean()
                made.model.train()
                file.seek(0)
                torch.save(made.module.state_dict(), file)


def prepared(model: nn.Module, **options: Any) -> None:
    """Train with an ``Accelerator`` of these options."""
    accelerator = notebook_accel.Accelerator(cpu=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(digits(), batch_size=_BATCH, shuffle=True, drop_last=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    while True:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()


def prepares_and_accumulates() -> None:
    prepared(dense(), gradient_accumulation_steps=4)


def shards() -> None:
    prepared(dense(), fsdp_plugin=notebook_accel.FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap"))


PROGRAMS: tuple[Callable[[], None], ...] = (
    accumulates, compiles_once, loads_in_workers_evaluates_and_saves, prepares_and_accumulates, shards,
)  # fmt: skip

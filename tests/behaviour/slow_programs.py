"""Training programs with one planted cause of slowness each. They run until they are stopped. Run in ranks."""

from __future__ import annotations

import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset

import notebook_accel

SLOW_S = 0.05


def line_of(mark: str) -> int:
    """The number of the line with this mark."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# planted: {mark}"))


def rank() -> int:
    return int(os.environ["RANK"])


class Samples(Dataset[Any]):
    def __init__(self, slow_ranks: tuple[int, ...] = ()) -> None:
        self.slow_ranks = slow_ranks

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if rank() in self.slow_ranks:
            time.sleep(SLOW_S / 8)  # planted: data
        return torch.ones(16), index % 4


class Model(torch.nn.Module):
    def __init__(self, slow_ranks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)
        self.slow_ranks = slow_ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if rank() in self.slow_ranks:
            time.sleep(SLOW_S)  # planted: forward
        logits: torch.Tensor = self.layer(x)
        return logits


class Program:
    """A plain loop over 8 samples a batch, with DistributedDataParallel or with our ``Accelerator``."""

    def __init__(self, is_prepared: bool = False, data: Dataset[Any] | None = None, model: Any = None) -> None:
        model = model or Model()
        self.loader: Any = DataLoader(data or Samples(), batch_size=8)
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
        if is_prepared:
            accelerator = notebook_accel.Accelerator(cpu=True)
            prepared = accelerator.prepare(model, self.optimizer, self.loader)
            self.model, self.optimizer, self.loader = prepared
        else:
            dist.init_process_group("gloo")
            self.model = DistributedDataParallel(model)

    def steps(self) -> Iterator[None]:
        while True:
            for x, y in self.loader:
                F.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                yield

    def train(self) -> None:
        for _ in self.steps():
            pass


def slow_loader(is_prepared: bool) -> None:
    Program(is_prepared, data=Samples(slow_ranks=(0, 1))).train()


def slow_samples_on_one_rank(is_prepared: bool) -> None:
    Program(is_prepared, data=Samples(slow_ranks=(1,))).train()


def slow_forward_on_one_rank(is_prepared: bool) -> None:
    Program(is_prepared, model=Model(slow_ranks=(1,))).train()


def evaluates_each_step_with_a_new_loader(is_prepared: bool) -> None:
    """An evaluation of two batches, whose loader is asked while gradients are enabled."""
    held, made = Subset(Samples(slow_ranks=(0, 1)), range(16)), Program(is_prepared)
    for _ in made.steps():
        made.model.eval()
        for x, _ in DataLoader(held, batch_size=8):
            with torch.no_grad():
                x.sum()
        made.model.train()


def slow_line_between_the_steps(is_prepared: bool) -> None:
    for _ in Program(is_prepared).steps():
        time.sleep(SLOW_S)  # planted: other


def large_gradients(is_prepared: bool) -> None:
    Program(is_prepared, model=torch.nn.Sequential(torch.nn.Linear(16, 400_000), torch.nn.AdaptiveAvgPool1d(4))).train()


def saves_each_step(is_prepared: bool) -> None:
    state = torch.ones(4 << 20)
    with tempfile.TemporaryFile() as file:
        for _ in Program(is_prepared).steps():
            file.seek(0)
            torch.save(state, file)  # planted: checkpoint


class Compiled(Model):
    """Compiles a part of its forward pass, whose input grows in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 16
        torch._dynamo.config.recompile_limit = 10_000
        self.mean = torch.compile(lambda x: (x * x).mean(), dynamic=False, backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.length += 1
        logits: torch.Tensor = self.layer(x) + self.mean(torch.ones(self.length))  # planted: compilation
        return logits


def compiles_for_changing_shapes(is_prepared: bool) -> None:
    Program(is_prepared, model=Compiled()).train()

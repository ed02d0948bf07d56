"""Functions that several ranks run, each with an XLA device, where torch_xla is installed."""

from __future__ import annotations

import itertools
import os
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator
from notebook_accel.environment import RankPlace
from notebook_accel.training.backends import xla
from notebook_accel.utils import broadcast
from tests.xla import work

ROWS = 64


def plain_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def in_one_process(batch: int, epochs: int) -> list[torch.Tensor]:
    """The parameters after training on the CPU, with torch alone."""
    model = plain_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for _ in range(epochs):
        for x, y in DataLoader(work.data(ROWS), batch_size=batch):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def train(batch: int, steps: int, epochs: int) -> dict[str, Any]:
    """Trains; the device, the parameters, and compilations and values read back by the end of each epoch."""
    import torch_xla.runtime

    accelerator = Accelerator(gradient_accumulation_steps=steps)
    own = plain_model()
    if accelerator.process_index:
        torch.nn.init.zeros_(own[0].weight)  # type: ignore[arg-type]  # rank 0's weights take their place
    net, optimizer, loader = accelerator.prepare(
        own, torch.optim.SGD(own.parameters(), lr=0.5, momentum=0.9), DataLoader(work.data(ROWS), batch_size=batch)
    )
    compiled, read = [], []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(x), y))
                optimizer.step()
                optimizer.zero_grad()
        compiled.append(xla.compiled_count())
        read.append(work.values_read())
    return {
        "place": (str(accelerator.device), accelerator.num_processes, torch_xla.runtime.global_device_count()),
        "parameters": [parameter.detach().cpu() for parameter in own.parameters()],
        "compiled": compiled,
        "read": [after - before for before, after in itertools.pairwise(read)],
    }


def collectives() -> dict[str, Any]:
    """Return the results of the ranks' collectives, for tensors on the devices and for objects."""
    accelerator = Accelerator()
    rank, device = accelerator.process_index, accelerator.device
    row = torch.tensor([[float(rank), float("inf")]], device=device)
    count = torch.tensor(rank + 1, device=device)
    names = accelerator.prepare(DataLoader(TensorDataset(torch.arange(5)), batch_size=2))
    accelerator.print("printed by rank", rank)
    accelerator.wait_for_everyone()
    return {
        "rows": accelerator.gather(row).tolist(),
        "flags": accelerator.gather(torch.tensor([rank == 0], device=device)).tolist(),
        "sum": int(accelerator.reduce(count)),
        "mean": float(accelerator.reduce(count.float(), reduction="mean")),
        "sent": broadcast({"x": count}, from_process=1)["x"].tolist(),
        "padded": accelerator.gather(accelerator.pad_across_processes(torch.ones(rank + 1, device=device))).tolist(),
        "seen": sorted(n for [batch] in names for n in accelerator.gather_for_metrics(batch).tolist()),
        "objects": accelerator.gather_for_metrics([f"of {rank}"], use_gather_object=True),
        "device": str(accelerator.gather(row).device),
    }


class _OneSided(torch.nn.Module):
    """Rank 1 has a branch for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.own = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.common(x)
        return total + self.own(x) if os.environ["RANK"] == "1" else total


def one_sided() -> None:
    accelerator = Accelerator()
    net = accelerator.prepare(_OneSided())
    accelerator.backward(net(torch.ones(1, 2, device=accelerator.device)).sum())


def topologies(variables: dict[str, str], ranks: int, joined: bool) -> list[dict[str, str]]:
    """Return what torch_xla sets for each rank of a TPU under these variables, without waking a device."""
    from torch_xla._internal import tpu

    found = []
    for rank in range(ranks):
        place = RankPlace(rank, ranks, rank, ranks)
        with mock.patch.dict(os.environ, variables, clear=True):
            if joined:
                xla.forget_whole_machine(place, os.environ)
                tpu.configure_topology(rank, ranks)
            else:
                xla.take_one_chip(place, os.environ)
                tpu.configure_one_chip_topology()
            found.append(dict(os.environ))
    return found

"""Measures sharded training through this library, as a ratio to torch's own ``fully_shard`` and checkpoints.

    python -m benchmarks.sharded

Two ranks on the CPU with one thread each. Blocks of both are interleaved, and each is compared with torch's block
beside it. A step's cost is the CPU time of the rank's main thread, in which waiting for the other rank doesn't count. A
save is measured in CPU time of the whole process, and in wall time, which on a shared disk says less.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, notebook_launcher

STEPS = 16
Clock = Callable[[], float]
Pair = tuple[Callable[[], Any], Callable[[], Any]]


def make_model(width: int, depth: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make a model of equal blocks, and its optimizer."""
    torch.manual_seed(0)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
            self.head = torch.nn.Linear(width, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = torch.relu(block(x))
            out: torch.Tensor = self.head(x)
            return out

    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def by_torch(width: int, depth: int) -> tuple[Any, Any]:
    """Shard the model as one writes it without a library."""
    model, _ = make_model(width, depth)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def steps_of_both() -> Pair:
    """Return the steps of torch alone, and those of an ``Accelerator``, on the same batch."""
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    ours, our_optimizer = accelerator.prepare(*make_model(64, 4))
    model, optimizer = by_torch(64, 4)

    def torchs() -> None:
        for _ in range(STEPS):
            F.cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def own() -> None:
        for _ in range(STEPS):
            accelerator.backward(F.cross_entropy(ours(x), y))
            accelerator.clip_grad_norm_(ours.parameters(), 1.0)
            our_optimizer.step()
            our_optimizer.zero_grad()

    return torchs, own


def saves_of_both(folder: pathlib.Path) -> Pair:
    """Return a save by ``torch.distributed.checkpoint`` and one by ``save_state``, of some 400 MB."""
    width, depth = 2048, 8
    x, y = torch.randn(8, width), torch.randint(0, 10, (8,))
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    ours, our_optimizer = accelerator.prepare(*make_model(width, depth))
    accelerator.backward(F.cross_entropy(ours(x), y))
    our_optimizer.step()
    model, optimizer = by_torch(width, depth)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()

    def emptied(name: str) -> str:
        if dist.get_rank() == 0:
            shutil.rmtree(folder / name, ignore_errors=True)
        dist.barrier()
        return str(folder / name)

    def torchs() -> None:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=emptied("torch"))

    return torchs, lambda: accelerator.save_state(emptied("own"))


def ratios(pair: Pair, blocks: int, clock: Clock) -> tuple[float, float, float]:
    """Return the median ratio of the second to the first by the clock and by wall time, and the first's CPU time."""
    for run in pair:
        run()
    taken: tuple[list[tuple[float, float]], ...] = ([], [])
    for block in range(blocks):
        for which in (0, 1) if block % 2 else (1, 0):
            dist.barrier()
            started = clock(), time.perf_counter()
            pair[which]()
            taken[which].append((clock() - started[0], time.perf_counter() - started[1]))
    by_clock, by_wall = (
        statistics.median(own[i] / torchs[i] for torchs, own in zip(*taken, strict=True)) for i in (0, 1)
    )
    return by_clock, by_wall, statistics.median(cpu_s for cpu_s, _ in taken[0])


def measure(blocks: int, saves: int, folder: str) -> list[tuple[str, float, float, float]]:
    """Measure in a rank."""
    torch.set_num_threads(1)
    steps = ratios(steps_of_both(), blocks, time.thread_time)
    saving = ratios(saves_of_both(pathlib.Path(folder)), saves, time.process_time)
    return [("step", *steps), ("save", *saving)]


def main() -> None:
    """Print the ratios of each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=41, help="paired blocks of steps")
    parser.add_argument("--saves", type=int, default=25, help="paired saves")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = notebook_launcher(
            measure, (given.blocks, given.saves, folder), num_processes=2, use_cpu=True, view="none"
        )
    print(f"torch {torch.__version__}, 2 ranks, load {os.getloadavg()[0]:.1f}")
    for rank, rows in enumerate(found):
        for name, cpu, wall, cost_s in rows:
            each = cost_s / (STEPS if name == "step" else 1) * 1000
            print(f"rank {rank}: a {name}: {cpu:.3f} in CPU time, {wall:.3f} in wall time ({each:.2f} ms by torch)")


if __name__ == "__main__":
    main()

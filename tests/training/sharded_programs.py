"""A small language model of handwritten digits, and programs that train it, sharded or whole.

The text of a digit is the sequence of its pixels, in 17 shades. Ranks call these functions by name.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import pathlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from notebook_accel.utils import TorchDynamoPlugin, set_seed

SHADES = 17
LENGTH = 16
SAVED_AFTER = 3
RESUMED_STEPS = 3


@functools.cache
def digits() -> torch.Tensor:
    """Return the middle rows of the digits as shades, ``(samples, LENGTH + 1)``."""
    from sklearn.datasets import load_digits

    pixels = torch.tensor(load_digits().data, dtype=torch.int64)
    return pixels[:768, 24 : 24 + LENGTH + 1]


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.mix = torch.nn.Linear(LENGTH, LENGTH)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = F.linear(self.norm(x).transpose(1, 2), self.mix.weight * self.mask.to(x.dtype), self.mix.bias)
        x = x + mixed.transpose(1, 2)
        return x + self.down(F.gelu(self.up(x)))


class Writer(torch.nn.Module):
    """A language model whose head is its embedding, and whose positions don't learn."""

    def __init__(self, width: int = 24, depth: int = 2) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(SHADES, width)
        self.positions = torch.nn.Embedding(LENGTH, width)
        self.positions.requires_grad_(False)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, SHADES, bias=False)
        torch.nn.init.normal_(self.embedding.weight, std=0.2)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x) + self.positions(torch.arange(LENGTH, device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


@dataclasses.dataclass
class Case:
    """A training program's settings.

    Attributes:
        sharded: Shard the model.
        batch_size: Number of samples of all ranks together.
        window: Micro-batches of an accumulation window.
        precision: The ``Accelerator``'s.
        plugin: Settings of the plugin.
        groups: Give the optimizer two groups of parameters.
        calls: Prepare ``"together"``, the ``"model first"``, or the ``"optimizer first"``.
        seed: The seed of the model.
        parallel: The arguments of ``ParallelismConfig``; with ``tp_size`` the blocks are cut into parts.
        cpu: Train on CPUs even where there are GPUs.
        dynamo: The arguments of ``TorchDynamoPlugin``, for a model that ``prepare`` compiles.
        alone: Rank 0 saves checkpoints alone.
    """

    sharded: bool = True
    batch_size: int = 24
    window: int = 1
    precision: str = "no"
    plugin: dict[str, Any] = dataclasses.field(default_factory=dict)
    groups: bool = False
    calls: str = "together"
    seed: int = 3
    parallel: dict[str, int] = dataclasses.field(default_factory=dict)
    cpu: bool = True
    dynamo: dict[str, Any] = dataclasses.field(default_factory=dict)
    alone: bool = False


def cut_into_parts(model: Writer, mesh: Any) -> None:
    """Give each rank of a mesh a part of the blocks' layers."""
    plan: Any = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


class Program:
    """Training that can be stopped, saved and loaded."""

    def __init__(self, case: Case) -> None:
        set_seed(case.seed)
        parallel = ParallelismConfig(**case.parallel)
        is_sharded = case.sharded and (not case.parallel or parallel.dp_shard_enabled)
        self.accelerator = accelerator = Accelerator(
            cpu=case.cpu,
            mixed_precision=case.precision,
            gradient_accumulation_steps=case.window,
            fsdp_plugin=FullyShardedDataParallelPlugin(**case.plugin) if is_sharded else None,
            parallelism_config=parallel if case.parallel else None,
            dynamo_plugin=TorchDynamoPlugin(**case.dynamo) if case.dynamo else None,
        )
        self.model: Any = Writer()
        if parallel.tp_enabled:
            cut_into_parts(self.model, accelerator.torch_device_mesh["tp"])
        decays = [p for p in self.model.parameters() if p.ndim > 1 and p.requires_grad]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups: Any = [{"params": decays}, {"params": others, "weight_decay": 0.0}] if case.groups else decays + others
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        # It counts optimizer steps, however many ranks there are.
        self.schedule = lr_scheduler.CosineAnnealingLR(optimizer, 300)
        accelerator.register_for_checkpointing(self.schedule)
        samples = digits()
        data = TensorDataset(samples[:, :-1], samples[:, 1:])
        batches = accelerator.num_processes // parallel.non_data_parallel_size
        self.loader = accelerator.prepare(DataLoader(data, case.batch_size // batches, shuffle=True))
        if case.calls == "together":
            self.net, self.optimizer = accelerator.prepare(self.model, optimizer)
        elif case.calls == "model first":
            self.net = accelerator.prepare(self.model)
            self.optimizer = accelerator.prepare(optimizer)
        else:
            self.optimizer = accelerator.prepare(optimizer)
            self.net = accelerator.prepare(self.model)
        self.losses: list[float] = []

    def train(self, micro_batches: int) -> list[float]:
        """Train so many micro-batches, counting those before, and return their losses, averaged over the ranks."""
        accelerator = self.accelerator
        while len(self.losses) < micro_batches:
            for x, y in self.loader:
                with accelerator.accumulate(self.net):
                    loss = F.cross_entropy(self.net(x).flatten(0, 1), y.flatten())
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(self.net.parameters(), 0.2)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        self.schedule.step()
                self.losses.append(accelerator.reduce(loss.detach(), "mean").item())
                if len(self.losses) == micro_batches:
                    break
        return self.losses

    def weights(self) -> dict[str, list[Any]]:
        """Return rank 0's whole weights, and nothing on other ranks."""
        state = self.accelerator.get_state_dict(self.net)
        return {name: value.tolist() for name, value in state.items()} if self.accelerator.is_main_process else {}


def losses(case: Case, micro_batches: int) -> list[float]:
    """Train and return the losses."""
    return Program(case).train(micro_batches)


def trained(case: Case, micro_batches: int) -> tuple[list[float], dict[str, Any]]:
    """Train and return the losses and the weights."""
    program = Program(case)
    return program.train(micro_batches), program.weights()


def held_bytes(case: Case) -> dict[str, int]:
    """Return the bytes of parameters, gradients and the optimizer's state that a rank holds after a backward pass."""
    program = Program(case)
    program.train(1)
    x, y = next(iter(program.loader))
    program.accelerator.backward(F.cross_entropy(program.net(x).flatten(0, 1), y.flatten()))
    parameters = list(program.net.parameters())
    states = [value for of_one in program.optimizer.state.values() for value in of_one.values()]
    gc.collect()
    return {
        "parameters": sum(map(_local_bytes, parameters)),
        "gradients": sum(_local_bytes(p.grad) for p in parameters if p.grad is not None),
        "optimizer": sum(map(_local_bytes, states)),
    }


def held_bytes_of_each(cases: list[Case]) -> list[dict[str, int]]:
    """Return the bytes of ``held_bytes`` for one case after the other."""
    return [held_bytes(case) for case in cases]


def _local_bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())


def files_in(folder: str) -> list[str]:
    """Return the names of all files below a folder."""
    root = pathlib.Path(folder)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def optimizer_state(program: Program) -> list[Any]:
    """Return the optimizer's state with whole tensors."""
    state = program.optimizer.state_dict()
    moments = [
        {name: getattr(value, "full_tensor", lambda value=value: value)().tolist() for name, value in values.items()}
        for _, values in sorted(state["state"].items())
    ]
    # Parameters on several meshes are updated one by one, which changes no number.
    return [moments, [{**group, "foreach": None} for group in state["param_groups"]]]


def saved(folder: str, case: Case) -> Any:
    """Return the state at a checkpoint, and the losses of training that goes on undisturbed."""
    program = Program(case)
    program.train(SAVED_AFTER)
    if program.accelerator.is_main_process or not case.alone:
        program.accelerator.save_state(folder)
    state = program.weights(), optimizer_state(program), program.schedule.state_dict()
    return state, program.train(SAVED_AFTER + RESUMED_STEPS)[SAVED_AFTER:]


def loaded(folder: str, case: Case) -> Any:
    """Return the state after loading, and the losses of training that goes on from it."""
    program = Program(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # new ranks draw numbers of their own
        program.accelerator.load_state(folder)
    state = program.weights(), optimizer_state(program), program.schedule.state_dict()
    program.losses = [0.0] * SAVED_AFTER
    return state, program.train(SAVED_AFTER + RESUMED_STEPS)[SAVED_AFTER:]

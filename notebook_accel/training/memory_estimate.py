"""How much memory a model needs to train, worked out before it is given any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.formatting import format_number, format_size
from notebook_accel.training.handlers import DistributedDataParallelKwargs

__all__ = ["MemoryEstimate", "estimate_memory"]

_DTYPES = {"no": None, "fp16": torch.float16, "bf16": torch.bfloat16}
_GATHERED_BLOCKS = 2  # fully_shard gathers the next block while one computes


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The memory that training needs on each rank, without activations, which depend on the batch.

    Attributes:
        parameters: Number of parameters of the model.
        num_processes: Number of ranks.
        is_sharded: True if each rank holds a share of the model, false if it holds all of it.
        parameter_bytes: Bytes of the parameters and buffers that a rank holds.
        gradient_bytes: Bytes of their gradients, with the buckets in which DistributedDataParallel averages them.
        optimizer_bytes: Bytes of the optimizer's state.
        gathered_bytes: Bytes of the whole blocks that a rank of a sharded model holds for a moment.
    """

    parameters: int
    num_processes: int
    is_sharded: bool
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all of it on one rank."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.gathered_bytes

    def __str__(self) -> str:
        how = "sharded over" if self.is_sharded else "whole on each of"
        ranks = "1 rank" if self.num_processes == 1 else f"{how} {self.num_processes} ranks"
        parts = {
            "parameters": self.parameter_bytes,
            "gradients": self.gradient_bytes,
            "optimizer": self.optimizer_bytes,
            "gathered blocks": self.gathered_bytes,
        }
        listed = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size)
        return (
            f"{format_number(self.parameters)} parameters, {ranks}: about {format_size(self.total_bytes)} a rank and "
            f"the activations ({listed})"
        )


def estimate_memory(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    *,
    num_processes: int = 1,
    sharded: bool = False,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    mixed_precision: str = "no",
) -> MemoryEstimate:
    """Estimate the memory of training on each rank, without activations and without allocating the model.

    Args:
        model: The model, best on the meta device, or a function that makes it. The function is called on the meta
            device, so a model larger than this machine's memory can be estimated.
        num_processes: Number of ranks.
        sharded: Whether each rank holds a share of the model (FSDP) instead of all of it.
        optimizer: The class of the optimizer, or a function that makes one for a list of parameters. It takes a step
            on the meta device, so that the size of its state isn't guessed.
        mixed_precision: ``no``, ``fp16`` or ``bf16``.

    Raises:
        ConfigError: An argument has a value that can't be used.
    """
    if mixed_precision not in _DTYPES:
        raise ConfigError(f"mixed_precision is {mixed_precision!r}.", fix=f"one of {', '.join(map(repr, _DTYPES))}")
    if num_processes < 1:
        raise ConfigError(f"num_processes is {num_processes}.", fix="1 or more")
    if not isinstance(model, torch.nn.Module):
        with torch.device("meta"):
            model = model()
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    held_bytes = _bytes(parameters)
    state_bytes = _state_bytes(optimizer, trained)
    buffer_bytes = _bytes(model.buffers())
    gradient_bytes = _bytes(trained)
    gathered_bytes = 0
    if sharded and num_processes > 1:
        held_bytes, gradient_bytes, state_bytes = (
            -(-whole // num_processes) for whole in (held_bytes, gradient_bytes, state_bytes)
        )
        gathered_bytes = _GATHERED_BLOCKS * _largest_block_bytes(model, _DTYPES[mixed_precision])
    elif num_processes > 1 and not DistributedDataParallelKwargs().gradient_as_bucket_view:
        gradient_bytes *= 2  # the buckets hold a copy
    return MemoryEstimate(
        parameters=sum(parameter.numel() for parameter in parameters),
        num_processes=num_processes,
        is_sharded=sharded,
        parameter_bytes=held_bytes + buffer_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=state_bytes,
        gathered_bytes=gathered_bytes,
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _state_bytes(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], trained: list[torch.nn.Parameter]
) -> int:
    """Return the bytes of the optimizer's state after a step on meta tensors of these shapes."""
    if not trained:
        return 0
    stand_ins = [torch.nn.Parameter(torch.empty_like(parameter, device="meta")) for parameter in trained]
    made = make(stand_ins)
    for stand_in in stand_ins:
        stand_in.grad = torch.empty_like(stand_in)
    try:
        made.step()
    # Some steps read numbers, such as Adafactor's: the state is there by then. Others need a closure, such as LBFGS's.
    except (RuntimeError, TypeError) as error:
        if len(made.state) < len(trained):
            raise ConfigError(
                f"The state of {type(made).__name__} can't be estimated: its step needs more than shapes ({error}).",
                fix="optimizer=torch.optim.AdamW, or another one whose state has the same size",
            ) from error
    return _bytes(leaf for state in made.state.values() for leaf in _tensors(state))


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (value for value in state.values() if isinstance(value, torch.Tensor))


def _largest_block_bytes(model: torch.nn.Module, dtype: torch.dtype | None) -> int:
    """Return the bytes of the largest part that is gathered at once: a repeated block, or all that isn't in one."""
    blocks = {block for module in model.modules() if isinstance(module, torch.nn.ModuleList) for block in module}
    inside = {parameter for block in blocks for parameter in block.parameters()}
    parts = [list(block.parameters()) for block in blocks]
    parts.append([parameter for parameter in model.parameters() if parameter not in inside])
    return max(sum(p.numel() * (dtype or p.dtype).itemsize for p in part) for part in parts)

"""Estimates the memory that training a model needs, without allocating it, and reports the memory that it takes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.formatting import format_number, format_size
from notebook_accel.payload.sharded_tensors import is_sharded_tensor
from notebook_accel.reporting import reporter
from notebook_accel.training import fsdp
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.handlers import DistributedDataParallelKwargs
from notebook_accel.training.model_files import size_bytes
from notebook_accel.training.precision import DTYPES

__all__ = ["MemoryEstimate", "estimate_memory"]

_DOUBLINGS = 9  # how often the number of ranks is doubled to find one that fits
_GATHERED_BLOCKS = 2  # fully_shard gathers the next block while one computes
_FOLLOWED_STEPS = 2  # the steps after which the memory is reported


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
        device_bytes: Bytes of the device's memory that the estimate is compared with, ``None`` for no comparison.
        fits_with: Changes that would make it fit; empty if it fits already, or if no change that is tried helps.
    """

    parameters: int
    num_processes: int
    is_sharded: bool
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    device_bytes: int | None = None
    fits_with: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Total bytes on one rank."""
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
            f"the activations ({listed}){self._comparison()}"
        )

    def _comparison(self) -> str:
        if self.device_bytes is None:
            return ""
        if self.total_bytes <= self.device_bytes:
            return (
                f". Of {format_size(self.device_bytes)} that leaves {format_size(self.device_bytes - self.total_bytes)}"
            )
        fits = f"it fits {', or '.join(self.fits_with)}" if self.fits_with else "nothing that was tried makes it fit"
        return f". That is more than {format_size(self.device_bytes)}: {fits}"


def estimate_memory(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    *,
    num_processes: int = 1,
    sharded: bool = False,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW,
    mixed_precision: str = "no",
    device_memory: int | str | None = None,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
) -> MemoryEstimate:
    """Estimate the memory of training on each rank, without activations and without allocating the model.

    Args:
        model: The model, best on the meta device, or a function that creates it. The function is called on the meta
            device, so a model larger than this machine's memory can be estimated.
        num_processes: Number of ranks.
        sharded: Whether each rank holds a share of the model (FSDP) instead of all of it.
        optimizer: The class of the optimizer, or a function that creates one for a list of parameters. The optimizer
            takes a step on the meta device, to measure its state.
        mixed_precision: ``no``, ``fp16`` or ``bf16``.
        device_memory: Memory of a rank's GPU, in bytes or as text such as ``"24GiB"``. The estimate is compared with
            it, and says what would make it fit.
        fsdp_plugin: The settings that choose the blocks of a sharded model. Default: those of the launch.

    Raises:
        ConfigError: An argument has a value that can't be used.
    """
    if mixed_precision not in DTYPES:
        raise ConfigError(f"mixed_precision is {mixed_precision!r}.", fix=f"one of {', '.join(map(repr, DTYPES))}")
    if num_processes < 1:
        raise ConfigError(f"num_processes is {num_processes}.", fix="1 or more")
    if not isinstance(model, torch.nn.Module):
        with torch.device("meta"):
            model = model()
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    whole = _Whole(
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=_bytes(parameters),
        buffer_bytes=_bytes(model.buffers()),
        gradient_bytes=_bytes(trained),
        optimizer_bytes=_state_bytes(optimizer, trained),
        gathered_bytes=_GATHERED_BLOCKS
        * _largest_block_bytes(model, DTYPES[mixed_precision], fsdp_plugin or FullyShardedDataParallelPlugin()),
    )
    device_bytes = None if device_memory is None else size_bytes(device_memory, "device_memory")
    estimate = dataclasses.replace(whole.on_rank(num_processes, sharded=sharded), device_bytes=device_bytes)
    return dataclasses.replace(estimate, fits_with=tuple(_remedies(whole, estimate)))


def warn_of_large_models(
    objects: Sequence[Any],
    backend: Backend,
    plugin: FullyShardedDataParallelPlugin,
    *,
    copies: int,
    mixed_precision: str,
) -> None:
    """Warn, before models are sharded, if a rank's share of one and its optimizer's state won't fit on the device.

    Models without their optimizer in ``objects``, and models that are offloaded to the host, aren't checked. The ranks
    train this number of ``copies`` of each model.
    """
    memory = backend.memory()
    if memory is None or plugin.cpu_offload:
        return
    _, device_bytes = memory()
    models = [item for item in objects if isinstance(item, torch.nn.Module)]
    optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
    for model in models:
        own = set(model.parameters())
        moving = (opt for opt in optimizers if any(p in own for group in opt.param_groups for p in group["params"]))
        optimizer = next(moving, None)
        if optimizer is None or any(map(is_sharded_tensor, own)):
            continue
        with contextlib.suppress(ConfigError, RuntimeError, TypeError, ValueError):  # its optimizer can't be recreated
            estimate = estimate_memory(
                model,
                num_processes=backend.place.world_size // copies,
                sharded=True,
                optimizer=_making_another(optimizer),
                mixed_precision=mixed_precision,
                device_memory=device_bytes,
                fsdp_plugin=plugin,
            )
            if estimate.total_bytes > device_bytes:
                warnings.warn(f"{type(model).__name__} may not fit: {estimate}.", stacklevel=3)


def _making_another(optimizer: torch.optim.Optimizer) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    known = set(inspect.signature(type(optimizer)).parameters) - {"fused", "foreach", "capturable"}
    settings = {name: value for name, value in optimizer.defaults.items() if name in known}
    return functools.partial(type(optimizer), **settings)


@dataclasses.dataclass(frozen=True)
class _Whole:
    """The sizes of a whole model in training."""

    parameters: int
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int

    def on_rank(self, ranks: int, *, sharded: bool) -> MemoryEstimate:
        """Return the estimate for one of this many ranks."""
        is_shared = sharded and ranks > 1
        share = ranks if is_shared else 1
        has_copies = ranks > 1 and not is_shared and not DistributedDataParallelKwargs().gradient_as_bucket_view
        return MemoryEstimate(
            parameters=self.parameters,
            num_processes=ranks,
            is_sharded=sharded,
            parameter_bytes=-(-self.parameter_bytes // share) + self.buffer_bytes,
            gradient_bytes=-(-self.gradient_bytes // share) * (2 if has_copies else 1),  # the buckets hold a copy
            optimizer_bytes=-(-self.optimizer_bytes // share),
            gathered_bytes=self.gathered_bytes if is_shared else 0,
        )


def _remedies(whole: _Whole, estimate: MemoryEstimate) -> Iterator[str]:
    """Yield changes that would make a model fit, if its estimate exceeds the device's memory."""
    limit_bytes, ranks = estimate.device_bytes, estimate.num_processes
    if limit_bytes is None or estimate.total_bytes <= limit_bytes:
        return
    if ranks > 1 and whole.buffer_bytes + whole.gathered_bytes <= limit_bytes:
        yield "with cpu_offload=True" if estimate.is_sharded else "sharded with cpu_offload=True"
    more = (ranks << doublings for doublings in range(0 if ranks > 1 else 1, _DOUBLINGS))
    fitting = (n for n in more if whole.on_rank(n, sharded=True).total_bytes <= limit_bytes)
    enough = next(fitting, None)
    if enough is not None:
        yield f"sharded (--fsdp) on {enough} ranks" if not estimate.is_sharded else f"on {enough} ranks"


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # of sparse ones too


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
    # Some steps read values, such as Adafactor's, but create the state before. Others need a closure, such as LBFGS's.
    except (RuntimeError, TypeError) as error:
        if len(made.state) < len(trained):
            raise ConfigError(
                f"The state of {type(made).__name__} can't be estimated: its step needs more than shapes ({error}).",
                fix="optimizer=torch.optim.AdamW, or another one whose state has the same size",
            ) from error
    return _bytes(itertools.chain.from_iterable(map(_tensors, made.state.values())))


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (value for value in state.values() if isinstance(value, torch.Tensor))


def _largest_block_bytes(
    model: torch.nn.Module, dtype: torch.dtype | None, plugin: FullyShardedDataParallelPlugin
) -> int:
    """Return the bytes of the largest unit that is gathered at once: a block, or everything outside blocks."""
    largest, taken = 0, set[torch.nn.Parameter]()
    for unit in [*fsdp.chosen_units(model, plugin), model]:  # inner units first
        own = set(unit.parameters()) - taken
        taken |= own
        largest = max(largest, sum(p.numel() * (dtype or p.dtype).itemsize for p in own))
    return largest


class ModelMemoryReports:
    """Reports the memory of an ``Accelerator``'s prepared models and optimizers, and keeps none of them alive.

    Gradients and optimizer state exist only after a step. The second step is the first that has parameters, gradients
    and optimizer state at once, so the device's peak memory is reported after it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def track(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Report the memory now and after the first steps. Outside a launched rank, do nothing."""
        if not reporter().is_connected:
            return
        before = len(self._models)
        for model in models:
            self._models.add(model)
        for optimizer in optimizers:
            if optimizer not in self._steps:
                self._steps[optimizer] = 0
                optimizer.register_step_post_hook(self._stepped)
        if len(self._models) > before:
            self._report(peak_bytes=0)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps = self._steps.get(optimizer, _FOLLOWED_STEPS)
        if steps < _FOLLOWED_STEPS:
            self._steps[optimizer] = steps + 1
            self._report(peak_bytes=self._peak_bytes() if steps + 1 == _FOLLOWED_STEPS else 0)

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _report(self, peak_bytes: int) -> None:
        parameters = {parameter for model in self._models for parameter in model.parameters()}
        gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
        states = (state for optimizer in self._steps for state in optimizer.state.values())
        reporter().report_model_memory(
            parameters=sum(parameter.numel() for parameter in parameters),
            held_parameters=sum(_held(parameter).numel() for parameter in parameters),
            parameter_bytes=_bytes(map(_held, parameters)),
            gradient_bytes=_bytes(map(_held, gradients)),
            optimizer_bytes=_bytes(map(_held, itertools.chain.from_iterable(map(_tensors, states)))),
            peak_bytes=peak_bytes,
        )


def _held(tensor: Any) -> torch.Tensor:
    """Return this rank's share of a tensor: all of it, unless it is sharded."""
    with torch.no_grad():
        share: torch.Tensor = tensor.to_local() if is_sharded_tensor(tensor) else tensor
    return share

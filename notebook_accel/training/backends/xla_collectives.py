"""Collectives of XLA devices, and data parallelism that uses them.

If PJRT has joined the devices, collectives become parts of a graph, which runs when a step ends. All ranks' graphs have
to be the same program, or the ranks deadlock. So values that differ between ranks, such as the source of a broadcast,
enter the graph as data, never as a constant, a shape, or a further operation.

Otherwise values go through the host's memory, by gloo. A step then has two graphs: all operations before its
collective, and the rest.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from notebook_accel import torch_internals
from notebook_accel.errors import CollectiveError
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.gradients import AveragingWrapper, TrainableParameters


class Collectives(Protocol):
    """Collectives of tensors on devices. Every rank makes the same calls, with the same shapes."""

    def all_reduce(self, tensors: Sequence[torch.Tensor], scale: float = 1.0) -> None:
        """Replace the tensors by their sums over the ranks, times ``scale``, in place, in one collective."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' tensors of shape ``(n, ...)``, in order of rank: ``(world_size * n, ...)``."""

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Replace the tensors by those of rank ``source``, in place."""


class BetweenDevices:
    """``Collectives`` of devices that PJRT has joined."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size

    def all_reduce(self, tensors: Sequence[torch.Tensor], scale: float = 1.0) -> None:
        import torch_xla.core.xla_model as xm

        xm.all_reduce(xm.REDUCE_SUM, list(tensors), scale=scale, pin_layout=False)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        # All-reduce each rank's tensor with zeros in the other ranks' places: torch_xla's own all_gather uses the order
        # of the devices, which may differ from that of the ranks.
        own = torch.arange(self._world_size) == self._rank
        mask = own.reshape(-1, *[1] * tensor.ndim).to(tensor.device)
        places = _summable(tensor).unsqueeze(0) * mask.to(_summable(tensor).dtype)
        # Multiplying alone would turn an infinite value into NaN in the places of other ranks.
        places = torch.where(mask, places, torch.zeros_like(places))
        self.all_reduce([places])
        return places.reshape(-1, *tensor.shape[1:]).to(tensor.dtype)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        if not tensors:
            return
        is_source = torch.tensor(self._rank == source).to(tensors[0].device)
        values = [torch.where(is_source, _summable(tensor), torch.zeros_like(_summable(tensor))) for tensor in tensors]
        self.all_reduce(values)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value.to(tensor.dtype))


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to(torch.int32) if tensor.dtype is torch.bool else tensor


class ThroughHost:
    """``Collectives`` of devices that PJRT hasn't joined, through the host's memory.

    ``host`` is the backend of host tensors; ``compute`` runs all recorded operations on the device.
    """

    def __init__(self, host: Backend, compute: Callable[[], None]) -> None:
        self._host = host
        self._compute = compute

    def all_reduce(self, tensors: Sequence[torch.Tensor], scale: float = 1.0) -> None:
        self._check_sizes(sum(tensor.numel() for tensor in tensors))
        for _, same in itertools.groupby(sorted(tensors, key=_dtype_name), _dtype_name):
            self._all_reduce(list(same), scale)

    def _all_reduce(self, tensors: list[torch.Tensor], scale: float) -> None:
        """Reduce tensors of one type, in one transfer each way."""
        together = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        [total] = self._read([together])
        self._host.all_reduce(total)
        parts = torch.split(total.to(together.device), [tensor.numel() for tensor in tensors])
        with torch.no_grad():
            for tensor, part in zip(tensors, parts, strict=True):
                whole = part.reshape(tensor.shape)
                tensor.copy_(whole if scale == 1 else whole * scale)

    def _check_sizes(self, size: int) -> None:
        sizes = self._host.all_gather(torch.tensor([size])).tolist()
        if len(set(sizes)) > 1:  # gloo would end the process
            shown = ", ".join(f"{count:,} on rank {rank}" for rank, count in enumerate(sizes))
            raise CollectiveError(
                f"The ranks reduce different numbers of values: {shown}.",
                why="Every rank has to have the same gradients, and some parameters have none on some ranks.",
                fix="have every rank use the same parameters in its forward pass, if only multiplied by zero",
            )

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        [own] = self._read([tensor])
        return self._host.all_gather(own).to(tensor.device)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        with torch.no_grad():
            for tensor, value in zip(tensors, self._read(tensors), strict=True):
                self._host.broadcast(value, source)
                tensor.copy_(value)

    def _read(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the tensors on the host."""
        self._compute()  # everything, or the rest of the step would compute these tensors again
        return [tensor.detach().cpu().contiguous() for tensor in tensors]


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype)


class XlaDataParallel(AveragingWrapper):
    """Averages a model's gradients over the ranks at the end of each backward pass, in one collective.

    Parameters that become trainable later, such as those of added layers, are averaged too.
    """

    def __init__(self, model: torch.nn.Module, world_size: int, collectives: Collectives) -> None:
        super().__init__()
        self.module = model
        self._world_size = world_size
        self._collectives = collectives
        self._syncs = True
        self._is_queued = False
        self._hooks: list[Any] = []
        self._register_hooks()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            if self.training and self.before_training_pass is not None:
                self.before_training_pass()
            if self._watched.have_changed():
                added = self._watched.added()
                if added:
                    self._collectives.broadcast(added, source=0)
                self._register_hooks()
        return self.module(*inputs, **kwargs)

    def _register_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._watched = TrainableParameters(self.module)
        trainable: list[Any] = self._watched.trainable
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._queue) for parameter in trainable]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep this rank's gradients local in the body."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _queue(self, _: torch.Tensor) -> None:
        if self._syncs and not self._is_queued:
            self._is_queued = True
            torch_internals.after_backward(self._average)

    def _average(self) -> None:
        self._is_queued = False
        gradients = [parameter.grad for parameter in self._watched.trainable if parameter.grad is not None]
        self._collectives.all_reduce(gradients, scale=1 / self._world_size)

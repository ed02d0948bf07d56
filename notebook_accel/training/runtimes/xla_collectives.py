"""Collectives between XLA devices. They become parts of a graph, which is computed when a step ends.

All ranks' graphs have to be the same program, or they wait for each other for ever. So what differs between ranks, such
as which of them gives its values, goes in as data: never as a constant, a shape, or an operation more.

Knows torch_xla, and imports it when it is first used.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["DataParallel", "all_gather", "all_reduce", "broadcast"]


def all_reduce(tensors: Iterable[torch.Tensor], scale: float = 1.0) -> None:
    """Replaces the tensors by their sums over the ranks, times ``scale``, in place, by one collective for all."""
    import torch_xla.core.xla_model as xm

    xm.all_reduce(xm.REDUCE_SUM, list(tensors), scale=scale, pin_layout=False)


def all_gather(tensor: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """The ranks' tensors of shape ``(n, ...)``, in order of rank: ``(world_size * n, ...)``.

    Each rank adds its own to zeros in the places of the others, because the order of torch_xla's own is that of the
    devices, which needn't be that of the ranks.
    """
    own = torch.arange(world_size) == rank
    mask = own.reshape(-1, *[1] * tensor.ndim).to(tensor.device)
    places = _summable(tensor).unsqueeze(0) * mask.to(_summable(tensor).dtype)
    # Not only multiplied, which leaves an infinite value's trace in the places of other ranks.
    places = torch.where(mask, places, torch.zeros_like(places))
    all_reduce([places])
    return places.reshape(-1, *tensor.shape[1:]).to(tensor.dtype)


def broadcast(tensors: Iterable[torch.Tensor], rank: int, source: int) -> None:
    """Replaces the tensors by those of one rank, in place, by one collective for all."""
    tensors = list(tensors)
    if not tensors:
        return
    is_source = torch.tensor(rank == source).to(tensors[0].device)
    values = [torch.where(is_source, _summable(tensor), torch.zeros_like(_summable(tensor))) for tensor in tensors]
    all_reduce(values)
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value.to(tensor.dtype))


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to(torch.int32) if tensor.dtype is torch.bool else tensor


class DataParallel(torch.nn.Module):
    """A model whose gradients are averaged over the ranks at the end of each backward pass, all by one collective.

    Pickles and copies as the model in it, since it means nothing outside its ranks.

    Args:
        model: The model, on the device.
        world_size: Number of ranks.
    """

    def __init__(self, model: torch.nn.Module, world_size: int) -> None:
        super().__init__()
        self.module = model
        self._world_size = world_size
        self._syncs = True
        self._is_queued = False
        self._learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self._learning:
            register: Any = parameter.register_post_accumulate_grad_hook
            register(self._queue)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients stay this rank's own in here."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _queue(self, _: torch.Tensor) -> None:
        if self._syncs and not self._is_queued:
            self._is_queued = True
            engine: Any = torch.autograd.Variable._execution_engine  # as torch's DDP has it
            engine.queue_callback(self._average)

    def _average(self) -> None:
        self._is_queued = False
        gradients = [parameter.grad for parameter in self._learning if parameter.grad is not None]
        all_reduce(gradients, scale=1 / self._world_size)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self.module,),)

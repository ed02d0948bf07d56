"""The interface between training and a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from notebook_accel.environment import RankPlace
from notebook_accel.training.handlers import DistributedDataParallelKwargs

__all__ = ["Backend", "Uploader"]


class Uploader(Protocol):
    """Takes the batches of an iteration to the device while the model computes, in the order in which they come."""

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Accept the tensors of one batch."""

    def begin(self) -> None:
        """Start their transfer, if it hasn't started: the device has been given work of the running step."""

    def take(self) -> Sequence[torch.Tensor]:
        """Return the oldest batch that was sent and not taken, on the device. The step before has been given to it."""

    def close(self) -> None:
        """End the iteration."""


class Backend(Protocol):
    """Computes on this rank's device and communicates with the other ranks.

    Every rank calls the same methods in the same order.
    """

    @property
    def place(self) -> RankPlace:
        """This rank's place among all."""

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""

    @property
    def compares_calls(self) -> bool:
        """True if ranks should compare their calls before each collective.

        True where a mismatch would end the whole process instead of raising an error, and where a further small message
        costs little.
        """

    @property
    def has_left(self) -> bool:
        """True if ``leave`` was called."""

    def explain(self, error: RuntimeError) -> None:
        """Raise a ``CollectiveError`` with every rank's place in the code if ``error`` comes from waiting for them."""

    def memory(self) -> Callable[[], tuple[int, int]] | None:
        """Return a function that gives the device's used and total bytes, ``None`` without memory of its own."""

    def release_memory(self) -> None:
        """Give unused device memory back, for other processes to use."""

    def place_model(self, model: torch.nn.Module) -> None:
        """Move a model to the device, in place, so that its optimizers stay valid."""

    def place_leaf(self, leaf: torch.Tensor) -> None:
        """Move a learning tensor to the device, in place."""

    def to_host(self, state: Any) -> Any:
        """Return a state dict that can be written to a file. Every rank calls it, also if only one writes."""

    def uploader(self, *, non_blocking: bool) -> Uploader | None:
        """Return an uploader for one iteration, ``None`` where a plain copy is enough.

        Args:
            non_blocking: Don't wait for copies out of pinned memory.
        """

    def mark_step(self) -> None:
        """End a step on devices that put work off until a step is complete."""

    def computes_in(self, dtype: torch.dtype, *, downcast: bool) -> bool:
        """Have the device itself compute in ``dtype``; return whether it does, so that no autocast is needed.

        Args:
            dtype: The type that replaces float32.
            downcast: Have float32 replace float64 too.

        Raises:
            ConfigError: The device computes in another type already, and can't change.
        """

    def seed(self, seed: int) -> None:
        """Seed the device's generator, where ``torch.manual_seed`` doesn't."""

    def generator_state(self) -> Mapping[str, Any]:
        """Return the state of the device's generators by name, as ``torch.load(weights_only=True)`` reads it."""

    def set_generator_state(self, state: Mapping[str, Any]) -> None:
        """Set the device's generators to a state from ``generator_state``. Other entries are ignored."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' tensors of shape ``(n, ...)``, in order of rank: ``(world_size * n, ...)``."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by the sum over the ranks, in place."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace ``tensor`` by that of rank ``source``, in place."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the ranks' objects, in order of rank. They are pickled."""

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Return the object of rank ``source``. It is pickled."""

    def scatter_object(self, values: Sequence[Any] | None) -> Any:
        """Return this rank's item of rank 0's ``values``; others give ``None``. Each item is pickled by itself."""

    def data_parallel(self, model: torch.nn.Module, options: DistributedDataParallelKwargs) -> torch.nn.Module:
        """Return a module that averages ``model``'s gradients over the ranks in each backward pass.

        All ranks begin with rank 0's weights. The module may have a context manager ``no_sync``, in which gradients
        stay local, and ``sync_in_backward``, in which they are averaged although the forward pass was in ``no_sync``.
        """

    def leave(self) -> None:
        """Leave the other ranks. Later calls fail."""

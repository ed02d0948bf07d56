"""The seam between training and a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from notebook_accel.environment import RankPlace
from notebook_accel.training.handlers import DistributedDataParallelKwargs

__all__ = ["Backend", "Uploader"]


class Uploader(Protocol):
    """Takes a pass's batches to the device while the model computes, in the order in which they come."""

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hands over the tensors of one batch."""

    def begin(self) -> None:
        """Begins with them, if that isn't done yet: the running step has been asked for, in part at least."""

    def take(self) -> Sequence[torch.Tensor]:
        """The oldest batch that was sent and not taken, on the device. The step before it has been asked for."""

    def close(self) -> None:
        """Ends the pass."""


class Backend(Protocol):
    """How this rank computes and talks to the others. Every rank calls the same methods in the same order."""

    @property
    def place(self) -> RankPlace:
        """This rank's place among all."""

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""

    @property
    def compares_calls(self) -> bool:
        """True if ranks should compare what they are about to do before each collective.

        True where ranks that disagree would take the whole process down instead of raising an error, and where a
        further small message costs little.
        """

    @property
    def has_left(self) -> bool:
        """True if ``leave`` was called."""

    def explain(self, error: RuntimeError) -> None:
        """Raises a ``CollectiveError`` that says what every rank was doing if ``error`` comes from waiting for them."""

    def memory(self) -> Callable[[], tuple[int, int]] | None:
        """What gives the device's used and total bytes, ``None`` if it has no memory of its own."""

    def release_memory(self) -> None:
        """Gives back device memory that nothing uses any more, for other processes to use."""

    def place_model(self, model: torch.nn.Module) -> None:
        """Moves a model to the device, in place: optimizers that were made for it go on working."""

    def place_leaf(self, leaf: torch.Tensor) -> None:
        """The same for a tensor that learns."""

    def to_host(self, state: Any) -> Any:
        """A state dict as it can be written to a file. Every rank calls it, also where only one writes."""

    def uploader(self, *, non_blocking: bool) -> Uploader | None:
        """What takes the batches of a pass to the device, ``None`` where a copy is all that it takes.

        Args:
            non_blocking: Don't wait for copies out of pinned memory.
        """

    def mark_step(self) -> None:
        """Has the device compute what was asked of it, where that is put off until a step is complete."""

    def computes_in(self, dtype: torch.dtype, *, downcast: bool) -> bool:
        """Has the device itself compute in ``dtype``, if it can; returns whether it does, so that nothing autocasts.

        Args:
            dtype: What takes the place of float32.
            downcast: Have float32 take the place of float64 too.

        Raises:
            ConfigError: It computes in something else already, and can't change.
        """

    def seed(self, seed: int) -> None:
        """Seeds the device's generator, where ``torch.manual_seed`` doesn't."""

    def generator_state(self) -> Mapping[str, Any]:
        """The state of the device's generators, by name, made of what ``torch.load(weights_only=True)`` reads."""

    def set_generator_state(self, state: Mapping[str, Any]) -> None:
        """Puts them back to where ``generator_state`` has them. Others in ``state`` are passed over."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors of shape ``(n, ...)``, in order of rank: ``(world_size * n, ...)``."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replaces ``tensor`` by the sum over the ranks, in place."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replaces ``tensor`` by that of rank ``source``, in place."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """The ranks' objects, in order of rank. They are pickled."""

    def broadcast_object(self, value: Any, source: int) -> Any:
        """The object of rank ``source``. It is pickled."""

    def scatter_object(self, values: Sequence[Any] | None) -> Any:
        """The object at this rank's place in rank 0's ``values``; others give ``None``. Each is pickled by itself."""

    def data_parallel(self, model: torch.nn.Module, options: DistributedDataParallelKwargs) -> torch.nn.Module:
        """A module that averages ``model``'s gradients over the ranks in each backward pass.

        It begins with rank 0's weights on every rank. If it has a method ``no_sync``, gradients stay local in there; if
        it has ``sync_in_backward``, they don't in there, although the forward pass was in ``no_sync``.
        """

    def leave(self) -> None:
        """Leaves the other ranks. What is called afterwards fails."""

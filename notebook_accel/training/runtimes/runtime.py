"""The seam between training and a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from notebook_accel.environment import RankPlace
from notebook_accel.training.handlers import DistributedDataParallelKwargs

__all__ = ["Runtime"]


class Runtime(Protocol):
    """How this rank computes and talks to the others. Every rank calls the same methods in the same order."""

    @property
    def place(self) -> RankPlace:
        """This rank's place among all."""

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""

    @property
    def compares_calls(self) -> bool:
        """Whether ranks should compare what they are about to do before each collective.

        True where ranks that disagree would take the whole process down instead of raising an error, and where a
        further small message costs little.
        """

    @property
    def has_left(self) -> bool:
        """Whether ``leave`` was called."""

    def explain(self, error: RuntimeError) -> None:
        """Raises a ``CollectiveError`` that says what every rank was doing if ``error`` comes from waiting for them."""

    def memory(self) -> Callable[[], tuple[int, int]] | None:
        """What gives the device's used and total bytes, ``None`` if it has no memory of its own."""

    def release_memory(self) -> None:
        """Gives back device memory that nothing uses any more, for other processes to use."""

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

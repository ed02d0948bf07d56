"""The interface between training and a backend, and a view of a backend in which some ranks count as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from notebook_accel.environment import RankPlace
from notebook_accel.training.handlers import DistributedDataParallelKwargs


class Uploader(Protocol):
    """Copies the batches of an iteration to the device, in order, while the model computes."""

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Accept the tensors of one batch."""

    def begin(self) -> None:
        """Start the next transfer unless it has started. Called when the device has work of the current step queued."""

    def take(self) -> Sequence[torch.Tensor]:
        """Return the oldest batch that was sent and not taken, on the device. Called after the step before it."""

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

        That is so where a mismatch would end the process instead of raising, and a small extra message is cheap.
        """

    @property
    def has_left(self) -> bool:
        """True if ``leave`` was called."""

    def explain(self, error: RuntimeError) -> None:
        """Raise a ``CollectiveError`` with every rank's place in the code if ``error`` comes from waiting for ranks."""

    def memory(self) -> Callable[[], tuple[int, int]] | None:
        """Return a function that returns the device's used and total bytes; ``None`` if it has no memory of its own."""

    def release_memory(self) -> None:
        """Release unused device memory for other processes."""

    def place_model(self, model: torch.nn.Module) -> None:
        """Move a model to the device, in place, so that its optimizers stay valid."""

    def place_leaf(self, leaf: torch.Tensor) -> None:
        """Move a trainable tensor to the device, in place."""

    def to_host(self, state: Any) -> Any:
        """Return a state dict that can be written to a file. Every rank calls this, even if only one writes."""

    def uploader(self, *, non_blocking: bool) -> Uploader | None:
        """Return an uploader for one iteration, ``None`` where a plain copy is enough.

        Args:
            non_blocking: Don't wait for copies out of pinned memory.
        """

    @property
    def mark_step(self) -> Callable[[], None] | None:
        """A function that ends a step, on devices that defer work until a step is complete; ``None`` on others."""

    def computes_in(self, dtype: torch.dtype, *, downcast: bool) -> bool:
        """Try to have the device itself compute in ``dtype``; return True if it does, so that no autocast is needed.

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

    def absent_ranks(self) -> Sequence[int]:
        """Wait for the other ranks, and return those that will never make this call, the same ones on all ranks here.

        Raises:
            CollectiveError: Until the deadline of a collective, some ranks neither came nor went on elsewhere.
        """

    def barrier(self) -> None:
        """Block until every rank has called this method."""

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
        """Return this rank's item of rank 0's ``values``; other ranks pass ``None``. Each item is pickled by itself."""

    def data_parallel(self, model: torch.nn.Module, options: DistributedDataParallelKwargs) -> torch.nn.Module:
        """Return a module that averages ``model``'s gradients over the ranks in each backward pass.

        All ranks begin with rank 0's weights. The module may have two context managers: in ``no_sync`` gradients stay
        local; in ``sync_in_backward`` they are averaged although the forward pass was in ``no_sync``.
        """

    def mesh(self, sizes: Mapping[str, int], joint: Mapping[str, tuple[str, ...]]) -> Any:
        """Return a ``DeviceMesh`` of all ranks, for sharded models. All ranks call this.

        Args:
            sizes: The sizes of its dimensions, by name.
            joint: Further names, each for one or more of the dimensions joined to one.

        Raises:
            ConfigError: Models can't be sharded on this device.
        """

    def background_group(self) -> Any:
        """Return the process group over which background threads exchange objects; ``None`` for one rank.

        All ranks call this. It is the same group each time.
        """

    def leave(self) -> None:
        """Leave the group. Later calls fail."""


class SharedSamples:
    """A view of a backend in which ranks that work on the same samples count as one, for loaders and metrics.

    Tensor parallelism splits a model's layers over ranks, all of which need the same batch. These ranks have
    consecutive numbers: with groups of two, ranks 0 and 1, then 2 and 3, and so on. Gathered results have each group's
    part once; a broadcast or a barrier is as in ``all_ranks``. All ranks of all groups call the methods.

    Attributes:
        all_ranks: The backend of this rank.
        place: The place of the group among all groups.
    """

    def __init__(self, backend: Backend, ranks_per_sample: int) -> None:
        place, size = backend.place, ranks_per_sample
        self.all_ranks = backend
        self.place = dataclasses.replace(place, rank=place.rank // size, world_size=place.world_size // size)
        self._group_size = size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        by_rank = self.all_ranks.all_gather(tensor).reshape(self.all_ranks.place.world_size, *tensor.shape)
        return by_rank[:: self._group_size].flatten(0, 1)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.all_ranks.all_gather_object(value)[:: self._group_size]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.all_ranks.all_reduce(tensor)
        tensor.div_(
            self._group_size, rounding_mode=None if tensor.is_floating_point() or tensor.is_complex() else "floor"
        )

    def scatter_object(self, values: Sequence[Any] | None) -> Any:
        each = None if values is None else [value for value in values for _ in range(self._group_size)]
        return self.all_ranks.scatter_object(each)

    def __getattr__(self, name: str) -> Any:
        if name == "all_ranks":  # not set yet: the object is being created
            raise AttributeError(name)
        return getattr(self.all_ranks, name)


def sharing(backend: Backend, ranks_per_sample: int) -> Backend:
    """Return the backend in which each group of ``ranks_per_sample`` consecutive ranks counts as one."""
    return backend if ranks_per_sample == 1 else cast(Backend, SharedSamples(backend, ranks_per_sample))


def all_ranks(backend: Backend) -> Backend:
    """Return the backend in which each rank counts by itself."""
    return backend.all_ranks if isinstance(backend, SharedSamples) else backend


def shares_samples(backend: Backend) -> bool:
    """Return whether other ranks work on the same samples as this one."""
    return all_ranks(backend).place != backend.place

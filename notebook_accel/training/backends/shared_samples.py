"""A view of a backend in which ranks that work on the same samples count as one, for loaders and metrics.

Tensor parallelism splits a model's layers over ranks, all of which need the same batch. These ranks have consecutive
numbers: with groups of two, ranks 0 and 1, then 2 and 3, and so on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import torch

from notebook_accel.training.backends.backend import Backend


class SharedSamples:
    """The backend of a group of ranks that work on the same samples.

    Gathered results have each group's part once; a broadcast or a barrier is as in ``backend``. All ranks of all groups
    call the methods.

    Args:
        backend: The backend of this rank.
        parts: Number of ranks in a group.

    Attributes:
        all_ranks: The backend of this rank.
        place: The place of the group among all groups.
    """

    def __init__(self, backend: Backend, parts: int) -> None:
        self.all_ranks = backend
        self.place = dataclasses.replace(
            backend.place, rank=backend.place.rank // parts, world_size=backend.place.world_size // parts
        )
        self._parts = parts

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        by_rank = self.all_ranks.all_gather(tensor).reshape(self.all_ranks.place.world_size, *tensor.shape)
        return by_rank[:: self._parts].flatten(0, 1)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self.all_ranks.all_gather_object(value)[:: self._parts]

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.all_ranks.all_reduce(tensor)
        tensor.div_(self._parts, rounding_mode=None if tensor.is_floating_point() or tensor.is_complex() else "floor")

    def scatter_object(self, values: Sequence[Any] | None) -> Any:
        each = None if values is None else [value for value in values for _ in range(self._parts)]
        return self.all_ranks.scatter_object(each)

    def __getattr__(self, name: str) -> Any:
        if name == "all_ranks":  # not set yet: the object is being created
            raise AttributeError(name)
        return getattr(self.all_ranks, name)


def sharing(backend: Backend, parts: int) -> Backend:
    """Return the backend in which each group of ``parts`` consecutive ranks counts as one."""
    return backend if parts == 1 else cast(Backend, SharedSamples(backend, parts))


def all_ranks(backend: Backend) -> Backend:
    """Return the backend in which each rank counts by itself."""
    return backend.all_ranks if isinstance(backend, SharedSamples) else backend


def shares_samples(backend: Backend) -> bool:
    """Return whether other ranks work on the same samples as this one."""
    return all_ranks(backend).place != backend.place

"""One process on its own: no group to join, and every collective is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from notebook_accel.environment import RankPlace
from notebook_accel.training.backends.devices import TorchDevice
from notebook_accel.training.handlers import DistributedDataParallelKwargs

__all__ = ["SingleProcess"]


class SingleProcess(TorchDevice):
    """A ``Backend`` of one rank.

    Args:
        place: Rank 0 of 1.
        device: What it computes on.
    """

    compares_calls = False

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        assert place.world_size == 1
        self.place = place
        self.device = device
        self.has_left = False

    def explain(self, error: RuntimeError) -> None:
        pass

    def barrier(self) -> None:
        pass

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_reduce(self, tensor: torch.Tensor) -> None:
        pass

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        pass

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any, source: int) -> Any:  # noqa: ARG002  # the seam's signature
        return value

    def scatter_object(self, values: Sequence[Any] | None) -> Any:
        assert values is not None
        return values[0]

    def data_parallel(self, model: torch.nn.Module, options: DistributedDataParallelKwargs) -> torch.nn.Module:  # noqa: ARG002
        return model

    def leave(self) -> None:
        self.has_left = True

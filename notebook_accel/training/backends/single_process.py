"""Backends of processes that join no group: a single rank, and a worker process of a data loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.training.backends.devices import TorchDevice
from notebook_accel.training.handlers import DistributedDataParallelKwargs


class _Alone(TorchDevice):
    """The part of a ``Backend`` that processes without a group have in common: everything but collectives."""

    compares_calls = False

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self.place = place
        self.device = device
        self.has_left = False

    def explain(self, error: RuntimeError) -> None:
        pass

    def leave(self) -> None:
        self.has_left = True

    def absent_ranks(self) -> Sequence[int]:
        return ()


class SingleProcess(_Alone):
    """A ``Backend`` of one rank, rank 0 of 1, in which every collective is the identity."""

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

    def broadcast_object(self, value: Any, source: int) -> Any:  # noqa: ARG002  # the interface's signature
        return value

    def scatter_object(self, values: Sequence[Any] | None) -> Any:
        assert values is not None
        return values[0]

    def data_parallel(self, model: torch.nn.Module, options: DistributedDataParallelKwargs) -> torch.nn.Module:  # noqa: ARG002
        return model

    def mesh(self, sizes: Any, joint: Any) -> Any:  # noqa: ARG002  # the interface's signature
        raise ConfigError("A model can't be sharded over one rank.", fix="num_processes=2 or more")

    def background_group(self) -> Any:
        return None


class WorkerProcess(_Alone):
    """A ``Backend`` of a data loader's worker process, which has its rank's place and refuses collectives.

    The rank itself takes part in collectives; no rank waits for a worker.
    """

    def __init__(self, place: RankPlace) -> None:
        super().__init__(place, torch.device("cpu"))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TrainingError(
            "A worker process of a data loader can't communicate with other ranks.",
            why="Only the rank that it works for takes part in collectives.",
            fix="call it in the training loop, or use num_workers=0",
        )

    barrier = all_gather = all_reduce = broadcast = _refuse
    all_gather_object = broadcast_object = scatter_object = data_parallel = mesh = background_group = _refuse

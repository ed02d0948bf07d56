"""A worker process of a rank's loader: it may ask which rank it works for, and can't talk to the others."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from notebook_accel.environment import RankPlace
from notebook_accel.errors import TrainingError
from notebook_accel.training.backends.devices import TorchDevice

__all__ = ["WorkerProcess"]


class WorkerProcess(TorchDevice):
    """A ``Backend`` whose collectives are refused: the rank itself takes part in them, and nobody waits for a worker.

    Args:
        place: That of the rank whose worker this is.
    """

    compares_calls = False

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        self.device = torch.device("cpu")
        self.has_left = False

    def explain(self, error: RuntimeError) -> None:
        pass

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TrainingError(
            "A worker process of a loader can't talk to other ranks.",
            why="The rank that it works for does.",
            fix="do it in the training loop; or num_workers=0",
        )

    barrier = all_gather = all_reduce = broadcast = _refuse
    all_gather_object = broadcast_object = scatter_object = _refuse
    data_parallel = _refuse

    def leave(self) -> None:
        self.has_left = True

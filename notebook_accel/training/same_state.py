"""Optimizers and schedulers, which have to be in the same state on all ranks, as their weights have to be equal.

An interrupt can come between one rank's step and another's. Afterwards rank 0's state is made that of all.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from notebook_accel.training.runtimes.roster import Roster
from notebook_accel.training.runtimes.runtime import Runtime
from notebook_accel.training.trees import map_leaves

__all__ = ["follow_first_rank", "forget", "remember"]

_stepping: Roster[Any, None] = Roster()


def remember(stepping: Any) -> None:
    """Takes note of a prepared optimizer or scheduler, by its ``state_dict`` and ``load_state_dict``."""
    _stepping.add(stepping, type(stepping).__name__, None)


def forget() -> None:
    """None of them has a counterpart on all ranks any more."""
    _stepping.clear()


def follow_first_rank(runtime: Runtime) -> None:
    """Where ranks have come apart, all get the state that rank 0 has. All ranks call it."""
    common, _ = _stepping.match(runtime.all_gather_object)
    digests = [_digest(stepping.state_dict()) for stepping, _ in common]
    by_rank: list[list[int]] = runtime.all_gather_object(digests)
    for (stepping, _), of_ranks in zip(common, zip(*by_rank, strict=True), strict=True):
        if len(set(of_ranks)) > 1:
            own = map_leaves(_on_cpu, stepping.state_dict()) if runtime.place.rank == 0 else None
            stepping.load_state_dict(runtime.broadcast_object(own, 0))


def _on_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _digest(state: Any) -> int:
    """Of the state's numbers; of each tensor's the sum, since what differs by a step differs in that too."""
    return zlib.crc32(repr(map_leaves(_sum, state)).encode())


def _sum(leaf: Any) -> Any:
    return float(leaf.double().sum()) if isinstance(leaf, torch.Tensor) else leaf

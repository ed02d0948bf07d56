"""What has to be in the same state on all ranks: optimizers, schedulers, windows, loaders' epochs, the loss scale.

An interrupt can come between one rank's step and another's. Afterwards rank 0's state is made that of all, and the step
that was interrupted begins anew.
"""

from __future__ import annotations

import zlib
from typing import Any, Protocol

import torch

from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.backends.roster import Roster
from notebook_accel.training.trees import map_leaves

__all__ = ["Stepping", "follow_first_rank", "forget", "remember"]


class Stepping(Protocol):
    """What moves on with training. It may have a method ``abandon_step``, which forgets a step that was begun."""

    def state_dict(self) -> dict[str, Any]:
        """How far it is."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Goes on from there."""


_stepping: Roster[Any, None] = Roster()


def remember(stepping: Stepping) -> None:
    """Takes note of something prepared. All ranks do so in the same order."""
    _stepping.add(stepping, type(stepping).__name__, None)


def forget() -> None:
    """None of them has a counterpart on all ranks any more."""
    _stepping.clear()


def follow_first_rank(backend: Backend) -> bool:
    """Where ranks have come apart, all get the state that rank 0 has. All ranks call it.

    The step that was interrupted begins anew: where ranks are apart, or in a window, gradients are cleared.

    Returns:
        Whether a window had begun.
    """
    entries, _ = _stepping.match(backend.all_gather_object)
    common = [stepping for stepping, _ in entries]
    digests = [_digest(stepping.state_dict()) for stepping in common]
    is_in_window = any(getattr(stepping, "is_in_window", False) for stepping in common)
    by_rank: list[tuple[bool, list[int]]] = backend.all_gather_object((is_in_window, digests))
    are_apart = [len(set(of_ranks)) > 1 for of_ranks in zip(*(found for _, found in by_rank), strict=True)]
    for stepping, is_apart in zip(common, are_apart, strict=True):
        if is_apart:
            own = map_leaves(_on_cpu, stepping.state_dict()) if backend.place.rank == 0 else None
            stepping.load_state_dict(backend.broadcast_object(own, 0))
    is_in_window = any(found for found, _ in by_rank)
    for stepping in common:
        if hasattr(stepping, "abandon_step"):
            stepping.abandon_step()
        elif isinstance(stepping, torch.optim.Optimizer) and (is_in_window or any(are_apart)):
            stepping.zero_grad()
    return is_in_window


def _on_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def _digest(state: Any) -> int:
    """Of the state's numbers; of each tensor's the sum, since what differs by a step differs in that too."""
    return zlib.crc32(repr(map_leaves(_sum, state)).encode())


def _sum(leaf: Any) -> Any:
    return float(leaf.double().sum()) if isinstance(leaf, torch.Tensor) else leaf

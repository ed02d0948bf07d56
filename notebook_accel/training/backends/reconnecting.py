"""Modules that average gradients, and how they go on in another process group: as the objects that they are.

Whoever holds one, such as the user's ``model``, goes on with it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch

from notebook_accel.training.backends.roster import Gather, Roster

__all__ = ["forget", "is_remembered", "reconnect_all", "remember"]

Connect = Callable[[Any, torch.nn.Module], None]

_connected: Roster[torch.nn.Module, Connect] = Roster()


def remember(parallel: torch.nn.Module, connect: Connect) -> None:
    """Takes note of a module that was connected.

    Args:
        parallel: It.
        connect: Connects it, emptied, to the present group; takes it and the module in it.
    """
    _connected.add(parallel, "\n".join(f"{name} {tuple(p.shape)}" for name, p in parallel.named_parameters()), connect)


def forget() -> None:
    """None of them will be connected again."""
    _connected.clear()


def is_remembered(parallel: torch.nn.Module) -> bool:
    """Return whether it is one of these modules."""
    return parallel in _connected


def reconnect_all(gather: Gather) -> list[str]:
    """Connects every module that all ranks have to the group that there is now. All ranks call it.

    Returns:
        The names of the classes of those that not all ranks have; they stay without a group.
    """
    common, left = _connected.match(gather)
    for parallel, connect in common:
        _reconnect(parallel, connect)
    return [type(parallel.module).__name__ for parallel in left]


def _reconnect(parallel: Any, connect: Connect) -> None:
    before = dict(vars(parallel))
    hooks = {
        name: value
        for name, value in before.items()
        if isinstance(value, collections.OrderedDict) and "hooks" in name and value
    }
    module = parallel.module
    vars(parallel).clear()
    try:
        connect(parallel, module)
    except BaseException:
        vars(parallel).clear()
        vars(parallel).update(before)  # so that it can be tried again
        raise
    vars(parallel).update(hooks, training=before["training"])

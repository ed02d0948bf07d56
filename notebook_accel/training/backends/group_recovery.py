"""Replace a broken process group by a new one, as a session does after an interrupt.

Prepared objects keep their identity. All ranks continue from rank 0's weights, as after ``prepare``. An interrupt can
come between one rank's step and another's, so all ranks also get rank 0's state of optimizers, schedulers, windows,
loaders' epochs and the loss scale, and the interrupted step starts over.
"""

from __future__ import annotations

import itertools
import os
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from notebook_accel import torch_internals
from notebook_accel.payload.sharded_tensors import is_sharded_tensor
from notebook_accel.training.backends import torch_group
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.trees import map_leaves, send_to_device

_Key = tuple[int, int]


def collective_counts() -> list[int] | None:
    """Return the number of collectives that each group has run, ``None`` without a group.

    The first item is 1 if this package uses the default group, else 0. A group that carries CPU and GPU tensors by
    different backends has a number for each. The last item is for this package's calls. Ranks whose lists differ would
    hang.
    """
    if not dist.is_initialized():
        return None
    groups = torch_internals.process_groups()
    compared = [group for group in groups if getattr(group, "group_desc", "") != torch_group.BACKGROUND]
    begun = [number for group in compared for number in torch_internals.call_counts(group)]
    return [int(torch_group.is_ours()), *begun, torch_group.own_calls()]


def renew_group(renewals: int | None, *, rejoins: bool, namespace: Mapping[str, Any]) -> list[str]:
    """Leave the process group and create another. All ranks call this at once.

    Args:
        renewals: Number of this renewal, which gives the new group its own prefix in the store. ``None`` where this
            package created the group: each of its groups has a prefix anyway.
        rejoins: Create the new group now, since all ranks had a group of the same origin. Otherwise the next object
            that needs a group creates it.
        namespace: The rank's variables, to name those that are lost.

    Returns:
        Descriptions, for the user, of the objects that were lost.

    Raises:
        TrainingError: The other ranks didn't join in time.
    """
    if renewals is not None:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(renewals)
    if not dist.is_initialized():
        _forget_all()
        return []
    # Libraries check this name: Lightning computes a mean differently with "gloo". torch's default has no name.
    backend = None if dist.get_backend() == "undefined" else dist.get_backend()
    members, others = torch_group.break_up()
    groups = "a process group" if others == 1 else f"{others} process groups"
    lost = [f"{groups} that the code has made itself"] if others else []
    lost += [
        f"{name}, which averages gradients and wasn't made by prepare: wrap {name}.module again"
        for name, value in namespace.items()
        if isinstance(value, DistributedDataParallel) and value not in _parallels
    ]
    lost += [
        f"{name}, which is sharded over the ranks: make it, prepare it and load a checkpoint again"
        for name, value in namespace.items()
        if isinstance(value, torch.nn.Module) and any(map(is_sharded_tensor, value.parameters()))
    ]
    if rejoins:
        lost += _rejoin(members, backend)
    else:
        _forget_all()
    return lost


def _forget_all() -> None:
    """Forget prepared objects, which have to be prepared again, perhaps with other ranks."""
    _parallels.clear()
    _states.clear()


def _rejoin(members: Sequence[torch_group.Member], backend: str | None) -> list[str]:
    """Create the new group, connect prepared objects to it, and return descriptions of those that were lost."""
    if not members:
        # Not ``dist.init_process_group``, which a session replaces to compare the cells' calls of it.
        dist.distributed_c10d.init_process_group(backend)
        return []
    for member in members:
        member.rejoin()
    common, left = _parallels.match(members[0].all_gather_object)
    for parallel in common:
        parallel.reconnect()
    lost = [f"a prepared {type(item.module).__name__}, which not all ranks have: prepare it again" for item in left]
    if _copy_state_of_rank_0(members[0]):
        lost.append("gradients of an accumulation window that had begun")
    return lost


class _TrackedObjects:
    """Objects that all ranks created in the same order, held weakly."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._objects: weakref.WeakValueDictionary[_Key, Any] = weakref.WeakValueDictionary()

    def __contains__(self, obj: object) -> bool:
        return any(tracked is obj for tracked in self._objects.values())

    def add(self, obj: object, description: str) -> None:
        """Track an object. ``description`` is equal for its counterparts, and differs for other kinds of objects."""
        self._objects[next(self._numbers), zlib.crc32(description.encode())] = obj

    def clear(self) -> None:
        """Forget all objects and count from 0 again, as a new rank does."""
        self._numbers = itertools.count()
        self._objects.clear()

    def match(self, all_gather: Callable[[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        """Return the objects that all ranks still have, in one order, and those that only some have.

        All ranks call this method.
        """
        alive = dict(self._objects.items())
        by_rank: list[list[_Key]] = all_gather(sorted(alive))
        common = set(by_rank[0]).intersection(*by_rank[1:])
        # Ranks may have counted differently if one was interrupted while it made an object.
        self._numbers = itertools.count(1 + max((number for keys in by_rank for number, _ in keys), default=-1))
        return [alive[key] for key in sorted(common)], [alive[key] for key in sorted(alive) if key not in common]


_parallels = _TrackedObjects()
_states = _TrackedObjects()


def track_parallel(parallel: torch.nn.Module) -> None:
    """Track a module that averages gradients, so that its method ``reconnect`` can connect it to a later group."""
    _parallels.add(parallel, "\n".join(f"{name} {tuple(p.shape)}" for name, p in parallel.named_parameters()))


def track_state(stateful: Any) -> None:
    """Track an object whose state has to be equal on all ranks. All ranks call this in the same order.

    The object has ``state_dict`` and ``load_state_dict``. Its optional method ``abandon_step`` forgets an unfinished
    step.
    """
    _states.add(stateful, type(stateful).__name__)


def _copy_state_of_rank_0(backend: Backend) -> bool:
    """Broadcast rank 0's state of objects that differ, and abandon the interrupted step. All ranks call this.

    If ranks differ or a window had begun, gradients are cleared.

    Returns:
        True if a window had begun.
    """
    common = [stateful for stateful in _states.match(backend.all_gather_object)[0] if not _is_of_shards(stateful)]
    digests = [_digest(stateful.state_dict()) for stateful in common]
    is_in_window = any(getattr(stateful, "is_in_window", False) for stateful in common)
    by_rank: list[tuple[bool, list[int]]] = backend.all_gather_object((is_in_window, digests))
    differ = [len(set(of_ranks)) > 1 for of_ranks in zip(*(found for _, found in by_rank), strict=True)]
    for stateful, differs in zip(common, differ, strict=True):
        if differs:
            own = send_to_device(stateful.state_dict(), torch.device("cpu")) if backend.place.rank == 0 else None
            stateful.load_state_dict(backend.broadcast_object(own, 0))
    is_in_window = any(found for found, _ in by_rank)
    for stateful in common:
        if hasattr(stateful, "abandon_step"):
            stateful.abandon_step()
        elif isinstance(stateful, torch.optim.Optimizer) and (is_in_window or any(differ)):
            stateful.zero_grad()
    return is_in_window


def _is_of_shards(stateful: Any) -> bool:
    """Return whether an object is the optimizer of a sharded model, which is lost with its group."""
    groups = stateful.param_groups if isinstance(stateful, torch.optim.Optimizer) else []
    return any(is_sharded_tensor(parameter) for group in groups for parameter in group["params"])


def _digest(state: Any) -> int:
    """Return a digest of the state's numbers and its tensors' sums, which differ between states a step apart."""

    def summed(leaf: Any) -> Any:
        return float(leaf.double().sum()) if isinstance(leaf, torch.Tensor) else leaf

    return zlib.crc32(repr(map_leaves(summed, state)).encode())

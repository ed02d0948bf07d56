"""Going on in another process group when the one that there was has broken: what a session does after an interrupt.

What was prepared stays what it is. Gradients' averaging begins with rank 0's weights, as after ``prepare``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from notebook_accel.training import same_state
from notebook_accel.training.backends import reconnecting, torch_group
from notebook_accel.training.backends.torch_distributed import TorchDistributed
from notebook_accel.training.passes import PASSES

__all__ = ["abandon_passes", "renew", "standing"]


def abandon_passes() -> None:
    """Forgets the passes over loaders that a cell has left by an error, and that its traceback keeps as if they ran.

    A pass that the user's code holds itself is there again with its next batch.
    """
    PASSES.clear()


def standing() -> list[int] | None:
    """Return whether this package has made the group, and how many calls were made in each; ``None`` without a group.

    Ranks whose numbers differ would wait for each other in vain. A group that carries CPU and GPU tensors by different
    backends has a number for each of the two.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    groups: Iterable[Any] = dist.distributed_c10d._world.pg_map  # in the order in which they were made
    return [int(torch_group.is_ours()), *(number for group in groups for number in _calls(group))]


def _calls(group: Any) -> Iterator[int]:
    for device in sorted(group._device_types, key=str):
        with contextlib.suppress(RuntimeError):  # this backend, such as MPI's, doesn't count
            yield group._get_backend(device)._get_sequence_number_for_group()


def renew(renewals: int | None, *, rejoins: bool, namespace: Mapping[str, Any]) -> list[str]:
    """Leaves the process group and makes another. All ranks call it at once.

    Args:
        renewals: The how-manieth time. What ranks say in the store then has a prefix of its own. ``None`` where this
            package has made the group: each of its groups has a prefix anyway.
        rejoins: Whether all ranks have a group of the same origin, so that they can make another. Otherwise whoever
            needs one makes it.
        namespace: The rank's names, for the names of what is lost.

    Returns:
        What couldn't be kept, for the user.

    Raises:
        TrainingError: The other ranks didn't come in time.
    """
    if renewals is not None:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(renewals)
    if not (dist.is_available() and dist.is_initialized()):
        _forget()
        return []
    backend = dist.get_backend_config()
    members, others = torch_group.break_up()
    groups = "a process group" if others == 1 else f"{others} process groups"
    lost = [f"{groups} that the code has made itself"] if others else []
    lost += [
        f"{name}, which averages gradients and wasn't made by prepare: wrap {name}.module again"
        for name, value in namespace.items()
        if isinstance(value, DistributedDataParallel) and not reconnecting.is_remembered(value)
    ]
    if rejoins:
        lost += _rejoin(members, backend)
    else:
        _forget()
    return lost


def _forget() -> None:
    """What was prepared has to be prepared again, with ranks that may be other ones."""
    reconnecting.forget()
    same_state.forget()


def _rejoin(members: Sequence[TorchDistributed], backend: str) -> list[str]:
    if not members:
        dist.init_process_group(backend)
        return []
    for member in members:
        member.rejoin()
    left = reconnecting.reconnect_all(members[0].all_gather_object)
    lost = [f"a prepared {name}, which not all ranks have: prepare it again" for name in left]
    if same_state.follow_first_rank(members[0]):
        lost.append("gradients of an accumulation window that had begun")
    return lost

"""CPUs and NVIDIA GPUs: ``torch.distributed`` with gloo and NCCL.

torch has one default group in a process. It is made by whoever comes first: if the user's code has made it, it is used
as it is and left alone at the end.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, not listed in __all__
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.training.runtimes.devices import memory_of, release_memory_of

__all__ = ["TorchDistributed", "current_place"]

# torch 2.13 renamed the collective and warns about the old name.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

# Keys of an earlier group, or of an earlier start of these ranks, stay in a store that outlives it. So each group has a
# prefix of its own. Ranks run the same program and count alike.
_group_numbers = itertools.count()

# The group that was made here, and who uses it. The last one to leave takes it down.
_own_group: dist.ProcessGroup | None = None
_members: weakref.WeakSet[TorchDistributed] = weakref.WeakSet()


class TorchDistributed:
    """A ``Runtime`` over torch's default process group.

    Args:
        place: This rank's place in the group.
        device: What it computes on.
        deadline_s: How long to wait for the other ranks, in seconds, if the group has to be made.

    Raises:
        TrainingError: The other ranks, or the store where ranks meet, weren't there in time.
    """

    def __init__(self, place: RankPlace, device: torch.device, deadline_s: float) -> None:
        self.place = place
        self.device = device
        if not dist.is_initialized():
            _make_group(place, device, deadline_s)
        self._group = dist.group.WORLD
        self._has_left = False
        if self._group is _own_group:
            _members.add(self)

    @property
    def has_left(self) -> bool:
        return self._has_left or dist.group.WORLD is not self._group

    @property
    def compares_calls(self) -> bool:
        # gloo ends the process when sizes don't match. On a GPU the host would have to wait for a further message.
        return self.device.type == "cpu" and self.place.world_size > 1

    def memory(self) -> Callable[[], tuple[int, int]] | None:
        return memory_of(self.device)

    def release_memory(self) -> None:
        release_memory_of(self.device)

    def barrier(self) -> None:
        # Not dist.barrier: with several backends in one group that has to guess the device.
        ticket = torch.ones((), device=self.device)
        dist.all_reduce(ticket)
        ticket.item()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().contiguous()
        gathered = tensor.new_empty((self.place.world_size * tensor.shape[0], *tensor.shape[1:]))
        _all_gather_single(_as_bytes(gathered), _as_bytes(tensor))
        return gathered

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        dist.broadcast(_as_bytes(tensor), source)

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: Any, source: int) -> Any:
        values = [value]
        dist.broadcast_object_list(values, source)
        return values[0]

    def data_parallel(self, model: torch.nn.Module) -> torch.nn.Module:
        device = next(model.parameters()).device
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    def leave(self) -> None:
        self._has_left = True
        _members.discard(self)
        if not _members and _own_group is not None and dist.group.WORLD is _own_group:
            dist.destroy_process_group()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, which every backend can send; not every backend knows every type."""
    return tensor.reshape(-1).view(torch.uint8)


def current_place() -> RankPlace | None:
    """This rank's place in the group that already exists in this process, ``None`` if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    place = RankPlace.from_environment()
    rank = dist.get_rank()
    local_rank = place.local_rank if "LOCAL_RANK" in os.environ else rank
    return dataclasses.replace(place, rank=rank, world_size=dist.get_world_size(), local_rank=local_rank)


def _make_group(place: RankPlace, device: torch.device, deadline_s: float) -> None:
    global _own_group
    if not place.master_port:
        raise ConfigError(
            f"WORLD_SIZE is {place.world_size}, but MASTER_PORT isn't set.",
            why="Ranks find each other through a store at MASTER_ADDR:MASTER_PORT.",
            fix="unset RANK and WORLD_SIZE, or set MASTER_ADDR and MASTER_PORT to the same values on every rank",
        )
    timeout = datetime.timedelta(seconds=deadline_s)
    try:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        raise TrainingError(
            f"Rank {place.rank} of {place.world_size} could not meet the others at "
            f"{place.master_addr}:{place.master_port} within {deadline_s:g} s.",
            why=str(error),
            fix="see that every rank is running and that all have the same MASTER_ADDR and MASTER_PORT",
        ) from error
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"notebook_accel/{restarts}/{next(_group_numbers)}", store)
    _wait_for_all(store, place, timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size)
    _own_group = dist.group.WORLD


def _wait_for_all(store: Store, place: RankPlace, timeout: datetime.timedelta) -> None:
    """Waits until every rank has come to the store, so that those who don't come can be named."""
    keys = [f"rank {rank}" for rank in range(place.world_size)]
    store.set(keys[place.rank], "here")
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        missing = [key for key in keys if not store.check([key])]
        raise TrainingError(
            f"Rank {place.rank} waited {timeout.total_seconds():g} s for the others; missing: {', '.join(missing)}.",
            why="They have ended, or haven't come to their Accelerator yet.",
            fix="make the Accelerator on every rank, before work that takes some ranks longer than others",
        ) from None

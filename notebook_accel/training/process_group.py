"""Joins the group of all ranks, and keeps the backend through which this process has joined it."""

from __future__ import annotations

import dataclasses
import weakref

import torch.distributed as dist
from torch.utils.data import get_worker_info

from notebook_accel import environment
from notebook_accel.environment import RankPlace
from notebook_accel.reporting import reporter
from notebook_accel.training.backends import torch_group, xla
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.backends.devices import clock_of, local_device, utilisation_of
from notebook_accel.training.backends.single_process import SingleProcess, WorkerProcess
from notebook_accel.training.backends.torch_distributed import TorchDistributed
from notebook_accel.training.handlers import InitProcessGroupKwargs

# The backend of the latest join. Weak, since a backend stays in the group as long as something holds it.
_latest: weakref.ref[Backend] | None = None


def join(*, cpu: bool = False, options: InitProcessGroupKwargs | None = None) -> Backend:
    """Make this process the rank that its environment describes, and return its backend.

    If this process is in a group already, created here or by the user's code, that group is used as it is. A data
    loader's worker process joins no group, because its rank is a member already. With ``cpu``, or the launcher's
    environment variable, compute on the CPU even where there are GPUs.

    Raises:
        ConfigError: The environment variables don't describe a rank.
        TrainingError: The other ranks didn't join in time, or this rank has no device.
    """
    global _latest
    cpu = cpu or bool(environment.flag(environment.USE_CPU))
    options = options or InitProcessGroupKwargs()
    if options.backend is None and environment.flag(environment.OVERSUBSCRIBE):
        options = dataclasses.replace(options, backend="gloo")  # NCCL refuses two ranks on one GPU
    group_place = torch_group.current_place()
    if group_place is None and get_worker_info() is not None:
        return WorkerProcess(RankPlace.from_environment())
    place = group_place or RankPlace.from_environment()
    backend: Backend
    if not cpu and xla.is_asked_for():
        backend = xla.XlaDevice(place, options)
    else:
        device = local_device(place, cpu=cpu, shared=options.backend == "gloo")
        is_alone = place.world_size == 1 and group_place is None
        backend = SingleProcess(place, device) if is_alone else TorchDistributed(place, device, options)
    device = backend.device
    reporter().set_device(str(device), backend.memory(), utilisation_of(device), clock_of(device))
    _latest = weakref.ref(backend)
    return backend


def seed_device(seed: int) -> None:
    """Seed the device's generator, if this process has joined with a device that torch doesn't seed itself."""
    backend = None if _latest is None else _latest()
    if backend is not None and get_worker_info() is None:  # a data loader's worker has no device
        backend.seed(seed)


def joined() -> Backend | None:
    """Return the current backend, ``None`` if this process hasn't joined."""
    backend = None if _latest is None else _latest()
    return None if backend is None or backend.has_left or not is_at(rank_place(), backend) else backend


def current(*, cpu: bool = False, options: InitProcessGroupKwargs | None = None) -> Backend:
    """Return the current backend; join if there is none."""
    return joined() or join(cpu=cpu, options=options)


def end() -> None:
    """Make every member in this process leave the group, and destroy the group, whoever has created it."""
    backend, group = joined(), torch_group.made_here()
    for member in [] if group is None else list(group.members):
        member.leave()
    if backend is not None and not backend.has_left:
        backend.leave()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_at(place: RankPlace, backend: Backend) -> bool:
    """Return whether a backend belongs to a place. A forked rank may also have inherited the notebook's backend."""
    return (backend.place.rank, backend.place.world_size) == (place.rank, place.world_size)


def rank_place() -> RankPlace:
    """Return this rank's place among all ranks, even before it has joined and after it has left."""
    return torch_group.current_place() or RankPlace.from_environment()

"""Join the group of all ranks, or find the backend through which this process has joined it."""

from __future__ import annotations

import dataclasses
import os
import weakref

from torch.utils.data import get_worker_info

from notebook_accel import environment
from notebook_accel.environment import RankPlace
from notebook_accel.reporting import reporter
from notebook_accel.training.backends import torch_group, xla
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.backends.devices import local_device, utilisation_of
from notebook_accel.training.backends.single_process import SingleProcess, WorkerProcess
from notebook_accel.training.backends.torch_distributed import TorchDistributed
from notebook_accel.training.handlers import InitProcessGroupKwargs

__all__ = ["current", "is_at", "join", "joined", "rank_place", "seed_device"]

# The backend of the latest join. Weak: the holders of a backend keep it in the group.
_latest: weakref.ref[Backend] | None = None


def join(*, cpu: bool = False, options: InitProcessGroupKwargs | None = None) -> Backend:
    """Make this process the rank that its environment describes, and return its backend.

    A group that this process is in already, made here or by the user's code, is used as it is. A loader's worker
    process joins none: its rank is a member already.

    Args:
        cpu: Compute on the CPU, also where there are GPUs. The launcher's environment variable has the same effect.
        options: Options of the group, such as how long ranks wait for each other.

    Raises:
        ConfigError: The environment variables don't describe a rank.
        TrainingError: The other ranks didn't come in time, or this one has no device.
    """
    cpu = cpu or environment.is_true(os.environ.get(environment.USE_CPU, ""))
    options = options or InitProcessGroupKwargs()
    if options.backend is None and environment.is_true(os.environ.get(environment.OVERSUBSCRIBE, "")):
        options = dataclasses.replace(options, backend="gloo")  # NCCL refuses two ranks on one GPU
    joined = torch_group.current_place()
    if joined is None and get_worker_info() is not None:
        return WorkerProcess(RankPlace.from_environment())
    place = joined or RankPlace.from_environment()
    if not cpu and xla.is_asked_for():
        return _joined(xla.XlaDevice(place, options))
    device = local_device(place, cpu=cpu, shared=options.backend == "gloo")
    backend: Backend
    if place.world_size == 1 and joined is None:
        backend = SingleProcess(place, device)
    else:
        backend = TorchDistributed(place, device, options)
    return _joined(backend)


def _joined(backend: Backend) -> Backend:
    global _latest
    reporter().set_device(str(backend.device), backend.memory(), utilisation_of(backend.device))
    _latest = weakref.ref(backend)
    return backend


def seed_device(seed: int) -> None:
    """Seed the device's generator, if this process has joined with a backend that torch doesn't seed itself."""
    backend = None if _latest is None else _latest()
    if backend is not None and get_worker_info() is None:  # a loader's worker has no device
        backend.seed(seed)


def joined() -> Backend | None:
    """Return the present backend, ``None`` if this process hasn't joined."""
    backend = None if _latest is None else _latest()
    return None if backend is None or backend.has_left or not is_at(rank_place(), backend) else backend


def current(*, cpu: bool = False) -> Backend:
    """Return the present backend; join if there is none."""
    return joined() or join(cpu=cpu)


def is_at(place: RankPlace, backend: Backend) -> bool:
    """Return whether a backend belongs to a place. A forked rank also has the notebook's, if there is one."""
    return (backend.place.rank, backend.place.world_size) == (place.rank, place.world_size)


def rank_place() -> RankPlace:
    """Return this rank's place among all, also before it has joined and after it has left."""
    return torch_group.current_place() or RankPlace.from_environment()

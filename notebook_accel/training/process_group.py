"""Joining the group of all ranks."""

from __future__ import annotations

import dataclasses
import os
import weakref

from torch.utils.data import get_worker_info

from notebook_accel import environment
from notebook_accel.environment import RankPlace
from notebook_accel.reporting import reporter
from notebook_accel.training.handlers import InitProcessGroupKwargs
from notebook_accel.training.runtimes import torch_group, xla
from notebook_accel.training.runtimes.devices import local_device, utilisation_of
from notebook_accel.training.runtimes.runtime import Runtime
from notebook_accel.training.runtimes.single_process import SingleProcess
from notebook_accel.training.runtimes.torch_distributed import TorchDistributed
from notebook_accel.training.runtimes.worker_process import WorkerProcess

__all__ = ["current", "is_at", "join", "joined", "rank_place", "seed_device"]

# The latest that this process has joined by. Weak: who holds a runtime is who is still a member of the group.
_latest: weakref.ref[Runtime] | None = None


def join(*, cpu: bool = False, options: InitProcessGroupKwargs | None = None) -> Runtime:
    """Makes this process one of the ranks that its environment says, and returns the way to the others.

    A group that this process is in already, made here or by the user's code, is used as it is. A worker process of a
    loader joins none: its rank is a member already.

    Args:
        cpu: Compute on the CPU, also where there are GPUs; so does the environment variable that the launcher sets.
        options: How the group is made, and how long ranks wait for each other in it.

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
    runtime: Runtime
    if place.world_size == 1 and joined is None:
        runtime = SingleProcess(place, device)
    else:
        runtime = TorchDistributed(place, device, options)
    return _joined(runtime)


def _joined(runtime: Runtime) -> Runtime:
    global _latest
    reporter().set_device(str(runtime.device), runtime.memory(), utilisation_of(runtime.device))
    _latest = weakref.ref(runtime)
    return runtime


def seed_device(seed: int) -> None:
    """Seeds the device's generator, if this process has joined by one that torch doesn't seed itself."""
    runtime = None if _latest is None else _latest()
    if runtime is not None and get_worker_info() is None:  # a loader's worker has no device
        runtime.seed(seed)


def joined() -> Runtime | None:
    """The way to the other ranks if this process has one already."""
    runtime = None if _latest is None else _latest()
    return None if runtime is None or runtime.has_left or not is_at(rank_place(), runtime) else runtime


def current(*, cpu: bool = False) -> Runtime:
    """The way to the other ranks that this process has already; joins if it has none."""
    return joined() or join(cpu=cpu)


def is_at(place: RankPlace, runtime: Runtime) -> bool:
    """Whether a runtime is that of a place. A forked rank has the notebook's too, if there is one."""
    return (runtime.place.rank, runtime.place.world_size) == (place.rank, place.world_size)


def rank_place() -> RankPlace:
    """This rank's place among all, also before it has joined and after it has left."""
    return torch_group.current_place() or RankPlace.from_environment()

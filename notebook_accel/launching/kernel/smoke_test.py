"""A trial run: ranks that do nothing but meet, use their device and add up one number.

It finds what can't be seen from outside: a driver that doesn't match, a firewall on loopback, GPUs that can't reach
each other.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import Finding, PreflightError, RunError
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.ranks.worker import Target

__all__ = ["run"]

_DEADLINE_S = 120.0  # eight GPUs take their time to find each other


def run(start: Callable[[Target, LaunchConfig, threading.Lock], Job], config: LaunchConfig) -> float:
    """Holds a trial run; the seconds that it took.

    Args:
        start: Starts ranks, which end when the lock is free.
        config: The options of the launch that it stands for.

    Raises:
        PreflightError: It has failed, or took too long.
    """
    started_s = time.monotonic()
    attended = threading.Lock()
    try:
        with attended:
            job = start(Target(names={}, function=use_device), _options(config), attended)
            if job.run_here is not None:
                job.run_here()
            job.results()
    except RunError as error:
        finding = Finding(
            "The trial run before the launch has failed: its ranks met, used their devices and summed a number, "
            "or tried to.",
            str(error),
            "mend that first; notebook-accel doctor --trial tries again. Without the debug mode there is no trial run",
        )
        raise PreflightError((finding,)) from error
    return time.monotonic() - started_s


def _options(config: LaunchConfig) -> LaunchConfig:
    """Ranks of this machine alone, once."""
    alone: dict[str, Any] = {"max_restarts": 0, "num_nodes": 1, "node_rank": 0, "rdzv_backend": "static"}
    alone |= {"master_addr": "127.0.0.1", "rdzv_endpoint": "", "main_process_port": None}
    return config.replace(timeout_s=_DEADLINE_S, name="trial run", **alone)


def use_device() -> str:
    """Runs in each rank; the device that it has used."""
    torch = importlib.import_module("torch")
    backend = importlib.import_module("notebook_accel.training.process_group").join()
    try:
        ones = torch.ones(64, 64, device=backend.device)
        backend.all_reduce(ones)
        total = float((ones @ ones).mean())
        expected = 64 * backend.place.world_size**2
        if total != expected:
            raise RuntimeError(f"{backend.device} computes {total} where {expected} is right")
    finally:
        backend.leave()
    return str(backend.device)

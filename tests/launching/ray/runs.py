"""Helpers for tests of runs on a cluster."""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

from notebook_accel import notebook_launcher
from notebook_accel.launching.kernel.job import Job
from tests import processes

__all__ = ["DEADLINE_S", "all_is_free", "are_gone", "connected", "have_begun", "launch"]

DEADLINE_S = 120.0


def launch(function: Any, *args: Any, **options: Any) -> Job:
    """Start a function on two ranks, one on each node unless the options say something else."""
    given = {"num_processes": 2, "engine": "ray", "engine_options": {"strategy": "SPREAD"}, "view": "none", **options}
    job = notebook_launcher(function, args, background=True, **given)
    assert isinstance(job, Job)
    return job


def connected() -> Any:
    """Return Ray, connected to the tests' cluster even if this process has launched nothing yet."""
    ray: Any = importlib.import_module("ray")
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    return ray


def all_is_free() -> None:
    """Wait until the cluster has all of its CPUs back."""
    free = connected().available_resources
    processes.wait_until(lambda: free().get("CPU") == 2, "the cluster has all of its CPUs back", timeout_s=60)


def have_begun(folder: pathlib.Path) -> list[int]:
    """Wait until two ranks are in ``wait_to_be_ended``, and return their processes."""
    files = [folder / f"{rank}.began" for rank in (0, 1)]
    processes.wait_until(lambda: all(file.exists() for file in files), "both ranks run", timeout_s=DEADLINE_S)
    processes.wait_until(lambda: all(file.read_text() for file in files), "both ranks have said who they are")
    return [int(file.read_text()) for file in files]


def are_gone(pids: list[int]) -> bool:
    """Return whether all of these processes have ended."""
    return not any(process is not None and process.is_alive for process in map(processes.read, pids))

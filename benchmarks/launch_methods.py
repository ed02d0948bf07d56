"""Ways to start ranks, each as code for a kernel: ``prepare`` runs once, ``launch()`` is what is timed.

Every ``launch`` makes ``RANKS`` processes call ``work``, which says when its first line ran, and returns when all have
ended. Where a way can take a function of the notebook, it is given one; the others get the same from a module.
"""

from __future__ import annotations

import dataclasses

__all__ = ["METHODS", "RANKS", "Method", "code"]

RANKS = 2

_WORK = """
import os, time
def work():
    now = time.monotonic_ns()
    rank = os.environ.get("RANK", "")
    with open(os.path.join(os.environ["BENCHMARK_FOLDER"], f"{rank}-{os.getpid()}"), "w") as file:
        file.write(str(now))
    return rank
"""


@dataclasses.dataclass(frozen=True)
class Method:
    """One way.

    Attributes:
        name: What the table calls it.
        needs: The module without which it can't be measured.
        prepare: Code that runs in the kernel before anything is timed, and defines ``launch()``.
        typing_s: Seconds that a user takes to type after it, in which things may become ready.
        later: How many launches follow the first.
    """

    name: str
    needs: str
    prepare: str
    typing_s: float = 0.0
    later: int = 5


_FORK = """
def launch():
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = str(rank)
            try: work()
            finally: os._exit(0)
        pids.append(pid)
    for pid in pids: os.waitpid(pid, 0)
"""

_FORKSERVER = """
import multiprocessing
from benchmarks import work as module
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "benchmarks.work"])
def launch():
    processes = [context.Process(target=module.work_as, args=(rank,)) for rank in range(2)]
    for process in processes: process.start()
    for process in processes: process.join()
"""

_ACCELERATE = """
import socket
from accelerate import notebook_launcher
def launch():
    with socket.create_server(("127.0.0.1", 0)) as free: port = str(free.getsockname()[1])
    notebook_launcher(work, (), num_processes=2, use_port=port)
"""

_SPAWN = """
import torch.multiprocessing
from benchmarks import work as module
def launch(): torch.multiprocessing.spawn(module.work_as, nprocs=2)
"""

_TORCHRUN = """
import subprocess, sys
from benchmarks import work as module
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", module.__file__]
def launch(): subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""

_TORCHRUNX = """
import torchrunx
def launch():
    launcher = torchrunx.Launcher(
        hostnames=["localhost"], workers_per_host=2, backend="gloo",
        extra_env_vars={"BENCHMARK_FOLDER": os.environ["BENCHMARK_FOLDER"], "PYTHONPATH": os.environ["PYTHONPATH"]},
    )
    launcher.run(work)
"""

_IPYPARALLEL = """
import ipyparallel
def launch():
    with ipyparallel.Cluster(n=2, log_level=50) as client:
        client[:].use_cloudpickle()
        client[:].apply_sync(work)
"""

_OURS = """
%load_ext notebook_accel
from notebook_accel import notebook_launcher
def launch(): return notebook_launcher(work, num_processes=2, start_method="{method}", use_cpu=True, view="panel")
"""

METHODS = (
    Method("os.fork", "torch", _FORK),
    Method("ours, spawn", "notebook_accel", _OURS.format(method="spawn"), typing_s=3.0),
    Method("ours, fork", "notebook_accel", _OURS.format(method="fork"), typing_s=3.0),
    Method("ours, spawn at once", "notebook_accel", _OURS.format(method="spawn")),
    Method("forkserver, torch preloaded", "torch", _FORKSERVER),
    Method("Accelerate notebook_launcher", "accelerate", _ACCELERATE),
    Method("torch.multiprocessing.spawn", "torch", _SPAWN, later=2),
    Method("torchrun", "torch", _TORCHRUN, later=2),
    Method("torchrunx", "torchrunx", _TORCHRUNX, later=2),
    Method("ipyparallel, cold", "ipyparallel", _IPYPARALLEL, later=2),
)


def code(method: Method) -> str:
    """What a kernel runs before it is timed."""
    return f"import torch\n{_WORK}\n{method.prepare}"

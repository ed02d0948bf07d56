"""Measures the time from a cell to the first line of the user's function on the last rank, and back.

    python -m benchmarks.launch --rounds 7

Each round measures every way to start ranks, one after the other, in a fresh kernel that has imported torch. A kernel's
first launch and its later ones are listed apart. Ratios are to a plain ``os.fork`` of the same kernel, the floor.

Each method is code for a kernel: ``prepare`` runs once, ``launch()`` is timed. Every ``launch`` makes two processes
call ``work``, which notes when its first line ran, and returns when both have ended. Methods that can send a function
of the notebook get one; the others import the same function from a module.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

from tests import kernels, processes

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_READING_S = 5.0  # between the first launch and the later ones, as if the user read the result
_DEADLINE_S = 180.0
_LAUNCH = "import time\nstarted = time.monotonic_ns()\nlaunch()\nreturned = time.monotonic_ns()"

Times = tuple[float, float]  # to the first line on the last rank, and to the return, in ms


_RANKS = 2

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
class _LaunchMethod:
    """One way to start ranks.

    Attributes:
        name: The name in the table.
        needs: A module that the method imports.
        prepare: Code that runs in the kernel before anything is timed, and defines ``launch()``.
        typing_s: Pause after ``prepare`` in seconds, as if the user typed; processes may become ready meanwhile.
        later: Number of launches after the first.
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
    _LaunchMethod("os.fork", "torch", _FORK),
    _LaunchMethod("ours, spawn", "notebook_accel", _OURS.format(method="spawn"), typing_s=3.0),
    _LaunchMethod("ours, fork", "notebook_accel", _OURS.format(method="fork"), typing_s=3.0),
    _LaunchMethod("ours, spawn at once", "notebook_accel", _OURS.format(method="spawn")),
    _LaunchMethod("forkserver, torch preloaded", "torch", _FORKSERVER),
    _LaunchMethod("Accelerate notebook_launcher", "accelerate", _ACCELERATE),
    _LaunchMethod("torch.multiprocessing.spawn", "torch", _SPAWN, later=2),
    _LaunchMethod("torchrun", "torch", _TORCHRUN, later=2),
    _LaunchMethod("torchrunx", "torchrunx", _TORCHRUNX, later=2),
    _LaunchMethod("ipyparallel, cold", "ipyparallel", _IPYPARALLEL, later=2),
)


def _code(method: _LaunchMethod) -> str:
    """Return the code that a kernel runs before it is timed."""
    return f"import torch\n{_WORK}\n{method.prepare}"


def main() -> int:
    """Measure and print the table."""
    chosen, rounds = _read_arguments()
    first: dict[str, list[Times]] = collections.defaultdict(list)
    later: dict[str, list[Times]] = collections.defaultdict(list)
    memory: dict[str, int] = {}
    for number in range(rounds):
        for method in (
            chosen[number % len(chosen) :] + chosen[: number % len(chosen)]
        ):  # each method comes first in some round
            try:
                launches, memory_now = measure(method)
            except AssertionError as error:
                print(f"!!! {method.name} FAILED in this round: {error}", file=sys.stderr)
                continue
            memory = memory_now or memory
            first[method.name].append(launches[0])
            later[method.name].append(_medians(launches[1:]))
            print(
                f"round {number + 1} of {rounds}: {method.name}: first {_in_words(launches[0])}, "
                f"later {_in_words(later[method.name][-1])}",
                file=sys.stderr,
                flush=True,
            )
    _print_table("first launch of a kernel", chosen, first)
    _print_table("later launches", chosen, later)
    for name, size_bytes in memory.items():
        print(f"kept ready, {name}: {size_bytes / 2**20:.0f} MiB that nobody shares")
    return 0


def _read_arguments() -> tuple[list[_LaunchMethod], int]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--methods", default="", help="parts of their names, with commas between; default: all")
    given = parser.parse_args()
    parts = [part.strip() for part in given.methods.split(",") if part.strip()]
    chosen = [method for method in METHODS if not parts or any(part in method.name for part in parts)]
    for method in [method for method in chosen if importlib.util.find_spec(method.needs) is None]:
        print(f"!!! {method.name} is NOT measured: {method.needs} can't be imported.", file=sys.stderr)
        chosen.remove(method)
    if not chosen:
        parser.error("nothing to measure; there are: " + ", ".join(method.name for method in METHODS))
    return chosen, given.rounds


def measure(method: _LaunchMethod, root: pathlib.Path = _ROOT) -> tuple[list[Times], dict[str, int]]:
    """Return the times of a kernel's launches with the package in ``root``, the first of all first, and memory."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="benchmark-launch-"))
    said = folder / "said"
    said.mkdir()
    try:
        with kernels.running(folder, _environment(said, root)) as kernel:
            prepared = kernel.run(_code(method), _DEADLINE_S)
            assert prepared.status == "ok", prepared.traceback
            time.sleep(method.typing_s)
            launches = [_launch(kernel, said)]
            time.sleep(_READING_S)
            launches += [_launch(kernel, said) for _ in range(method.later)]
            return launches, _memory(kernel) if "ours, spawn" in method.name else {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _environment(said: pathlib.Path, root: pathlib.Path) -> dict[str, str]:
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"BENCHMARK_FOLDER": str(said), "PYTHONPATH": path}


def _launch(kernel: kernels.Kernel, said: pathlib.Path) -> Times:
    for file in said.iterdir():
        file.unlink()
    launched = kernel.run(_LAUNCH, _DEADLINE_S)
    assert launched.status == "ok", launched.traceback
    started, returned = (int(kernel.value(name)) for name in ("started", "returned"))
    lines = [int(file.read_text()) for file in said.iterdir()]
    assert len(lines) == _RANKS, f"{len(lines)} ranks have run"
    return (max(lines) - started) / 1e6, (returned - started) / 1e6


def _memory(kernel: kernels.Kernel) -> dict[str, int]:
    """Return the private memory of agent and template while nothing runs."""
    found = {}
    for process in kernel.descendants():
        name = "agent" if processes.is_agent(process) else "template" if processes.is_template(process) else ""
        lines = pathlib.Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        found[name] = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return found


def _medians(launches: list[Times]) -> Times:
    return statistics.median(line for line, _ in launches), statistics.median(end for _, end in launches)


def _in_words(times: Times) -> str:
    return f"{times[0]:.1f} / {times[1]:.1f} ms"


def _print_table(title: str, chosen: list[_LaunchMethod], times: dict[str, list[Times]]) -> None:
    floor = _medians(times[METHODS[0].name]) if times[METHODS[0].name] else None
    print(f"\n{title}, {_RANKS} ranks, medians of {max(map(len, times.values()), default=0)} kernels")
    print(f"{'':30} {'first line':>12} {'x floor':>8} {'returned':>12} {'x floor':>8}")
    for method in chosen:
        if not times[method.name]:
            print(f"{method.name:30} failed")
            continue
        line, end = _medians(times[method.name])
        ratios = (f"{line / floor[0]:8.2f}", f"{end / floor[1]:8.2f}") if floor else ("", "")
        print(f"{method.name:30} {line:9.1f} ms {ratios[0]:>8} {end:9.1f} ms {ratios[1]:>8}")


if __name__ == "__main__":
    sys.exit(main())

"""Compares giving every rank a model with naive pickling, torch's shared tensors and a fork.

    python benchmarks/payload.py [--size_mib 1024] [--ranks 2 8] [--repeats 3]

Each method starts with the model in the parent and its workers running, and ends when every worker has read all of it.
Seconds are medians of interleaved repeats. Memory is the peak growth of all processes together, as the sum of their
proportional set sizes. It is measured in a round of its own, since sampling it slows the processes down.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch
import torch.multiprocessing

from notebook_accel import notebook_launcher
from notebook_accel.launching.kernel import local

_TENSORS = 16
_POLL_S = 0.001
_DEADLINE_S = 300.0


def make_model(size_mib: int) -> list[torch.Tensor]:
    """Make tensors of this total size, on pages that were written."""
    return [torch.full((size_mib * (1 << 20) // _TENSORS // 4,), 1.0) for _ in range(_TENSORS)]


def read_all(model: list[torch.Tensor], folder: str, rank: int) -> None:
    """Read everything as a worker, report it by a file, and wait for the end of the round."""
    torch.set_num_threads(1)
    total = sum(float(tensor[::512].sum()) for tensor in model)  # two numbers of each page
    pathlib.Path(folder, f"read-{rank}-{total:.0f}").touch()
    _wait_for(lambda: pathlib.Path(folder, "go").exists(), "the end of the round")


def launched(model: list[torch.Tensor], folder: str) -> None:
    """Read everything in a rank of notebook_accel."""
    read_all(model, folder, int(os.environ["RANK"]))


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(_POLL_S)


# The methods: each is a context that holds its workers and yields a function that hands them the model. ---------------

Start = Callable[[list[torch.Tensor], str], object]


@contextlib.contextmanager
def ours(ranks: int) -> Iterator[Start]:
    """Use ``notebook_launcher``."""
    notebook_launcher(os.getpid, (), ranks, use_cpu=True, view="none")  # starts the template
    jobs: list[Any] = []
    yield lambda model, folder: jobs.append(
        notebook_launcher(launched, (model, folder), ranks, use_cpu=True, view="none", background=True)
    )
    for job in jobs:
        job.results(_DEADLINE_S)


@contextlib.contextmanager
def pickled(ranks: int) -> Iterator[Start]:
    """Send cloudpickle's bytes through a pipe to each worker."""
    with _workers(ranks, multiprocessing.get_context("spawn"), _read_pickled) as pipes:

        def start(model: list[torch.Tensor], folder: str) -> None:
            data = cloudpickle.dumps((model, folder))
            for pipe in pipes:
                pipe.send_bytes(data)

        yield start


@contextlib.contextmanager
def shared(ranks: int) -> Iterator[Start]:
    """Use torch.multiprocessing, which moves the tensors to memory that every worker may write."""
    with _workers(ranks, torch.multiprocessing.get_context("spawn"), _read_shared) as pipes:

        def start(model: list[torch.Tensor], folder: str) -> None:
            for pipe in pipes:
                pipe.send((model, folder))

        yield start


@contextlib.contextmanager
def forked(ranks: int) -> Iterator[Start]:
    """Fork the parent."""
    pids: list[int] = []

    def start(model: list[torch.Tensor], folder: str) -> None:
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                read_all(model, folder, rank)
                os._exit(0)
            pids.append(pid)

    yield start
    for pid in pids:
        os.waitpid(pid, 0)


@contextlib.contextmanager
def _workers(ranks: int, context: Any, target: Callable[..., None]) -> Iterator[list[Any]]:
    pairs = [context.Pipe() for _ in range(ranks)]
    processes = [
        context.Process(target=target, args=(theirs, rank), daemon=True) for rank, (_, theirs) in enumerate(pairs)
    ]
    for process in processes:
        process.start()
    pipes = [ours for ours, _ in pairs]
    for pipe in pipes:
        pipe.recv()  # it has imported torch
    yield pipes
    for process in processes:
        process.join(_DEADLINE_S)


def _read_pickled(pipe: Any, rank: int) -> None:
    pipe.send("ready")
    model, folder = cloudpickle.loads(pipe.recv_bytes())
    read_all(model, folder, rank)


def _read_shared(pipe: Any, rank: int) -> None:
    pipe.send("ready")
    model, folder = pipe.recv()
    read_all(model, folder, rank)


METHODS = {"ours": ours, "naive pickling": pickled, "torch shared": shared, "fork": forked}


# Measuring ------------------------------------------------------------------------------------------------------------

_SAMPLER = """
import os, pathlib, sys, time
root, stop = int(sys.argv[1]), pathlib.Path(sys.argv[2])
def tree():
    children = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try: parent = int(pathlib.Path("/proc", entry, "stat").read_text().rpartition(") ")[2].split()[1])
        except OSError: continue
        children.setdefault(parent, []).append(int(entry))
    found = [root]
    for pid in found: found += [child for child in children.get(pid, []) if child != os.getpid()]
    return found
def pss_mib():
    total = 0
    for pid in tree():
        try: lines = pathlib.Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()
        except OSError: continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024
first = peak = pss_mib()
print(first, flush=True)
while not stop.exists():
    peak = max(peak, pss_mib())
    time.sleep(0.02)
print(max(peak, pss_mib()) - first, flush=True)
"""


def measure(method: str, ranks: int, size_mib: int, *, memory: bool) -> float:
    """Return the seconds until every worker has read everything, or the peak in MiB.

    Each round makes a new model, since torch's shared tensors change theirs for good.
    """
    model = make_model(size_mib)
    with tempfile.TemporaryDirectory() as folder, METHODS[method](ranks) as start:
        sampler = _start_sampler(folder) if memory else None
        began = time.perf_counter()
        start(model, folder)
        _wait_for(lambda: len(list(pathlib.Path(folder).glob("read-*"))) == ranks, f"{method}: all ranks")
        seconds = time.perf_counter() - began
        if sampler is not None:
            pathlib.Path(folder, "stop").touch()
            peak_mib = float(sampler.communicate(timeout=_DEADLINE_S)[0])
        pathlib.Path(folder, "go").touch()
        return peak_mib if memory else seconds


def _start_sampler(folder: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _SAMPLER, str(os.getpid()), f"{folder}/stop"]
    sampler = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert sampler.stdout is not None
    sampler.stdout.readline()  # the first measurement, before anything happens
    return sampler


def copy_into_fresh_pages(size_mib: int) -> float:
    """Return the seconds for one copy of the model, the floor of every method that copies it."""
    model = make_model(size_mib)
    began = time.perf_counter()
    copies = [tensor.clone() for tensor in model]
    seconds = time.perf_counter() - began
    assert len(copies) == _TENSORS
    return seconds


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size_mib", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for ranks in asked.ranks:
        seconds: dict[str, list[float]] = {name: [] for name in ["one copy", *asked.methods]}
        for _ in range(asked.repeats):
            seconds["one copy"].append(copy_into_fresh_pages(asked.size_mib))
            for name in asked.methods:
                seconds[name].append(measure(name, ranks, asked.size_mib, memory=False))
        peaks = {name: measure(name, ranks, asked.size_mib, memory=True) for name in asked.methods}
        floor = statistics.median(seconds["one copy"])
        print(
            f"\n{asked.size_mib} MiB to {ranks} ranks, {os.cpu_count()} cores; one copy into fresh pages: {floor:.2f} s"
        )
        print(f"{'':<16}{'seconds':>9}{'copies':>9}{'peak MiB':>10}{'models':>8}")
        for name in asked.methods:
            median, peak = statistics.median(seconds[name]), peaks[name]
            print(f"{name:<16}{median:>9.2f}{median / floor:>9.1f}{peak:>10,.0f}{peak / asked.size_mib:>8.2f}")
    local.engine().close()


if __name__ == "__main__":
    main()

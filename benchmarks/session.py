"""Compares a cell of a session with ipyparallel and with a bare pipe.

    python -m benchmarks.session --rounds 7
    python -m benchmarks.session --cells 10000

Everything is measured inside a real kernel. Each round starts a fresh kernel for every method; figures are medians over
the rounds of each round's median. ipyparallel and nbdistributed are measured where they can be imported; the latter
starts its workers with the ``python`` of PATH, which has to be this one. With ``--cells`` that many cells run in one
session, and the resources that its processes hold are compared before and after.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import statistics
import sys
import tempfile
from typing import NamedTuple

from tests import kernels

_DEADLINE_S = 240.0
_TIMED = """
import json, statistics, time
def timed(act, times):
    took = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took)
"""
# Children that answer through pipes: nothing that waits for as many processes can be faster.
_PIPE = """
import os
def child():
    order, ordered = os.pipe()
    answered, answer = os.pipe()
    if os.fork() == 0:
        try:
            os.close(ordered), os.close(answered)
            while os.read(order, 1):
                os.write(answer, b"x")
        finally:
            os._exit(0)
    os.close(order), os.close(answer)
    return ordered, answered
ends = [child() for _ in range({ranks})]
def cell():
    for ordered, _ in ends: os.write(ordered, b"x")
    for _, answered in ends: os.read(answered, 1)
found = {{"cell": timed(cell, 500)}}
import mmap
fresh = bytes(100_000_000)
def copy():
    with mmap.mmap(-1, len(fresh)) as pages: pages[:] = fresh
found["100 MB"] = timed(copy, 7)
print(json.dumps(found), flush=True)
os.killpg(0, 9)  # the children hold each other's pipes, and would stay
"""
_OURS = """
%load_ext notebook_accel
import torch
_ = get_ipython().run_cell_magic("distributed", "-n 1 --view none", "1")  # starts agent and template
began = time.perf_counter()
get_ipython().run_line_magic("distributed", "start -n {ranks} --use_cpu --view none")
get_ipython().run_cell_magic("distributed", "", "pass")
found = {{"start to first cell": 1e3 * (time.perf_counter() - began)}}
def cell(): get_ipython().run_cell_magic("distributed", "", "pass")
found["cell"] = timed(cell, 300)
tensor = torch.ones(25_000_000)
def push():
    tensor.add_(1)
    get_ipython().run_line_magic("push", "tensor")
push()
found["100 MB"] = timed(push, 5)
get_ipython().run_line_magic("distributed", "stop")
print(json.dumps(found))
"""
# The resources of each process of a session: private memory in MiB, descriptors, threads.
_HELD = """
%load_ext notebook_accel
import gc, os
get_ipython().run_line_magic("distributed", "start -n 2 --use_cpu --view none")
session = get_ipython().magics_manager.magics["cell"]["rank"].__self__.session
from tests import processes
agent = next(process.pid for process in processes.children(os.getpid()) if processes.is_agent(process))
def held():
    gc.collect()
    get_ipython().run_cell_magic("distributed", "", "import gc; _ = gc.collect()")
    pids = [os.getpid(), agent, *(info.pid for info in session.job.ranks)]
    return [measured(pid) for pid in pids]
def measured(pid):
    with open(f"/proc/{pid}/smaps_rollup") as file:
        size = sum(int(line.split()[1]) for line in file if line.startswith(("Private_Clean", "Private_Dirty")))
    return size / 1024, len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))
def run(count):
    for number in range(count):
        get_ipython().run_cell_magic("distributed", "", "value = [0] * 100\\nlen(value)")
run(2000)
before = held()
run({cells})
print(json.dumps([before, held()]))
"""
_IPYPARALLEL = """
import ipyparallel, numpy, logging
began = time.perf_counter()
cluster = ipyparallel.Cluster(n={ranks}, log_level=logging.ERROR)
view = cluster.start_and_connect_sync(activate=False)[:]
view.block = True
view.execute("pass")
found = {{"start to first cell": 1e3 * (time.perf_counter() - began)}}
found["cell"] = timed(lambda: view.execute("pass"), 200)
array = numpy.ones(25_000_000, dtype=numpy.float32)
found["100 MB"] = timed(lambda: view.push(dict(array=array)), 3)
cluster.stop_cluster_sync()
print(json.dumps(found))
"""
_NBDISTRIBUTED = """
%load_ext nbdistributed
began = time.perf_counter()
get_ipython().run_line_magic("dist_init", "--num-processes {ranks}")
time.sleep(30)  # a cell that comes right after the start can hang
found = {{}}
found["cell"] = timed(lambda: get_ipython().run_cell_magic("distributed", "", "pass"), 20)
get_ipython().run_line_magic("dist_shutdown", "")
print(json.dumps(found))
"""


class _SessionMethod(NamedTuple):
    name: str
    code: str
    needs: str = "torch"


_FLOOR = _SessionMethod("bare pipes, one copy", _PIPE)
_METHODS = (
    _FLOOR,
    _SessionMethod("ours", _OURS),
    _SessionMethod("ipyparallel", _IPYPARALLEL, "ipyparallel"),
    _SessionMethod("nbdistributed", _NBDISTRIBUTED, "nbdistributed"),
)
_FIGURES = ("cell", "100 MB", "start to first cell")


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--methods", nargs="+", help="only these, such as ours")
    parser.add_argument(
        "--cells", type=int, default=0, help="instead, compare the resources held before and after so many cells"
    )
    given = parser.parse_args()
    if given.cells:
        return _print_what_is_held(given.cells)
    chosen = []
    for method in _METHODS:
        if given.methods and not any(method.name.startswith(name) for name in given.methods):
            continue
        if importlib.util.find_spec(method.needs) is None:
            print(f"!!! {method.name} is NOT measured: {method.needs} can't be imported.", file=sys.stderr)
        else:
            chosen.append(method)
    for ranks in given.ranks:
        found: dict[str, list[dict[str, float]]] = {method.name: [] for method in chosen}
        for number in range(given.rounds):
            for method in (
                chosen[number % len(chosen) :] + chosen[: number % len(chosen)]
            ):  # each method comes first in some round
                figures = _measure(method, ranks)
                if figures:
                    found[method.name].append(figures)
        _print_table(ranks, found)
    return 0


def _print_what_is_held(cells: int) -> int:
    with tempfile.TemporaryDirectory() as folder, kernels.running(pathlib.Path(folder)) as kernel:
        kernel.run("import json")
        outcome = kernel.run(_HELD.replace("{cells}", str(cells)), _DEADLINE_S)
        assert outcome.status == "ok", outcome.traceback
    before, after = json.loads(outcome.stdout.splitlines()[-1])
    print(f"{f'after 2,000 cells, and {cells:,} more':32}{'MiB of its own':>20}{'descriptors':>16}{'threads':>12}")
    for name, old, new in zip(("kernel", "agent", "rank 0", "rank 1"), before, after, strict=True):
        shown = f"{old[0]:.1f} -> {new[0]:.1f}", f"{old[1]} -> {new[1]}", f"{old[2]} -> {new[2]}"
        print(f"{name:32}{shown[0]:>20}{shown[1]:>16}{shown[2]:>12}")
    return 0


def _measure(method: _SessionMethod, ranks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, kernels.running(pathlib.Path(folder)) as kernel:
        assert kernel.run(_TIMED).status == "ok"
        outcome = kernel.run(_in_a_child(method, method.code.format(ranks=ranks)), _DEADLINE_S)
        lines = outcome.stdout.splitlines()
        if outcome.status != "ok" or not lines:
            print(f"!!! {method.name} FAILED with {ranks} ranks: {outcome.traceback[-500:]}", file=sys.stderr)
            return {}
        return dict(json.loads(lines[-1]))


def _in_a_child(method: _SessionMethod, code: str) -> str:
    """Run the floor in a process of its own, so that its children don't hold the kernel's sockets."""
    if method is not _FLOOR:
        return code
    return (
        "import subprocess, sys\n"
        f"run = subprocess.run([sys.executable, '-c', {_TIMED + code!r}], capture_output=True, text=True, "
        "start_new_session=True)\nprint(run.stdout or run.stderr, end='')"
    )


def _print_table(ranks: int, found: dict[str, list[dict[str, float]]]) -> None:
    rounds = max(map(len, found.values()), default=0)
    print(f"\n{ranks} ranks, medians of {rounds} kernels, ms (and x the floor)")
    print(f"{'':22}" + "".join(f"{figure:>26}" for figure in _FIGURES))
    floor = {figure: _median(found[_FLOOR.name], figure) for figure in _FIGURES}
    for name, rows in found.items():
        cells = []
        for figure in _FIGURES:
            value, base = _median(rows, figure), floor[figure]
            ratio = f" ({value / base:.1f} x)" if value is not None and base else ""
            cells.append("" if value is None else f"{value:.2f}{ratio}")
        print(f"{name:22}" + "".join(f"{cell:>26}" for cell in cells))


def _median(rows: list[dict[str, float]], figure: str) -> float | None:
    values = [row[figure] for row in rows if figure in row]
    return statistics.median(values) if values else None


if __name__ == "__main__":
    sys.exit(main())

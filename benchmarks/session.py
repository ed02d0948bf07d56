"""What a cell costs in ranks that stay: an empty one, one that gets a tensor, and the way to the first.

    python -m benchmarks.session --cells 200

Measured in a fresh kernel each, in turn: a session of this package, ipyparallel's engines where it is installed, and
two forked processes at the ends of bare pipes, which is the floor. nbdistributed is not among them.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import statistics
import sys
import tempfile

from tests import kernels

_DEADLINE_S = 300.0
_TENSOR_BYTES = 100_000_000

# What each of them is called, and the cells that start it with {ranks} ranks, make an empty cell, push a tensor.
_FLOOR = """
import os, struct
def start():
    global ends
    ends = []
    for _ in range({ranks}):
        to_child, from_kernel = os.pipe()
        to_kernel, from_child = os.pipe()
        if os.fork() == 0:
            while os.read(to_child, 1):
                os.write(from_child, b"x")
            os._exit(0)
        os.close(to_child)
        ends.append((from_kernel, to_kernel))
def empty():
    for write, _ in ends:
        os.write(write, b"x")
    for _, read in ends:
        os.read(read, 1)
def push():
    tensor.clone()
def stop():
    for write, _ in ends:
        os.close(write)
    for _ in ends:
        os.wait()
"""
_OURS = """
from notebook_accel import Session
def start():
    global session
    session = Session(num_processes={ranks}, use_cpu=True, view="none")
    empty()
def empty():
    session.execute("pass")
def push():
    session.push(tensor=tensor)
def stop():
    session.close()
"""
_IPYPARALLEL = """
import ipyparallel
def start():
    global cluster, view
    cluster = ipyparallel.Cluster(n={ranks})
    view = cluster.start_and_connect_sync()[:]
    view.block = True
    empty()
def empty():
    view.execute("pass")
def push():
    view["tensor"] = tensor
def stop():
    cluster.stop_cluster_sync()
"""
_MEASURE = """
import statistics, time, torch
def in_ms(act):
    started = time.perf_counter()
    act()
    return (time.perf_counter() - started) * 1e3
tensor = torch.ones({tensor_bytes} // 4)
first = in_ms(start)
empty_ms = statistics.median(in_ms(empty) for _ in range({cells}))
push_ms = statistics.median(in_ms(push) for _ in range(5))
stop()
print("MEASURED", first, empty_ms, push_ms)
"""
_METHODS = {"bare pipes": _FLOOR, "this session": _OURS, "ipyparallel": _IPYPARALLEL}


def main() -> int:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=200, help="empty cells in each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each method once in each")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8], help="numbers of ranks")
    options = parser.parse_args()
    methods = dict(_METHODS)
    if importlib.util.find_spec("ipyparallel") is None:
        print("!!! ipyparallel is not installed, and so not compared: pip install ipyparallel", file=sys.stderr)
        del methods["ipyparallel"]
    for ranks in options.ranks:
        measured = {name: [_measured(code, ranks, options.cells) for _ in range(options.rounds)]
                    for name, code in methods.items()}  # fmt: skip
        print(f"\n{ranks} ranks, medians of {options.rounds} rounds, in ms")
        print(f"{'':<14}{'start, first cell':>20}{'empty cell':>14}{'100 MB tensor':>16}")
        for name, rows in measured.items():
            start, empty, push = (statistics.median(column) for column in zip(*rows, strict=True))
            note = "  (the tensor: one copy of it)" if name == "bare pipes" else ""
            print(f"{name:<14}{start:>20.0f}{empty:>14.2f}{push:>16.0f}{note}")
    return 0


def _measured(code: str, ranks: int, cells: int) -> tuple[float, ...]:
    """Start to the first cell, an empty cell and a push, in ms, in a kernel of its own."""
    with tempfile.TemporaryDirectory() as folder, kernels.running(pathlib.Path(folder)) as kernel:
        kernel.run("%load_ext notebook_accel", _DEADLINE_S)
        kernel.run("%%distributed -n 1 --use_cpu\n1", _DEADLINE_S)  # the template is ready
        kernel.run(code.format(ranks=ranks), _DEADLINE_S)
        outcome = kernel.run(_MEASURE.format(tensor_bytes=_TENSOR_BYTES, cells=cells), _DEADLINE_S)
        assert outcome.status == "ok", outcome.traceback
        line = next(line for line in outcome.stdout.splitlines() if line.startswith("MEASURED"))
        return tuple(map(float, line.split()[1:]))


if __name__ == "__main__":
    sys.exit(main())

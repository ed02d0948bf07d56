"""What a launch costs, counted: calls of this project's functions, page faults and copied bytes.

No busy machine changes these numbers. Code that a rank runs for the first time costs some page faults, which
are most of its start.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from notebook_accel.launching.kernel.job import Job
from tests.training.test_costs import calls_of_a_step

_ROOT = pathlib.Path(__file__).parents[2]

# In a module that Python imports before all else: count in each rank, from its fork to its end.
_IN_RANKS = """
import json, os, resource, sys

def count():
    calls, pid, leave = 0, os.getpid(), os._exit

    def note(frame, event, _):
        nonlocal calls
        calls += event == "call" and "/notebook_accel/" in frame.f_code.co_filename

    def report(status):
        sys.setprofile(None)
        if os.getpid() == pid and "RANK" in os.environ:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            with open(f"{os.environ['COUNTS']}/{pid}", "w") as file:
                json.dump({"calls": calls, "faults": faults}, file)
        leave(status)

    os._exit = report
    sys.setprofile(note)

if "COUNTS" in os.environ:
    os.register_at_fork(after_in_child=count)
"""

_LAUNCHES = """
import json, os, sys
import notebook_accel

calls = 0

def note(frame, event, _):
    global calls
    calls += event == "call" and "/notebook_accel/" in frame.f_code.co_filename

def work():
    return 1

def launch():
    assert notebook_accel.notebook_launcher(work, num_processes=2, use_cpu=True, view="none") == [1, 1]

for _ in range(3):
    launch()
before = set(os.listdir(os.environ["COUNTS"]))
sys.setprofile(note)
launch()
sys.setprofile(None)
ranks = [json.load(open(f"{os.environ['COUNTS']}/{name}")) for name in set(os.listdir(os.environ["COUNTS"])) - before]
print(json.dumps({"calls": calls, "ranks": ranks}))
"""


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the limits are those of one version of Python")
def test_launch_calls_few_functions_and_touches_little_memory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_IN_RANKS)
    path = os.pathsep.join([str(tmp_path), str(_ROOT)])
    counts = tmp_path / "counts"
    counts.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _LAUNCHES],
        env={**os.environ, "COUNTS": str(counts), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert 0 < found["calls"] <= 500  # in the kernel's main thread
    assert len(found["ranks"]) == 2
    for rank in found["ranks"]:
        assert 0 < rank["calls"] <= 400
        assert 0 < rank["faults"] <= 1.15 * 2190  # counting costs some of them


def test_step_of_a_rank_that_is_watched_calls_few_functions(launch: Callable[..., Job]) -> None:
    for calls in launch(calls_of_a_step, 1, True, profile="off").results(timeout_s=60):
        print(sum(calls.values()), sorted(calls.items(), key=lambda item: -item[1]))
        assert 0 < sum(calls.values()) <= 45


def io_bytes(kind: str) -> int:
    """Return the bytes that this process has read (``rchar``) or written (``wchar``)."""
    rows = pathlib.Path("/proc/self/io").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith(kind))


def resident_bytes(name: str) -> int:
    """Return a row of this process's memory in ``status``."""
    rows = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(row.split()[1]) for row in rows if row.startswith(f"{name}:"))


def copied_bytes() -> int:
    """Return how much of the files in memory that this process maps are copies of its own."""
    copied, is_in_file = 0, False
    for row in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        name, *values = row.split()
        if not name.endswith(":"):
            is_in_file = "/memfd:" in row
        elif name == "Anonymous:" and is_in_file:
            copied += 1024 * int(values[0])
    return copied


def look_at(tensor: torch.Tensor) -> tuple[float, int, int]:
    """Read a tensor, and return its sum, the bytes that this rank has read by calls, and those that it has copied."""
    return float(tensor.sum()), io_bytes("rchar"), copied_bytes()


def write_to(tensor: torch.Tensor) -> int:
    """Write to a tensor, and return the bytes that this rank has copied."""
    tensor.add_(1)
    return copied_bytes()


def test_tensor_is_copied_once_in_the_kernel_and_never_in_a_rank(launch: Callable[..., Job]) -> None:
    size_bytes = 128 << 20
    tensor = torch.ones(size_bytes // 4)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_bytes, written = resident_bytes("VmRSS"), io_bytes("wchar")
    found = launch(look_at, tensor).results(timeout_s=60)
    assert size_bytes <= io_bytes("wchar") - written < 1.02 * size_bytes
    assert resident_bytes("VmHWM") - before_bytes < 0.2 * size_bytes
    for total, read_bytes, own_bytes in found:
        assert total == tensor.numel()
        assert read_bytes < 0.2 * size_bytes
        assert own_bytes < 0.01 * size_bytes
    assert launch(write_to, tensor).results(timeout_s=60)[0] >= size_bytes  # what would be found if it were copied

"""Counts the files of this package that a cell, a session's cell and an attachment enter until their result.

    python -m benchmarks.trips

A file is entered when a function of it is called, in any thread of the kernel, the agent, the template or a rank,
between the start of the notebook's cell and its result. ``--list`` names the files of each process.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import sys
import tempfile
import time

from tests import kernels

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PACKAGES = ("notebook_accel", "kernel_ext")
_SETTLING_S = 3.0  # until what a launch starts in the background has ended

# In a module that Python imports before all else, in every process: note at each call which file it is in and when.
_NOTING = """
import os, sys, threading, time

def begin():
    into = os.open(f"{os.environ['TRIPS']}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    last = {}

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and ("/notebook_accel/" in name or "/kernel_ext/" in name) and "/tests/" not in name:
            now = time.monotonic_ns()
            if now - last.get(name, 0) > 1_000_000:
                last[name] = now
                os.write(into, f"{now} {name}\\n".encode())

    sys.setprofile(note)
    threading.setprofile(note)

if "TRIPS" in os.environ:
    os.register_at_fork(after_in_child=begin)
    begin()
"""

_TRIPS = {
    "a cell": ("%%distributed --num_processes 2 --use_cpu --fresh\nfound = 1\nfound", ""),
    "a session's cell": ("%%distributed\nfound = 1\nfound", "%distributed start --num_processes 2 --use_cpu"),
    "an attachment": (
        "%distributed attach night",
        (
            "%distributed stop\n"
            "%%distributed --num_processes 2 --use_cpu --detach --name night\nimport time\ntime.sleep(60)"
        ),
    ),
}


def _role(pid: str, noted: str, kernel_pid: int) -> str:
    """Return what a process is, by the file that only its kind enters."""
    if int(pid) == kernel_pid:
        return "kernel"
    if "/launching/agent/agent.py" in noted:
        return "agent"
    return "rank" if "/launching/ranks/worker.py" in noted else "template"


def _entered(folder: pathlib.Path, kernel_pid: int, since: int, until: int) -> dict[str, set[str]]:
    """Return the files that each kind of process has entered between two times of ``time.monotonic_ns()``."""
    found: dict[str, set[str]] = collections.defaultdict(set)
    for noted in folder.iterdir():
        text = noted.read_text()
        role = _role(noted.name, text, kernel_pid)
        for row in text.splitlines():
            when, _, name = row.partition(" ")
            if since <= int(when) <= until:
                found[role].add(str(pathlib.Path(name).relative_to(_ROOT)))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "sitecustomize.py").write_text(_NOTING)
        (noted := folder / "noted").mkdir()
        path = os.pathsep.join([str(folder), str(_ROOT)])
        kernel = kernels.Kernel(folder, {"PYTHONPATH": path, "TRIPS": str(noted), "XDG_STATE_HOME": str(folder)})
        try:
            kernel.run("%load_ext notebook_accel")
            for trip, (cell, before) in _TRIPS.items():
                _run_all(kernel, before)
                if trip != "an attachment":
                    kernel.run(cell)  # the first one starts processes
                time.sleep(_SETTLING_S)
                since = time.monotonic_ns()
                outcome = kernel.run(cell)
                until = time.monotonic_ns()
                assert outcome.status == "ok", outcome.traceback
                found = _entered(noted, kernel.pid, since, until)
                print(f"{trip}: {len(set().union(*found.values()))} files, of them {_by_role(found)}")
                for role, files in found.items() if given.list else ():
                    print(f"  {role}: {' '.join(sorted(files))}")
        finally:
            kernel.run("%distributed stop night")
            kernel.close()


def _run_all(kernel: kernels.Kernel, code: str) -> None:
    magic, separator, body = code.partition("\n%%")
    for part in (magic, f"%%{body}" if separator else ""):
        if part:
            outcome = kernel.run(part)
            assert outcome.status == "ok", outcome.traceback


def _by_role(found: dict[str, set[str]]) -> str:
    return ", ".join(f"{len(files)} in the {role}" for role, files in sorted(found.items()))


if __name__ == "__main__":
    sys.exit(main())

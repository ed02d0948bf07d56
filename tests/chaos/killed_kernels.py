"""Detached runs whose kernel is killed at any moment: nothing that they said is lost, and in the end all is gone."""

from __future__ import annotations

import inspect
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import detached, detached_runs
from notebook_accel.launching.kernel.detached_job import DetachedJob
from notebook_accel.launching.run_folders import RunFolder
from notebook_accel.protocol import events
from tests import processes
from tests.launching import functions

_ROOT = pathlib.Path(__file__).parents[2]
_LONG_S = 100.0
# With the functions' source, since importing their module would import torch, which a launcher doesn't need.
_PROGRAM = f"""
from __future__ import annotations
import os, pathlib, sys, time
import notebook_accel
from notebook_accel import detach, notebook_launcher

{inspect.getsource(functions.rank)}
{inspect.getsource(functions.reports_until)}
print("ready", flush=True)
is_late = sys.argv[2] == "detaching"
job = notebook_launcher(
    reports_until, (sys.argv[1], [1] * 1000), 2, use_cpu=True, view="none", name="night",
    detach=not is_late, background=is_late,
)
while is_late and not all(rank.metrics for rank in job.ranks):
    time.sleep(0.01)
print("launched", flush=True)
if is_late:
    job = detach(job)
job.results()
print("ended", flush=True)
time.sleep(100)
"""
MOMENTS = ("launching", "starting", "training", "ending", "detaching")


def launcher_of_a_run(mark: pathlib.Path, moment: str) -> subprocess.Popen[str]:
    """A process that launches a detached run, which goes on until the file is there; it is about to."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(mark), moment], stdout=subprocess.PIPE, text=True, cwd=_ROOT, bufsize=1
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    return launcher


def kill_at(moment: str, launcher: subprocess.Popen[str], mark: pathlib.Path, rng: random.Random) -> None:
    """Kill the launcher at a random time within that part of the run."""
    assert launcher.stdout is not None
    if moment != "launching":
        assert [line for line in launcher.stdout.readline().splitlines() if not line.startswith("Launching")] in (
            [], ["launched"]
        )  # fmt: skip
    if moment == "detaching":  # once the ranks train
        assert launcher.stdout.readline() == "launched\n"
    if moment in ("training", "ending"):
        [folder] = run_folders.every()
        processes.wait_until(lambda: detached_runs.summary(folder).metrics, "the ranks train", _LONG_S)
    if moment == "ending":
        mark.touch()
    # The random moment itself. A run is detached within some hundredths of a second.
    time.sleep(rng.uniform(0.0, {"launching": 1.0, "detaching": 0.05}.get(moment, 0.5)))
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()


def one_round(moment: str, folder: pathlib.Path, rng: random.Random) -> str:
    """Kill the process that has launched a run, and check all that is promised then; how the run was found."""
    folder.mkdir()
    mark = folder / "mark"
    kill_at(moment, launcher_of_a_run(mark, moment), mark, rng)
    processes.wait_until(is_decided, "the launch was taken over or is gone", _LONG_S)
    found = run_folders.every()
    assert len(found) == 1 or moment in ("launching", "detaching")
    if found:
        check(found[0], mark, may_lack_lines=moment == "detaching")
    processes.wait_until(lambda: not agents(), "no agent is left", _LONG_S)
    processes.wait_until(is_clean, "no folder is left", _LONG_S)
    return f"{moment}: {'found' if found else 'gone'}"


def is_decided() -> bool:
    """Return whether every launch has either begun its run or given up."""
    root = run_folders.root()
    folders = [RunFolder(path) for path in root.iterdir()] if root.exists() else []
    return all(folder.is_published or not folder.is_held for folder in folders)


def is_clean() -> bool:
    run_folders.remove_old(all_ended=True)
    root = run_folders.root()
    return not root.exists() or not list(root.iterdir())


def agents() -> list[processes.Process]:
    """Return the agents of detached runs: orphans that the test process has adopted."""
    return [
        each
        for each in processes.children(os.getpid())
        # The command of this process's own agent ends with its number.
        if "notebook_accel.launching.agent." in each.command and not each.command.endswith(f" {os.getpid()}")
    ]


def check(folder: RunFolder, mark: pathlib.Path, *, may_lack_lines: bool) -> None:
    for agent in agents():
        processes.kill(agent, signal.SIGHUP)
    began_s = time.monotonic()
    job = detached.attach_and_show("night", show=lambda _: None)
    assert time.monotonic() - began_s < _LONG_S
    assert job.folder.id == folder.id
    mark.touch()
    results = job.results(_LONG_S)
    assert [(rank, rest) for rank, _, rest in results] == [(0, [1] * 1000), (1, [1] * 1000)]
    said = printed(job)
    for rank, steps, _ in results:
        expected = [f"step {number}" for number in range(steps)]
        assert job.logs(rank).splitlines() == expected
        assert said[rank] == (expected[len(expected) - len(said[rank]) :] if may_lack_lines else expected)
    processes.wait_until(lambda: not folder.is_held, "its agent has gone", _LONG_S)


def printed(job: DetachedJob) -> dict[int, list[str]]:
    """The lines of each rank, as they came to the kernel that is attached."""
    lines: dict[int, list[str]] = {rank: [] for rank in range(job.world_size)}
    for rank, event in job.events():
        if isinstance(event, events.Output):
            assert not event.left_out
            lines[rank] += event.text.split("\n")
    return lines

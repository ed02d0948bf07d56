"""Measures the cost of the panel in the kernel and of reporting in the ranks, which only count and report.

    python -m benchmarks.panel [--ranks 64] [--steps_per_s 10000] [--seconds 20]

A real kernel, whose front end shows widgets, launches real ranks. The kernel's cost is its process's CPU time while
they run, beside an idle kernel's; a rank's cost is that of its sampling thread and of counting. Both are shares of one
core. Memory is the kernel's after each hour of a simulated day of events, which arrive all at once.
"""

from __future__ import annotations

import argparse
import ast
import os
import pathlib
import sys
import tempfile
import time

from tests import kernels, processes

_DEADLINE_S = 300.0
_SETTLE_S = 5.0

# Counts as a loader's loop does, a hundred steps at a time, so that many ranks share few cores. One of them is measured
# by its phases, so that the panel has a diagnosis.
_RANKS = """
%%distributed -n {ranks} --use_cpu --view panel --background --out job
import os, threading, time
from notebook_accel import report, reporting
from notebook_accel.launching.ranks.progress import PROGRESS
counter = reporting.Counter("steps")
counter.start(epoch=1, total=1_000_000_000)
sampler = next(thread for thread in threading.enumerate() if thread.name == "notebook-accel-reporter")
clock = time.pthread_getcpuclockid(sampler.ident)
began_s, sampled_s = time.monotonic(), time.clock_gettime(clock)
while (elapsed_s := time.monotonic() - began_s) < {seconds}:
    while counter.step < elapsed_s * {steps_per_s}:
        for _ in range(100): counter.step += 1
    report(loss=1 / (1 + elapsed_s), accuracy=elapsed_s)
    for phase in ("data", "forward", "backward", "optimizer"): PROGRESS.clock.enter(phase)
    PROGRESS.clock.begin_step(None)
    time.sleep(0.05)
sampling = (time.clock_gettime(clock) - sampled_s) / elapsed_s

def counting_s(counter):
    began_s = time.thread_time()
    for _ in range(200_000): counter.step += 1
    return (time.thread_time() - began_s) / 200_000
sampling, counting_s(counter) * {steps_per_s}
"""

# A day of events of {ranks} ranks, with a report from each every {every_s} s instead of five a second.
_DAY = """
import time
from kernel_ext.panel import PanelView
from notebook_accel.protocol import events
from notebook_accel.config import LaunchConfig
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.spec import JobSpec

def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

spec = JobSpec(name="day", world_size={ranks}, environment={{}}, working_directory="", sys_path=[])
job = Job(LaunchRequest(Target({{}}), {{}}, spec, LaunchConfig(), ""))
view = PanelView(job)
sizes = []
for second in range(0, 86_400, {every_s}):
    at, steps = {{"time_s": job.started_s + second}}, second * 10_000
    epoch, step = divmod(steps, 100_000)
    values = {{"loss": 1.0 / (1 + second), "accuracy": second / 86_400}}
    for rank in range({ranks}):
        job.deliver(rank, events.Progress(step=step, total=100_000, epoch=1 + epoch, steps=steps, **at))
        job.deliver(rank, events.Metrics(step=steps, values=values, **at))
        job.deliver(rank, events.Output(text=f"step {{steps}}", **at))
    view._take_events()  # what a refresh does, without a picture for each of so many seconds
    if second % 3600 < {every_s}:
        view.refresh()
        sizes.append(resident_mib())
job.end("")
view.close()
sizes
"""


def run(kernel: kernels.Kernel, code: str) -> str:
    """Run a cell as a front end with a user does. Return the representation of its value."""
    outcome = kernel.run(code.strip("\n"), _DEADLINE_S, allow_stdin=True)
    if outcome.status != "ok":
        raise RuntimeError(outcome.traceback)
    return outcome.result


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and all its threads so far."""
    fields = pathlib.Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """Measure each process's share of one core, from now on for some seconds."""
    before, began_s = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
    time.sleep(seconds)
    return {name: (cpu_s(pid) - before[name]) / (time.monotonic() - began_s) for name, pid in pids.items()}


def main() -> None:
    """Measure and print the shares and the memory."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps_per_s", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--every_s", type=int, default=30, help="Seconds between two reports in the day of events.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, kernels.running(pathlib.Path(folder)) as running:
        run(running, "%load_ext notebook_accel")
        run(running, "%%distributed -n 1 --use_cpu --view none\n1")
        (agent,) = processes.children(running.pid)
        pids = {"kernel": running.pid, "agent": agent.pid}
        idle = share(pids, 5.0)
        run(running, _RANKS.format(**{**vars(given), "seconds": given.seconds + 2 * _SETTLE_S}))
        time.sleep(_SETTLE_S)  # until all have started
        busy = share(pids, given.seconds)
        results = ast.literal_eval(run(running, f"list(job.results({_DEADLINE_S}))"))
        sampling = sorted(of_sampling for of_sampling, _ in results)
        print(f"{given.ranks} ranks, {given.steps_per_s:,} steps a second each; shares of one core:")
        for name in pids:
            print(f"  {name}: {busy[name]:.1%} (idle: {idle[name]:.1%})")
        print(f"  a rank's sampling thread: {sampling[len(sampling) // 2]:.2%} (median), {sampling[-1]:.2%} (maximum)")
        print(f"  a rank's counting: {max(of_counting for _, of_counting in results):.2%} (maximum)")
        sizes = ast.literal_eval(run(running, _DAY.format(**vars(given))))
        print("The kernel's memory in MiB, after each hour of a day: " + " ".join(f"{size:.0f}" for size in sizes))


if __name__ == "__main__":
    sys.exit(main())

"""Code for a kernel in which runs are made up, event by event, and nothing is launched."""

from __future__ import annotations

__all__ = ["SETUP"]

SETUP = """
import threading
import time
from kernel_ext.panel import open_view
from notebook_accel.protocol import events
from notebook_accel.config import LaunchConfig
from notebook_accel.launching.kernel.engine import LaunchRequest
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.spec import JobSpec

class Control:
    calls = []
    called = threading.Event()
    def stop(self):
        self._note("stop")
    def interrupt(self, *, escalate):
        self._note("interrupt" if escalate else "interrupt and keep")
    def inspect(self):
        self._note("inspect")
    def _note(self, call):
        Control.calls.append(call)
        Control.called.set()

def make_job(is_background=False, world_size=2, **options):
    spec = JobSpec(name="digits", world_size=world_size, environment={}, working_directory="", sys_path=[])
    lock = None if is_background else threading.Lock()
    config = LaunchConfig(**options)
    job = Job(LaunchRequest(Target({}), {}, spec, config, f"{world_size} CPUs", foreground_lock=lock))
    job.attach(Control())
    Control.calls.clear()
    Control.called.clear()
    return job

def start(job):
    for rank in range(job.world_size):
        job.deliver(rank, events.Started(pid=rank + 1))
        job.deliver(rank, events.Progress(step=1, total=10, steps=1))

def finish(job):
    for rank in range(job.world_size):
        job.deliver(rank, events.Finished(result_bytes=1))
        job.deliver(rank, events.Ended(exit_code=0))
    job.end("")
"""

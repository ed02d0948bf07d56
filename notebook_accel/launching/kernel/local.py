"""The engine for this machine, in the kernel. One agent, started by the first launch, serves all runs of a kernel."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable

from notebook_accel import config
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, LaunchError, RunError
from notebook_accel.interrupts import held
from notebook_accel.launching import processes
from notebook_accel.launching.kernel import run_payload
from notebook_accel.launching.kernel.agent_process import ForkedTemplate, LocalAgent
from notebook_accel.launching.kernel.detached_job import DetachedJob
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.run_folders import RunFolder
from notebook_accel.protocol.agent_messages import ElasticOptions


class LocalEngine:
    """Runs ranks on this machine, through an agent that the first launch starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agent: LocalAgent | None = None

    def warm(self) -> None:
        """Start agent and template in the background, ahead of the first launch. The launch reports any failure."""
        if processes.are_supported():
            with contextlib.suppress(LaunchError, OSError), held(), self._lock:
                self._running_agent().prepare(_usual_options())

    def warm_in_kernel(self) -> None:
        """Call ``warm`` in a notebook's kernel only, since a script may never launch."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if hasattr(shell, "kernel"):
            self.warm()

    def launch(self, request: LaunchRequest, elastic: ElasticOptions | None = None) -> Job:
        """Start ranks that are forked from the template. With ``elastic``, the run is on several nodes."""
        request, pickled = run_payload.pickle_target(request)
        with run_payload.prepared_run(request, pickled) as (job, payload):
            with self._lock:
                agent = self._running_agent()
                agent.expect(job)
                agent.prepare(request.config)
            agent.launch(job, payload, elastic=elastic)
        return job

    def launch_forked(self, job: Job, payload: int, fork: Callable[[int], ForkedTemplate]) -> None:
        """Start ranks that are forked from their own template, which ``fork`` makes with the descriptor of its log."""
        with self._lock:
            agent = self._running_agent()
            agent.expect(job)
        try:
            template = fork(agent.process.log)
        except BaseException:
            agent.forget(job)
            raise
        try:
            agent.launch(job, payload, template)
        finally:
            template.close()

    def launch_detached(self, job: DetachedJob, payload: int, lock: int) -> None:
        """Start ranks in an agent of their own, which leaves this process at once.

        ``lock`` holds the lock of the job's folder.

        Raises:
            ProcessStartError: The agent can't be started, or refuses the run.
        """
        agent = LocalAgent(is_daemon=True)
        try:
            agent.prepare(job.config)
            agent.launch_detached(job, payload, lock)
        except BaseException:
            agent.close()
            raise

    def detach(self, job: Job, folder: RunFolder, lock: int) -> None:
        """Detach a run and its agent from this process. Another agent serves later launches.

        ``lock`` holds the folder's lock.

        Raises:
            RunError: The run has ended, or another run goes on.
        """
        with self._lock:
            agent = self._agent
            if agent is None or not agent.serves(job):
                raise RunError(f"The run {job.name!r} can't be detached now.", why="It has ended.")
            agent.detach(job, folder, lock)
            self._agent = None

    def close(self) -> None:
        """End every run, the agent and the template, and wait until they are gone."""
        with self._lock:
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def _running_agent(self) -> LocalAgent:
        if self._agent is None or self._agent.is_lost:
            self._agent = LocalAgent()
        return self._agent


def _usual_options() -> LaunchConfig:
    """Return the options that a launch probably has. A launch with others may need another template."""
    try:
        return config.resolve({}, file=config.default_path())
    except ConfigError:  # a launch that reads the file reports the problem
        return LaunchConfig()


_engine = LocalEngine()


def engine() -> LocalEngine:
    """Return this process's engine."""
    return _engine


def _forget_after_fork() -> None:
    global _engine
    agent = _engine._agent
    if agent is not None:
        agent.close_in_fork()
    _engine = LocalEngine()


def _close() -> None:
    with contextlib.suppress(KeyboardInterrupt):  # what isn't gone yet ends with this process
        _engine.close()


if hasattr(os, "register_at_fork"):  # Windows, where this module can be imported, lacks it
    os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_close)

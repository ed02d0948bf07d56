"""The engine whose one rank is this process: for ``breakpoint()``, ``input()`` and post-mortem debugging.

Nothing is pickled, and nothing runs beside it. What a cell assigns stays in the notebook, as if the magic were not
there. The rank's environment variables, its store and its default process group are there only as long as it runs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from notebook_accel import environment, reporting
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError, ProcessStartError
from notebook_accel.launching.kernel import run_payload
from notebook_accel.launching.kernel.engine import LaunchRequest
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.ranks import failure, store, worker
from notebook_accel.launching.results import Results
from notebook_accel.launching.spec import JobSpec
from notebook_accel.protocol import events

__all__ = ["InlineEngine"]


class InlineEngine:
    """Runs one rank in this process, while the foreground waits for the job."""

    def launch(self, request: LaunchRequest) -> Job:
        """Return the job; ``foreground`` runs it. See ``Engine``."""
        if request.foreground_lock is None:
            raise ConfigError(
                "start_method='inline' runs in the cell itself, which can't go on in the background.",
                fix="leave out background, or start_method",
            )
        namespace = sys.modules["__main__"].__dict__
        found = run_payload.notebook_sources([*namespace.values(), request.target.function])
        spec = msgspec.structs.replace(request.spec, sources=found | dict(request.spec.sources))
        port = request.config.main_process_port or 0
        try:
            listening = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise ProcessStartError(f"The port {port} for the ranks' store can't be used: {error.strerror}.") from None
        job = Job.from_request(request, spec)
        job.run_here = _Run(job, spec, request.target, namespace, listening).run
        return job


class _Run:
    def __init__(
        self, job: Job, spec: JobSpec, target: worker.Target, namespace: dict[str, Any], listening: socket.socket
    ) -> None:
        self._job = job
        self._spec = spec
        self._target = target
        self._namespace = namespace
        self._listening = listening

    def run(self) -> None:
        """Run the user's code to its end and ends the job.

        Raises:
            KeyboardInterrupt: The kernel was interrupted.
        """
        outcome, raised = None, None
        worker.show_sources(self._spec.sources)
        with self._as_rank():
            self._job.deliver(0, events.Started(pid=os.getpid()))
            try:
                outcome = Results([worker.call(self._spec, self._target, self._namespace)])
                for name in self._spec.pull:  # it is in the notebook already, or nowhere
                    failure.look_up(self._namespace, name)
            except BaseException as error:  # noqa: BLE001 - SystemExit too: the kernel is not to end with the run
                raised = error
        if raised is None:
            self._job.deliver(0, events.Finished(result_bytes=0))
        else:
            outcome = None
            said = failure.describe(raised, self._spec, [])
            self._job.deliver(0, msgspec.structs.replace(said, exception=b""))  # it is here itself
        self._job.deliver(0, events.Ended(exit_code=0 if raised is None else 1))
        self._job.end_here(outcome, raised)
        if isinstance(raised, KeyboardInterrupt):
            raise raised

    @contextlib.contextmanager
    def _as_rank(self) -> Iterator[None]:
        """Make this process the rank, as far as the user's code can tell, and takes it back."""
        place = RankPlace(0, 1, 0, 1, "127.0.0.1", self._listening.getsockname()[1])
        wanted = {**self._spec.environment, **place.variables(), **store.VARIABLES}
        wanted |= environment.tasks_of_schedulers(wanted)
        changed: dict[str, str | None] = {
            name: value for name, value in wanted.items() if os.environ.get(name) != value
        }
        with environment.patched(changed), store.serving(place, self._listening.detach()):
            reporter = reporting.connect(_Delivering(self._job))
            try:
                yield
            finally:
                reporter.close()
                reporting.disconnect()


class _Delivering:
    """A connection that delivers events to the job directly, in place of the one to the agent."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def send(self, body: bytes) -> None:
        self._job.deliver(0, events.decode(body))

"""The engine whose only rank is the kernel itself: for ``breakpoint()``, ``input()`` and post-mortem debugging.

Nothing is pickled, and no other process is started. Variables that a cell assigns stay in the notebook, as in a cell
without the magic. The rank's environment variables, store and default process group exist only while it runs.
"""

from __future__ import annotations

import bdb
import contextlib
import dataclasses
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from notebook_accel import environment, reporting, time_limit
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError, ProcessStartError
from notebook_accel.launching.kernel import run_payload
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.ranks import failure, store, worker
from notebook_accel.launching.results import Results
from notebook_accel.protocol import events


def launch(request: LaunchRequest) -> Job:
    """Return the job of one rank in this process, which the foreground runs while it waits for the job."""
    if request.is_background:
        raise ConfigError(
            "start_method='inline' runs in the cell itself, which can't go on in the background.",
            fix="leave out background, or start_method",
        )
    namespace = sys.modules["__main__"].__dict__
    found = run_payload.notebook_sources([*namespace.values(), request.target.function])
    spec = msgspec.structs.replace(request.spec, sources=found | dict(request.spec.sources))
    port = request.config.main_process_port or 0
    try:
        store_socket = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise ProcessStartError(f"The port {port} for the ranks' store can't be used: {error.strerror}.") from None
    job = Job(dataclasses.replace(request, spec=spec))
    job.run_here = lambda: _run(job, request.target, namespace, store_socket)
    return job


def _run(job: Job, target: worker.Target, namespace: dict[str, Any], store_socket: socket.socket) -> None:
    """Run the user's code as the only rank, and end the job.

    Raises:
        KeyboardInterrupt: The kernel was interrupted.
    """
    outcome: Results | None = None
    raised: BaseException | None = None
    worker.show_sources(job.spec.sources)
    with _as_rank(job, store_socket):
        job.deliver(0, events.Started(pid=os.getpid()))
        try:
            outcome = Results([worker.call(job.spec, target, namespace)])
            worker.finish_background_work()
            for name in job.spec.pull:  # the notebook has the variables already; raise if one is missing
                worker.look_up(namespace, name)
        except bdb.BdbQuit as error:  # `quit` in a debugger ends the run as an interrupt does
            raised, job.ended_by = KeyboardInterrupt().with_traceback(error.__traceback__), "quit in the debugger"
        except BaseException as error:  # noqa: BLE001 - SystemExit too, which must not end the kernel
            raised = failure.readable(error)
    if raised is None:
        job.deliver(0, events.Finished())
    else:
        outcome = None
        failed = failure.describe(raised, job.spec, [])
        job.deliver(0, msgspec.structs.replace(failed, exception=b""))  # the job has the exception itself
    job.deliver(0, events.Ended(exit_code=0 if raised is None else 1))
    job.end_here(outcome, raised)
    if isinstance(raised, KeyboardInterrupt):
        raise raised


@contextlib.contextmanager
def _as_rank(job: Job, store_socket: socket.socket) -> Iterator[None]:
    """Give this process a rank's environment, store and reporter for the body."""
    place = RankPlace(0, 1, 0, 1, "127.0.0.1", store_socket.getsockname()[1])
    wanted = {**job.spec.environment, **place.variables(), **store.VARIABLES}
    wanted |= time_limit.variables(job.config.end_at, job.config.end_margin_s)
    wanted |= environment.tasks_of_schedulers(wanted)
    kernels_argv, sys.argv = sys.argv, ["cell.py"]
    changed = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    with environment.patched(changed), store.serving(place, store_socket.detach()):
        reporter = reporting.connect(_DirectConnection(job))
        try:
            yield
        finally:
            sys.argv = kernels_argv
            reporter.close()
            reporting.disconnect()


@dataclasses.dataclass(frozen=True)
class _DirectConnection:
    """A connection that delivers events directly to the job, in place of the connection to the agent."""

    job: Job

    def send(self, body: bytes) -> None:
        self.job.deliver(0, events.decode(body))

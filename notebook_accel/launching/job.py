"""The handle of a run: what the notebook holds, a view draws and an engine feeds."""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from notebook_accel import serialization
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import (
    NotebookAccelError,
    ProcessStartError,
    RankFailedError,
    RunStoppedError,
    RunTimeoutError,
    SupervisorLostError,
)
from notebook_accel.events import Event
from notebook_accel.launching.messages import Reason
from notebook_accel.launching.record import Record
from notebook_accel.launching.results import Results
from notebook_accel.launching.spec import JobSpec

__all__ = ["Control", "Job"]

_MOST_PENDING_EVENTS = 100_000

Status = Literal["starting", "running", "succeeded", "failed", "stopped"]


class Control(Protocol):
    """What an engine lets one do with a run that it has started."""

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in the ranks; after the grace they are ended."""

    def stop(self) -> None:
        """Ends the ranks: SIGTERM, and SIGKILL after the grace."""

    def kill(self) -> None:
        """Ends the ranks at once."""


class Job:
    """A run that was started. Made by the launcher, fed by an engine, read by a view and by the user.

    Attributes:
        id: Unique among the kernel's runs.
        name: The run's name.
        config: Its options.
        world_size: Number of ranks.
        devices: What they run on, such as ``2 CPUs``.
        is_background: Whether nobody waits for it in the cell that started it.
        started_s: When it was started, in seconds of ``time.monotonic()``.
        ended_s: When it ended, ``None`` as long as it runs.

    Args:
        shipped: What the payload holds by value, for what comes back by reference.
        result_files: One memory file a rank, which this owns.
        bind: Takes the pulled names and their values, once, when the results are read.
    """

    def __init__(
        self,
        job_id: str,
        spec: JobSpec,
        config: LaunchConfig,
        *,
        devices: str,
        is_background: bool,
        shipped: Sequence[Any],
        result_files: Sequence[int],
        bind: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        self.id = job_id
        self.name = spec.name
        self.config = config
        self.world_size = spec.world_size
        self.devices = devices
        self.is_background = is_background
        self.started_s = time.monotonic()
        self.ended_s: float | None = None
        self._bind = bind or (lambda _: None)
        self._shipped = shipped
        self._result_files = result_files
        self._close_results = weakref.finalize(self, _close_all, tuple(result_files))
        self._control: Control | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._pending: collections.deque[tuple[int, Event]] = collections.deque(maxlen=_MOST_PENDING_EVENTS)
        self._record = Record(spec.world_size)
        self._reason: Reason = ""
        self._engine_error: NotebookAccelError | None = None
        self._outcome: Results | None = None
        self._error: NotebookAccelError | None = None

    # What users call ---------------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether the run has ended, in whatever way."""
        return self._ended.is_set()

    @property
    def status(self) -> Status:
        """Where the run stands, in a word."""
        if not self.done:
            return "running" if self._record.has_started else "starting"
        if self._reason in ("stopped", "interrupted"):
            return "stopped"
        return "succeeded" if self._has_all_results() else "failed"

    @property
    def error(self) -> NotebookAccelError | None:
        """Why the run did not succeed; ``None`` while it runs and when it did."""
        if not self.done or self.status == "succeeded":
            return None
        with self._lock:
            if self._error is None:
                self._error = self._make_error()
            return self._error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the run has ended; returns whether it has."""
        return self._ended.wait(timeout_s)

    def results(self, timeout_s: float | None = None) -> Results:
        """Every rank's result, as soon as all are there.

        Args:
            timeout_s: How long to wait; ``None``: until the run has ended, which the agent watches over.

        Raises:
            RunTimeoutError: The run hasn't ended by then; it goes on.
            RunError: The run has failed or was stopped.
        """
        if not self.wait(timeout_s):
            raise RunTimeoutError(
                f"The run {self.name!r} has not ended after {timeout_s:g} s.",
                why="It goes on; asking again later does no harm.",
                fix="job.results() to wait for its end, job.stop() to end it",
            )
        error = self.error
        if error is not None:
            saved = self.bind_what_was_saved()
            if saved and isinstance(error, RankFailedError):
                error.pulled = saved
            raise error
        with self._lock:
            if self._outcome is None:
                self._outcome = self._read_results()
        return self._outcome

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in every rank, as an interrupt of the kernel does. Doesn't wait for the end."""
        self._tell(lambda control: control.interrupt())

    def stop(self) -> None:
        """Ends the run. Doesn't wait for the end."""
        self._tell(lambda control: control.stop())

    def kill(self) -> None:
        """Ends the run at once, without letting the ranks clean up. Doesn't wait for the end."""
        self._tell(lambda control: control.kill())

    def __repr__(self) -> str:
        return f"<Job {self.name!r}: {self.status}, {self.world_size} ranks on {self.devices}>"

    def bind_what_was_saved(self) -> tuple[str, ...]:
        """After a failure or an interrupt: binds the names to be pulled to what they were then in rank 0; their names.

        Nothing if rank 0 was killed, or had none of the names yet.
        """
        with self._lock:
            if not self.done or not self._close_results.alive or self._has_all_results():
                return ()
            _, pulled = serialization.open_sealed(self._result_files[0], origins=self._shipped).value
            self._close_results()
        self._bind(pulled)
        return tuple(pulled)

    # What views and engines call ------------------------------------------------------------------------------------

    def events(self) -> list[tuple[int, Event]]:
        """What the ranks have said since the last call, each once, with the rank, in order of arrival."""
        drained = []
        with contextlib.suppress(IndexError):
            while True:
                drained.append(self._pending.popleft())
        return drained

    def where_ranks_stood(self) -> list[str]:
        """For ranks that were interrupted: lines such as ``rank 0 was at In[7], line 12``."""
        failures = sorted(self._record.failures.items())
        return [f"rank {rank} was at {failed.line}" for rank, failed in failures if failed.line]

    def attach(self, control: Control) -> None:
        """The engine's handle on the run."""
        self._control = control

    def deliver(self, rank: int, event: Event) -> None:
        """Takes one event of a rank. Called by the engine's thread."""
        self._record.add(rank, event)
        self._pending.append((rank, event))

    def end(self, reason: Reason, error: NotebookAccelError | None = None) -> None:
        """The run is over: every rank is gone. Called once, by the engine's thread."""
        self._reason = reason
        self._engine_error = error
        self.ended_s = time.monotonic()
        if not self._has_all_results() and not self._record.has_saved:
            self._close_results()
        self._ended.set()

    # ----------------------------------------------------------------------------------------------------------------

    def _tell(self, what: Callable[[Control], None]) -> None:
        if self._control is not None and not self.done:
            what(self._control)

    def _has_all_results(self) -> bool:
        return self._engine_error is None and self._reason == "" and len(self._record.finished) == self.world_size

    def _read_results(self) -> Results:
        values = []
        for rank, descriptor in enumerate(self._result_files):
            value, pulled = serialization.open_sealed(descriptor, origins=self._shipped).value
            values.append(value)
            if rank == 0:
                self._bind(pulled)
        self._close_results()
        return Results(values)

    def _make_error(self) -> NotebookAccelError:
        if self._engine_error is not None:
            return self._engine_error
        if self._reason == "timeout":
            return RunTimeoutError(
                f"The run {self.name!r} took longer than its timeout_s of {self.config.timeout_s:g} s and was stopped.",
                why="\n".join(self.where_ranks_stood()),
                fix="give timeout_s more time, or leave it out",
            )
        if self._reason in ("stopped", "interrupted"):
            return RunStoppedError(f"The run {self.name!r} was {self._reason}.")
        if self._reason == "template lost":
            return SupervisorLostError(
                "The process that the ranks were forked from has died, and the ranks with it.",
                why="Something killed it; often that is the system, when memory runs out.",
                fix="run the cell again: a new one is started",
            )
        failure = self._record.first_failure(self._shipped)
        return failure or ProcessStartError(f"The run {self.name!r} has ended, but no rank says why.")


def _close_all(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

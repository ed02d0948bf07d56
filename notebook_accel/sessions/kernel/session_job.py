"""The kernel's handle of code that runs in a session's ranks, in the foreground or in the background."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable, Mapping

from notebook_accel.errors import RunStoppedError
from notebook_accel.interrupts import Interrupts, Latch, held
from notebook_accel.launching.kernel.job import Handle, Status
from notebook_accel.launching.results import Results
from notebook_accel.launching.state.stacks import Stacks
from notebook_accel.sessions.kernel.output import Shown
from notebook_accel.sessions.kernel.rank_pool import Answer

_POLL_PERIOD_S = 0.1


class SessionJob(Handle):
    """Code that runs in a session's ranks. Its output appears under the cell that ran or started it.

    Args:
        name: The code's name, such as ``In[7]``.
        run_request: Function that sends the request, waits for its end, and returns the ranks' answers. Takes the
            request's ``title``, and in the background a function ``on_status``, which it calls with the job's status.
        stacks: Function that takes a deadline in seconds and returns the ranks' stacks.
    """

    def __init__(
        self, name: str, run_request: Callable[..., Mapping[int, Answer]], stacks: Callable[[float], Stacks]
    ) -> None:
        super().__init__(name)
        self._run_request = run_request
        self._stacks = stacks
        self._answers: Mapping[int, Answer] = {}
        self._error: BaseException | None = None
        self._began_s = time.monotonic()
        self._status: Status = "waiting"
        self._end: Status = "succeeded"  # valid once the code has ended
        self._is_under_way = Latch()
        self._is_refused = False  # the request failed before it was under way: ``start`` raises the error
        self._interrupts = Interrupts()

    # For users -------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        return self._end if self.done else self._status

    @property
    def error(self) -> BaseException | None:
        return self._error if self.done else None

    @property
    def shown(self) -> Shown:
        """The value of the code's last expression as each rank shows it."""
        return Shown({rank: reply.shown for rank, (reply, _) in self._answers.items() if reply.shown})

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the ranks that run the code. They keep their variables.

        A second call kills the ranks that go on. Code that waits for its turn never starts. Doesn't wait for the end.
        """
        if self._status == "running" or not self._interrupts.has_pending:
            self._interrupts.add_unless_closed(KeyboardInterrupt())

    def stop(self) -> None:
        """Interrupt the code. A second call of ``stop`` or ``interrupt`` kills the ranks that go on."""
        self.interrupt()

    def stacks(self, timeout_s: float = 10.0) -> Stacks:
        return self._stacks(timeout_s)

    def __repr__(self) -> str:
        return f"<{self.name}, in the background: {self.status}>"

    # For the session --------------------------------------------------------------------------------------------------

    def run(self) -> SessionJob:
        """Run the code, and return this job once it has ended. Raises the code's error."""
        self._answers = self._run_request(title=self.name)
        self._ended.set()
        return self

    def start(self) -> SessionJob:
        """Start the code, and leave the wait to a thread. Return once its request is about to be sent, or waits.

        Raises its error if it fails before that. An interrupt of the kernel meanwhile interrupts the code too.
        """
        context = contextvars.copy_context()  # so that the output appears under this cell
        name = f"notebook-accel-{self.name}"
        thread = threading.Thread(target=context.run, args=(self._run_in_thread,), name=name, daemon=True)
        with held() as interrupts:
            thread.start()
            try:
                while not self._is_under_way.wait(_POLL_PERIOD_S):
                    interrupts.check()
                interrupts.check()
            except BaseException:
                self.interrupt()
                raise
        if self._is_refused and self._error is not None:
            raise self._error
        return self

    def _set_status(self, status: Status) -> None:
        """Set the status: the code waits for its turn, or its request is about to be sent."""
        self._status = status
        self._is_under_way.set()

    def _results(self) -> Results:
        if self._error is not None:
            raise self._error
        return Results([value for _, value in self._answers.values()])

    def _run_in_thread(self) -> None:
        try:
            with held(self._interrupts):
                self._answers = self._run_request(title=self.name, on_status=self._set_status)
        except KeyboardInterrupt:
            self._error, self._end = RunStoppedError(f"{self.name} was interrupted."), "stopped"
        except BaseException as error:  # noqa: BLE001 - results() raises it
            self._error, self._end = error, "stopped" if isinstance(error, RunStoppedError) else "failed"
        self._is_refused = not self._is_under_way.is_set
        self._report_end()
        self._ended.set()
        self._is_under_way.set()

    def _report_end(self) -> None:
        took_s = time.monotonic() - self._began_s
        if self._error is None:
            value = f": {self.shown!r}" if self.shown else ""
            sys.stdout.write(f"[{self.name} has ended, after {took_s:.1f} s{value}]\n")
        elif not self._is_refused and (self._status == "running" or self._end == "failed"):
            # Otherwise the cell that called ``start`` shows the error, or the code was interrupted before it started.
            sys.stderr.write(f"[{self.name}, in the background, after {took_s:.1f} s]\n{self._error}\n")

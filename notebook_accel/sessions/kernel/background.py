"""The handle of a cell that runs in a session's ranks while the notebook goes on."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable
from typing import Literal

from notebook_accel.errors import RunStoppedError, RunTimeoutError
from notebook_accel.launching.results import Results
from notebook_accel.launching.state.stacks import Stacks
from notebook_accel.sessions.kernel.interrupts import held
from notebook_accel.sessions.kernel.output import Shown
from notebook_accel.sessions.kernel.pending_request import PendingRequest
from notebook_accel.sessions.kernel.rank_connections import RankRequest
from notebook_accel.uninterruptible import Latch

__all__ = ["BackgroundCell"]

_LOOK_PERIOD_S = 0.1
Status = Literal["waiting", "running", "succeeded", "failed", "stopped"]


class BackgroundCell:
    """A cell in the background, much as a ``Job`` is a run. Its output appears under the cell that started it.

    Attributes:
        name: Its name, such as ``In[7]``.

    Args:
        stacks: Returns the ranks' stacks, given a deadline in seconds.
    """

    def __init__(self, name: str, stacks: Callable[[float], Stacks]) -> None:
        self.name = name
        self._stacks = stacks
        self._outcome: Results | None = None
        self._error: BaseException | None = None
        self._began_s = time.monotonic()
        self._is_under_way = Latch()
        self._ended = Latch()
        self._lock = threading.Lock()
        self._is_interrupted = False
        self._end: Status = "succeeded"  # valid once it has ended
        self._is_refused = False  # failed before it was under way: ``start`` raises the error
        self._pending: tuple[PendingRequest, RankRequest] | None = None

    # For users -------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """The cell's state; ``waiting`` while the ranks are busy with earlier requests."""
        if self.done:
            return self._end
        return "waiting" if self._pending is None else "running"

    @property
    def done(self) -> bool:
        """True once the cell has ended, in whatever way."""
        return self._ended.is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the cell's end. Return whether it has ended."""
        return self._ended.wait(timeout_s)

    def results(self, timeout_s: float | None = None) -> Results:
        """Return the value of the cell's last expression on each rank that ran it. Wait until all are there.

        Args:
            timeout_s: Deadline; ``None`` for none.

        Raises:
            RunTimeoutError: The cell hasn't ended by then. It goes on.
            RunStoppedError: The cell was interrupted.
            RankFailedError: A rank raised an error, or died.
        """
        if not self.wait(timeout_s):
            raise RunTimeoutError(
                f"{self.name} has not ended after {timeout_s:g} s.",
                why="It goes on; asking again later does no harm.",
                fix="results() to wait for its end, interrupt() to end it",
            )
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the cell's ranks, which keep their variables.

        A second call kills the ranks that go on. A cell that still waits for its turn doesn't start. Doesn't wait for
        the end.
        """
        with self._lock:
            self._is_interrupted = True
            pending = self._pending
        if pending is not None and not self.done:
            pending_request, request = pending
            pending_request.interrupt_by(KeyboardInterrupt(), request)

    def stacks(self, timeout_s: float = 10.0) -> Stacks:
        """Return the stack of every rank of the session."""
        return self._stacks(timeout_s)

    def __repr__(self) -> str:
        return f"<{self.name}, in the background: {self.status}>"

    # For the session --------------------------------------------------------------------------------------------------

    def start(self, act: Callable[[], tuple[Shown, Results]]) -> None:
        """Start the cell. Return once the ranks have what they need for it, or while it waits for its turn.

        Args:
            act: Sends the request and waits for its end.

        Raises:
            PayloadError: Something that the ranks need can't be sent.
            KeyboardInterrupt: The kernel was interrupted meanwhile, and so is the cell.
        """
        context = contextvars.copy_context()  # so that output appears under its cell
        thread = threading.Thread(target=context.run, args=(self._run, act), name=f"notebook-accel-{self.name}")
        thread.daemon = True
        with held() as interrupts:
            thread.start()
            try:
                while not self._is_under_way.wait(_LOOK_PERIOD_S):
                    interrupts.check()
                interrupts.check()
            except BaseException:
                self.interrupt()
                raise
        if self._is_refused and self._error is not None:
            raise self._error

    def check(self) -> None:
        """Note that the cell waits for its turn. The request queue calls this again and again.

        Raises:
            KeyboardInterrupt: The cell was interrupted and mustn't start.
        """
        self._is_under_way.set()
        if self._is_interrupted:
            raise KeyboardInterrupt

    def begin(self, pending_request: PendingRequest, request: RankRequest) -> None:
        """Note that the cell's turn has come, just before its request is sent."""
        with self._lock:
            self._pending = pending_request, request
            is_interrupted = self._is_interrupted
        if is_interrupted:
            pending_request.interrupt_by(KeyboardInterrupt(), request)
        self._is_under_way.set()

    def _run(self, act: Callable[[], tuple[Shown, Results]]) -> None:
        shown = Shown({})
        try:
            shown, self._outcome = act()
        except KeyboardInterrupt:
            self._error, self._end = RunStoppedError(f"{self.name} was interrupted."), "stopped"
        except BaseException as error:  # noqa: BLE001 - results() raises it
            self._error, self._end = error, "stopped" if isinstance(error, RunStoppedError) else "failed"
        self._is_refused = not self._is_under_way.is_set
        self._say_end(shown)
        self._ended.set()
        self._is_under_way.set()

    def _say_end(self, shown: Shown) -> None:
        took_s = time.monotonic() - self._began_s
        if self._error is None:
            value = f": {shown!r}" if shown else ""
            sys.stdout.write(f"[{self.name} has ended, after {took_s:.1f} s{value}]\n")
        elif not self._is_refused and (self._pending is not None or self._end == "failed"):
            # Else the cell that tried to start it shows the error, or it was interrupted before it began.
            sys.stderr.write(f"[{self.name}, in the background, after {took_s:.1f} s]\n{self._error}\n")

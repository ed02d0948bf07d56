"""The handle of a cell that runs in a session's ranks while the notebook goes on."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Callable

from notebook_accel.errors import RunStoppedError
from notebook_accel.launching.kernel.job import Handle, Status
from notebook_accel.launching.results import Results
from notebook_accel.launching.state.stacks import Stacks
from notebook_accel.sessions.kernel.interrupts import Interrupts, held
from notebook_accel.sessions.kernel.output import Shown
from notebook_accel.uninterruptible import Latch

_POLL_PERIOD_S = 0.1


class BackgroundCell(Handle):
    """A cell that runs in a thread of its own, as a cell in the foreground does in the main thread.

    Its output appears under the cell that started it.

    Args:
        name: Its name, such as ``In[7]``.
        stacks: Returns the ranks' stacks, given a deadline in seconds.
    """

    def __init__(self, name: str, stacks: Callable[[float], Stacks]) -> None:
        super().__init__(name)
        self._stacks = stacks
        self._outcome: Results | None = None
        self._error: BaseException | None = None
        self._began_s = time.monotonic()
        self._status: Status = "waiting"
        self._end: Status = "succeeded"  # valid once it has ended
        self._is_under_way = Latch()
        self._is_refused = False  # failed before it was under way: ``start`` raises the error
        self._interrupts = Interrupts()

    # For users -------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        return self._end if self.done else self._status

    @property
    def error(self) -> BaseException | None:
        return self._error if self.done else None

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the cell's ranks, which keep their variables.

        A second call kills the ranks that go on. A cell that still waits for its turn doesn't start. Doesn't wait for
        the end.
        """
        if self._status == "running" or not self._interrupts.has_pending:
            self._interrupts.note_unless_closed(KeyboardInterrupt())

    def stop(self) -> None:
        """End the cell, as ``interrupt`` does: a second call of either kills the ranks that go on."""
        self.interrupt()

    def stacks(self, timeout_s: float = 10.0) -> Stacks:
        """Return the stack of every rank of the session."""
        return self._stacks(timeout_s)

    def __repr__(self) -> str:
        return f"<{self.name}, in the background: {self.status}>"

    # For the session --------------------------------------------------------------------------------------------------

    def start(self, act: Callable[[], tuple[Shown, Results]]) -> None:
        """Start the cell. Return once the ranks have what they need for it, or while it waits for its turn.

        Args:
            act: Sends the request and waits for its end. It calls ``note`` meanwhile.

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
                while not self._is_under_way.wait(_POLL_PERIOD_S):
                    interrupts.check()
                interrupts.check()
            except BaseException:
                self.interrupt()
                raise
        if self._is_refused and self._error is not None:
            raise self._error

    def note(self, status: Status) -> None:
        """Note that the cell waits for its turn, or that its request is about to be sent."""
        self._status = status
        self._is_under_way.set()

    def _results(self) -> Results:
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def _run(self, act: Callable[[], tuple[Shown, Results]]) -> None:
        shown = Shown({})
        try:
            with held(self._interrupts):
                shown, self._outcome = act()
        except KeyboardInterrupt:
            self._error, self._end = RunStoppedError(f"{self.name} was interrupted."), "stopped"
        except BaseException as error:  # noqa: BLE001 - results() raises it
            self._error, self._end = error, "stopped" if isinstance(error, RunStoppedError) else "failed"
        self._is_refused = not self._is_under_way.is_set
        self._report_end(shown)
        self._ended.set()
        self._is_under_way.set()

    def _report_end(self, shown: Shown) -> None:
        took_s = time.monotonic() - self._began_s
        if self._error is None:
            value = f": {shown!r}" if shown else ""
            sys.stdout.write(f"[{self.name} has ended, after {took_s:.1f} s{value}]\n")
        elif not self._is_refused and (self._status == "running" or self._end == "failed"):
            # Else the cell that tried to start it shows the error, or it was interrupted before it began.
            sys.stderr.write(f"[{self.name}, in the background, after {took_s:.1f} s]\n{self._error}\n")

"""A cell that runs in a session's ranks while the notebook goes on: its handle."""

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
from notebook_accel.sessions.kernel.pending_request import Asking
from notebook_accel.sessions.kernel.rank_connections import Question
from notebook_accel.sessions.showing import Shown
from notebook_accel.uninterruptible import Latch

__all__ = ["BackgroundCell"]

_LOOK_PERIOD_S = 0.1
Status = Literal["waiting", "running", "succeeded", "failed", "stopped"]


class BackgroundCell:
    """A cell in the background, as a ``Job`` is a run. What it prints appears under the cell that started it.

    Attributes:
        name: What it is called, such as ``In[7]``.

    Args:
        stacks: Gives where the ranks stand.
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
        self._end: Status = "succeeded"  # how it has ended, as soon as it has
        self._is_refused = False  # before it was under way, so that who starts it is told
        self._asked: tuple[Asking, Question] | None = None

    # What users call --------------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """How it stands. It is waiting as long as the ranks are busy with what was asked before."""
        if self.done:
            return self._end
        return "waiting" if self._asked is None else "running"

    @property
    def done(self) -> bool:
        """True if it has ended, in whatever way."""
        return self._ended.is_set

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended; returns whether it has."""
        return self._ended.wait(timeout_s)

    def results(self, timeout_s: float | None = None) -> Results:
        """The value of its last expression in each rank that it runs in, as soon as all are there.

        Args:
            timeout_s: How long to wait; ``None``: until it has ended.

        Raises:
            RunTimeoutError: It hasn't ended by then; it goes on.
            RunStoppedError: It was interrupted.
            RankFailedError: A rank has raised something, or died.
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
        """Raises KeyboardInterrupt in its ranks, which keep what they have; called again, kills those that go on.

        If it waits for its turn, it doesn't begin. Doesn't wait for the end.
        """
        with self._lock:
            self._is_interrupted = True
            asked = self._asked
        if asked is not None and not self.done:
            asking, question = asked
            asking.interrupt_by(KeyboardInterrupt(), question)

    def stacks(self, timeout_s: float = 10.0) -> Stacks:
        """Where every rank of the session stands."""
        return self._stacks(timeout_s)

    def __repr__(self) -> str:
        return f"<{self.name}, in the background: {self.status}>"

    # What a session calls ---------------------------------------------------------------------------------------------

    def start(self, act: Callable[[], tuple[Shown, Results]]) -> None:
        """Begins, and returns when the ranks have what they need for it, or when it waits for its turn.

        Args:
            act: Asks the ranks and waits for the end.

        Raises:
            PayloadError: Something that they need can't be sent.
            KeyboardInterrupt: The kernel was interrupted meanwhile, and so is this.
        """
        context = contextvars.copy_context()  # so that output finds its cell
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
        """Called while it waits for its turn.

        Raises:
            KeyboardInterrupt: It isn't to begin.
        """
        self._is_under_way.set()
        if self._is_interrupted:
            raise KeyboardInterrupt

    def begin(self, asking: Asking, question: Question) -> None:
        """Its turn has come, and the ranks are about to be asked."""
        with self._lock:
            self._asked = asking, question
            is_interrupted = self._is_interrupted
        if is_interrupted:
            asking.interrupt_by(KeyboardInterrupt(), question)
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
        elif not self._is_refused and (self._asked is not None or self._end == "failed"):
            # Otherwise the cell that was to start it shows the error, or it was interrupted before it had begun.
            sys.stderr.write(f"[{self.name}, in the background, after {took_s:.1f} s]\n{self._error}\n")

"""Waiting for the ranks' answers, whatever comes: one fails, one dies, the kernel is interrupted."""

from __future__ import annotations

import collections
import contextlib
import signal
import sys
import time
from collections.abc import Callable

from notebook_accel.errors import NotebookAccelError, RunError
from notebook_accel.launching.state.stacks import Stacks
from notebook_accel.protocol import session_messages as messages
from notebook_accel.sessions.kernel.interrupts import held
from notebook_accel.sessions.kernel.output import Output, ranks_in_words
from notebook_accel.sessions.kernel.rank_connections import RankConnections, RankRequest

__all__ = ["Console", "PendingRequest"]

_TICK_S = 0.1
_HEAD_START_S = 0.2  # for the others to fail by themselves, when one has
_ALONE_S = 3.0  # that some ranks may need longer than the others, before it is looked whether they wait for these
_STACKS_DEADLINE_S = 2.0
_PATIENCE_S = 60.0  # with a rank that goes on although it was interrupted, as in a long call of C++ code


class PendingRequest:
    """Asks ranks something and waits for the end of it.

    Args:
        connections: Brings it to them.
        output: Shows what they print and display meanwhile; ``None``: nothing.
        grace_s: How long a rank may take to come to an end that was interrupted, until something is said about it.
        console: Who answers a rank's debugger.
        stacks: Gives where the ranks stand, at most after so many seconds, if it is to be said when one waits in vain.

    Attributes:
        interrupted: Ranks that were interrupted, because of the kernel's interrupt or of another rank.
        killed: Ranks that went on all the same, and were killed.
        interrupt: The kernel's interrupt, if it has come, or what else has ended the waiting.
    """

    def __init__(
        self,
        connections: RankConnections,
        output: Output | None,
        grace_s: float,
        *,
        console: Console | None = None,
        stacks: Callable[[float], Stacks] | None = None,
    ) -> None:
        self._connections = connections
        self._output = output
        self._grace_s = grace_s
        self._console = console
        self._stacks = stacks  # until it was said who waits in vain
        self._alone_s: float | None = None  # since when ranks go on without the others
        self._look_s = _ALONE_S  # how long they then may, before it is looked where they stand
        self._interrupt_s: float | None = None
        self._said = False
        self._interrupts: collections.deque[BaseException] = collections.deque()  # that nobody has heeded yet
        self.interrupted: list[int] = []
        self.killed: list[int] = []
        self.interrupt: BaseException | None = None

    def ask(self, request: RankRequest) -> None:
        """Sends it and waits until every rank has answered or is gone. The kernel's interrupt is kept, not raised.

        So is what else is raised here: the ranks would be left to themselves.
        """
        is_over = False
        with held() as interrupts, interrupts.taken_by(lambda interrupt: self.interrupt_by(interrupt, request)):
            while not is_over:
                try:
                    if not request.was_asked:
                        self._connections.ask(request)
                    self._wait(request)
                    is_over = True
                except BaseException as interrupt:  # noqa: BLE001 - a signal handler of the user's may raise anything
                    self.interrupt_by(interrupt, request)
        self._heed(request)

    def interrupt_by(self, interrupt: BaseException, request: RankRequest) -> None:
        """Interrupts the ranks; the second time, kills those that go on.

        Any thread may call it, and a signal handler in the middle of anything: it is only noted here.
        """
        self._interrupts.append(interrupt)
        request.notify()

    def _heed(self, request: RankRequest) -> None:
        while self._interrupts:
            interrupt = self._interrupts.popleft()
            if self.interrupt is None:
                self.interrupt = interrupt
            elif isinstance(interrupt, KeyboardInterrupt):
                self._kill(request)

    def _wait(self, request: RankRequest) -> None:
        failed_s: float | None = None
        show_s = time.monotonic() + _TICK_S
        while pending := request.pending:
            now_s = time.monotonic()
            self._heed(request)
            if failed_s is None and (request.lost or any(a.reply.failed for a in list(request.answers.values()))):
                failed_s = now_s
            is_over = self.interrupt is not None or (failed_s is not None and now_s - failed_s >= _HEAD_START_S)
            if is_over and request.was_sent and self._interrupt_s is None:
                self._interrupt(pending, now_s)
            if self._interrupt_s is not None:
                self._urge(request, now_s - self._interrupt_s)
            elif len(pending) < len(self._connections.ranks):
                self._look_for_waiting(request, now_s)
            request.wait(_TICK_S)
            self._listen(request)
            if self._output is not None and time.monotonic() >= show_s:  # a short cell's in order of rank, at its end
                self._output.show_new()
                show_s = time.monotonic() + _TICK_S
        self._listen(request)

    def _listen(self, request: RankRequest) -> None:
        while request.said:
            rank, said = request.said.popleft()
            if isinstance(said, messages.Displayed):
                if self._output is not None:
                    self._output.display(rank, said.display)
            elif self._console is not None:
                if self._output is not None:
                    self._output.show_until(rank, said.log_bytes)
                line = self._console.answer(said.text) if self.interrupt is None else ""
                self._connections.tell(rank, messages.Typed(number=request.number, line=line))

    def _interrupt(self, ranks: list[int], now_s: float) -> None:
        self._interrupt_s = now_s
        self.interrupted = ranks
        for rank in ranks:
            self._connections.signal(rank, signal.SIGINT)

    def _urge(self, request: RankRequest, since_s: float) -> None:
        if since_s > _PATIENCE_S:
            self._kill(request)
        elif since_s > max(self._grace_s, 1.0) and not self._said:
            self._said = True
            who = ranks_in_words(request.pending)
            goes_on = (
                f"{who} goes on although it was" if len(request.pending) == 1 else f"{who} go on although they were"
            )
            sys.stderr.write(
                f"[{goes_on} interrupted. Interrupt once more to kill; after {_PATIENCE_S:g} s that is done anyway]\n"
            )

    def _look_for_waiting(self, request: RankRequest, now_s: float) -> None:
        """Says which ranks are in a collective when the others have ended what was asked, or weren't asked."""
        self._alone_s = self._alone_s or now_s
        if self._stacks is None or now_s - self._alone_s < self._look_s:
            return
        self._look_s *= 2
        with contextlib.suppress(NotebookAccelError):  # not in time, or the session is over
            waiting = [stack for stack in self._stacks(_STACKS_DEADLINE_S) if stack.rank in request.pending]
            lines = [f"rank {stack.rank} waits for others at {stack.user_line}"
                     for stack in waiting if stack.waits_in not in ("", "backward")]  # fmt: skip
            if lines:
                self._stacks = None
                others = ranks_in_words([rank for rank in self._connections.ranks if rank not in request.pending])
                sys.stderr.write(f"[{', '.join(lines)}, and nothing runs on {others}: an interrupt ends that]\n")

    def _kill(self, request: RankRequest) -> None:
        for rank in request.pending:
            if rank not in self.killed:
                self.killed.append(rank)
                self._connections.signal(rank, signal.SIGKILL)


class Console:
    """Asks the user with ``input()``, which a kernel hands on to its front end.

    Attributes:
        refusal: Why nobody could be asked, if that is so.
    """

    def __init__(self) -> None:
        self._has_ended = False
        self.refusal: RunError | None = None

    def answer(self, text: str) -> str:
        """What the user types for this, with the end of the line; empty when there will be no more.

        Args:
            text: What the debugger says, its prompt at the end.
        """
        if self._has_ended:
            return ""
        before, newline, prompt = text.rpartition("\n")
        sys.stdout.write(before + newline)
        sys.stdout.flush()
        try:
            with held() as interrupts, interrupts.opened():
                return input(prompt) + "\n"
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
        except NotImplementedError:  # how a kernel says that its front end can't ask
            self.refusal = RunError(
                "A debugger asks for commands, and nobody can be asked here.",
                why="What runs this notebook, such as nbconvert or papermill, has nobody who could type something.",
                fix="open the notebook in a front end, or call session.debug() in a terminal",
            )
        self._has_ended = True
        return ""

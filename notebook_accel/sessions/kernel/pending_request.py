"""The kernel's wait for the ranks' answers to a request, during which ranks may die and interrupts may come."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from notebook_accel.errors import NotebookAccelError, RunError
from notebook_accel.formatting import ranks_in_words
from notebook_accel.launching.state.stacks import Stacks
from notebook_accel.protocol import session_messages as messages
from notebook_accel.sessions.kernel.interrupts import Interrupts, held
from notebook_accel.sessions.kernel.output import CellOutput
from notebook_accel.sessions.kernel.rank_connections import RankConnections, RankRequest

_TICK_S = 0.1
_HEAD_START_S = 0.2  # for other ranks to fail by themselves after a first failure
_ALONE_S = 3.0  # that some ranks may take longer than others before their stacks are inspected
_TOGETHER_S = 5.0  # of all ranks' work before their stacks are inspected, in case they hang in different collectives
_STACKS_DEADLINE_S = 2.0
_PATIENCE_S = 60.0  # after which an interrupted rank is killed; until then it may end a long call of C++ code


class PendingRequest(RankRequest):
    """A request to several ranks, and the wait for their answers.

    Args:
        number: As for ``RankRequest``.
        outgoing: As for ``RankRequest``.
        connections: The connections to the ranks.
        grace_s: Seconds that an interrupted rank may take to end before a message reports it.
        output: Shows the ranks' output and displays meanwhile; ``None`` to show nothing.
        console: Answers a rank's debugger.
        stacks: Function that takes a deadline in seconds and returns the ranks' stacks, to report ranks that wait in
            vain.
    """

    def __init__(
        self,
        number: int,
        outgoing: Mapping[int, tuple[bytes, Sequence[int]]],
        connections: RankConnections,
        grace_s: float,
        *,
        output: CellOutput | None = None,
        console: Console | None = None,
        stacks: Callable[[float], Stacks] | None = None,
    ) -> None:
        super().__init__(number, outgoing)
        self.output = output
        self._connections = connections
        self._grace_s = grace_s
        self._console = console
        self._stacks = stacks  # ``None`` once ranks that wait in vain were reported
        self._alone_s: float | None = None  # time since which only some ranks are busy
        self._inspection_s = _ALONE_S  # seconds from then to the next inspection of their stacks
        self._began_s = time.monotonic()
        self._next_look_s = _TOGETHER_S  # seconds from then to the next inspection while all ranks are busy
        self._places: list[Any] = []  # of the ranks, at the last of these inspections
        self._interrupt_s: float | None = None
        self._is_reported = False
        self.interrupted: list[int] = []  # ranks, by the kernel or because another rank failed
        self.killed: list[int] = []  # ranks that ignored the interrupt
        self.interrupt: BaseException | None = None  # the first one, or another exception that ended the wait

    def send_and_wait(self) -> None:
        """Send the request and wait until every rank has answered or died.

        An interrupt kills the pending ranks if it is the second one, or if a message has reported that they go on after
        another rank's failure. Another interrupt is stored, not raised, like any other exception: raising would abandon
        the ranks.
        """
        is_over = False
        with held() as interrupts, interrupts.waking(self.notify):
            while not is_over:
                try:
                    if not self.was_queued:
                        self._connections.send(self)
                    self._wait(interrupts)
                    is_over = True
                except BaseException as error:  # noqa: BLE001 - a signal handler of the user's may raise anything
                    interrupts.note(error)
            self._act_on(interrupts)

    def _act_on(self, interrupts: Interrupts) -> None:
        while (interrupt := interrupts.take()) is not None:
            # Ranks that were interrupted after another rank's failure are killed only when a message has offered that.
            if isinstance(interrupt, KeyboardInterrupt) and (self.interrupt is not None or self._is_reported):
                self._kill()
            elif self.interrupt is None:
                self.interrupt = interrupt

    def _wait(self, interrupts: Interrupts) -> None:
        failed_s: float | None = None
        show_s = time.monotonic() + _TICK_S
        while pending := self.pending:
            now_s = time.monotonic()
            self._act_on(interrupts)
            if failed_s is None and (self.lost or any(reply.failed for reply in list(self.replies.values()))):
                failed_s = now_s
            is_over = self.interrupt is not None or (failed_s is not None and now_s - failed_s >= _HEAD_START_S)
            if is_over and self.was_sent and self._interrupt_s is None:
                self._interrupt(pending, now_s)
            if self._interrupt_s is not None:
                self._escalate(now_s - self._interrupt_s)
            elif len(pending) < len(self._connections.ranks):
                self._look_for_waiting(now_s)
            elif len(pending) > 1:
                self._look_for_hanging(now_s)
            self.wait(_TICK_S)
            self._take_messages()
            if self.output is not None and time.monotonic() >= show_s:  # a short cell's output is shown at its end
                self.output.show_new()
                show_s = time.monotonic() + _TICK_S
        self._take_messages()

    def _take_messages(self) -> None:
        while self.incoming:
            rank, message = self.incoming.popleft()
            assert self.output is not None  # only user code sends these
            if isinstance(message, messages.Displayed):
                self.output.display(rank, message.display)
            elif self._console is not None:
                self.output.show_until(rank, message.log_bytes)
                line = self._console.answer(message.text) if self.interrupt is None else ""
                self._connections.tell(rank, messages.Input(number=self.number, line=line))

    def _interrupt(self, ranks: list[int], now_s: float) -> None:
        self._interrupt_s = now_s
        self.interrupted = ranks
        for rank in ranks:
            self._connections.signal(rank, signal.SIGINT)

    def _escalate(self, since_s: float) -> None:
        """Report ranks that go on after an interrupt, and finally kill them."""
        if since_s > _PATIENCE_S:
            self._kill()
        elif since_s > max(self._grace_s, 1.0) and not self._is_reported:
            self._is_reported = True
            pending = self.pending
            go_on = "goes on although it was" if len(pending) == 1 else "go on although they were"
            sys.stderr.write(
                f"[{ranks_in_words(pending)} {go_on} interrupted. Interrupt once more to kill; after {_PATIENCE_S:g} s "
                "that is done anyway]\n"
            )

    def _look_for_waiting(self, now_s: float) -> None:
        """Report ranks that wait in a collective while the other ranks are idle."""
        self._alone_s = self._alone_s or now_s
        if self._stacks is None or now_s - self._alone_s < self._inspection_s:
            return
        self._inspection_s *= 2
        with contextlib.suppress(NotebookAccelError):  # no stacks in time, or the session is over
            stacks, pending = self._stacks(_STACKS_DEADLINE_S), self.pending
            waiting = [stack for stack in stacks if stack.rank in pending and stack.waits_in not in ("", "backward")]
            lines = [f"rank {stack.rank} waits for others at {stack.user_line}" for stack in waiting]
            if lines:
                self._stacks = None
                others = ranks_in_words([rank for rank in self._connections.ranks if rank not in pending])
                sys.stderr.write(f"[{', '.join(lines)}, and nothing runs on {others}: an interrupt ends that]\n")

    def _look_for_hanging(self, now_s: float) -> None:
        """Report ranks that all wait in a collective, at different places: in the same ones in two inspections."""
        if self._stacks is None or now_s - self._began_s < self._next_look_s:
            return
        self._next_look_s *= 2
        with contextlib.suppress(NotebookAccelError):
            stacks, before = self._stacks(_STACKS_DEADLINE_S), self._places
            self._places = [(stack.user_line, stack.waits_in, stack.collective) for stack in stacks]
            are_apart = len({stack.user_line for stack in stacks}) > 1
            if are_apart and before == self._places and all(stack.waits_in for stack in stacks):
                self._stacks = None
                places = "; ".join(f"rank {stack.rank} in {stack.waits_in} at {stack.user_line}" for stack in stacks)
                sys.stderr.write(f"[All ranks wait for each other: {places}. An interrupt ends that]\n")

    def _kill(self) -> None:
        for rank in self.pending:
            if rank not in self.killed:
                self.killed.append(rank)
                self._connections.signal(rank, signal.SIGKILL)


class Console:
    """The user's end of a debugger: asks with ``input()``, which a kernel forwards to its front end."""

    def __init__(self) -> None:
        self._has_ended = False
        self.refusal: RunError | None = None  # the error to raise if the front end can't ask the user

    def answer(self, text: str) -> str:
        """Show a debugger's output and prompt. Return the typed line with its newline; empty at the end of input."""
        if self._has_ended:
            return ""
        before, newline, prompt = text.rpartition("\n")
        sys.stdout.write(before + newline)
        sys.stdout.flush()
        try:
            with held() as interrupts, interrupts.allowed():
                return input(prompt) + "\n"
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
        except NotImplementedError:  # raised by a kernel whose front end can't ask
            self.refusal = RunError(
                "A debugger asks for commands, and nobody can be asked here.",
                why="What runs this notebook, such as nbconvert or papermill, has nobody who could type something.",
                fix="open the notebook in a front end, or call session.debug() in a terminal",
            )
        self._has_ended = True
        return ""

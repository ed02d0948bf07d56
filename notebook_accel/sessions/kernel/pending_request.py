"""A request's waits in the kernel: for its turn, and for the ranks' answers.

Meanwhile ranks may die and interrupts may come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from notebook_accel.errors import NotebookAccelError, RunError
from notebook_accel.formatting import ranks_in_words
from notebook_accel.interrupts import Interrupts, Latch, held
from notebook_accel.launching.kernel.job import Status
from notebook_accel.launching.state.stacks import Stacks
from notebook_accel.protocol import session_messages as messages
from notebook_accel.sessions.kernel.output import CellOutput
from notebook_accel.sessions.kernel.rank_connections import RankConnections, RankRequest

_TICK_S = 0.1
_HEAD_START_S = 0.2  # for other ranks to fail by themselves after a first failure
_ALONE_S = 3.0  # that some ranks may take longer than others before their stacks are inspected
_TOGETHER_S = 5.0  # of all ranks' work before their stacks are inspected, in case they hang in different collectives
_STACKS_DEADLINE_S = 2.0
_PATIENCE_S = 60.0  # after which an interrupted rank is killed; until then it may end a long call of C++ code


@dataclasses.dataclass(eq=False)
class _Turn:
    """The turn of a request."""

    title: str  # the request in words
    has_come: Latch = dataclasses.field(default_factory=Latch)


class RequestQueue:
    """Gives the ranks to one request at a time, in order of arrival.

    Each request waits in its own thread, with interrupts held.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: list[_Turn] = []  # first that of the request that has the ranks

    @property
    def titles(self) -> list[str]:
        """The requests in words: first the one that has the ranks, then those that wait."""
        return [turn.title for turn in list(self._queue)]

    @contextlib.contextmanager
    def turn(
        self,
        title: str,
        check: Callable[[], None] = lambda: None,
        *,
        on_status: Callable[[Status], object] | None = None,
    ) -> Iterator[None]:
        """Wait until the ranks are free, and reserve them for the body.

        ``check`` is called repeatedly during the wait; an exception that it raises ends only the wait. ``on_status`` is
        called with ``waiting`` if the request must wait; without ``on_status``, a message names the request in front.
        """
        mine = _Turn(title)
        try:
            busy_with = self._join(mine)
            if busy_with and on_status is not None:
                on_status("waiting")
            elif busy_with:
                sys.stderr.write(f"[{title} waits until {busy_with} has ended; an interrupt ends only the waiting]\n")
            while not mine.has_come.is_set:
                check()
                mine.has_come.wait(_TICK_S)
            yield
        finally:
            self._leave(mine)

    @contextlib.contextmanager
    def if_free(self, title: str) -> Iterator[bool]:
        """Reserve the ranks for the body if they are free now. Yield whether they are."""
        mine = _Turn(title)
        with self._lock:
            is_free = not self._queue
            if is_free:
                self._queue.append(mine)
        try:
            yield is_free
        finally:
            self._leave(mine)

    def _join(self, turn: _Turn) -> str:
        """Join the queue. Return the title of the request that has the ranks; empty if they were free."""
        with self._lock:
            self._queue.append(turn)
            first = self._queue[0]
            first.has_come.set()
            return "" if first is turn else first.title  # read under the lock: soon the caller itself may be first

    def _leave(self, turn: _Turn) -> None:
        with self._lock:
            if turn in self._queue:
                self._queue.remove(turn)
            if self._queue:
                self._queue[0].has_come.set()


@dataclasses.dataclass(eq=False, kw_only=True)
class PendingRequest(RankRequest):
    """A request to several ranks, and the wait for their answers."""

    connections: RankConnections
    grace_s: float  # that an interrupted rank may take to end before a message reports it
    output: CellOutput | None  # shows the ranks' output and displays meanwhile; ``None`` shows nothing
    console: Console | None  # answers a rank's debugger
    # Takes a deadline in seconds and returns the ranks' stacks; ``None`` once ranks that wait in vain were reported.
    stacks: Callable[[float], Stacks] | None
    interrupted: list[int] = dataclasses.field(default_factory=list)  # by the kernel or because another rank failed
    killed: list[int] = dataclasses.field(default_factory=list)  # ranks that ignored the interrupt
    was_taken: bool = False  # the user's code has got the interrupt
    interrupt: BaseException | None = None  # the first one, or another exception that ended the wait
    _interrupt_s: float | None = None
    _is_reported: bool = False
    _alone_s: float | None = None  # time since which only some ranks are busy
    _inspections: int = 0  # of their stacks so far; each comes after twice the time of the one before
    _began_s: float = dataclasses.field(default_factory=time.monotonic)
    _next_look_s: float = _TOGETHER_S  # from then to the next inspection while all ranks are busy
    _deadlock: tuple[Any, ...] = ()  # by the last of these inspections

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
                        self.connections.send(self)
                    self._wait(interrupts)
                    is_over = True
                except BaseException as error:  # noqa: BLE001 - a signal handler of the user's may raise anything
                    interrupts.add(error)
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
            elif len(pending) < len(self.connections.ranks):
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
            elif self.console is not None:
                self.output.show_until(rank, message.log_bytes)
                line = self.console.answer(message.text) if self.interrupt is None else ""
                self.connections.tell(rank, messages.Input(number=self.number, line=line))

    def _interrupt(self, ranks: list[int], now_s: float) -> None:
        self._interrupt_s = now_s
        self.interrupted = ranks
        for rank in ranks:
            self.connections.signal(rank, signal.SIGINT)

    def _escalate(self, since_s: float) -> None:
        """Report ranks that go on after an interrupt, and finally kill them."""
        if since_s > _PATIENCE_S:
            self._kill()
        elif since_s > max(self.grace_s, 1.0) and not self._is_reported:
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
        if self.stacks is None or now_s - self._alone_s < _ALONE_S * 2**self._inspections:
            return
        self._inspections += 1
        with contextlib.suppress(NotebookAccelError):  # no stacks in time, or the session is over
            stacks, pending = self.stacks(_STACKS_DEADLINE_S), self.pending
            waiting = [stack for stack in stacks if stack.rank in pending and stack.waits_in not in ("", "backward")]
            lines = [f"rank {stack.rank} waits for others at {stack.user_line}" for stack in waiting]
            if lines:
                self.stacks = None
                others = ranks_in_words([rank for rank in self.connections.ranks if rank not in pending])
                sys.stderr.write(f"[{', '.join(lines)}, and nothing runs on {others}: an interrupt ends that]\n")

    def _look_for_hanging(self, now_s: float) -> None:
        """Report ranks that all wait in a collective, at different places: in the same ones in two inspections."""
        if self.stacks is None or now_s - self._began_s < self._next_look_s:
            return
        self._next_look_s *= 2
        with contextlib.suppress(NotebookAccelError):
            stacks, before = self.stacks(_STACKS_DEADLINE_S), self._deadlock
            self._deadlock = stacks.deadlock
            if before == self._deadlock != ():
                self.stacks = None
                places = "; ".join(f"rank {stack.rank} in {stack.waits_in} at {stack.user_line}" for stack in stacks)
                sys.stderr.write(f"[All ranks wait for each other: {places}. An interrupt ends that]\n")

    def _kill(self) -> None:
        for rank in self.pending:
            if rank not in self.killed:
                self.killed.append(rank)
                self.connections.signal(rank, signal.SIGKILL)


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
                "The debugger needs commands, and nobody can type them here.",
                why="A program such as nbconvert or papermill runs this notebook.",
                fix="open the notebook in a front end, or call session.debug() in a terminal",
            )
        self._has_ended = True
        return ""

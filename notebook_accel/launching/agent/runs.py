"""The agent's account of one run: its ranks, why it is ending, and what is still to be sent to end it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Sequence

from notebook_accel.environment import RankPlace
from notebook_accel.launching.agent import log_keeping
from notebook_accel.launching.agent.output import LogTail
from notebook_accel.launching.processes import close_all, kill_group, state
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import Connection

__all__ = ["Rank", "Run", "reason_of"]

_LOOK_PERIOD_S = 0.05
# One rank's end breaks the others' connections, and they say so before it is known that it has ended, and how.
_CAUSE_DEADLINE_S = 1.0
_EXIT_DEADLINE_S = 60.0  # from the run's last word to its last exit: what is registered with atexit may upload things
_REASONS: dict[messages.How, messages.Reason] = {"interrupt": "interrupted", "stop": "stopped", "kill": "stopped"}
_STRENGTH: dict[messages.How, int] = {"interrupt": 0, "stop": 1, "kill": 2}
_STEPS: dict[messages.How, tuple[signal.Signals, ...]] = {
    "interrupt": (signal.SIGINT, signal.SIGTERM, signal.SIGKILL),
    "stop": (signal.SIGTERM, signal.SIGKILL),
    "kill": (signal.SIGKILL,),
}


@dataclasses.dataclass
class Rank:
    """One rank of a run.

    Attributes:
        number: Its rank.
        connection: Over which it says its events.
        log: What it writes to its standard output and error.
        dump: The file that it writes its stacks to when it is asked for them.
        pid: ``None`` until it was forked.
        status: How it exited, ``None`` while it lives.
        said_started: Whether it has come to the user's code.
        said_finished: Whether its result is there.
        said_failed: Whether it has said what it raised; it is ending by itself then.
        lost_peer: Whether that was only that another rank has gone.
        failure: What it has said; without the exception itself.
        steps: How many it has done, ``None`` if it counts none.
        was_told_to_end: Whether a signal was sent to it, or is to be as soon as it is there.
        must_exit_s: When it is killed if it hasn't exited, in seconds of ``time.monotonic()``; ``None``: no deadline.
    """

    number: int
    connection: Connection
    log: LogTail
    dump: int
    pid: int | None = None
    status: int | None = None
    said_started: bool = False
    said_finished: bool = False
    said_failed: bool = False
    lost_peer: bool = False
    failure: events.Failed | None = None
    steps: int | None = None
    was_told_to_end: bool = False
    must_exit_s: float | None = None
    _waiting_signal: signal.Signals | None = None

    @property
    def has_ended_by_itself(self) -> bool:
        """True if it is gone already, and its template has not said so yet."""
        return self.pid is not None and state(self.pid) in ("Z", "X", "")

    def forked(self, pid: int) -> None:
        """It exists from now on; if its end was decided before, it ends now. Again, it does nothing."""
        if self.pid is not None:
            return
        self.pid = pid
        if self.was_told_to_end and self._waiting_signal != signal.SIGKILL:
            self.signal(signal.SIGTERM)  # which it can't take otherwise yet
        elif self._waiting_signal is not None:
            self.signal(self._waiting_signal)

    def close(self) -> None:
        """Closes what leads to it. For when it is gone."""
        self.connection.close()
        self.log.close()
        close_all([self.dump])

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal: to the rank itself, so that its own code can react; SIGKILL to all that it has started."""
        if self.pid is None:
            self._waiting_signal = number
        elif number == signal.SIGKILL:
            kill_group(self.pid)
        else:
            with contextlib.suppress(OSError):  # it has ended, or became another user's
                # One that somebody has stopped couldn't react; and whichever thread then goes on first would take it.
                os.kill(self.pid, signal.SIGCONT)
                os.kill(self.pid, number)


@dataclasses.dataclass
class Run:
    """One run.

    Attributes:
        launch: What the kernel asked for.
        descriptors: What came with it, until all ranks run; to the end if ranks may be started again.
        ranks: In order; empty until the run is started.
        reason: Why it is ending or has ended; empty as long as nothing but success ends it.
        refusal: Why it could not be started, as the user is told it; ``None`` if it could.
        store: Listens for the ranks' store, as long as there are descriptors.
        places: The ranks' places and further variables, for a part of a larger run.
        restarts: How often the agent has started its ranks again after a failure.
        is_held: Whether it goes on without any rank: its elastic process may have them started.
    """

    launch: messages.Launch
    descriptors: list[int]
    ranks: list[Rank] = dataclasses.field(default_factory=list)
    reason: messages.Reason = ""
    refusal: messages.Broken | None = None
    store: socket.socket | None = None
    places: Sequence[tuple[RankPlace, dict[str, str]]] = ()
    restarts: int = 0
    is_held: bool = False
    _wanted: messages.Reason = ""
    _is_interrupted_at_start: bool = False
    _was_taken_back: bool = False
    _how: messages.How | None = None
    _log_folder: int | None = None
    _next_look_s: float = 0.0
    _deadline_s: float | None = None
    _cause_deadline_s: float | None = None
    _steps: list[signal.Signals] = dataclasses.field(default_factory=list)
    _next_step_s: float | None = None

    @property
    def alive(self) -> list[Rank]:
        """The ranks that have not exited."""
        return [rank for rank in self.ranks if rank.status is None]

    def awaits(self, number: int) -> bool:
        """Return whether a rank was ordered and has not exited."""
        return number < len(self.ranks) and self.ranks[number].status is None

    @property
    def keeps(self) -> bool:
        """True if it goes on when a rank has died, also without any."""
        return self.launch.on_death == "keep"

    @property
    def needs_descriptors(self) -> bool:
        """True if ranks may be started later."""
        may_start_ranks = self.keeps or self.is_held or self._restarts_left > 0
        return may_start_ranks or any(not rank.said_started for rank in self.ranks)

    def place_of(self, number: int) -> tuple[RankPlace, dict[str, str]]:
        """A rank's place among all, and what its environment has besides."""
        if self.places:
            return self.places[number]
        assert self.store is not None
        size = self.launch.world_size
        place = RankPlace(number, size, number, size, "127.0.0.1", self.store.getsockname()[1])
        return place, {"TORCHELASTIC_RESTART_COUNT": str(self.restarts)}

    @property
    def _restarts_left(self) -> int:
        return 0 if self._wanted else self.launch.max_restarts - self.restarts

    @property
    def is_to_restart(self) -> bool:
        """True if its ranks, of which none is left, are to be started again: one has failed, and nobody wants the end.

        A rank that raises KeyboardInterrupt wants the end.
        """
        if self._restarts_left <= 0 or self.refusal is not None or self.reason not in ("", "failed"):
            return False
        if any(rank.failure is not None and rank.failure.kind == "KeyboardInterrupt" for rank in self.ranks):
            return False
        return not all(rank.said_finished for rank in self.ranks)

    def stop_restarting(self, reason: messages.Reason) -> None:
        """Somebody wants the end: that is the reason, even if the ranks were ending because of a failure."""
        self._wanted = self._wanted or reason
        if self.launch.max_restarts > self.restarts and self.reason == "failed":
            self.reason = self._wanted

    @property
    def is_over(self) -> bool:
        """True if every rank has exited, and none will come in its place."""
        if self.alive or self.is_held:
            return False
        return not self.keeps or self._how is not None or all(rank.said_finished for rank in self.ranks)

    @property
    def may_start_again(self) -> bool:
        """True if it can be, once, without anybody's notice: no rank has come to the user's code."""
        if self.reason or self.is_held or self.launch.places or self._was_taken_back:
            return False
        return not any(rank.said_started for rank in self.ranks)

    def take_back(self) -> None:
        """Makes it what it was before it was started. Its ranks are gone."""
        self._was_taken_back = True
        for rank in self.alive:
            rank.close()
        self.ranks.clear()
        if self.store is not None:
            self.store.close()
        self._let_go_of_logs()

    def rest(self) -> None:
        """Forgets its ranks, which are gone, and how they came to end: all may be started once more."""
        self.ranks.clear()
        self.reason, self._how = "", None
        self._steps, self._next_step_s, self._cause_deadline_s = [], None, None
        self._is_interrupted_at_start = False
        if self.store is not None:
            self.store.close()
            self.store = None

    def started(self) -> None:
        """Its time runs from now on."""
        self._log_folder = log_keeping.hold(self.launch.log_folder)
        if self.launch.timeout_s is not None:
            self._deadline_s = time.monotonic() + self.launch.timeout_s

    def end(self, how: messages.How, reason: messages.Reason | None = None) -> None:
        """Begins to end it. The first reason stays; a later end counts only if it is a stronger one."""
        if self._how is not None and _STRENGTH[how] <= _STRENGTH[self._how]:
            return
        self._how = how
        self.reason = self.reason or (reason or _REASONS[how])
        for rank in self.alive:
            if rank.said_finished:
                rank.connection.shutdown()  # it waits for nothing but to be let go
        self._steps = list(_STEPS[how])
        self._step(time.monotonic())

    def become_part(self) -> None:
        """Its ranks have the places that came with it, and so has rank 0's store, if that is to be here."""
        of_all = 1 + self.launch.world_size
        listening = [socket.socket(fileno=descriptor) for descriptor in self.descriptors[of_all:]]
        del self.descriptors[of_all:]
        self.begin_at(self.launch.places, listening.pop() if listening else None)

    def begin_at(self, places: Sequence[tuple[RankPlace, dict[str, str]]], store: socket.socket | None) -> None:
        """All ranks are about to be started, at these places."""
        self.places, self.store = places, store
        for result in self.descriptors[1:]:
            os.ftruncate(result, 0)  # what those before had begun to write

    def put(self, rank: Rank) -> None:
        """Takes a rank, in place of an earlier one of the same number if there was one."""
        self.ranks[rank.number : rank.number + 1] = [rank]
        if self._is_interrupted_at_start:
            rank.signal(signal.SIGINT)

    def refuse(self, broken: messages.Broken) -> None:
        """It could not be started as a whole."""
        self.refusal = self.refusal or broken
        self.end("kill", "failed")

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in the ranks that run the user's code, and leaves the rest to them."""
        self._is_interrupted_at_start = not self.ranks
        for rank in self.alive:
            if not rank.said_finished and not rank.said_failed:
                rank.signal(signal.SIGINT)

    def rank_failed(self, rank: Rank) -> None:
        """A rank has raised something, or is gone without a result. Unless the run keeps on, the others end as well.

        Not at once if it has only lost its peer, whose own end is on its way: stopped now, the peer couldn't say why.
        """
        if self.keeps:
            rank.must_exit_s = time.monotonic() + _EXIT_DEADLINE_S
        elif rank.lost_peer:
            self._cause_deadline_s = self._cause_deadline_s or time.monotonic() + _CAUSE_DEADLINE_S
        elif not self.reason:
            self.end("stop", "failed")

    def release(self) -> None:
        """Every rank has finished: lets them go. They wait for it, since rank 0 serves the store that all use."""
        for rank in self.alive:
            rank.connection.shutdown()
        self._steps, self._next_step_s = [signal.SIGKILL], time.monotonic() + _EXIT_DEADLINE_S

    def tick(self, now_s: float) -> None:
        """Does what has become due."""
        if self._deadline_s is not None and now_s > self._deadline_s and not self.reason:
            self.end("interrupt", "timeout")  # which says where each rank stood
        if self._cause_deadline_s is not None and now_s > self._cause_deadline_s and not self.reason:
            self.end("stop", "failed")
        if self._next_step_s is not None and now_s > self._next_step_s:
            self._step(now_s)
        for rank in self.alive:
            if rank.must_exit_s is not None and now_s > rank.must_exit_s:
                rank.signal(signal.SIGKILL)

    def with_new_output(self, now_s: float) -> list[tuple[Rank, int]]:
        """The ranks that have written something, each with its log's size; none if it is too soon to look again."""
        if now_s < self._next_look_s:
            return []
        self._next_look_s = now_s + _LOOK_PERIOD_S
        grown = [(rank, rank.log.grown_bytes) for rank in self.alive]
        return [(rank, size) for rank, size in grown if size is not None]

    def ended(self) -> None:
        """It is over: its logs are for the user, and older ones may go."""
        self._let_go_of_logs()
        log_keeping.remove_old(kernel_pid=os.getppid())

    def close_descriptors(self) -> None:
        """Closes what came with the launch, and the store's socket."""
        close_all(self.descriptors)
        self.descriptors.clear()
        if self.store is not None:
            self.store.close()
            self.store = None

    def _let_go_of_logs(self) -> None:
        if self._log_folder is not None:
            close_all([self._log_folder])
            self._log_folder = None

    def _step(self, now_s: float) -> None:
        number = self._steps.pop(0)
        for rank in self.alive:
            if rank.said_failed and number != signal.SIGKILL:
                continue
            rank.was_told_to_end = rank.was_told_to_end or not rank.has_ended_by_itself
            rank.signal(number)
        self._next_step_s = now_s + self.launch.grace_s if self._steps else None


def reason_of(how: messages.How) -> messages.Reason:
    """What a run that never started ended by."""
    return _REASONS[how]

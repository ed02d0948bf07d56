"""Decides what happens next in a run, from what its ranks did: without input, output, processes or a clock.

An agent drives one ``RunPolicy`` for its ranks, and the kernel one for the ranks of all machines of a cluster. A driver
records facts, and afterwards calls ``orders``, as it does a few times a second. These are the rules, in this order:

1. The first reason to end a run is its reason. Later ones can only make the signals stronger. One that rules out
   restarts also takes the place of a failure after which the ranks would have been restarted.
2. A run that has passed its timeout is interrupted.
3. A rank fails if it raises, or exits without a result. The others are then stopped. If all failed ranks have only lost
   a peer, the others get a moment, so that the peer's own failure can arrive. A run that keeps its ranks goes on.
4. Ranks that have finished wait until all have, since rank 0 serves the store of all. Then they are released, and
   killed if they don't exit in time. A rank that raised in a run that keeps the others has the same time to exit.
5. A run ends by SIGINT, SIGTERM and SIGKILL, from its first signal on, with a grace period after each. A rank that
   raised ends by itself, so it gets SIGKILL only. After a failure that ends the run, the first rank gets SIGINT before
   SIGTERM if it has variables to save.
6. When all ranks have exited and not all have finished, they are restarted as often as ``max_restarts`` allows, unless
   anything but a failure was among the reasons, or a KeyboardInterrupt that rule 5 doesn't explain. Otherwise the run
   is over. A run that keeps its ranks, or is held, goes on without any, until it is ended or held no longer.
"""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from notebook_accel.protocol import events
from notebook_accel.protocol.agent_messages import How, Reason

# A rank's death breaks its peers' connections, and they may report that before the agent has noticed the death.
_CAUSE_DEADLINE_S = 1.0
_EXIT_DEADLINE_S = 60.0  # from a run's last event to its last exit: an atexit function may upload something
REASONS: dict[How, Reason] = {"interrupt": "interrupted", "stop": "stopped", "kill": "stopped"}

_Signals: TypeAlias = tuple[tuple[signal.Signals, signal.Signals], ...]
_KILL: _Signals = ((signal.SIGKILL, signal.SIGKILL),)
_STOP: _Signals = ((signal.SIGTERM, signal.SIGTERM), *_KILL)
# For each way to end a run, in rising strength: the signals to the first rank and to the others.
_SIGNALS: dict[How, _Signals] = {"interrupt": ((signal.SIGINT, signal.SIGINT), *_STOP), "stop": _STOP, "kill": _KILL}
HOW: dict[signal.Signals, How] = {signal.SIGINT: "interrupt", signal.SIGTERM: "stop", signal.SIGKILL: "kill"}
_SAVE_AND_STOP: _Signals = ((signal.SIGINT, signal.SIGTERM), *_STOP)


@dataclasses.dataclass(frozen=True)
class Signal:
    """Send a signal to a rank."""

    rank: int
    number: signal.Signals


@dataclasses.dataclass(frozen=True)
class Release:
    """Let all ranks exit."""


@dataclasses.dataclass
class RankFacts:
    """The facts about one rank by which a policy decides."""

    number: int
    _: dataclasses.KW_ONLY
    said_started: bool = False  # it has reached the user's code
    said_finished: bool = False  # its result is written
    failure: events.Failed | None = None  # the report of its exception, after which it ends by itself
    status: int | None = None  # of its exit, ``None`` while it lives
    must_exit_s: float = math.inf  # when it is killed if it hasn't exited

    def take(self, event: events.Event) -> None:
        """Record an event of the rank, if it is one that counts."""
        if isinstance(event, events.Started):
            self.said_started = True
        elif isinstance(event, events.Finished):
            self.said_finished = True
        elif isinstance(event, events.Failed):
            self.failure = msgspec.structs.replace(event, exception=b"")

    @property
    def has_failed(self) -> bool:
        """True if the rank has raised, or has exited without a result."""
        return self.failure is not None or (self.status is not None and not self.said_finished)

    @property
    def has_lost_peer(self) -> bool:
        """True if the rank has failed because another rank has gone."""
        return self.failure is not None and self.failure.lost_peer

    @property
    def is_working(self) -> bool:
        """True if the rank may still write its result."""
        return self.status is None and self.failure is None and not self.said_finished


@dataclasses.dataclass
class _Attempt:
    """The part of a policy's state that a restart clears."""

    how: How | None = None  # how the ranks are being ended, as strongly as the last signal
    signals_left: _Signals = ()
    next_signal_s: float = -math.inf
    cause_due_s: float = math.inf  # when ranks that have only lost a peer count as the cause
    may_exit: bool = False  # the ranks of the whole run have finished, wherever they are
    is_released: bool = False
    saves: bool = False  # the first rank was interrupted so that it saves its variables


@dataclasses.dataclass(kw_only=True)
class RunPolicy:
    """The rules of one run. Only restarts, requests and the timeout outlast the ranks of an attempt."""

    ranks: Sequence[RankFacts]  # in order, kept by the driver; empty until they are started
    grace_s: float  # between two signals
    timeout_s: float | None = None
    max_restarts: int = 0
    keeps: bool = False  # the run goes on when a rank has died, even the last one
    saves: bool = False  # the first rank has variables to save when it is interrupted
    is_part: bool = False  # of a larger run, which orders the release of its ranks
    is_held: bool = False  # somebody else may start ranks, and order their release
    reason: Reason = ""  # why the ranks are ending or have ended early; empty otherwise
    final_reason: Reason = ""  # why nothing is started again; empty if a failure may restart the ranks
    restarts: int = 0  # how often the ranks were started again
    was_requeued: bool = False  # the whole run was started again, before its ranks had reached the user's code
    is_interrupted_at_start: bool = False  # the interrupt was for ranks that didn't exist
    _deadline_s: float = math.inf
    _attempt: _Attempt = dataclasses.field(default_factory=_Attempt)

    @property
    def alive(self) -> Sequence[RankFacts]:
        """The ranks that have not exited."""
        return [rank for rank in self.ranks if rank.status is None]

    @property
    def have_all_finished(self) -> bool:
        """True if every rank has its result."""
        return all(rank.said_finished for rank in self.ranks)

    @property
    def is_final(self) -> bool:
        """True if the ranks won't be started again, whatever becomes of them."""
        # If another rank's failure has interrupted the first one, nobody has asked for the end.
        interruptible = self.ranks[1:] if self._attempt.saves else self.ranks
        failures = [rank.failure.kind for rank in interruptible if rank.failure is not None]
        return bool(self.final_reason) or "KeyboardInterrupt" in failures

    @property
    def may_start_ranks(self) -> bool:
        """True if ranks may be started later."""
        may_restart = self.keeps or self.is_held or self._has_restarts_left
        return may_restart or not all(rank.said_started for rank in self.ranks)

    @property
    def may_requeue(self) -> bool:
        """True if the whole run can be started again unnoticed, at most once: no rank has reached the user's code."""
        is_fixed = self.reason or self.is_held or self.is_part or self.was_requeued
        return not is_fixed and not any(rank.said_started for rank in self.ranks)

    @property
    def saves_at_failure(self) -> bool:
        """True if the next failure interrupts the first rank, since no restart follows."""
        return self.saves and not self._has_restarts_left

    @property
    def outcome(self) -> Literal["", "restart", "over"]:
        """The step that follows once all ranks are gone; empty as long as the run goes on."""
        goes_on_without_ranks = self.keeps and not self.reason and not self.have_all_finished
        if self.alive or self.is_held or goes_on_without_ranks:
            return ""
        is_failure = not self.have_all_finished and not self.is_final
        return "restart" if is_failure and self._has_restarts_left else "over"

    @property
    def _has_restarts_left(self) -> bool:
        return not self.final_reason and self.restarts < self.max_restarts

    def start_clock(self, now_s: float) -> None:
        """Start the clock of the timeout, unless it already runs."""
        if self.timeout_s is not None:
            self._deadline_s = min(self._deadline_s, now_s + self.timeout_s)

    def restart(self) -> None:
        """Forget how the ranks have ended. The driver has forgotten the ranks, and starts others."""
        self.restarts += 1
        self.reason, self.is_interrupted_at_start, self._attempt = "", False, _Attempt()

    def interrupt(self) -> list[Signal]:
        """Return the signals that interrupt the ranks that run the user's code, after which no stronger one follows."""
        self.is_interrupted_at_start = not self.ranks
        return [Signal(rank.number, signal.SIGINT) for rank in self.ranks if rank.is_working]

    def fail(self) -> None:
        """Stop the ranks because of a failure, which may restart them."""
        first = self.ranks[0]
        saves = self.saves_at_failure and not self.reason and first.said_started and first.is_working
        self._attempt.saves = self._attempt.saves or saves
        self._end("stop", "failed", _SAVE_AND_STOP if saves else _STOP)

    def end(self, how: How, reason: Reason) -> None:
        """End the run for good."""
        self._end(how, reason, _SIGNALS[how])
        self.final_reason = self.final_reason or reason
        if self.max_restarts and self.reason == "failed":
            self.reason = self.final_reason

    def release(self) -> None:
        """Let all ranks exit, since those of the larger run have finished."""
        self._attempt.may_exit = True

    def orders(self, now_s: float) -> list[Signal | Release]:
        """Apply the rules to the facts, and return what the driver must do now."""
        if now_s > self._deadline_s and not self.reason:
            self.end("interrupt", "timeout")  # the interrupt shows where each rank stood
        if not self.reason and not self.keeps and self._has_failed(now_s):
            self.fail()
        return [*self._due_release(now_s), *self._due_signals(now_s), *self._overdue(now_s)]

    def _has_failed(self, now_s: float) -> bool:
        failed = [rank for rank in self.ranks if rank.has_failed]
        if failed and all(rank.has_lost_peer for rank in failed):
            self._attempt.cause_due_s = min(self._attempt.cause_due_s, now_s + _CAUSE_DEADLINE_S)
            return now_s > self._attempt.cause_due_s
        return bool(failed)

    def _end(self, how: How, reason: Reason, signals: _Signals) -> None:
        self.reason = self.reason or reason
        if _is_stronger(how, self._attempt.how):
            self._attempt.how, self._attempt.signals_left, self._attempt.next_signal_s = how, signals, -math.inf

    def _due_release(self, now_s: float) -> list[Release]:
        attempt = self._attempt
        is_own = self.ranks and self.have_all_finished and not (self.is_part or self.is_held)
        if attempt.is_released or not (is_own or attempt.may_exit):
            return []
        attempt.is_released = True
        attempt.signals_left, attempt.next_signal_s = _KILL, now_s + _EXIT_DEADLINE_S
        return [Release()]

    def _due_signals(self, now_s: float) -> list[Signal]:
        attempt = self._attempt
        if not attempt.signals_left or now_s <= attempt.next_signal_s:
            return []
        (to_first, to_others), *left = attempt.signals_left
        attempt.signals_left, attempt.next_signal_s = tuple(left), now_s + self.grace_s
        if attempt.how is not None and _is_stronger(HOW[to_others], attempt.how):
            attempt.how = HOW[to_others]
        numbered = [(rank, to_first if rank is self.ranks[0] else to_others) for rank in self.alive]
        return [Signal(rank.number, each) for rank, each in numbered if rank.failure is None or each == signal.SIGKILL]

    def _overdue(self, now_s: float) -> list[Signal]:
        """Return the signals that kill failed ranks of a run that keeps the others, once their time to exit is over."""
        failed = [rank for rank in self.alive if rank.failure is not None and self.keeps]
        for rank in failed:
            rank.must_exit_s = min(rank.must_exit_s, now_s + _EXIT_DEADLINE_S)
        return [Signal(rank.number, signal.SIGKILL) for rank in failed if now_s > rank.must_exit_s]


def _is_stronger(how: How, than: How | None) -> bool:
    return than is None or len(_SIGNALS[how]) < len(_SIGNALS[than])

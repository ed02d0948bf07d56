"""What happens next in a run, whatever its ranks do and whoever ends it, in any order."""

from __future__ import annotations

import signal

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from notebook_accel.launching.state import policy as rules
from notebook_accel.launching.state.first_failure import first_failed
from notebook_accel.launching.state.policy import RankFacts, Release, RunPolicy, Signal
from notebook_accel.protocol import events
from notebook_accel.protocol.agent_messages import How, Reason

_GRACE_S = 5.0
_STRENGTH = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
_ENDS: list[tuple[How, Reason]] = [
    ("interrupt", "interrupted"), ("stop", "stopped"), ("stop", "terminated"), ("kill", "stopped"),
    ("kill", "template lost"), ("kill", "elastic lost"), ("kill", "failed"),
]  # fmt: skip
_WORLD_SIZE = 3
ranks = st.integers(0, _WORLD_SIZE - 1)


def raised(kind: str = "ValueError", *, time_s: float = 0.0) -> events.Failed:
    return events.Failed(time_s=time_s, kind=kind, message="", traceback="", lost_peer=kind == "LostPeer")


def started(count: int = _WORLD_SIZE) -> list[RankFacts]:
    return [RankFacts(number, said_started=True) for number in range(count)]


class Driver(RuleBasedStateMachine):
    """A driver whose ranks do what they like. What the policy orders is checked after each of their deeds."""

    @initialize(
        max_restarts=st.integers(0, 2),
        kind=st.sampled_from(["plain", "keeps", "is_part", "is_held"]),
        saves=st.booleans(),
        timeout_s=st.none() | st.just(30.0),
    )
    def launch(self, max_restarts: int, kind: str, saves: bool, timeout_s: float | None) -> None:
        self.now_s = 1.0
        self.ranks: list[RankFacts] = []
        self.policy = RunPolicy(
            ranks=self.ranks,
            grace_s=_GRACE_S,
            timeout_s=timeout_s,
            max_restarts=max_restarts if kind == "plain" else 0,  # the agent restarts no others
            keeps=kind == "keeps",
            saves=saves,
            is_part=kind == "is_part",
            is_held=kind == "is_held",
        )
        self.policy.start_clock(self.now_s)
        self.is_for_good = False  # somebody has asked for the end
        self.start()

    def start(self) -> None:
        self.ranks[:] = [RankFacts(number) for number in range(_WORLD_SIZE)]
        self.sent: dict[int, list[signal.Signals]] = {number: [] for number in range(_WORLD_SIZE)}
        self.reason: Reason = ""
        self.released_s: float | None = None
        self.failed_s: float | None = None  # when the first rank failed
        self.may_release = False
        self.is_over = False

    # What may happen ------------------------------------------------------------------------------------------------

    @rule(rank=ranks)
    def starts(self, rank: int) -> None:
        if self.ranks[rank].is_working:
            self.ranks[rank].take(events.Started(pid=1))
        self.look()

    @rule(rank=ranks)
    def finishes(self, rank: int) -> None:
        if self.ranks[rank].is_working:
            self.ranks[rank].take(events.Finished())
        self.look()

    @rule(rank=ranks, kind=st.sampled_from(["ValueError", "LostPeer", "KeyboardInterrupt"]))
    def raises(self, rank: int, kind: str) -> None:
        if self.ranks[rank].is_working:
            self.ranks[rank].take(raised(kind))
        self.look()

    @rule(rank=ranks, status=st.sampled_from([0, 1, -signal.SIGKILL]))
    def exits(self, rank: int, status: int) -> None:
        if self.ranks[rank].status is None:
            self.ranks[rank].status = status
        self.look()

    @rule(have_finished=st.booleans())
    def all_exit(self, have_finished: bool) -> None:
        for rank in self.policy.alive:
            if have_finished and rank.is_working:
                rank.take(events.Finished())
            rank.status = 0
        self.look()

    @rule()
    def all_finish(self) -> None:
        for rank in self.policy.alive:
            if rank.is_working:
                rank.take(events.Finished())
        self.look()

    @rule(passed_s=st.sampled_from([0.1, 1.5, _GRACE_S + 1, 70.0]))
    def waits(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.look()

    @rule(how_and_why=st.sampled_from(_ENDS))
    def is_ended(self, how_and_why: tuple[How, Reason]) -> None:
        self.is_for_good = self.is_for_good or not self.is_over
        self.policy.end(*how_and_why)
        self.look()

    @rule()
    def fails_elsewhere(self) -> None:
        self.policy.fail()
        self.look()

    @rule(rank=ranks)
    def node_is_lost(self, rank: int) -> None:
        facts = self.ranks[rank]
        facts.said_finished, facts.status = False, -signal.SIGKILL
        self.policy.fail()
        self.look()

    @precondition(lambda self: self.policy.is_part or self.policy.is_held)
    @rule()
    def is_released_by_the_whole_run(self) -> None:
        self.may_release = True
        self.policy.release()
        self.look()

    @rule()
    def is_interrupted(self) -> None:
        for order in self.policy.interrupt():
            assert order.number == signal.SIGINT and self.ranks[order.rank].is_working
        self.look()

    @precondition(lambda self: self.policy.keeps and not self.policy.reason)
    @rule(rank=ranks)
    def is_started_again(self, rank: int) -> None:
        if self.ranks[rank].status is not None:
            self.ranks[rank], self.sent[rank] = RankFacts(rank), []
        self.look()

    @rule()
    def is_held_no_longer(self) -> None:
        self.policy.is_held = False
        self.look()

    # What must hold -------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Carry out and check the orders. A run that is over is not looked at again, a failed one may be restarted."""
        if self.is_over:
            return
        if any(rank.has_failed for rank in self.ranks) and self.failed_s is None:
            self.failed_s = self.now_s
        was_ending = bool(self.policy.reason)
        orders = self.policy.orders(self.now_s)
        if self.policy.reason == "failed" and not was_ending:
            causes = [rank for rank in self.ranks if rank.has_failed and not rank.has_lost_peer]
            assert causes or (self.failed_s is not None and self.now_s > self.failed_s + rules._CAUSE_DEADLINE_S)
        for order in orders:
            if isinstance(order, Release):
                assert self.may_release or all(rank.said_finished for rank in self.ranks)
                assert self.released_s is None
                self.released_s = self.now_s
            else:
                self.check(order)
        assert self.policy.reason == self.reason or not self.reason or self.reason == "failed", "the first reason stays"
        self.reason = self.policy.reason
        if not (self.policy.alive or self.policy.is_held or self.policy.keeps):
            assert self.policy.outcome, "nothing can happen any more"
        if self.policy.outcome == "restart":
            self.restart()
        self.is_over = self.policy.outcome == "over"

    def check(self, order: Signal) -> None:
        rank, sent = self.ranks[order.rank], self.sent[order.rank]
        assert rank.status is None, "it has exited"
        assert order.number == signal.SIGKILL or rank.failure is None, "it ends by itself"
        assert self.policy.reason or self.released_s is not None or rank.must_exit_s < self.now_s
        if sent and self.released_s is None:
            assert _STRENGTH.index(order.number) >= _STRENGTH.index(sent[-1]), "signals never get weaker"
        if self.released_s is not None and not self.policy.reason and not self.policy.keeps:
            assert self.now_s > self.released_s + rules._EXIT_DEADLINE_S, "a released rank has its time"
        sent.append(order.number)

    def restart(self) -> None:
        assert not self.policy.alive and not self.is_for_good
        assert not all(rank.said_finished for rank in self.ranks)
        assert all(rank.failure is None or rank.failure.kind != "KeyboardInterrupt" for rank in self.ranks)
        self.policy.restart()
        assert self.policy.restarts <= self.policy.max_restarts
        assert self.policy.reason == ""
        self.start()

    def teardown(self) -> None:
        """Whatever has happened: a run that is ended kills the ranks that stay, and is over once they are gone."""
        if not hasattr(self, "policy") or self.is_over:
            return
        self.policy.is_held = False
        self.policy.end("interrupt", "interrupted")
        self.is_for_good = True
        for _ in range(5):
            self.now_s += rules._EXIT_DEADLINE_S + 1
            self.look()
        assert all(self.sent[rank.number][-1] == signal.SIGKILL for rank in self.policy.alive)
        for rank in self.ranks:
            rank.status = rank.status if rank.status is not None else -signal.SIGKILL
        assert self.policy.outcome == "over"


TestDriver = Driver.TestCase
TestDriver.settings = hypothesis.settings(max_examples=100, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(
    ("happens", "saves", "to_first"),
    [
        ({1: raised()}, True, [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]),
        ({1: raised()}, False, [signal.SIGTERM, signal.SIGKILL]),
        ({0: raised(), 1: raised()}, True, [signal.SIGKILL]),
    ],
    ids=["it saves its variables first", "it has none to save", "it ends by itself"],
)
def test_first_rank_gets_its_time_to_save(
    happens: dict[int, events.Failed], saves: bool, to_first: list[signal.Signals]
) -> None:
    policy = RunPolicy(ranks=started(), grace_s=_GRACE_S, saves=saves)
    for number, failed in happens.items():
        policy.ranks[number].take(failed)
    sent = [order for now_s in range(0, 100, 10) for order in policy.orders(now_s) if isinstance(order, Signal)]
    assert [order.number for order in sent if order.rank == 0] == to_first
    assert sent[-1] == Signal(2, signal.SIGKILL) and policy.reason == "failed"


def test_interrupt_to_save_is_not_taken_for_one_that_somebody_has_asked_for() -> None:
    policy = RunPolicy(ranks=started(), grace_s=_GRACE_S, saves=True)
    policy.ranks[1].take(raised())
    policy.orders(0.0)
    policy.ranks[0].take(raised("KeyboardInterrupt"))
    assert not policy.is_final
    policy.ranks[2].take(raised("KeyboardInterrupt"))
    assert policy.is_final


def test_first_rank_is_not_interrupted_before_a_restart() -> None:
    policy = RunPolicy(ranks=started(), grace_s=_GRACE_S, saves=True, max_restarts=1)
    policy.ranks[1].take(raised())
    assert policy.orders(0.0) == [Signal(0, signal.SIGTERM), Signal(2, signal.SIGTERM)]


def test_failure_that_comes_in_time_takes_the_place_of_a_lost_peers() -> None:
    policy = RunPolicy(ranks=started(), grace_s=_GRACE_S)
    policy.ranks[0].take(raised("LostPeer"))
    assert policy.orders(0.0) == [] and policy.orders(0.9) == [] and policy.reason == ""
    policy.ranks[2].take(raised())
    assert policy.orders(0.95) == [Signal(1, signal.SIGTERM)]


@pytest.mark.parametrize(("max_restarts", "reason"), [(0, "failed"), (1, "stopped")])
def test_request_takes_the_place_of_a_failure_that_would_have_restarted_the_ranks(
    max_restarts: int, reason: Reason
) -> None:
    policy = RunPolicy(ranks=started(), grace_s=_GRACE_S, max_restarts=max_restarts)
    policy.ranks[1].status = 1
    policy.orders(0.0)
    policy.end("stop", "stopped")
    assert policy.reason == reason


@pytest.mark.parametrize("how", ["interrupt", "stop"])
def test_repeated_or_weaker_request_does_not_postpone_the_next_signal(how: How) -> None:
    policy = RunPolicy(ranks=started(1), grace_s=_GRACE_S)
    policy.end("stop", "stopped")
    assert policy.orders(0.0) == [Signal(0, signal.SIGTERM)]
    policy.end(how, "interrupted")
    assert policy.orders(4.0) == [] and policy.orders(5.1) == [Signal(0, signal.SIGKILL)]
    assert policy.reason == "stopped"


def test_kept_run_without_any_rank_goes_on_until_it_is_ended() -> None:
    policy = RunPolicy(ranks=started(), grace_s=_GRACE_S, keeps=True)
    for rank in policy.ranks:
        rank.status = 3
    assert policy.interrupt() == policy.orders(0.0) == []
    assert (policy.outcome, policy.reason) == ("", "")
    policy.end("stop", "stopped")
    assert (policy.outcome, policy.reason) == ("over", "stopped")


@pytest.mark.parametrize(("kind", "outcome"), [("ValueError", "restart"), ("KeyboardInterrupt", "over")])
def test_ranks_are_restarted_after_a_failure_but_not_after_an_interrupt(kind: str, outcome: str) -> None:
    policy = RunPolicy(ranks=started(), grace_s=_GRACE_S, max_restarts=1)
    policy.ranks[1].take(raised(kind))
    policy.orders(0.0)
    for rank in policy.ranks:
        rank.status = 1
    assert (policy.outcome, policy.reason) == (outcome, "failed")


def test_released_ranks_have_a_minute_to_exit() -> None:
    policy = RunPolicy(ranks=started(), grace_s=_GRACE_S)
    for rank in policy.ranks[:2]:
        rank.take(events.Finished())
    assert policy.orders(0.0) == []
    policy.ranks[2].take(events.Finished())
    assert policy.orders(1.0) == [Release()] and policy.orders(60.9) == []
    policy.ranks[1].status = 0
    assert policy.orders(61.1) == [Signal(0, signal.SIGKILL), Signal(2, signal.SIGKILL)]


def test_timeout_is_that_of_all_attempts_together() -> None:
    policy = RunPolicy(ranks=started(), grace_s=_GRACE_S, timeout_s=10.0, max_restarts=9)
    policy.start_clock(0.0)
    policy.restart()
    policy.start_clock(8.0)
    assert policy.orders(10.0) == []
    assert policy.orders(10.1) == [Signal(rank, signal.SIGINT) for rank in range(_WORLD_SIZE)]
    assert policy.reason == "timeout"


@hypothesis.given(
    kinds=st.dictionaries(ranks, st.sampled_from(["ValueError", "LostPeer"])),
    died=st.sets(ranks),
    times=st.permutations(range(_WORLD_SIZE)),
)
def test_first_failure_is_the_earliest_that_is_no_lost_peer(
    kinds: dict[int, str], died: set[int], times: list[int]
) -> None:
    failed = {rank: raised(kind, time_s=times[rank]) for rank, kind in kinds.items()}
    died_s = {rank: float(times[rank]) for rank in died - set(kinds)}
    causes = [rank for rank in range(_WORLD_SIZE) if rank in died_s or kinds.get(rank) == "ValueError"]
    assert first_failed(failed, died_s) == min(causes or kinds, key=lambda rank: times[rank], default=None)

"""Messages that cross between the agent and the elastic process of a run.

Both ends are the real ones, in one process and a step at a time; the ranks have no processes.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server import api

from notebook_accel.environment import RankPlace
from notebook_accel.launching.agent.elastic_runs import ElasticRuns
from notebook_accel.launching.agent.runs import Run, open_rank
from notebook_accel.launching.agent.templates import TemplateProcess
from notebook_accel.launching.elastic import elastic_agent, nodes, rendezvous
from notebook_accel.launching.elastic.elastic_agent import AgentConnection, ElasticAgent
from notebook_accel.launching.elastic.rendezvous import RefusedError
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import elastic_messages, events
from notebook_accel.protocol.agent_messages import ElasticOptions, Meeting
from notebook_accel.protocol.channel import Connection, EventLoop


def meeting() -> Meeting:
    """Of one node, which meets itself."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Meeting(
        num_nodes=1, node_rank=0, backend="static", host="127.0.0.1", port=port, timeout_s=60,
        silence_s=60,
    )  # fmt: skip


class Agent:
    """The agent's end, for one run of two ranks that have no processes.

    Attributes:
        run: The run.
        runs: The end itself.
        theirs: The elastic process's end of the line.
        order: What that process is told first.
        told: What the kernel was told.
    """

    def __init__(self) -> None:
        self.told: list[msgspec.Struct] = []
        self._loop = EventLoop()
        self.runs = ElasticRuns(
            loop=self._loop,
            ending_run_on_error=lambda _: contextlib.nullcontext(),
            start_ranks=self._start,
            tell_kernel=self.told.append,
        )
        options = ElasticOptions(max_restarts=9, monitor_interval_s=0.01, run_id="crossing", meeting=meeting())
        self.run = Run(
            messages.Launch(
                job_id="1", world_size=2, port=0, grace_s=5, timeout_s=None, log_folder="", elastic=options
            ),
            [],
        )  # fmt: skip
        template, theirs = Connection.pair()
        with contextlib.closing(template), contextlib.closing(theirs):
            self.runs.begin(self.run, TemplateProcess(theirs, 0))
            [ordered] = template.receive()
        order = messages.decode_for_template(ordered.body)
        assert isinstance(order, messages.ForkElastic)
        self.order = order
        self.theirs = Connection.from_descriptor(ordered.descriptors[0])

    def close(self) -> None:
        self.theirs.close()
        self.runs.handle_report(messages.Exited(job_id="1", rank=messages.ELASTIC, status=0, peak_bytes=0))
        self._end_ranks()
        self.run.close_descriptors()
        self._loop._selector.close()

    @property
    def attempts(self) -> list[int]:
        """Return the number of restarts after failures, for each start of the ranks."""
        return [told.restarts for told in self.told if isinstance(told, messages.Starting)]

    def read(self) -> None:
        """Takes what the elastic process has written."""
        self._loop.wait(0)

    def look(self) -> None:
        """Does what the agent does after each message: here, tells the elastic process what has become of the ranks."""
        self.runs.tick(time.monotonic())
        self.run.tick(time.monotonic())

    def ranks_fail(self) -> None:
        """Both ranks are gone without a result."""
        self._end_ranks()
        self.run.tick(time.monotonic())

    def _start(self, run: Run) -> None:
        for number in range(2):
            rank, theirs, _ = open_rank(run.launch, number, self.told.append)
            theirs.close()
            run.put(rank)

    def _end_ranks(self) -> None:
        for rank in self.run.alive:
            rank.status = 1
            rank.close()


@pytest.fixture(scope="module", autouse=True)
def _first_store() -> None:
    """With its first store, torch makes a pipe that stays until the process ends."""
    TCPStore("127.0.0.1", 0, is_master=True)


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


@pytest.fixture
def elastic(agent: Agent) -> Iterator[ElasticAgent]:
    """The elastic process's end, of a run that has one node. Its store and threads, which end with it, end here."""
    connection = AgentConnection(agent.theirs, agent.order)
    made = ElasticAgent(agent.order, connection)
    handler: Any = made._worker_group.spec.rdzv_handler
    yield made
    for patience in (made._patience, handler._patience):
        patience._thread.shutdown()
    vars(made).clear()
    vars(handler).clear()


def state(elastic: ElasticAgent) -> api.WorkerState:
    return elastic._monitor_workers(elastic._worker_group).state


def test_stop_that_crosses_with_the_end_of_ranks_is_not_for_the_next_ones(agent: Agent, elastic: ElasticAgent) -> None:
    group = elastic._worker_group
    elastic._initialize_workers(group)
    agent.read()
    assert state(elastic) is api.WorkerState.HEALTHY
    agent.ranks_fail()
    agent.look()  # RanksEnded is on its way ...
    elastic._restart_workers(group)  # ... when StopRanks is written, since something has happened on another node
    agent.read()  # StopRanks, and StartRanks of the next attempt
    agent.look()
    assert (len(agent.attempts), agent.run.policy.reason, len(agent.run.alive)) == (2, "", 2)
    assert state(elastic) is api.WorkerState.HEALTHY
    agent.ranks_fail()
    agent.look()
    assert state(elastic) is api.WorkerState.FAILED  # it is told of the ranks that are there now


@pytest.mark.parametrize("has_restarts", [False, True])
def test_rank_is_interrupted_to_save_if_no_restart_is_left_and_the_failure_is_named(
    agent: Agent, elastic: ElasticAgent, has_restarts: bool
) -> None:
    agent.run.policy.saves = True
    agent.run.policy.max_restarts = 9 if has_restarts else 0
    elastic._initialize_workers(elastic._worker_group)
    agent.read()
    assert state(elastic) is api.WorkerState.HEALTHY
    first, second = agent.run.ranks
    first.take(events.Started(pid=1))
    second.take(events.Failed(kind="ValueError", message="", traceback=""))
    agent.look()
    assert first._waiting_signal == (signal.SIGTERM if has_restarts else signal.SIGINT)
    if not has_restarts:
        first.take(events.Failed(kind="KeyboardInterrupt", message="", traceback=""))
    agent.ranks_fail()
    agent.look()
    assert state(elastic) is api.WorkerState.FAILED
    assert elastic._here.failure is not None and elastic._here.failure.what.startswith("ValueError")


def test_end_of_ranks_that_are_gone_is_not_that_of_the_next_ones(agent: Agent, elastic: ElasticAgent) -> None:
    elastic._initialize_workers(elastic._worker_group)
    agent.read()
    stale = elastic_messages.RanksEnded(attempt=0), elastic_messages.RanksFinished(attempt=2)
    for message in stale:
        agent.runs._all["1"].tell(message)
    assert state(elastic) is api.WorkerState.HEALTHY and elastic._here.state == "running"


def test_stop_of_present_ranks_ends_them(agent: Agent) -> None:
    connection = AgentConnection(agent.theirs, agent.order)
    connection.send(start(attempt=1))
    for attempt in (2, 0, 1):
        assert agent.run.policy.reason == ""
        connection.send(elastic_messages.StopRanks(attempt=attempt))
        agent.read()
        agent.look()
    assert agent.run.policy.reason == "failed" and all(rank.was_told_to_end for rank in agent.run.ranks)


def test_refused_start_is_answered() -> None:
    agent = Agent()
    try:
        agent.run.end("stop", "stopped")
        connection = AgentConnection(agent.theirs, agent.order)
        connection.send(start(attempt=1))
        agent.read()
        assert agent.attempts == [] and connection.receive() == [
            elastic_messages.Leave(why="The run was ended there (stopped).")
        ]
    finally:
        agent.close()


def start(attempt: int) -> elastic_messages.StartRanks:
    places: list[Any] = [(RankPlace(rank, 2, rank, 2, "127.0.0.1", 1), {}) for rank in range(2)]
    return elastic_messages.StartRanks(attempt=attempt, places=places, restarts=attempt - 1)


@pytest.mark.parametrize("what", ["started", "ended"])
def test_order_that_nothing_comes_of_ends_the_run_on_all_nodes(
    agent: Agent, elastic: ElasticAgent, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "ended":
        elastic._order = msgspec.structs.replace(agent.order, grace_s=0.0)
        elastic._initialize_workers(elastic._worker_group)
        agent.read()
        assert state(elastic) is api.WorkerState.HEALTHY  # the ranks are being started, and may take their time
    monkeypatch.setattr(elastic_agent, "_ANSWER_S", 0.2)
    with pytest.raises(RefusedError, match=f"The ranks were told to be {what}, and nothing has come of it for 0.2 s"):
        if what == "ended":
            elastic._stop_workers(elastic._worker_group)
        else:
            elastic._initialize_workers(elastic._worker_group)
            while True:
                assert state(elastic) is api.WorkerState.HEALTHY
    assert elastic._here.failure is not None and elastic._here.failure.is_wanted


@pytest.mark.parametrize("lost_peer", [True, False])
def test_ranks_that_have_only_lost_a_peer_fail_after_a_killed_node_would_have_been_noticed(
    agent: Agent, elastic: ElasticAgent, monkeypatch: pytest.MonkeyPatch, lost_peer: bool
) -> None:
    monkeypatch.setattr(elastic_agent, "_CAUSE_S", 0.0)
    elastic._initialize_workers(elastic._worker_group)
    failure = messages.Failure(what="Connection closed by peer", lost_peer=lost_peer)
    agent.runs._all["1"].tell(elastic_messages.RanksEnded(attempt=1, failure=failure))
    assert state(elastic) is (api.WorkerState.HEALTHY if lost_peer else api.WorkerState.FAILED)
    assert elastic._here.failure == failure
    elastic._meeting = msgspec.structs.replace(elastic._meeting, silence_s=0.0)
    assert state(elastic) is api.WorkerState.FAILED


def test_node_that_is_told_not_to_be_the_host_waits_for_the_host() -> None:
    alone = msgspec.structs.replace(meeting(), backend="c10d", timeout_s=0.0, settings={"is_host": "false"})
    options = ElasticOptions(max_restarts=0, monitor_interval_s=0.01, run_id="hosting", meeting=alone)
    lines: list[str] = []
    with pytest.raises(RefusedError, match=f"No node has listened at 127.0.0.1:{alone.port}"):
        rendezvous.dynamic(options, lines.append)
    assert lines == [f"waiting for a node that listens at 127.0.0.1:{alone.port}"]


class _Store(dict[str, bytes]):
    """The store of a round, in this process."""

    def set(self, key: str, value: bytes) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]  # a store has no default
        return self[key]


def test_of_two_processes_with_the_same_node_rank_the_one_that_node_0_has_seen_starts() -> None:
    store: Any = _Store()

    def card(token: str) -> nodes.Card:
        return nodes.Card(
            num_nodes=2, num_processes=1, max_restarts=0, python="", torch="", notebook_accel="", host="", token=token
        )

    late_s = time.monotonic() + 1
    seen = {0: card("a"), 1: card("b")}
    assert nodes.agree_on_start(store, 0, seen, late_s) is not None
    assert nodes.agree_on_start(store, 1, seen, late_s) is not None
    assert nodes.agree_on_start(store, 1, {0: card("a"), 1: card("c")}, late_s) is None

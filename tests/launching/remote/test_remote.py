"""Runs over two agents that are reached by byte streams, here within this process, so that no cluster is needed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch.distributed

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import (
    NotebookAccelError,
    RankFailedError,
    RunStoppedError,
    RunTimeoutError,
    SupervisorLostError,
)
from notebook_accel.launching.kernel import launcher, run_payload
from notebook_accel.launching.kernel.devices import Devices
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.remote import run as remote_run
from notebook_accel.launching.remote.host import NodeFacts, NodeHost
from notebook_accel.launching.remote.run import AgentSlot, NodeClock, NodePart, RemoteRun
from notebook_accel.launching.spec import JobSpec
from notebook_accel.payload import memory_files
from notebook_accel.protocol import agent_messages, events
from tests.loopback import Loopback, Rank

DEADLINE_S = 60.0


class Stream:
    """Calls a host, and hands on what it says in two pieces, as a network may."""

    def __init__(self, node: Node, agent_pid: int) -> None:
        self._node, self._host = node, node.host
        self._agent_pid = agent_pid
        self._rest = b""

    def used(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def read(self) -> tuple[float, bytes]:
        if self._rest:
            data, self._rest = self._rest, b""
            return time.monotonic() + self._node.clock_ahead_s, data
        time_s, data = self._host.read(self._agent_pid, 0.2)
        time_s += self._node.clock_ahead_s
        data, self._rest = data[: len(data) // 2], data[len(data) // 2 :]
        return time_s, data

    def write(self, body: bytes) -> None:
        self._host.write(self._agent_pid, body)

    def post(self, body: bytes) -> None:
        with contextlib.suppress(OSError):
            self._host.write(self._agent_pid, body)

    def last_words(self) -> str:
        return self._host.last_words()

    def loss(self, error: Exception, ranks: str) -> NotebookAccelError:
        return SupervisorLostError(f"{ranks}: {error}")


class Node:
    """A host and its agent."""

    def __init__(self) -> None:
        self.host = NodeHost("127.0.0.1")
        self.slot = AgentSlot()
        self.clock_ahead_s = 0.0  # what the host says of its clock; its ranks have this machine's


class Run(RemoteRun):
    def __init__(self, job: Job, payload: int, nodes: Sequence[Node]) -> None:
        super().__init__(job, {})
        self._nodes = nodes
        self._payload = memory_files.whole(payload)

    def _using_nodes(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _open(self, attempt_id: str) -> Sequence[NodePart]:
        self._attempt_id = attempt_id
        size = self.job.world_size // len(self._nodes)
        return [self._part(number, node, size) for number, node in enumerate(self._nodes)]

    def _part(self, number: int, node: Node, size: int) -> NodePart:
        pid, folder, port = node.host.open(self._attempt_id, self.job.name, "", size, None if number else 0)
        agent = node.slot.agent(pid, NodeFacts(*node.host.facts()), lambda: Stream(node, pid))
        ranks = range(number * size, (number + 1) * size)
        return NodePart(
            run=self,
            agent=agent,
            id=self._attempt_id,
            address="127.0.0.1",
            ranks=ranks,
            variables={"NODE": str(number)},
            store_port=port,
            log_folder=pathlib.Path(folder) if folder else None,
        )

    def _launch(self, bodies: Sequence[bytes]) -> None:
        for node, body in zip(self._nodes, bodies, strict=True):
            node.host.launch(self._attempt_id, body, self._payload)

    def _results(self, part: NodePart) -> Sequence[Any]:
        return self._nodes[self._parts.index(part)].host.results(self._attempt_id, as_buffers=False)

    def _close(self) -> None:
        kill = agent_messages.encode(agent_messages.End(job_id=self._attempt_id, how="kill"))
        for node in self._nodes:
            node.host.close(self._attempt_id, kill)

    def _can_restart(self) -> bool:
        return True


class Engine:
    def __init__(self) -> None:
        self.nodes = [Node(), Node()]

    def launch(self, request: LaunchRequest) -> Job:
        request, pickled = run_payload.pickle_target(request)
        with run_payload.prepared_run(request, pickled) as (job, payload):
            run = Run(job, payload, self.nodes)
            job.send_order = run.take_order
            run.start()
        return job

    def agents(self) -> list[int]:
        """The agents' processes."""
        return [node.slot._pid for node in self.nodes]

    def start(self, function: Any = len, *args: Any, pull: tuple[str, ...] = (), **options: Any) -> Job:
        """Starts a function on two nodes with two ranks each."""
        target = Target(names={}, function=function, args=args)
        request = LaunchRequest(target, {}, JobSpec(name="run", pull=pull), LaunchConfig(num_processes=4, **options))
        return launcher._start(request, Devices("CPU", 1), self)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the agents."""
        for node in self.nodes:
            with node.host._lock:
                node.host._drop_agent()


@pytest.fixture
def engine(loopback: Loopback, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine whose ranks are scripts."""

    class Queue(list[NodePart]):
        put = list.append

        def get(self) -> NodePart:
            loopback.wait_until(lambda: self)
            return self.pop(0)

    monkeypatch.setattr(remote_run, "queue", types.SimpleNamespace(SimpleQueue=Queue))
    made = Engine()
    yield made
    made.close()
    loopback.settle()


def ranks_of(loopback: Loopback) -> list[Rank]:
    """The ranks of the only run, in their order among all."""
    loopback.advance(1.0)
    found = sorted(loopback.ranks, key=lambda rank: rank.fork.place.rank)
    assert len(found) == 4
    return found


def finish(loopback: Loopback) -> None:
    for rank in ranks_of(loopback):
        rank.finish(rank.fork.place.rank)


def place() -> tuple[int, str, str, str]:
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    print(f"rank {torch.distributed.get_rank()} was here")
    return torch.distributed.get_rank(), os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], os.environ["NODE"]


@pytest.mark.slow
def test_ranks_meet_over_two_agents() -> None:
    engine = Engine()
    before = set(threading.enumerate())
    try:
        job = engine.start(place)
        assert job.results(DEADLINE_S) == [
            (0, "0", "0", "0"),
            (1, "1", "0", "0"),
            (2, "0", "1", "1"),
            (3, "1", "1", "1"),
        ]
        assert [job.logs(rank) for rank in range(4)] == [f"rank {rank} was here\n" for rank in range(4)]
    finally:
        engine.close()
        for thread in set(threading.enumerate()) - before:
            thread.join(DEADLINE_S)


def test_ranks_over_two_agents_all_end_and_start_again_when_one_fails(engine: Engine, loopback: Loopback) -> None:
    job = engine.start()
    for rank in ranks_of(loopback):
        rank.print(f"rank {rank.fork.place.rank} was here")
    places = [(rank.fork.place.local_rank, rank.fork.variables["GROUP_RANK"]) for rank in ranks_of(loopback)]
    assert places == [(0, "0"), (1, "0"), (0, "1"), (1, "1")]
    assert [rank.fork.variables["NODE"] for rank in ranks_of(loopback)] == ["0", "0", "1", "1"]
    finish(loopback)
    assert job.results(DEADLINE_S) == [0, 1, 2, 3]
    assert [job.logs(rank) for rank in range(4)] == [f"rank {rank} was here\n" for rank in range(4)]
    agents = engine.agents()
    job = engine.start()
    ranks_of(loopback)[3].fail(ValueError("no images"))
    with pytest.raises(RankFailedError, match="no images") as caught:
        job.results(DEADLINE_S)
    assert caught.value.rank == 3 and engine.agents() == agents
    job = engine.start(max_restarts=1)
    ranks_of(loopback)[3].fail(ValueError("no images"))
    assert {rank.fork.variables["TORCHELASTIC_RESTART_COUNT"] for rank in ranks_of(loopback)} == {"1"}
    finish(loopback)
    assert job.results(DEADLINE_S) == [0, 1, 2, 3]
    assert job.restarts == ("rank 3: ValueError: no images",)


def test_ranks_save_when_no_restart_follows_the_failure(engine: Engine, loopback: Loopback) -> None:
    job = engine.start(pull=("trained",), max_restarts=1)
    for first_signal in (signal.SIGTERM, signal.SIGINT):
        *others, last = ranks_of(loopback)
        last.fail(ValueError("no images"))
        loopback.advance(0.1)
        assert [rank.signals[:1] for rank in others] == [[first_signal]] * 3
    with pytest.raises(RankFailedError, match="no images"):
        job.results(DEADLINE_S)
    assert job.restarts == ("rank 3: ValueError: no images",)


@pytest.mark.parametrize("restarts", [0, 1])
def test_timeout_of_a_run_on_one_node_is_its_reason(engine: Engine, loopback: Loopback, restarts: int) -> None:
    engine.nodes = engine.nodes[:1]
    job = engine.start(timeout_s=9.0, max_restarts=restarts)
    assert len(ranks_of(loopback)) == 4
    with pytest.raises(RunTimeoutError):
        job.results(DEADLINE_S)
    assert job.restarts == ()


def test_nothing_is_started_again_after_an_interrupt(engine: Engine, loopback: Loopback) -> None:
    job = engine.start(max_restarts=1)
    ranks_of(loopback)[3].fail(KeyboardInterrupt())
    with pytest.raises(RankFailedError, match="KeyboardInterrupt"):
        job.results(DEADLINE_S)
    assert job.restarts == ()


def test_two_runs_share_the_agents_and_each_is_ended_by_itself(engine: Engine, loopback: Loopback) -> None:
    first = engine.start()
    ranks_of(loopback)
    second = engine.start()
    loopback.advance(1.0)
    assert (len(loopback.agents), len(loopback.ranks)) == (2, 8)
    assert [stack.rank for stack in first.stacks(DEADLINE_S)] == [0, 1, 2, 3]
    first.stop()
    with pytest.raises(RunStoppedError):
        first.results(DEADLINE_S)
    assert not second.done
    finish(loopback)
    assert second.results(DEADLINE_S) == [0, 1, 2, 3]


def test_times_of_each_node_are_put_on_the_kernels_clock(engine: Engine, loopback: Loopback) -> None:
    engine.nodes[1].clock_ahead_s = ahead_s = 86_400.0
    job = engine.start()
    ranks_of(loopback)[3].fail(ValueError("no images"))
    with pytest.raises(RankFailedError):
        job.results(DEADLINE_S)
    failed = job.ranks[3].failed
    assert failed is not None
    assert loopback.now_s - failed.time_s == pytest.approx(ahead_s, abs=DEADLINE_S)


def test_run_ends_whatever_the_clusters_library_raises(
    engine: Engine, loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = engine.start()
    ranks_of(loopback)

    def fails(*_: object) -> None:
        raise SystemExit("of the library")

    monkeypatch.setattr(Stream, "read", fails)
    with pytest.raises(SupervisorLostError, match="of the library"):
        job.results(DEADLINE_S)


def test_interrupted_ranks_may_take_longer_than_those_of_another_node(engine: Engine, loopback: Loopback) -> None:
    job = engine.start(grace_s=DEADLINE_S)
    ranks = ranks_of(loopback)
    for rank in ranks[:2]:
        rank.ignores = {signal.SIGINT}
    job.interrupt()
    loopback.advance(DEADLINE_S / 2)
    assert (len(loopback.ranks), len(job.stacks(DEADLINE_S))) == (2, 4)
    assert [rank.signals for rank in ranks] == [[signal.SIGINT]] * 4
    for rank in ranks[:2]:
        rank.fail(KeyboardInterrupt())
    with pytest.raises(RunStoppedError, match="was interrupted"):
        job.results(DEADLINE_S)
    assert [info.failed and info.failed.kind for info in job.ranks] == ["KeyboardInterrupt"] * 4


def test_agent_that_dies_is_replaced_by_the_next_run_and_other_ranks_can_save(
    engine: Engine, loopback: Loopback
) -> None:
    job = engine.start(grace_s=DEADLINE_S)
    first, second, *_ = ranks_of(loopback)
    first.ignores = second.ignores = {signal.SIGTERM}
    loopback.agents[1].kill()
    loopback.advance(DEADLINE_S / 2)
    assert (first.signals, second.signals, len(loopback.ranks)) == ([signal.SIGTERM], [signal.SIGTERM], 2)
    first.exit(0)
    second.exit(0)
    with pytest.raises(SupervisorLostError, match="ranks 2 to 3 of 4"):
        job.results(DEADLINE_S)
    job = engine.start()
    finish(loopback)
    assert job.results(DEADLINE_S) == [0, 1, 2, 3]


def test_bytes_are_waited_for_no_longer_than_asked(loopback: Loopback) -> None:
    host = NodeHost("127.0.0.1")
    pid, _, _ = host.open("1", "run", "", 1, None)
    before_s = loopback.now_s
    assert host.read(pid, 0.05)[1] == b"" and loopback.now_s == pytest.approx(before_s + 0.05)
    with pytest.raises(ConnectionError):
        host.read(pid + 1, 0.05)  # of an agent that was here before
    host.close("1", agent_messages.encode(agent_messages.End(job_id="1", how="kill")))
    host._drop_agent()


def test_facts_are_what_has_to_be_known_of_a_node() -> None:
    facts = NodeFacts(*NodeHost("127.0.0.1").facts())
    assert set(facts.versions) == {"Python", "torch", "notebook-accel"} and all(facts.versions.values())
    assert facts.variables["GLOO_SOCKET_IFNAME"] == "lo" and facts.sys_path


def test_clock_of_a_node_is_known_within_the_time_that_its_quickest_answer_took() -> None:
    clock = NodeClock()
    ahead_s = 86_400.0  # the node's clock

    def answered(asked_s: float, sent_s: float, now_s: float, at_s: float) -> float:
        """Where an event of ``at_s`` is put after an answer; all by the kernel's clock."""
        clock.update(asked_s, sent_s + ahead_s, now_s)
        return clock.event_by_our_clock(events.Started(time_s=at_s + ahead_s, pid=1)).time_s

    assert answered(asked_s=10.0, sent_s=10.9, now_s=11.0, at_s=10.5) == pytest.approx(10.6)
    assert answered(asked_s=11.0, sent_s=11.99, now_s=12.0, at_s=11.5) == pytest.approx(11.51)
    assert answered(asked_s=12.0, sent_s=12.5, now_s=14.0, at_s=12.5) == pytest.approx(12.51)  # the kernel was busy
    ahead_s -= 3600  # the node was suspended for an hour
    assert answered(asked_s=20.0, sent_s=20.2, now_s=21.0, at_s=20.2) == pytest.approx(20.0)
    ahead_s += 7200  # the kernel's machine was
    assert answered(asked_s=30.0, sent_s=30.2, now_s=30.3, at_s=30.2) == pytest.approx(30.3)

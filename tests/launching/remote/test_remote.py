"""Runs over two agents that are reached by byte streams, here within this process, so that no cluster is needed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
import time
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
from notebook_accel.launching.remote.host import NodeFacts, NodeHost
from notebook_accel.launching.remote.run import AgentSlot, NodeClock, NodePart, RemoteRun
from notebook_accel.launching.spec import JobSpec
from notebook_accel.payload import memory_files
from notebook_accel.protocol import agent_messages, events
from tests import processes
from tests.launching import functions

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

    def start(self, function: Any, *args: Any, pull: tuple[str, ...] = (), **options: Any) -> Job:
        """Starts a function on two nodes with two ranks each."""
        target = Target(names={}, function=function, args=args)
        request = LaunchRequest(target, {}, JobSpec(name="run", pull=pull), LaunchConfig(num_processes=4, **options))
        return launcher._start(request, Devices("CPU", 1), self)  # type: ignore[arg-type]


def keep_agents(engine: Engine) -> None:
    """Wait until the hosts' runs are closed."""
    for host in (node.host for node in engine.nodes):
        processes.wait_until(lambda host=host: not host._parts, "its runs are closed", DEADLINE_S)


@contextlib.contextmanager
def ending(*hosts: NodeHost) -> Iterator[None]:
    """Ends hosts' agents, and waits for the threads that go with them."""
    before = set(threading.enumerate())
    try:
        yield
    finally:
        for host in hosts:
            with host._lock:
                host._drop_agent()
        for thread in set(threading.enumerate()) - before:
            thread.join(DEADLINE_S)


@pytest.fixture
def own() -> Iterator[Engine]:
    """An engine for a test that ends its agents."""
    made = Engine()
    with ending(*(node.host for node in made.nodes)):
        yield made


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    """An engine whose agents have run something."""
    made = Engine()
    with ending(*(node.host for node in made.nodes)):
        assert len(made.start(place).results(DEADLINE_S)) == 4
        keep_agents(made)
        yield made


@pytest.fixture
def running(shared: Engine) -> Iterator[Engine]:
    """The shared engine, for a test that leaves its agents alive."""
    yield shared
    keep_agents(shared)


def place() -> tuple[int, str, str, str]:
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    print(f"rank {torch.distributed.get_rank()} was here")
    return torch.distributed.get_rank(), os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], os.environ["NODE"]


def fails_once() -> str:
    if os.environ["RANK"] == "3" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("no images")
    return os.environ["TORCHELASTIC_RESTART_COUNT"]


def interrupts_itself() -> None:
    raise KeyboardInterrupt


def fails_while_others_wait(folder: str) -> None:
    """The last rank fails twice; the others note in which attempt they were interrupted."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    functions.note(folder, f"waits in {attempt}")
    if os.environ["RANK"] == "3":
        for rank in range(3):
            functions.wait_for(folder, f"{rank} waits in {attempt}")
        raise ValueError("no images")
    try:
        functions.wait_for(folder, "never there")
    except KeyboardInterrupt:
        functions.note(folder, f"saves in {attempt}")
        raise


def waits(folder: str) -> None:
    functions.note(folder, "waits")
    functions.wait_for(folder, "end")


def tidies_up(folder: str) -> None:
    functions.note(folder, "waits")
    try:
        functions.wait_for(folder, "never there")
    finally:
        if os.environ["NODE"] == "0":
            functions.wait_for(folder, "go")


def all_wait(folder: pathlib.Path) -> None:
    marks = [folder / f"{rank} waits" for rank in range(4)]
    processes.wait_until(lambda: all(mark.exists() for mark in marks), "all ranks wait", timeout_s=DEADLINE_S)


def test_ranks_meet_over_two_agents_and_all_end_and_start_again_when_one_fails(running: Engine) -> None:
    job = running.start(place)
    assert job.results(DEADLINE_S) == [(0, "0", "0", "0"), (1, "1", "0", "0"), (2, "0", "1", "1"), (3, "1", "1", "1")]
    assert [job.logs(rank) for rank in range(4)] == [f"rank {rank} was here\n" for rank in range(4)]
    agents = running.agents()
    job = running.start(fails_once)
    with pytest.raises(RankFailedError, match="no images") as caught:
        job.results(DEADLINE_S)
    assert caught.value.rank == 3
    assert running.agents() == agents
    assert all(rank.failed is None or 0 < time.monotonic() - rank.failed.time_s < DEADLINE_S for rank in job.ranks)
    job = running.start(fails_once, max_restarts=1)
    assert job.results(DEADLINE_S) == ["1"] * 4
    assert job.restarts == ("rank 3: ValueError: no images",)


def test_ranks_save_when_no_restart_follows_the_failure(running: Engine, tmp_path: pathlib.Path) -> None:
    job = running.start(fails_while_others_wait, str(tmp_path), pull=("trained",), max_restarts=1)
    with pytest.raises(RankFailedError, match="no images"):
        job.results(DEADLINE_S)
    assert job.restarts == ("rank 3: ValueError: no images",)
    assert sorted(mark.name for mark in tmp_path.glob("* saves in *")) == [f"{rank} saves in 1" for rank in range(3)]


def test_timeout_of_a_run_on_one_node_is_its_reason(running: Engine, tmp_path: pathlib.Path) -> None:
    alone = Engine()
    alone.nodes = running.nodes[:1]
    with pytest.raises(RunTimeoutError):
        alone.start(waits, str(tmp_path), timeout_s=1.0, max_restarts=1).results(DEADLINE_S)
    with pytest.raises(RunTimeoutError):
        alone.start(waits, str(tmp_path), timeout_s=1.0).results(DEADLINE_S)


def test_nothing_is_started_again_after_an_interrupt(running: Engine) -> None:
    job = running.start(interrupts_itself, max_restarts=1)
    with pytest.raises(RankFailedError, match="KeyboardInterrupt"):
        job.results(DEADLINE_S)
    assert job.restarts == ()


@pytest.mark.slow
def test_two_runs_share_the_agents_and_each_is_ended_by_itself(running: Engine, tmp_path: pathlib.Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    jobs = []
    for folder in folders:
        folder.mkdir()
        jobs.append(running.start(waits, str(folder)))
    for folder in folders:
        all_wait(folder)
    assert [stack.rank for stack in jobs[0].stacks(DEADLINE_S)] == [0, 1, 2, 3]
    jobs[0].stop()
    with pytest.raises(RunStoppedError):
        jobs[0].results(DEADLINE_S)
    assert not jobs[1].done
    (folders[1] / "end").touch()
    assert jobs[1].results(DEADLINE_S) == [None] * 4


@pytest.mark.slow
def test_times_of_each_node_are_put_on_the_kernels_clock(running: Engine) -> None:
    second = running.nodes[1]
    second.clock_ahead_s = ahead_s = 86_400.0
    try:
        job = running.start(fails_once)
        with pytest.raises(RankFailedError):
            job.results(DEADLINE_S)
    finally:
        second.clock_ahead_s = 0.0
    failed = job.ranks[3].failed
    assert failed is not None
    assert time.monotonic() - failed.time_s == pytest.approx(ahead_s, abs=DEADLINE_S)


@pytest.mark.slow
def test_run_ends_whatever_the_clusters_library_raises(
    own: Engine, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = own.start(waits, str(tmp_path))
    all_wait(tmp_path)

    def fails(*_: object) -> None:
        raise SystemExit("of the library")

    monkeypatch.setattr(Stream, "read", fails)
    with pytest.raises(SupervisorLostError, match="of the library"):
        job.results(DEADLINE_S)


@pytest.mark.slow
def test_interrupted_ranks_may_take_longer_than_those_of_another_node(running: Engine, tmp_path: pathlib.Path) -> None:
    job = running.start(tidies_up, str(tmp_path), grace_s=DEADLINE_S)
    all_wait(tmp_path)
    run = job.send_order.__self__  # type: ignore[union-attr]
    assert isinstance(run, Run)
    second = run._parts[1]
    job.interrupt()
    processes.wait_until(lambda: second.has_ended, "the second node's ranks have ended", DEADLINE_S)
    assert len(job.stacks(DEADLINE_S)) == 4  # the first node's agent has had all that it was told before
    (tmp_path / "go").touch()
    with pytest.raises(RunStoppedError, match="was interrupted"):
        job.results(DEADLINE_S)
    assert [info.failed and info.failed.kind for info in job.ranks] == ["KeyboardInterrupt"] * 4


def test_bytes_are_waited_for_no_longer_than_asked() -> None:
    host = NodeHost("127.0.0.1")
    with ending(host):
        pid, _, _ = host.open("1", "run", "", 1, None)
        assert host.read(pid, 0.05)[1] == b""
        with pytest.raises(ConnectionError):
            host.read(pid + 1, 0.05)  # of an agent that was here before
        host.close("1", b"")


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


@pytest.mark.slow
def test_agent_that_dies_is_replaced_by_the_next_run(shared: Engine, tmp_path: pathlib.Path) -> None:
    """And the ranks of other nodes can save when an agent dies. The last test, since it leaves no agent."""
    with ending(*(node.host for node in shared.nodes)):
        kill_an_agent_and_run_again(shared, tmp_path)


def kill_an_agent_and_run_again(engine: Engine, tmp_path: pathlib.Path) -> None:
    job = engine.start(functions.saves_at_sigterm, str(tmp_path), grace_s=DEADLINE_S)

    def have(what: str, ranks: range) -> bool:
        return all((tmp_path / f"{rank} {what}").exists() for rank in ranks)

    processes.wait_until(lambda: have("trains", range(4)), "all ranks train", DEADLINE_S)
    os.kill(engine.agents()[1], signal.SIGKILL)
    processes.wait_until(lambda: have("was asked", range(2)), "the first node's ranks save", DEADLINE_S)
    (tmp_path / "go").touch()
    with pytest.raises(SupervisorLostError, match="ranks 2 to 3 of 4"):
        job.results(DEADLINE_S)
    assert have("has saved", range(2))
    assert engine.start(place).results(DEADLINE_S)

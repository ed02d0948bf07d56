"""A run over several agents on other machines, each reached by a byte stream. Engines for clusters build on it.

Runs in the kernel. An engine reserves nodes, starts an agent on each, and gives the kernel an ``AgentStream`` to it.
The stream carries the frames of the agent's own socket unchanged in both directions. A ``RemoteAgent`` decodes them
with the code that also serves this machine's agent, in a thread that lives as long as the agent has runs. It passes
them to the ``NodePart`` of their run, which converts ranks and times: ranks are numbered over all nodes, and each
node's ``time.monotonic()`` has its own zero. File descriptors can't cross machines, so the engine itself transfers the
payload, with the Launch message, and the results.

``RemoteRun`` decides for all nodes. It releases the ranks when all have finished, ends all when one has failed or a
node is lost, and restarts all as often as ``max_restarts`` allows. The run ends when every part has ended.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import pathlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from notebook_accel.config import LaunchConfig
from notebook_accel.environment import RankPlace
from notebook_accel.errors import LaunchError, NotebookAccelError, SupervisorLostError
from notebook_accel.launching.kernel.agent_process import AgentLink
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.remote.host import NodeFacts
from notebook_accel.launching.state.policy import HOW, REASONS, RankFacts, Release, RunPolicy, Signal
from notebook_accel.payload import memory_files
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.agent_messages import Failure, OnDeath, RankDump, Reason, RunOrder, Starting
from notebook_accel.protocol.channel import take_frames


class NotWantedError(Exception):
    """The run was ended meanwhile, so the operation is no longer needed."""


class AgentStream(Protocol):
    """The bytes to and from an agent on another machine."""

    def used(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that encloses all of a thread's use of the stream."""

    def read(self) -> tuple[float, bytes]:
        """Wait a limited time for bytes from the agent. Raise if the agent, its node or the connection has gone.

        Returns the node's ``time.monotonic()`` at its answer, and the bytes, empty if none have come.
        """

    def write(self, body: bytes) -> None:
        """Send the body of a frame, and wait until the agent has received it. Raise if the agent has gone."""

    def post(self, body: bytes) -> None:
        """Queue the body of a frame for sending. Neither waits nor raises."""

    def last_words(self) -> str:
        """Return the end of the agent's log, for an error's ``why``."""

    def loss(self, error: BaseException, ranks: str) -> NotebookAccelError:
        """Convert an error of ``read`` to the error of the run, which has lost these ranks."""


class NodeClock:
    """The offset between a node's ``time.monotonic()`` and this machine's."""

    def __init__(self) -> None:
        self._offset_s: float | None = None

    def update(self, asked_s: float, there_s: float, now_s: float) -> None:
        """Update the offset from one answer: our time of the request, the node's time of its answer, and our time now.

        The node answered between the request and now, so each answer bounds the offset on both sides. An offset within
        the bounds stays as it is, so that a late answer doesn't move the node's events. An offset outside them, because
        clocks drift or a machine was suspended, moves to the nearer bound.
        """
        least_s, most_s = asked_s - there_s, now_s - there_s
        # The first offset starts at the upper bound: the node waits for news and sends it at once.
        known_s = most_s if self._offset_s is None else self._offset_s
        self._offset_s = max(least_s, min(known_s, most_s))

    def event_by_our_clock(self, event: events.Event) -> events.Event:
        """Return the node's event with its time converted to this machine's clock."""
        assert self._offset_s is not None, "events come with answers"
        return msgspec.structs.replace(event, time_s=event.time_s + self._offset_s)


class RemoteAgent(AgentLink["NodePart"]):
    """The kernel's link to an agent on another machine: its stream, and the facts of its node."""

    def __init__(self, stream: AgentStream, facts: NodeFacts) -> None:
        super().__init__()
        self.clock = NodeClock()
        self.facts = facts
        self._stream = stream
        self._received = bytearray()
        self._lock = threading.Lock()
        self._prepare_lock = threading.Lock()
        self._is_reading = False

    def expect(self, job: NodePart) -> None:
        with self._lock:
            super().expect(job)
            if not self._is_reading:
                name = f"notebook-accel-agent-{job.address}"
                try:
                    threading.Thread(target=self._run, name=name, daemon=True).start()
                except RuntimeError:  # the system refuses another thread
                    self.forget(job)
                    raise
                self._is_reading = True

    def prepare_launch(self, part: NodePart, places: Sequence[messages.Place]) -> bytes:
        """Prepare a template for a part, and return the body of its Launch message, which the engine sends."""
        self.expect(part)
        with self._prepare_lock:
            self.prepare(part.config)
        return messages.encode(self._launch_message(part, places=places))

    def tell(self, message: messages.ToAgent) -> None:
        """Queue a message for the agent. Doesn't wait, and ignores an agent that has gone."""
        self._stream.post(messages.encode(message))

    def _environment(self) -> tuple[object, Mapping[str, str], Sequence[str]]:
        return True, self.facts.variables, self.facts.sys_path  # constant as long as the agent lives

    def _send(self, message: messages.ToAgent, descriptors: Sequence[int] = ()) -> None:
        assert not descriptors
        self._stream.write(messages.encode(message))

    def _receive(self) -> Sequence[bytes]:
        asked_s = time.monotonic()
        there_s, data = self._stream.read()
        self.clock.update(asked_s, there_s, time.monotonic())
        self._received += data
        return [body for body, _ in take_frames(self._received)]

    def _last_words(self) -> str:
        return self._stream.last_words()

    def _run(self) -> None:
        """Read messages until the agent has no runs. The thread's function."""
        with self._stream.used():
            try:
                while self._has_jobs():
                    self._read()
            except BaseException as error:  # noqa: BLE001 - after any error, no run may wait for ever
                with self._lock:
                    lost, self._jobs, self._is_reading = self._jobs, {}, False
                for part in lost.values():
                    part.end("", self._loss(error, part.ranks_in_words))

    def _loss(self, error: BaseException, ranks: str) -> NotebookAccelError:
        try:
            return self._stream.loss(error, ranks)
        except Exception as other:  # noqa: BLE001 - an engine's library may raise anything
            return _run_lost_error(other)

    def _has_jobs(self) -> bool:
        with self._lock:
            self._is_reading = bool(self._jobs)
        return self._is_reading


def _run_lost_error(error: BaseException) -> SupervisorLostError:
    why = f"{type(error).__name__}: {str(error).strip()}"
    return SupervisorLostError("The run was lost on the cluster.", why=why)


class AgentSlot:
    """Holds a node's current ``RemoteAgent``, replaced when the node has started another agent. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._agent: RemoteAgent | None = None

    def agent(self, pid: int, facts: NodeFacts, make_stream: Callable[[], AgentStream]) -> RemoteAgent:
        """Return the agent with this pid on the node."""
        with self._lock:
            if self._agent is None or self._pid != pid:
                self._pid, self._agent = pid, RemoteAgent(make_stream(), facts)
            return self._agent


@dataclasses.dataclass(eq=False, kw_only=True)
class NodePart:
    """The part of a run that is on one node: passes the messages of the node's agent on to the run."""

    run: RemoteRun
    agent: RemoteAgent
    id: str  # which the agent's messages carry
    address: str  # at which other nodes reach the node
    ranks: range  # the ranks on the node, as the whole run numbers them
    variables: Mapping[str, str]  # environment variables for these ranks only
    store_port: int  # the port of the ranks' store, if this is the first part
    log_folder: pathlib.Path | None  # folder of the logs on the node; ``None`` if it could not be made
    dumps: list[RankDump] | None = None  # the ranks' stacks, kept until those of the other nodes have come
    has_ended: bool = False  # it sends no more messages
    on_death: OnDeath = "stop"

    @property
    def config(self) -> LaunchConfig:
        return self.run.job.config

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def saves(self) -> bool:
        return self.run.saves

    @property
    def ranks_in_words(self) -> str:
        """The ranks as an error names them, such as ``ranks 2 to 3 of 4``."""
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {self.ranks[0]} to {self.ranks[-1]}"
        return f"{ranks} of {self.run.job.world_size}"

    def deliver(self, rank: int, event: events.Event) -> None:
        self.run.deliver(self, self.ranks[rank], self.agent.clock.event_by_our_clock(event))

    def take_dumps(self, dumps: Sequence[RankDump]) -> None:
        self.run.take_dumps(self, [msgspec.structs.replace(dump, rank=self.ranks[dump.rank]) for dump in dumps])

    def start(self, starting: Starting) -> None:
        raise NotImplementedError(f"{starting}: only elastic processes say this, and no part has one")

    def end(self, reason: Reason, error: NotebookAccelError | None = None, elsewhere: Failure | None = None) -> None:
        assert elsewhere is None, "only elastic processes know of other nodes"
        self.run.part_ended(self, reason, error)


class RemoteRun(abc.ABC):
    """One run over several agents, which takes the orders of its job. A base class for engines.

    ``variables`` are what the launch sets for the ranks.
    """

    def __init__(self, job: Job, variables: Mapping[str, str]) -> None:
        self.job = job
        self._variables = variables
        self._parts: Sequence[NodePart] = ()
        self._is_launched = False
        self._ranks: list[RankFacts] = []  # of all parts
        # The agents escalate signals, and stop their part when a rank there has failed.
        self._policy = RunPolicy(
            ranks=self._ranks, grace_s=math.inf, max_restarts=job.config.max_restarts, saves=job.saves
        )
        self._requested_end: messages.How | None = None  # how the user asked to end the run
        self._error: NotebookAccelError | None = None
        self._ended_parts: queue.SimpleQueue[NodePart] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what the agents' threads change; the kernel's main thread never takes it

    def start(self) -> None:
        """Start the run's thread, which ends with the run."""
        threading.Thread(target=self._run, name=f"notebook-accel-run-{self.job.id}", daemon=True).start()

    @property
    def saves(self) -> bool:
        """True if the next failure of a rank interrupts those that have variables to send back."""
        return self._policy.saves_at_failure

    # What an engine adds --------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _using_nodes(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that encloses all work of the run's thread."""

    @abc.abstractmethod
    def _open(self, attempt_id: str) -> Sequence[NodePart]:
        """Reserve nodes and open a part of the run with this id on each, in the order of the ranks.

        Raises:
            NotWantedError: The run was ended meanwhile.
        """

    @abc.abstractmethod
    def _launch(self, bodies: Sequence[bytes]) -> None:
        """Transfer the payload to every part's node, and send the Launch message with its body to the node's agent."""

    @abc.abstractmethod
    def _results(self, part: NodePart) -> Sequence[Any]:
        """Return each rank's result as the buffer that the rank has written.

        Raises:
            NotebookAccelError: The node is lost.
        """

    @abc.abstractmethod
    def _close(self) -> None:
        """Kill what still runs, and release whatever was opened or reserved."""

    @abc.abstractmethod
    def _can_restart(self) -> bool:
        """Return whether there are nodes on which the ranks could be restarted."""

    # What a job asks for --------------------------------------------------------------------------------------------

    def take_order(self, order: RunOrder) -> None:
        """Send the job's order to all nodes."""
        if isinstance(order, messages.Respawn):
            raise LaunchError(f"Rank {order.rank} can't be started again by itself: the run is on several machines.")
        if isinstance(order, messages.End):
            self._requested_end = self._requested_end or order.how
        elif isinstance(order, messages.Inspect):
            if not self._is_launched:  # no agent has ranks yet
                self.job.take_dumps(())
            for part in self._parts:
                part.dumps = None
        self._tell_parts(lambda part_id: msgspec.structs.replace(order, job_id=part_id))

    def _tell_parts(self, message_to: Callable[[str], messages.ToAgent]) -> None:
        for part in self._parts:
            if not part.has_ended:
                part.agent.tell(message_to(part.id))

    # What the agents' threads say -----------------------------------------------------------------------------------

    def deliver(self, part: NodePart, rank: int, event: events.Event) -> None:
        if part not in self._parts:
            return  # the part belongs to an earlier attempt
        self.job.deliver(rank, event)
        if isinstance(event, events.Output):
            self._keep_log(rank, event, part.address)
        elif isinstance(event, events.Started | events.Finished):
            with self._lock:
                self._ranks[rank].take(event)
                self._carry_out_orders()

    def take_dumps(self, part: NodePart, dumps: Sequence[RankDump]) -> None:
        """Store the stacks of a part's ranks. Once those of all parts are there, deliver them to the job."""
        with self._lock:
            part.dumps = list(dumps)
            there = [other for other in self._parts if not other.has_ended]
            if all(other.dumps is not None for other in there):
                self.job.take_dumps([dump for other in there for dump in other.dumps or ()])

    def part_ended(self, part: NodePart, reason: Reason, error: NotebookAccelError | None) -> None:
        """Record the end of a part. The first failed part ends the others, unless all were told to end."""
        if part not in self._parts:
            return  # the part belongs to an earlier attempt
        with self._lock:
            part.has_ended = True
            self._ranks_ended(part.ranks, reason, error)
        self._ended_parts.put(part)

    def _ranks_ended(self, ranks: range, reason: Reason, error: NotebookAccelError | None) -> None:
        """Record that ranks are gone: their agent has ended them for this reason, or the error has."""
        self._hear_request()
        is_lost = isinstance(error, SupervisorLostError)
        if error is not None and self._error is None and not (is_lost and self._policy.reason):
            self._error = error
        for rank in ranks:
            facts = self._ranks[rank]
            facts.status, facts.failure = -signal.SIGKILL, self.job.state.ranks[rank].failed
            facts.said_finished = facts.said_finished and not is_lost  # a lost node takes the results with it
        if is_lost or (reason == "failed" and not self._policy.reason):
            self._policy.fail()
        elif error is not None:  # the system has refused something, which ends a run on one machine too
            self._policy.end("stop", "failed")
        elif reason and not self._policy.reason:
            self._policy.end("stop", reason)
        self._carry_out_orders()

    def _hear_request(self) -> None:
        """Tell the policy how the user has asked to end the run, unless it is over and only its results are copied."""
        if self._requested_end is not None and self._policy.outcome != "over":
            self._policy.end(self._requested_end, REASONS[self._requested_end])

    def _carry_out_orders(self) -> None:
        orders = self._policy.orders(time.monotonic())
        if Release() in orders:
            self._tell_parts(lambda part_id: messages.Release(job_id=part_id))
        signals = {order.rank: order.number for order in orders if isinstance(order, Signal)}
        for part in self._parts:
            number = next((signals[rank] for rank in part.ranks if rank in signals), None)
            if number is not None and not part.has_ended:
                part.agent.tell(messages.End(job_id=part.id, how=HOW[number]))

    def _keep_log(self, rank: int, output: events.Output, address: str) -> None:
        """Append a rank's output on its node to its log on this machine. Errors such as a full disk are ignored."""
        if self.job.log_files:
            left_out = f"{output.left_out:,} lines left out, which are in its log on {address}"
            gap = f"[{left_out}]\n" if output.left_out else ""
            with contextlib.suppress(OSError), self.job.log_files[rank].open("a", encoding="utf-8") as file:
                file.write(f"{gap}{output.text}\n")

    # The run's thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._using_nodes():
            try:
                self._attempt()
                while self._is_to_restart():
                    self._policy.restart()
                    self._attempt()
            except BaseException as error:  # noqa: BLE001 - after any error, nobody may wait for ever
                self._error = self._error or _run_lost_error(error)
            if self._error is not None:
                self._error.__traceback__ = self._error.__context__ = None  # they would keep the engine's objects alive
        self.job.end(self._policy.reason, self._error)

    def _is_to_restart(self) -> bool:
        with self._lock:
            self._hear_request()
            return self._policy.outcome == "restart" and self._can_restart()

    def _attempt(self) -> None:
        before, self._error = self._error, None
        restarts = self._policy.restarts
        self._ranks[:] = map(RankFacts, range(self.job.world_size))
        self.job.start(
            Starting(
                job_id=self.job.id,
                restarts=restarts,
                first_rank=0,
                world_size=self.job.world_size,
                cause=None if before is None else Failure(what=before.what.rstrip(".")),
            )
        )
        try:
            self._parts = self._open(f"{self.job.id}.{restarts}")
            self._start(restarts)
            pending = set(self._parts)
            while pending:
                pending.discard(self._ended_parts.get())
            self._take_results()
        except NotWantedError:  # the run was ended before it had ranks
            with self._lock:
                self._hear_request()
        except Exception as error:  # noqa: BLE001 - an engine's library may raise anything, and the run can't go on
            known = error if isinstance(error, NotebookAccelError) else _run_lost_error(error)
            with self._lock:
                self._ranks_ended(range(self.job.world_size), "", known)
        finally:
            parts, self._parts, self._is_launched = self._parts, (), False
            for part in parts:
                part.agent.forget(part)
            self._close()

    def _start(self, restarts: int) -> None:
        store, *_ = self._parts
        bodies = []
        for number, part in enumerate(self._parts):
            variables = {
                **part.agent.facts.variables,
                **self._variables,
                **part.variables,
                "GROUP_RANK": str(number),
                "GROUP_WORLD_SIZE": str(len(self._parts)),
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
            }
            places = [
                RankPlace(rank, self.job.world_size, local, part.world_size, store.address, store.store_port)
                for local, rank in enumerate(part.ranks)
            ]
            bodies.append(part.agent.prepare_launch(part, [(place, variables) for place in places]))
        self._launch(bodies)
        self._is_launched = True
        how = self._requested_end
        if how is not None:  # the run was ended during the launch
            self._tell_parts(lambda part_id: messages.End(job_id=part_id, how=how))

    def _take_results(self) -> None:
        """Copy the ranks' results to the job's files; after a failure too, for the variables to be pulled."""
        for part in self._parts:
            try:
                results = self._results(part)
            except NotebookAccelError as error:
                self.part_ended(part, "", error)
                continue
            for rank, written in zip(part.ranks, results, strict=True):
                data = memoryview(written)
                if data.nbytes:
                    memory_files.fill(self.job.result_files.descriptors[rank], data)

"""The elastic process of a run on several nodes: torch elastic, whose ranks our own agent starts and stops.

The process decides when this node's ranks are started, and their numbers among all nodes. It also reports its ranks to
the other nodes, so that all nodes learn of a failure at once and nobody waits in vain for a rank that is gone.

The process is a fork of the template and ends with it. It never forks, since it has the threads of torch's stores.
Torch elastic's own workers, signal handlers and logs stay unused. Within ``launching``, only this module and
``rendezvous`` import torch; only the template imports them, by name.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.rendezvous.api import RendezvousHandler

import notebook_accel
from notebook_accel import environment
from notebook_accel.environment import RankPlace
from notebook_accel.launching.elastic import nodes, rendezvous
from notebook_accel.launching.elastic.nodes import GoneError, Guarded, NodeRound, NodeStatus, Patience
from notebook_accel.launching.elastic.rendezvous import RefusedError
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import elastic_messages, events
from notebook_accel.protocol.channel import ClosedError, Connection

_MEETING_S = 60.0  # for the steps that follow immediately once all nodes are there
_LEAVING_S = 5.0
_CAUSE_S = 10.0  # for a node, which may be busy, to report why its rank has gone
_ANSWER_S = 600.0  # for our agent to follow an order; far longer than a killed rank with much memory takes to exit
_ROLE = "default_role"  # as torch elastic's launcher calls it
_SHORTEST_S = 1e-3
_LOSS = messages.Failure(what="A rank has gone.", lost_peer=True)


class LeaveError(Exception):
    """The agent ends the run."""


class AgentConnection:
    """The connection to our own agent, which has ordered the run."""

    def __init__(self, connection: Connection, order: messages.ForkElastic) -> None:
        self._connection = connection
        self._connection.set_receive_deadline(order.options.monitor_interval_s)
        self._reported: list[str] = []

    def send(self, message: msgspec.Struct, descriptors: tuple[int, ...] = ()) -> None:
        self._connection.send(messages.encode(message), descriptors)

    def receive(self) -> list[elastic_messages.ToElastic]:
        """Return the agent's messages, after a wait of at most the monitor interval."""
        return [elastic_messages.decode_for_elastic(frame.body) for frame in self._connection.receive()]

    @property
    def has_news(self) -> bool:
        """True if ``receive`` wouldn't wait."""
        return bool(select.select([self._connection.fileno()], [], [], 0)[0])

    def report_wait(self, line: str) -> None:
        """Report which nodes this node waits for, and check that the run goes on.

        Raises:
            LeaveError: The agent ends the run.
        """
        self.report_nodes([line], is_news=[line] != self._reported)
        if self.has_news:
            for told in self.receive():
                if isinstance(told, elastic_messages.Leave):
                    raise LeaveError(told.why)

    def report_nodes(self, lines: list[str], *, is_news: bool) -> None:
        """Report the status of the other nodes if it has changed."""
        if lines != self._reported:
            self._reported = lines
            self.send(events.Nodes(lines=lines, is_news=is_news))


class ElasticAgent(api.SimpleElasticAgent):
    """Torch elastic's agent, which starts and stops this node's ranks through our own agent."""

    def __init__(self, order: messages.ForkElastic, connection: AgentConnection) -> None:
        super().__init__(_spec(order, connection))
        self.elsewhere: messages.Failure | None = None  # the last one on another node that stopped the ranks here
        self._connection = connection
        self._order = order
        self._meeting = order.options.meeting
        self._patience = Patience()
        self._nodes: NodeRound | None = None
        self._here = NodeStatus(state="starting", ranks=order.world_size)
        self._failed_s = 0.0
        self._states: dict[int, str] = {}
        self._listening: socket.socket | None = None
        self._master = (self._meeting.host, 0)
        self._attempt = 0
        self._answer_due_s: float | None = None
        self._ranks_are_running = False
        self._are_stopped = False  # because of another node, which is no failure of these ranks

    @property
    def _restarts(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    # Meeting -------------------------------------------------------------------------------------------------------

    def _rendezvous(self, worker_group: api.WorkerGroup) -> None:
        deadline_s = time.monotonic() + self._meeting.timeout_s
        self._nodes, self._states = None, {}
        while True:
            try:
                if self._meeting.backend == "static":
                    super()._rendezvous(worker_group)
                else:
                    with rendezvous.refusals(self._meeting):
                        super()._rendezvous(worker_group)
            except GoneError as gone:
                # A node that was lost during the rendezvous may come back. A run with restarts waits for it.
                if self._worker_group.spec.max_restarts == 0 or time.monotonic() > deadline_s:
                    raise RefusedError(str(gone), fix="launch it on all nodes again") from None
            else:
                return

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: api.WorkerSpec
    ) -> list[api.Worker]:
        meeting = self._meeting
        if group_world_size < meeting.num_nodes:
            raise rendezvous.without_others(group_world_size, meeting)
        guarded = Guarded(store, self._patience, meeting.silence_s, "The node that leads the others")
        self._meet(guarded, group_rank, group_world_size)
        assign: Callable[..., list[api.Worker]] = super()._assign_worker_ranks
        try:
            return self._patience.call(lambda: assign(store, group_rank, group_world_size, spec), _MEETING_S)
        except (RuntimeError, TimeoutError) as error:
            raise GoneError("A node has gone while all were meeting.") from error

    def _meet(self, store: Guarded, rank: int, size: int) -> None:
        """Exchange cards, agree on the number of restarts so far, and learn the address of the ranks' store."""
        meeting = self._meeting
        cards = self._shown_cards(store, rank, size)
        soon_s = time.monotonic() + _MEETING_S
        start = nodes.agree_on_start(store, rank, cards, soon_s)
        if start is None:
            raise rendezvous.place_taken(meeting)
        self._remaining_restarts = max(self._worker_group.spec.max_restarts - start.restarts, 0)
        if rank == 0:
            here = environment.address_towards(meeting.host, meeting.port)
            self._listening = _listening(meeting.host if meeting.backend == "static" else here)
            self._master = self._listening.getsockname()[:2]
            store.set("master", f"{self._master[1]} {self._master[0]}".encode())
        else:
            port, _, host = nodes.wait_for(store, "master", soon_s).decode().partition(" ")
            self._listening, self._master = None, (host, int(port))
        self._here = NodeStatus(state="starting", ranks=self._order.world_size)
        self._nodes = NodeRound(store, rank, cards, meeting.silence_s)

    def _shown_cards(self, store: Guarded, rank: int, size: int) -> dict[int, nodes.Card]:
        meeting = self._meeting
        card = nodes.Card(
            num_nodes=meeting.num_nodes,
            num_processes=self._order.world_size,
            max_restarts=self._worker_group.spec.max_restarts,
            python=platform.python_version(),
            torch=str(torch.__version__),
            notebook_accel=notebook_accel.VERSION,
            training=self._order.options.training,
            host=socket.gethostname(),
            restarts=self._restarts,
            token=os.urandom(8).hex(),
        )
        try:
            return nodes.show_cards(
                store,
                rank,
                size,
                card,
                deadline_s=time.monotonic() + meeting.timeout_s,
                waits_for=lambda missing: self._connection.report_wait(rendezvous.waiting_for(missing, meeting)),
            )
        except nodes.MisfitError as misfit:
            with contextlib.suppress(GoneError):  # the other nodes need this node's card to find the same misfit
                nodes.leave(store, rank, range(size), time.monotonic() + _LEAVING_S, serves=self._serves(rank))
            raise RefusedError(str(misfit), fix="launch the same, with the same packages, on all nodes") from None
        except TimeoutError as late:
            raise rendezvous.not_there(late.args[0], meeting) from None

    def _serves(self, rank: int) -> bool:
        """Return whether the nodes' store may end with this process."""
        return rank == 0 or self._meeting.backend != "static"

    # Ranks ---------------------------------------------------------------------------------------------------------

    def _start_workers(self, worker_group: api.WorkerGroup) -> dict[int, int]:
        self._attempt += 1
        start = elastic_messages.StartRanks(
            attempt=self._attempt,
            places=[self._place(worker_group, worker) for worker in worker_group.workers],
            restarts=self._restarts,
            cause=self.elsewhere,
        )
        if self._listening is None:
            self._connection.send(start)
        else:
            with self._listening as listening:
                self._connection.send(start, (listening.fileno(),))
        self.elsewhere, self._ranks_are_running, self._are_stopped = None, True, False
        self._answer_due_s = time.monotonic() + _ANSWER_S
        self._here = NodeStatus(state="running", ranks=self._order.world_size)
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _place(self, group: api.WorkerGroup, worker: api.Worker) -> tuple[RankPlace, dict[str, str]]:
        """Return a rank's place, and the other environment variables that torchrun sets."""
        spec, size = group.spec, group.spec.local_world_size
        place = RankPlace(worker.global_rank, worker.world_size, worker.local_rank, size, *self._master)
        variables = {
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_NAME": spec.role,
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        }
        address = environment.address_towards(self._meeting.host, self._meeting.port)
        if interface := environment.interface_of(address):
            variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        return place, variables

    def _monitor_workers(self, worker_group: api.WorkerGroup) -> api.RunResult:
        self._take_messages()
        if self._nodes is not None:
            try:
                self._nodes.pulse(self._here)
            except GoneError as gone:
                self.elsewhere = messages.Failure(what=str(gone))
                if isinstance(worker_group.spec.rdzv_handler, rendezvous.Static):
                    worker_group.spec.rdzv_handler.forget_store()
                return api.RunResult(api.WorkerState.FAILED)
            self._look_around(self._nodes)
        if self.elsewhere is not None or self._has_failed_for_good():
            return api.RunResult(api.WorkerState.FAILED)
        others = {} if self._nodes is None else self._nodes.others
        states = [self._here.state, *("" if status is None else status.state for status in others.values())]
        if all(state == "finished" for state in states):
            nothing = {worker.global_rank: None for worker in worker_group.workers}
            return api.RunResult(api.WorkerState.SUCCEEDED, nothing)
        return api.RunResult(api.WorkerState.HEALTHY)

    def _take_messages(self) -> None:
        for told in self._connection.receive():
            if isinstance(told, elastic_messages.Leave):
                self._end_everywhere(told.why)
                self.leave()
                raise LeaveError(told.why)
            if told.attempt != self._attempt:
                continue
            if isinstance(told, elastic_messages.RanksStand):
                self._here = msgspec.structs.replace(self._here, steps=told.steps)
                self._answer_due_s = self._answer_due_s if self._are_stopped else None
            elif isinstance(told, elastic_messages.RanksFinished):
                self._here = msgspec.structs.replace(self._here, state="finished")
            else:
                self._ranks_are_running, self._failed_s, self._answer_due_s = False, time.monotonic(), None
                if not self._are_stopped:
                    self._here = msgspec.structs.replace(self._here, state="failed", failure=told.failure or _LOSS)
        if self._answer_due_s is not None and time.monotonic() > self._answer_due_s:
            what = "ended" if self._are_stopped else "started"
            text = f"The ranks were told to be {what}, and nothing has come of it for {_ANSWER_S:g} s."
            self._end_everywhere(text)
            raise RefusedError(text, why="A process that the system can't end keeps the others waiting.")

    def _end_everywhere(self, why: str) -> None:
        """Set this node's last report, which tells the other nodes not to restart."""
        stopped = messages.Failure(what=why, is_wanted=True)
        self._here = msgspec.structs.replace(self._here, state="failed", failure=stopped)

    def _look_around(self, around: NodeRound) -> None:
        """Read the other nodes' status: adopt their failures, and report changes to the agent."""
        failures = []
        for rank, status in around.others.items():
            if status is not None and status.state == "failed" and status.failure is not None:
                failures.append(msgspec.structs.replace(status.failure, where=around.name(rank)))
        is_only_lost = self._here.state == "failed" and self._here.failure is not None and self._here.failure.lost_peer
        for failure in sorted(failures, key=lambda failure: (not failure.is_wanted, failure.lost_peer)):
            if self._here.state != "failed" or (is_only_lost and not failure.lost_peer) or failure.is_wanted:
                self.elsewhere = self.elsewhere or failure
            if failure.is_wanted:
                self._remaining_restarts = 0
        states: dict[int, str] = {
            rank: status.state if status is not None else "starting" for rank, status in around.others.items()
        }
        is_news, self._states = states != self._states, states
        lines = [_in_words(around.name(rank), status) for rank, status in around.others.items()]
        self._connection.report_nodes(lines, is_news=is_news)

    def _has_failed_for_good(self) -> bool:
        """Return whether ranks here have failed, and other nodes had time to report a cause that lies with them."""
        if self._here.state != "failed" or self._here.failure is None:
            return False
        waits = self._nodes is not None and self._here.failure.lost_peer
        # A node that was killed reports nothing, and is noticed by its silence.
        return not waits or time.monotonic() > self._failed_s + _CAUSE_S + self._meeting.silence_s

    def _stop_workers(self, worker_group: api.WorkerGroup) -> None:  # noqa: ARG002 - torch elastic passes it
        if self._ranks_are_running:
            self._are_stopped = True
            self._answer_due_s = time.monotonic() + self._order.grace_s + _ANSWER_S
            self._connection.send(elastic_messages.StopRanks(attempt=self._attempt))
        while self._ranks_are_running:  # our agent ends the ranks, finally by SIGKILL
            self._take_messages()
            with contextlib.suppress(GoneError):
                if self._nodes is not None:
                    self._nodes.pulse(self._here)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Do nothing: our agent ends the ranks when the run ends."""

    def _exit_barrier(self) -> None:
        """Do nothing: ``_monitor_workers`` reports success only when the ranks of all nodes have finished."""

    def leave(self) -> None:
        """Send this node's last report to the others, and close the rendezvous."""
        handler = self._worker_group.spec.rdzv_handler
        if self._nodes is not None and self._meeting.backend != "static":
            with contextlib.suppress(RuntimeError, TimeoutError):
                self._patience.call(handler.shutdown, _LEAVING_S)
        around, self._nodes = self._nodes, None
        if around is not None:
            with contextlib.suppress(GoneError):
                around.pulse(self._here)
                around.leave(time.monotonic() + _LEAVING_S, serves=self._serves(around.rank))


def _in_words(name: str, status: NodeStatus | None) -> str:
    if status is None:
        return f"{name}: starting"
    ranks = "1 rank" if status.ranks == 1 else f"{status.ranks} ranks"
    words = f"{name}: {ranks} {status.state}"
    if status.steps is not None:
        least, most = status.steps
        words += f", step {least:,}" if least == most else f", steps {least:,} to {most:,}"
    if status.state == "failed" and status.failure is not None:
        words += f": {status.failure.what}"
    return words


def _listening(host: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family, backlog=4096)
    except OSError as error:
        raise RefusedError(f"A port for the ranks' store can't be used: {error.strerror}.") from None


def run(order: messages.ForkElastic, descriptors: list[int]) -> int:
    """Run the elastic process and return its exit status. The descriptors came with the order."""
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    # SIGTERM stays ignored, as in the template: the agent ends this process when it has stopped the ranks.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # Our ranks have their own store. If torch elastic shared its store with them, a node that replaces a lost one would
    # wait for ever for an address that is written in the first round only (seen with torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    api._get_fq_hostname = socket.gethostname  # torch elastic's events look up the full name, which can take long
    connection = AgentConnection(Connection.from_descriptor(descriptors[0]), order)
    try:
        connection.send(_run(order, connection))
    except (ClosedError, LeaveError):  # the agent has gone with its ranks, or ends them itself
        return 1
    return 0


def _run(order: messages.ForkElastic, connection: AgentConnection) -> elastic_messages.Over:
    agent: ElasticAgent | None = None
    try:
        agent = ElasticAgent(order, connection)
        result = agent.run()
        has_succeeded = result is not None and not result.is_failed()
        return elastic_messages.Over(has_succeeded=has_succeeded, failure=agent.elsewhere)
    except RefusedError as refused:
        return elastic_messages.Over(refusal=refused.broken)
    except (ClosedError, LeaveError):
        raise
    except Exception as error:  # noqa: BLE001 - torch elastic raises many kinds
        text = f"The process that decides about this run's restarts has failed: {type(error).__name__}: {error}"
        return elastic_messages.Over(refusal=messages.Broken(text=text, why=traceback.format_exc()))
    finally:
        if agent is not None:
            agent.leave()


def _spec(order: messages.ForkElastic, connection: AgentConnection) -> api.WorkerSpec:
    options, meeting = order.options, order.options.meeting
    handler: RendezvousHandler
    if meeting.backend == "static":
        handler = rendezvous.Static(options, Patience(), connection.report_wait)
    else:
        connection.report_wait(f"waiting for {meeting.num_nodes} nodes at {meeting.endpoint}")
        handler = rendezvous.dynamic(options, connection.report_wait)
    return api.WorkerSpec(
        role=_ROLE,
        local_world_size=order.world_size,
        rdzv_handler=handler,
        entrypoint="ranks",  # appears only in torch elastic's events, which nobody reads
        max_restarts=options.max_restarts,
        # Torch elastic's sleep before each ``_monitor_workers``, which itself waits for our agent's messages.
        monitor_interval=_SHORTEST_S,
    )

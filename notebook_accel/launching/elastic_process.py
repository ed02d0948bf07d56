"""The elastic process of a run: torch elastic's agent and its rendezvous, with ranks that our agent starts and stops.

Nothing here forks: it has the threads of torch's stores. It is itself a fork of the template, and ends with it. torch
elastic's own workers, signal handlers and logs stay out of it: the ranks are what they are in every other run.

The only module of the launching room that imports torch; nothing but the template, by its name, imports it.
"""

from __future__ import annotations

import signal
import socket
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from notebook_accel.channel import ClosedError, Connection
from notebook_accel.environment import RankPlace
from notebook_accel.launching import elastic_messages, messages

__all__ = ["run"]

_ROLE = "default_role"  # as torch elastic's launcher calls it
_LOOPBACK = "127.0.0.1"
_SHORTEST_S = 1e-3


class _RefusedError(Exception):
    """The run can't be started, for the reason that the user is told."""

    def __init__(self, broken: messages.Broken) -> None:
        super().__init__(broken.text)
        self.broken = broken


class _Alone(RendezvousHandler):
    """The rendezvous of one node: there is nobody to meet, and no port to meet at.

    Args:
        run_id: The run's name.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store = HashStore()
        self._round = 0

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(_LOOPBACK, 0))

    def get_backend(self) -> str:
        return "static"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class _ElasticAgent(api.SimpleElasticAgent):
    """Starts and stops the ranks of this node through the agent.

    Args:
        spec: As torch elastic has it.
        line: To the agent.
        order: What the agent has ordered.
    """

    def __init__(self, spec: api.WorkerSpec, line: Connection, order: messages.ForkElastic) -> None:
        super().__init__(spec)
        self._line = line
        self._order = order
        self._listening: socket.socket | None = None
        self._master = (_LOOPBACK, 0)
        self._are_there = False  # ranks

    @property
    def _restarts(self) -> int:
        return int(self._worker_group.spec.max_restarts - self._remaining_restarts)

    def _rendezvous(self, worker_group: api.WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        self._listening = _listening(self._order.port)
        self._master = self._listening.getsockname()[:2]

    def _start_workers(self, worker_group: api.WorkerGroup) -> dict[int, int]:
        assert self._listening is not None
        places = [self._place(worker_group, worker) for worker in worker_group.workers]
        with self._listening as listening:
            start = elastic_messages.StartRanks(places=places, restarts=self._restarts)
            self._line.send(messages.encode(start), [listening.fileno()])
        self._are_there = True
        return {worker.local_rank: worker.global_rank for worker in worker_group.workers}

    def _place(self, group: api.WorkerGroup, worker: api.Worker) -> tuple[RankPlace, dict[str, str]]:
        """A rank's place, and the variables with which torchrun says the rest."""
        spec = group.spec
        place = RankPlace(
            worker.global_rank,
            worker.world_size,
            worker.local_rank,
            spec.local_world_size,
            *self._master,
        )
        return place, {
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_NAME": spec.role,
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "TORCHELASTIC_RESTART_COUNT": str(self._restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        }

    def _monitor_workers(self, worker_group: api.WorkerGroup) -> api.RunResult:
        for message in self._line.receive():
            told = elastic_messages.for_elastic.decode(message.body)
            if isinstance(told, elastic_messages.RanksFinished):
                nothing = {worker.global_rank: None for worker in worker_group.workers}
                return api.RunResult(api.WorkerState.SUCCEEDED, nothing)
            self._are_there = False
            return api.RunResult(api.WorkerState.FAILED)
        return api.RunResult(api.WorkerState.HEALTHY)

    def _stop_workers(self, worker_group: api.WorkerGroup) -> None:  # noqa: ARG002 - torch elastic gives it
        if self._are_there:
            self._line.send(messages.encode(elastic_messages.StopRanks()))
        while self._are_there:  # the agent ends them, by SIGKILL in the end
            for message in self._line.receive():
                told = elastic_messages.for_elastic.decode(message.body)
                self._are_there = not isinstance(told, elastic_messages.RanksEnded)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Nothing: what is still there, the agent ends with the run."""


def _listening(port: int) -> socket.socket:
    """Where the ranks' store is to be, on loopback."""
    try:
        return socket.create_server((_LOOPBACK, port), backlog=4096)
    except OSError as error:
        text = f"The port {port} for the ranks' store can't be used: {error.strerror}."
        raise _RefusedError(messages.Broken(text=text)) from None


def _spec(order: messages.ForkElastic) -> api.WorkerSpec:
    options = order.options
    return api.WorkerSpec(
        role=_ROLE,
        local_world_size=order.world_size,
        rdzv_handler=_Alone(options.run_id),
        entrypoint="ranks",  # in events that nobody takes
        max_restarts=options.max_restarts,
        # It sleeps so long before each look; the look itself waits for what the agent says.
        monitor_interval=_SHORTEST_S,
    )


def run(order: messages.ForkElastic, descriptors: list[int]) -> int:
    """The process; its exit status. The descriptor is that of the order."""
    for number in (signal.SIGTERM, signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    api._get_fq_hostname = socket.gethostname  # its events have a full name, and to ask for that can take long
    line = Connection.from_descriptor(descriptors[0])
    line.set_receive_deadline(order.options.monitor_interval_s)
    try:
        line.send(messages.encode(_run(order, line)))
    except ClosedError:  # the agent has gone, and ends its ranks so
        return 1
    return 0


def _run(order: messages.ForkElastic, line: Connection) -> elastic_messages.Over:
    try:
        result: Any = _ElasticAgent(_spec(order), line, order).run()
    except _RefusedError as refused:
        return elastic_messages.Over(refusal=refused.broken)
    return elastic_messages.Over(has_succeeded=result is not None and not result.is_failed())

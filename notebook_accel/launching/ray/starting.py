"""Starts the parts of a run on the nodes that the cluster has reserved for it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from notebook_accel.environment import RankPlace
from notebook_accel.errors import LaunchError, ProcessStartError
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.ray import host, losses
from notebook_accel.launching.ray.cluster import Cluster, Node, Placement
from notebook_accel.launching.ray.connection import Answer
from notebook_accel.protocol import ray_messages
from notebook_accel.protocol.agent_messages import RankDump
from notebook_accel.protocol.events import Event

__all__ = ["NodePart", "Starter"]

_START_DEADLINE_S = 120.0
_INSTALL_DEADLINE_S = 660.0  # of a runtime environment; Ray itself gives up after 600 s
_TRANSFER_DEADLINE_S = 1800.0  # of the payload; Ray notices a node that has gone before


@dataclasses.dataclass(eq=False)
class NodePart:
    """What is on one node.

    Attributes:
        node: The node.
        first: The rank that is local rank 0 there.
        actor: Its host.
        dumps: Where its ranks stand, until those of the other nodes are there.
        asked_s: When it was asked last, in seconds of ``time.monotonic()``.
        heard_s: When it has answered last, in seconds of ``time.monotonic()``.
        has_ended: Whether nothing more will come.
    """

    node: Node
    first: int
    actor: Any
    dumps: list[RankDump] | None = None
    asked_s: float = 0.0
    heard_s: float = 0.0
    has_ended: bool = False
    _offset_s: float | None = None  # what has to be added to the node's times

    @property
    def ranks(self) -> range:
        """The ranks that are there."""
        return range(self.first, self.first + len(self.node.bundles))

    def heard(self, there_s: float, now_s: float) -> None:
        """Takes an answer, and learns from it how far the node's clock is from this one.

        The answer was sent after it was asked for and before now, so each one bounds the offset on both sides. An
        offset within the bounds stays as it is: a late answer doesn't move the node's events. One that is outside them,
        because clocks drift or a machine was suspended, goes to the nearer bound.

        Args:
            there_s: The node's ``time.monotonic()`` as it answered.
            now_s: The time here.
        """
        self.heard_s = now_s
        least_s, most_s = self.asked_s - there_s, now_s - there_s
        # The first one is most likely close to the latter: the node waits for news, and sends them at once.
        known_s = most_s if self._offset_s is None else self._offset_s
        self._offset_s = max(least_s, min(known_s, most_s))

    def by_our_clock(self, event: Event) -> Event:
        """An event of the node with its time in seconds of this machine's ``time.monotonic()``."""
        assert self._offset_s is not None, "events come with answers"
        return msgspec.structs.replace(event, time_s=event.time_s + self._offset_s)


class Starter:
    """Starts one attempt of a run.

    Args:
        job: The run.
        cluster: Where.
        placement: What it has reserved there.
        is_wanted: Whether anybody still wants it. No wait goes on without, but for that until ranks are there, who can
            then be told.
    """

    def __init__(self, job: Job, cluster: Cluster, placement: Placement, is_wanted: Callable[[], bool]) -> None:
        self._job = job
        self._cluster = cluster
        self._placement = placement
        self._is_wanted = is_wanted
        self._ask = cluster.connection.ask
        self._error: Any = cluster.ray.exceptions.RayError

    def hosts(self) -> list[NodePart]:
        """A host on each node, which is there and has the notebook's versions.

        Raises:
            LaunchError: One can't be started, or has others.
            SupervisorLostError: A node, or the cluster, has gone.
            NotWantedError: Nobody wants it any more.
        """
        parts_of_nodes: list[NodePart] = []
        first = 0
        for node in self._placement.nodes:
            parts_of_nodes.append(NodePart(node, first, self._cluster.host(node)))
            first += len(node.bundles)
        for part in parts_of_nodes:
            _refuse_differences(self._facts(part))
        return parts_of_nodes

    def launch(
        self, on_nodes: Sequence[NodePart], payload: Any, environment: Mapping[str, str], *, restarts: int, gpus: float
    ) -> None:
        """Starts the ranks.

        Args:
            on_nodes: The hosts.
            payload: Ray's reference to the sealed payload.
            environment: Variables of the launch's own.
            restarts: How often it was done before.
            gpus: How many are reserved for a rank.

        Raises:
            LaunchError: They can't be started on one of the nodes.
            SupervisorLostError: A node, or the cluster, has gone.
            NotWantedError: Nobody wants it any more.
        """
        job, store = self._job, on_nodes[0]
        asked = self._ask(lambda: store.actor.listen.remote(job.id, job.config.main_process_port or 0))
        port = self._answer(store, asked, _START_DEADLINE_S, self._is_wanted)
        options = msgspec.json.encode(job.config)
        started = []
        for number, part in enumerate(on_nodes):
            places = [
                RankPlace(rank, job.world_size, rank - part.first, len(part.ranks), store.node.address, port)
                for rank in part.ranks
            ]
            variables = {
                **environment,
                **self._gpus(part.node, gpus),
                "GROUP_RANK": str(number),
                "GROUP_WORLD_SIZE": str(len(on_nodes)),
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
            }
            encoded = ray_messages.encode(
                ray_messages.Part(job_id=job.id, name=job.name, options=options, places=places, environment=variables)
            )
            started.append(self._ask(functools.partial(part.actor.launch.remote, encoded, payload)))
        for part, answer in zip(on_nodes, started, strict=True):
            self._answer(part, answer, _TRANSFER_DEADLINE_S, lambda: True)

    def _facts(self, part: NodePart) -> ray_messages.Facts:
        """What a host says of its node. One that has died since the last run is replaced once."""
        try:
            return self._asked_for_facts(part)
        except self._cluster.ray.exceptions.RuntimeEnvSetupError as error:
            self._cluster.drop(part.actor)
            raise ProcessStartError(
                f"The runtime environment could not be set up on the node {part.node.address}.",
                why=str(error).strip(),
                fix="another runtime_env in engine_options, or install what is missing on the nodes",
            ) from None
        except (self._error, TimeoutError):
            self._cluster.drop(part.actor)
        part.actor = self._cluster.host(part.node)
        try:
            return self._asked_for_facts(part)
        except (self._error, TimeoutError) as error:
            self._cluster.drop(part.actor)
            if not self._cluster.is_alive(part.node):
                raise losses.of_host(self._cluster, part.node, "what was to start ranks there", error) from None
            raise ProcessStartError(
                f"What starts ranks on the node {part.node.address} could not be started there.",
                why=losses.last_line(error),
                fix="install notebook-accel and torch on every node, or engine_options={'runtime_env': {'pip': [...]}}",
            ) from None

    def _asked_for_facts(self, part: NodePart) -> ray_messages.Facts:
        asked = [self._ask(part.actor.facts.remote)]
        patience_s = _INSTALL_DEADLINE_S if self._cluster.has_environment else _START_DEADLINE_S
        [encoded] = self._cluster.connection.answers(asked, patience_s, self._is_wanted)
        return msgspec.msgpack.decode(encoded, type=ray_messages.Facts)

    def _answer(self, part: NodePart, asked: Answer, patience_s: float, is_wanted: Callable[[], bool]) -> Any:
        try:
            [answer] = self._cluster.connection.answers([asked], patience_s, is_wanted)
        except self._cluster.ray.exceptions.RayTaskError as error:  # it is there, and can't do it
            raise ProcessStartError(
                f"The ranks on the node {part.node.address} could not be started.", why=losses.last_line(error)
            ) from None
        except (self._error, TimeoutError) as error:
            raise losses.of_host(self._cluster, part.node, "the start of its ranks", error) from None
        return answer

    def _gpus(self, node: Node, gpus: float) -> dict[str, str]:
        if not gpus:
            return {}
        found = self._cluster.gpus_of(self._placement, node, gpus, self._is_wanted)
        return {"CUDA_VISIBLE_DEVICES": ",".join(found)}


def _refuse_differences(node: ray_messages.Facts) -> None:
    here = host.versions()
    for name, version in node.versions.items():
        if version != here[name]:
            raise LaunchError(
                f"The node {node.address} has {name} {version or 'not at all'}, the notebook {here[name]}.",
                why="What is sent to the ranks is read by another version than has written it.",
                fix=f"the same {name} on both, or engine_options={{'runtime_env': {{'pip': [...]}}}}",
            )

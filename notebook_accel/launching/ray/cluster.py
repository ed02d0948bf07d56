"""What a cluster has, what it reserves for the ranks, and where they then are."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from notebook_accel.errors import ConfigError, Finding, LaunchError, ProcessStartError
from notebook_accel.launching.ray import host
from notebook_accel.launching.ray.connection import Connection, NotWantedError
from notebook_accel.launching.ray.options import RayOptions

__all__ = ["Cluster", "Node", "Placement"]

_FIRST_PERIOD_S = 0.01
_LONGEST_PERIOD_S = 0.5
_FIRST_NOTICE_S = 1.0
_NOTICE_PERIOD_S = 5.0
_SEAT_DEADLINE_S = 60.0

_hosts: dict[tuple[str, str], Any] = {}  # the notebook's actors, by connection and node, and runtime environment


@dataclasses.dataclass(frozen=True)
class Node:
    """A node that ranks were placed on.

    Attributes:
        id: Ray's name for it.
        address: Where other nodes reach it.
        bundles: The reservations there, one a rank, by their numbers in the placement group.
    """

    id: str
    address: str
    bundles: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """What the cluster has reserved.

    Attributes:
        group: Ray's placement group, one bundle a rank.
        nodes: The nodes in the order of the ranks.
    """

    group: Any
    nodes: tuple[Node, ...]


class Cluster:
    """A cluster that this process is connected to.

    Args:
        connection: To it.
        options: Of the launch.
    """

    def __init__(self, connection: Connection, options: RayOptions) -> None:
        self.connection = connection
        self.ray = connection.ray
        self._options = options

    @property
    def gpus(self) -> int:
        """How many GPUs it has in all."""
        return int(self._has().get("GPU", 0))

    @property
    def has_environment(self) -> bool:
        """True if nodes first set up a runtime environment."""
        return bool(self._options.runtime_env)

    def _has(self) -> Mapping[str, float]:
        resources: Mapping[str, float] = self.connection.call(self.ray.cluster_resources)
        return resources

    def resources_of_a_rank(self, *, use_cpu: bool) -> dict[str, float]:
        """What is reserved for each rank, by Ray's names."""
        wanted = self._options
        gpus = (1.0 if self.gpus and not use_cpu else 0.0) if wanted.gpus_per_rank is None else wanted.gpus_per_rank
        cpus = (0.0 if gpus else 1.0) if wanted.cpus_per_rank is None else wanted.cpus_per_rank
        amounts = {"CPU": cpus, "GPU": gpus, **wanted.resources}
        return {name: amount for name, amount in amounts.items() if amount}

    def check(self, world_size: int, resources: Mapping[str, float]) -> tuple[Finding, ...]:
        """What it could not reserve, whoever else uses it."""
        has = self._has()
        return tuple(
            Finding(
                f"{world_size} ranks need {amount * world_size:g} {name}, and the cluster has {has.get(name, 0):g}.",
                "engine='ray' reserves it for each rank.",
                "fewer ranks, fewer of it for each in engine_options, or more nodes",
            )
            for name, amount in resources.items()
            if amount * world_size > has.get(name, 0)
        )

    def reserve(
        self,
        world_size: int,
        resources: Mapping[str, float],
        *,
        notice: Callable[[str], None],
        is_wanted: Callable[[], bool],
    ) -> Placement:
        """Waits until the cluster has reserved what the ranks need.

        Args:
            world_size: Number of ranks.
            resources: What each needs.
            notice: Is told, now and then, what is missing.
            is_wanted: Whether anybody still waits for it.

        Raises:
            LaunchError: It can't have that, or not in time.
            NotWantedError: Nobody does.
        """
        group = self.connection.call(lambda: self._group(world_size, resources))
        try:
            nodes = self._wait_for(group, world_size, lambda: self._missing(world_size, resources), notice, is_wanted)
            self._refuse_other_nodes(len(nodes))
        except BaseException:
            self.release(group)
            raise
        return Placement(group, nodes)

    def _wait_for(
        self,
        group: Any,
        world_size: int,
        missing: Callable[[], str],
        notice: Callable[[str], None],
        is_wanted: Callable[[], bool],
    ) -> tuple[Node, ...]:
        wait_s = self._options.wait_s
        deadline_s = time.monotonic() + wait_s
        next_notice_s = time.monotonic() + _FIRST_NOTICE_S
        period_s = _FIRST_PERIOD_S
        while True:
            nodes = self.connection.call(lambda: self._nodes(group))
            if nodes:
                return nodes
            time.sleep(period_s)
            period_s = min(2 * period_s, _LONGEST_PERIOD_S)
            now_s = time.monotonic()
            if not is_wanted():
                raise NotWantedError
            if now_s > deadline_s:
                raise ProcessStartError(
                    f"The cluster could not reserve what {world_size} ranks need within {wait_s:g} s.",
                    why=missing(),
                    fix="fewer ranks, or other engine_options: strategy, cpus_per_rank, gpus_per_rank, wait_s",
                )
            if now_s > next_notice_s:
                next_notice_s = now_s + _NOTICE_PERIOD_S
                notice(f"waiting for the cluster: {missing()}")

    def _refuse_other_nodes(self, count: int) -> None:
        wanted = self._options.nodes
        if wanted is not None and count != wanted:
            raise LaunchError(
                f"The ranks would be on {count} nodes, and nodes={wanted} was asked for.",
                why=f"Ray has placed them so with strategy={self._options.strategy!r}.",
                fix="strategy='SPREAD' for more nodes, 'PACK' for fewer, or another number of ranks",
            )

    def release(self, group: Any) -> None:
        """Gives back what was reserved."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            self.connection.call(lambda: self._placed("remove_placement_group", group))

    def host(self, node: Node) -> Any:
        """The notebook's actor on a node, which may still have to start. It stays there for the next run.

        What the ranks need is reserved by the placement group; the actor itself needs next to nothing.

        Raises:
            ConfigError: Ray takes no such runtime environment.
        """
        key = (
            f"{self.connection.job_id} {node.id}",
            json.dumps(self._options.runtime_env, sort_keys=True, default=str),
        )
        if key not in _hosts:
            scheduling = importlib.import_module("ray.util.scheduling_strategies")
            options: dict[str, Any] = {
                "num_cpus": 0,
                "scheduling_strategy": scheduling.NodeAffinitySchedulingStrategy(node.id, soft=False),
                "max_concurrency": 16,
                "max_restarts": 0,
            }
            if self._options.runtime_env:
                options["runtime_env"] = self._options.runtime_env
            try:
                start = self.ray.remote(host.NodeHost).options(**options).remote
                _hosts[key] = self.connection.call(lambda: start(node.address))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"The engine option runtime_env={self._options.runtime_env} can't be used.",
                    why=str(error),
                    fix="for a folder of this machine, ray.init(runtime_env=...) in the notebook before the launch",
                ) from None
        return _hosts[key]

    def drop(self, actor: Any) -> None:
        """Ends a host; the next run starts another one."""
        for key in [key for key, known in _hosts.items() if known is actor]:
            del _hosts[key]
        with contextlib.suppress(Exception):  # it is gone already
            self.connection.call(lambda: self.ray.kill(actor))

    def gpus_of(self, placement: Placement, node: Node, gpus: float, is_wanted: Callable[[], bool]) -> list[str]:
        """The GPUs that Ray has reserved for the ranks on a node. Only an actor in a reservation is told.

        Raises:
            NotWantedError: Nobody waits for them any more.
            TimeoutError: They could not be asked in time.
        """
        seats: list[Any] = self.connection.call(lambda: self._seats(placement, node, gpus))
        try:
            found = self.connection.answers(
                [self.connection.ask(seat.gpus.remote) for seat in seats], _SEAT_DEADLINE_S, is_wanted
            )
        finally:
            for seat in seats:
                self.drop(seat)
        return list(dict.fromkeys(gpu for of_rank in found for gpu in of_rank))

    def _seats(self, placement: Placement, node: Node, gpus: float) -> list[Any]:
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        seat = self.ray.remote(_Seat)
        return [
            seat.options(
                num_cpus=0,
                num_gpus=gpus,
                scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(placement.group, bundle),
            ).remote()
            for bundle in node.bundles
        ]

    def is_alive(self, node: Node) -> bool:
        """Return whether the cluster still has a node."""
        return any(known["NodeID"] == node.id and known["Alive"] for known in self.connection.call(self.ray.nodes))

    def _group(self, world_size: int, resources: Mapping[str, float]) -> Any:
        bundles = [dict(resources) for _ in range(world_size)]
        return self._placed("placement_group", bundles, strategy=self._options.strategy)

    def _nodes(self, group: Any) -> tuple[Node, ...]:
        """Where the reservations are; nothing until they are, or if one of the nodes has just gone."""
        table: dict[str, Any] = self._placed("placement_group_table", group)
        if table.get("state") != "CREATED":
            return ()
        of_bundles: dict[int, str] = table["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self.ray.nodes() if node["Alive"]}
        if not addresses.keys() >= set(of_bundles.values()):
            return ()
        by_node: dict[str, list[int]] = {}
        for bundle, node_id in sorted(of_bundles.items()):
            by_node.setdefault(node_id, []).append(bundle)
        return tuple(Node(node_id, addresses[node_id], tuple(bundles)) for node_id, bundles in by_node.items())

    def _missing(self, world_size: int, resources: Mapping[str, float]) -> str:
        free = self.connection.call(self.ray.available_resources)
        amounts = ", ".join(
            f"{amount * world_size:g} {name} needed, {free.get(name, 0):g} free" for name, amount in resources.items()
        )
        is_there = all(amount * world_size <= free.get(name, 0) for name, amount in resources.items())
        return f"{amounts}, but not as strategy={self._options.strategy!r} wants it" if is_there else amounts

    def _placed(self, what: str, *args: Any, **options: Any) -> Any:
        """What a function of ``ray.util.placement_group`` returns."""
        if self.connection.is_driver:
            return getattr(importlib.import_module("ray.util.placement_group"), what)(*args, **options)
        key = (self.connection.job_id, "placing")
        if key not in _hosts:
            _hosts[key] = self.ray.remote(_Deputy).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
        return self.ray.get(_hosts[key].placed.remote(what, args, options))


class _Deputy:
    """Calls Ray for a notebook that is connected by Ray Client, which would have a new process do so each time."""

    def placed(self, what: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """What a function of ``ray.util.placement_group`` returns."""
        return getattr(importlib.import_module("ray.util.placement_group"), what)(*args, **options)


class _Seat:
    """An actor in a rank's reservation, as long as it takes to ask which GPUs are reserved there."""

    def gpus(self) -> list[str]:
        """Their ids, as ``CUDA_VISIBLE_DEVICES`` has them."""
        ids: dict[str, list[str]] = importlib.import_module("ray").get_runtime_context().get_accelerator_ids()
        return ids.get("GPU", [])

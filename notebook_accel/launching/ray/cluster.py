"""A Ray cluster, as the kernel uses it: a launch's options, its reservations, and its actors on the nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import yaml

from notebook_accel.errors import ConfigError, Finding, LaunchError, ProcessStartError
from notebook_accel.launching.ray.connection import ClusterConnection
from notebook_accel.launching.remote.host import NodeHost
from notebook_accel.launching.remote.run import AgentSlot, NotWantedError

_FIRST_PERIOD_S = 0.01
_LONGEST_PERIOD_S = 0.5
_FIRST_NOTICE_S = 1.0
_NOTICE_PERIOD_S = 5.0
_GPU_DEADLINE_S = 60.0


_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class RayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for placing the ranks.

    Attributes:
        address: The cluster: ``auto`` for the one that this machine belongs to or ``RAY_ADDRESS`` names, ``host:port``,
            or ``ray://host:port``. Ignored if the notebook is connected to a cluster already.
        cpus_per_rank: CPUs to reserve for each rank. Default: one for a rank without a GPU.
        gpus_per_rank: GPUs to reserve for each rank. Default: one if the cluster has any.
        resources: Other resources to reserve for each rank, by Ray's names.
        strategy: The spread of the ranks over nodes: a strategy of Ray's placement groups.
        nodes: Required number of nodes; ``None`` for any.
        runtime_env: Ray's runtime environment for the nodes: variables, pip packages, a working directory's URI.
        wait_s: Longest wait for resources that are in use, in seconds.
    """

    address: str = "auto"
    cpus_per_rank: _NotNegative | None = None
    gpus_per_rank: _NotNegative | None = None
    resources: dict[str, float] = {}
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    nodes: Annotated[int, msgspec.Meta(ge=1)] | None = None
    runtime_env: dict[str, Any] = {}
    wait_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0


def read_options(pairs: Sequence[str]) -> RayOptions:
    """Parse options from texts such as ``strategy=SPREAD``, whose values are YAML.

    Raises:
        ConfigError: An option doesn't exist, or can't have this value.
    """
    given: dict[str, Any] = {}
    known = RayOptions.__struct_fields__
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if name not in known or not equals:
            raise ConfigError(
                f"The engine option {pair!r} is not known.", fix=f"NAME=VALUE, where NAME is one of {', '.join(known)}"
            )
        try:
            given[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            given[name] = text
    try:
        return msgspec.convert(given, RayOptions)
    except msgspec.ValidationError as error:
        what, _, where = str(error).rpartition(" - at `$.")
        name = where.rstrip("`").partition("[")[0]
        raise ConfigError(f"The engine option {name}={given.get(name)!r} can't be used.", why=f"{what}.") from None


@dataclasses.dataclass(frozen=True)
class Node:
    """A node that ranks were placed on."""

    id: str  # Ray's id of the node
    address: str  # at which other nodes reach it
    bundles: tuple[int, ...]  # numbers of the placement group's bundles on the node, one per rank


@dataclasses.dataclass(frozen=True)
class Placement:
    """A reservation for a run: Ray's placement group, one bundle per rank, and its nodes in the order of the ranks."""

    group: Any
    nodes: tuple[Node, ...]


@dataclasses.dataclass(eq=False)
class Host:
    """The actor that runs the notebook's ``NodeHost`` on a node, and the slot of its agent."""

    actor: Any
    slot: AgentSlot = dataclasses.field(default_factory=AgentSlot)


_hosts: dict[tuple[str, str, str], Host] = {}  # by connection, node and runtime environment
_deputies: dict[str, Any] = {}  # by connection


class Cluster:
    """A connected cluster, and the options of a launch on it."""

    def __init__(self, connection: ClusterConnection, options: RayOptions) -> None:
        self.connection = connection
        self.ray = connection.ray
        self._options = options

    @property
    def gpus(self) -> int:
        """Number of GPUs in the cluster."""
        return int(self._has().get("GPU", 0))

    @property
    def has_environment(self) -> bool:
        """True if the nodes must set up a runtime environment."""
        return bool(self._options.runtime_env)

    def _has(self) -> Mapping[str, float]:
        resources: Mapping[str, float] = self.connection.call(self.ray.cluster_resources)
        return resources

    def resources_of_a_rank(self, *, use_cpu: bool) -> dict[str, float]:
        """Return the resources to reserve for each rank, by Ray's names."""
        wanted = self._options
        gpus = (1.0 if self.gpus and not use_cpu else 0.0) if wanted.gpus_per_rank is None else wanted.gpus_per_rank
        cpus = (0.0 if gpus else 1.0) if wanted.cpus_per_rank is None else wanted.cpus_per_rank
        amounts = {"CPU": cpus, "GPU": gpus, **wanted.resources}
        return {name: amount for name, amount in amounts.items() if amount}

    def check(self, world_size: int, resources: Mapping[str, float]) -> tuple[Finding, ...]:
        """Return findings about resources that the cluster lacks even when nobody else uses it."""
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

    # Reservations ---------------------------------------------------------------------------------------------------

    def reserve(
        self,
        world_size: int,
        resources: Mapping[str, float],
        *,
        notice: Callable[[str], None],
        is_wanted: Callable[[], bool],
    ) -> Placement:
        """Wait until the cluster has reserved these resources for each rank.

        ``notice`` is called now and then with the missing resources in words; the wait ends when ``is_wanted`` returns
        false.

        Raises:
            LaunchError: The cluster can't reserve the resources, or not in time.
            NotWantedError: ``is_wanted`` has returned false.
        """
        bundles = [dict(resources) for _ in range(world_size)]
        strategy = self._options.strategy
        group = self.connection.call(lambda: self._placement_call("placement_group", bundles, strategy=strategy))
        try:
            return Placement(group, self._wait_for(group, world_size, resources, notice, is_wanted))
        except BaseException:
            self.release(group)
            raise

    def _wait_for(
        self,
        group: Any,
        world_size: int,
        resources: Mapping[str, float],
        notice: Callable[[str], None],
        is_wanted: Callable[[], bool],
    ) -> tuple[Node, ...]:
        wait_s = self._options.wait_s
        deadline_s = time.monotonic() + wait_s
        next_notice_s = time.monotonic() + _FIRST_NOTICE_S
        period_s = _FIRST_PERIOD_S
        while True:
            nodes = self.connection.call(lambda: self._nodes(group))
            if nodes and self._options.nodes not in (None, len(nodes)):
                raise LaunchError(
                    f"The ranks would be on {len(nodes)} nodes, and nodes={self._options.nodes} was asked for.",
                    why=f"Ray has placed them so with strategy={self._options.strategy!r}.",
                    fix="strategy='SPREAD' for more nodes, 'PACK' for fewer, or another number of ranks",
                )
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
                    why=self._missing(world_size, resources),
                    fix="fewer ranks, or other engine_options: strategy, cpus_per_rank, gpus_per_rank, wait_s",
                )
            if now_s > next_notice_s:
                next_notice_s = now_s + _NOTICE_PERIOD_S
                notice(f"waiting for the cluster: {self._missing(world_size, resources)}")

    def _nodes(self, group: Any) -> tuple[Node, ...]:
        """Return the nodes of the reservations; nothing before they are made, or if one of the nodes has just gone."""
        table: dict[str, Any] = self._placement_call("placement_group_table", group)
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

    def release(self, group: Any) -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            self.connection.call(lambda: self._placement_call("remove_placement_group", group))

    def _placement_call(self, what: str, *args: Any, **options: Any) -> Any:
        """Call a function of ``ray.util.placement_group``."""
        if self.connection.is_driver:
            return _Deputy().call(what, args, options)
        key = self.connection.job_id
        if key not in _deputies:
            _deputies[key] = self.ray.remote(_Deputy).options(num_cpus=0, max_restarts=-1, max_task_retries=-1).remote()
        return self.ray.get(_deputies[key].call.remote(what, args, options))

    # Nodes ----------------------------------------------------------------------------------------------------------

    def host(self, node: Node) -> Host:
        """Return the notebook's host on a node, started if there is none. The host stays for the next run.

        The host reserves no resources: the ranks use those of the placement group.

        Raises:
            ConfigError: Ray refuses the runtime environment.
        """
        key = (
            self.connection.job_id,
            node.id,
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
                start = self.ray.remote(NodeHost).options(**options).remote
                _hosts[key] = Host(self.connection.call(lambda: start(node.address)))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"The engine option runtime_env={self._options.runtime_env} can't be used.",
                    why=str(error),
                    fix="for a folder of this machine, ray.init(runtime_env=...) in the notebook before the launch",
                ) from None
        return _hosts[key]

    def drop(self, actor: Any) -> None:
        """Kill an actor. If it is a host, the next run starts another one."""
        for key in [key for key, known in _hosts.items() if known.actor is actor]:
            del _hosts[key]
        with contextlib.suppress(Exception):  # the actor may be gone already
            self.connection.call(lambda: self.ray.kill(actor))

    def gpus_of(self, placement: Placement, node: Node, gpus: float, is_wanted: Callable[[], bool]) -> list[str]:
        """Return the GPUs that Ray has reserved for the ranks on a node. Only actors in the reservation can see them.

        Raises:
            NotWantedError: ``is_wanted`` has returned false.
            TimeoutError: The actors have not answered in time.
        """
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        actor_class = self.ray.remote(_GpuLister)

        def start() -> list[Any]:
            return [
                actor_class.options(
                    num_cpus=0,
                    num_gpus=gpus,
                    scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(placement.group, bundle),
                ).remote()
                for bundle in node.bundles
            ]

        listers = self.connection.call(start)
        try:
            asked = [self.connection.ask(lister.gpus.remote) for lister in listers]
            found = self.connection.answers(asked, _GPU_DEADLINE_S, is_wanted)
        finally:
            for lister in listers:
                self.drop(lister)
        return list(dict.fromkeys(gpu for of_rank in found for gpu in of_rank))

    def is_alive(self, node: Node) -> bool:
        return any(known["NodeID"] == node.id and known["Alive"] for known in self.connection.call(self.ray.nodes))


class _Deputy:
    """An actor that calls Ray for a notebook with Ray Client, which would start a process for each call."""

    def call(self, what: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        return getattr(importlib.import_module("ray.util.placement_group"), what)(*args, **options)


class _GpuLister:
    """A short-lived actor in a rank's reservation, which lists the reserved GPUs."""

    def gpus(self) -> list[str]:
        """Return the GPUs' ids as in ``CUDA_VISIBLE_DEVICES``."""
        ids: dict[str, list[str]] = importlib.import_module("ray").get_runtime_context().get_accelerator_ids()
        return ids.get("GPU", [])

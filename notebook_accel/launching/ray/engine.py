"""The engine for Ray clusters, which runs in the kernel: Ray places the ranks; the rest is as on one machine.

``RayRun`` implements what is Ray's own: nodes, payload and results. ``RemoteRun`` has what every cluster needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import (
    ConfigError,
    Finding,
    LaunchError,
    NotebookAccelError,
    ProcessStartError,
    SupervisorLostError,
)
from notebook_accel.launching.kernel import run_payload
from notebook_accel.launching.kernel.agent_process import agent_lost_error
from notebook_accel.launching.kernel.devices import Devices
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.ray import cluster, connection
from notebook_accel.launching.ray.cluster import Cluster, Host, Node, Placement
from notebook_accel.launching.ray.connection import Answer, last_line
from notebook_accel.launching.remote import host
from notebook_accel.launching.remote.run import NodePart, RemoteRun
from notebook_accel.payload import memory_files
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events

_PATIENCE_S = 1.0  # for which a host waits for bytes from its agent
_SILENCE_S = 30.0  # after which a host that has not answered is considered dead
_START_DEADLINE_S = 120.0
_INSTALL_DEADLINE_S = 660.0  # of a runtime environment; Ray itself gives up after 600 s
_TRANSFER_DEADLINE_S = 1800.0  # of payload and results; Ray reports a lost node earlier
_FAREWELL_S = 10.0


class RayRun(RemoteRun):
    """One run on a Ray cluster. Its sealed payload is put into the cluster's object store at once."""

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        payload: int,
        resources: Mapping[str, float],
        variables: Mapping[str, str],
    ) -> None:
        super().__init__(job, variables)
        self._cluster = cluster
        self._connection = cluster.connection
        self._payload = _put(cluster, payload)
        self._resources = resources
        self._attempt_id = ""
        self._placement: Placement | None = None
        self._on_nodes: list[tuple[Node, Host]] = []

    @contextlib.contextmanager
    def _using_nodes(self) -> Iterator[None]:
        with self._connection.used():
            yield
            self._payload = None  # a job that is kept must keep nothing in the cluster's memory

    def _is_wanted(self) -> bool:
        return self._requested_end is None

    def _notice(self, *lines: str) -> None:
        self.job.deliver(0, events.Nodes(lines=list(lines), is_news=bool(lines)))

    def _open(self, attempt_id: str) -> Sequence[NodePart]:
        job = self.job
        self._placement = self._cluster.reserve(
            job.world_size, self._resources, notice=self._notice, is_wanted=self._is_wanted
        )
        self._notice()  # clear the notice of the wait
        for node in self._placement.nodes:
            self._cluster.host(node)  # all start at the same time
        checked = [self._checked_host(node) for node in self._placement.nodes]
        self._attempt_id = attempt_id
        self._on_nodes = [(node, there) for node, (there, _) in zip(self._placement.nodes, checked, strict=True)]
        opened = []
        for number, (node, there) in enumerate(self._on_nodes):
            port = None if number else job.config.main_process_port or 0  # the first node has the ranks' store
            count = len(node.bundles)
            opened.append(self._ask(there, "open", attempt_id, job.name, job.config.log_dir, count, port))
        parts: list[NodePart] = []
        first = 0
        for node, (there, facts), answer in zip(self._placement.nodes, checked, opened, strict=True):
            agent_pid, log_folder, store_port = self._answer(node, answer, _START_DEADLINE_S, self._is_wanted)
            make_stream = functools.partial(_ActorStream, self._cluster, node, there.actor, agent_pid)
            ranks = range(first, first + len(node.bundles))
            first = ranks.stop
            parts.append(
                NodePart(
                    run=self,
                    agent=there.slot.agent(agent_pid, facts, make_stream),
                    id=attempt_id,
                    address=node.address,
                    ranks=ranks,
                    variables=self._gpu_variables(node),
                    store_port=store_port,
                    log_folder=pathlib.Path(log_folder) if log_folder else None,
                )
            )
        return parts

    def _checked_host(self, node: Node) -> tuple[Host, host.NodeFacts]:
        """Return a node's host and the node's facts. A host that has died since the last run is replaced once.

        Raises:
            LaunchError: The host can't be started, or has other versions than the notebook.
            SupervisorLostError: The node, or the cluster, has gone.
            NotWantedError: The run was ended meanwhile.
        """
        for is_last in (False, True):
            there = self._cluster.host(node)
            try:
                facts = self._facts(there)
                break
            except self._cluster.ray.exceptions.RuntimeEnvSetupError as error:
                self._cluster.drop(there.actor)
                raise ProcessStartError(
                    f"The runtime environment could not be set up on the node {node.address}.",
                    why=str(error).strip(),
                    fix="another runtime_env in engine_options, or install what is missing on the nodes",
                ) from None
            except (self._cluster.ray.exceptions.RayError, TimeoutError) as error:
                self._cluster.drop(there.actor)
                if is_last:
                    raise self._start_error(node, error) from None
        here = host.versions()
        for name, version in facts.versions.items():
            if version != here[name]:
                raise LaunchError(
                    f"The node {node.address} has {name} {version or 'not at all'}, the notebook {here[name]}.",
                    why="One version would have to read the data that another version writes.",
                    fix=f"the same {name} on both, or engine_options={{'runtime_env': {{'pip': [...]}}}}",
                )
        return there, facts

    def _start_error(self, node: Node, error: Exception) -> NotebookAccelError:
        if not self._cluster.is_alive(node):
            return _host_lost_error(self._cluster, node, "what was to start ranks there", error)
        return ProcessStartError(
            f"The process that starts ranks on the node {node.address} could not be started.",
            why=last_line(error),
            fix="install notebook-accel and torch on every node, or engine_options={'runtime_env': {'pip': [...]}}",
        )

    def _facts(self, there: Host) -> host.NodeFacts:
        patience_s = _INSTALL_DEADLINE_S if self._cluster.has_environment else _START_DEADLINE_S
        [facts] = self._connection.answers([self._ask(there, "facts")], patience_s, self._is_wanted)
        return host.NodeFacts(*facts[: len(host.NodeFacts._fields)])

    def _gpu_variables(self, node: Node) -> dict[str, str]:
        gpus = self._resources.get("GPU", 0)
        if not gpus:
            return {}
        assert self._placement is not None
        found = self._cluster.gpus_of(self._placement, node, gpus, self._is_wanted)
        return {"CUDA_VISIBLE_DEVICES": ",".join(found)}

    def _launch(self, bodies: Sequence[bytes]) -> None:
        started = [
            self._ask(there, "launch", self._attempt_id, body, self._payload)
            for (_, there), body in zip(self._on_nodes, bodies, strict=True)
        ]
        for (node, _), answer in zip(self._on_nodes, started, strict=True):
            # Wait even if the run was ended meanwhile: started ranks can be told to end.
            self._answer(node, answer, _TRANSFER_DEADLINE_S, lambda: True)

    def _ask(self, there: Host, method: str, *args: Any, **options: Any) -> Answer:
        return self._connection.ask(functools.partial(getattr(there.actor, method).remote, *args, **options))

    def _answer(self, node: Node, answer: Answer, patience_s: float, is_wanted: Callable[[], bool]) -> Any:
        """Return a host's answer to a call that starts the ranks."""
        try:
            [result] = self._connection.answers([answer], patience_s, is_wanted)
        except self._cluster.ray.exceptions.RayTaskError as error:  # the host lives, but its method has raised
            raise ProcessStartError(
                f"The ranks on the node {node.address} could not be started.", why=last_line(error)
            ) from None
        except (self._cluster.ray.exceptions.RayError, TimeoutError) as error:
            raise _host_lost_error(self._cluster, node, "the start of its ranks", error) from None
        return result

    def _results(self, part: NodePart) -> Sequence[Any]:
        node, there = self._on_nodes[self._parts.index(part)]
        try:
            asked = self._ask(there, "results", self._attempt_id, as_buffers=self._connection.is_driver)
            [results] = self._connection.answers([asked], _TRANSFER_DEADLINE_S)
        except self._cluster.ray.exceptions.RayError as error:
            self._cluster.drop(there.actor)
            raise _host_lost_error(self._cluster, node, part.ranks_in_words, error) from None
        return list(results)

    def _close(self) -> None:
        on_nodes, self._on_nodes = self._on_nodes, []
        placement, self._placement = self._placement, None
        if not self._connection.is_there:
            return
        kill = messages.encode(messages.End(job_id=self._attempt_id, how="kill"))
        with contextlib.suppress(Exception):  # some hosts may be gone already
            closed = [self._ask(there, "close", self._attempt_id, kill) for _, there in on_nodes]
            self._connection.answers(closed, _FAREWELL_S)
        if placement is not None:
            self._cluster.release(placement.group)

    def _can_restart(self) -> bool:
        return self._connection.is_there


class _ActorStream:
    """The stream to a node's agent: calls of the node's host write bytes to the agent, or read its bytes."""

    def __init__(self, cluster: Cluster, node: Node, actor: Any, agent_pid: int) -> None:
        self._cluster = cluster
        self._connection = cluster.connection
        self._node = node
        self._actor = actor
        self._agent_pid = agent_pid

    def used(self) -> contextlib.AbstractContextManager[None]:
        return self._connection.used()

    def read(self) -> tuple[float, bytes]:
        time_s, data = self._call(lambda: self._actor.read.remote(self._agent_pid, _PATIENCE_S))
        return time_s, data

    def write(self, body: bytes) -> None:
        try:
            self._call(lambda: self._actor.write.remote(self._agent_pid, body))
        except (self._cluster.ray.exceptions.RayError, TimeoutError) as error:
            raise self.loss(error, "the start of its ranks") from None

    def post(self, body: bytes) -> None:
        self._connection.post(lambda: self._actor.write.remote(self._agent_pid, body))

    def last_words(self) -> str:
        with contextlib.suppress(Exception):  # the host has gone too
            return str(self._call(self._actor.last_words.remote))
        return ""

    def loss(self, error: BaseException, ranks: str) -> NotebookAccelError:
        if isinstance(error, NotebookAccelError):
            return error
        if isinstance(error, self._cluster.ray.exceptions.RayTaskError):  # the host lives, and its agent has gone
            return agent_lost_error(self.last_words())
        try:
            return _host_lost_error(self._cluster, self._node, ranks, error)
        except NotebookAccelError as other:  # the cluster has gone too
            return other
        finally:
            self._cluster.drop(self._actor)

    def _call(self, what: Callable[[], Any]) -> Any:
        [answer] = self._connection.answers([self._connection.ask(what)], _SILENCE_S)
        return answer


def _host_lost_error(cluster: Cluster, node: Node, ranks: str, error: BaseException) -> SupervisorLostError:
    lost = f"The node {node.address} has gone, and {ranks} with it."
    if cluster.is_alive(node):
        lost = f"What runs {ranks} on the node {node.address} was ended, or doesn't answer."
    return SupervisorLostError(
        lost, why=last_line(error), fix="run the cell again; max_restarts lets a run go on by itself on what is left"
    )


def _put(cluster: Cluster, payload: int) -> Any:
    """Put the payload into the object store, and return Ray's reference to it."""
    data = pickle.PickleBuffer(memory_files.whole(payload))
    try:
        return cluster.connection.call(lambda: cluster.ray.put(data), _TRANSFER_DEADLINE_S)
    except cluster.ray.exceptions.RayError as error:
        raise LaunchError(
            "The data for the ranks could not be put into the cluster's object store.",
            why=last_line(error),
            fix="ray start --object-store-memory=BYTES, or send less",
        ) from None


class RayEngine:
    """Runs ranks on a cluster that this process is connected to."""

    def __init__(self, connected_cluster: Cluster) -> None:
        self._cluster = connected_cluster

    def devices(self, config: LaunchConfig) -> Devices:
        """Return the ranks' devices: the cluster's GPUs if it has any."""
        gpus = 0 if config.use_cpu else self._cluster.gpus
        return Devices("GPU", gpus) if gpus else Devices("CPU", 1)

    def check(self, config: LaunchConfig) -> tuple[Finding, ...]:
        world_size = config.num_processes or self.devices(config).available
        return self._cluster.check(world_size, self._cluster.resources_of_a_rank(use_cpu=config.use_cpu))

    def launch(self, request: LaunchRequest) -> Job:
        """Start the run's thread, which first waits for the cluster's reservation. See ``ClusterEngine``."""
        if request.on_death == "keep":
            raise ConfigError(
                "A session's ranks stay on this machine.", fix="leave out engine, or --fresh for the cell"
            )
        # The nodes have their own environment, folders and import path.
        there = msgspec.structs.replace(request.spec, environment={}, working_directory="", sys_path=[])
        request, pickled = run_payload.pickle_target(dataclasses.replace(request, spec=there))
        resources = self._cluster.resources_of_a_rank(use_cpu=request.config.use_cpu)
        with run_payload.prepared_run(request, pickled) as (job, payload):
            run = RayRun(job, self._cluster, payload, resources, request.variables)
            job.send_order = run.take_order
            run.start()
        return job


def connect(config: LaunchConfig) -> RayEngine:
    """Connect to a cluster, and return the engine for a launch with these options.

    Raises:
        ConfigError: An option can't be used on a cluster, Ray isn't installed, or there is no cluster.
    """
    wanted = cluster.read_options(config.engine_options)
    if config.start_method not in ("auto", "spawn"):
        raise ConfigError(
            f"start_method={config.start_method!r} can't be used with engine='ray'.",
            why="Its ranks are in this kernel, or forks of it.",
            fix="leave out start_method, or engine",
        )
    return RayEngine(Cluster(connection.connect(wanted.address), wanted))


def check_options(pairs: Sequence[str]) -> None:
    """Check engine options. Raises as ``cluster.read_options`` does."""
    cluster.read_options(pairs)

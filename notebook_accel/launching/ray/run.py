"""A run on a cluster, from the kernel: a thread that starts it on the nodes, hears of them, and makes one run of it.

The job is fed here as an agent feeds it. What is decided for the whole run is decided here: the ranks are let go when
all have finished, all are ended when one has failed, and it is over when every node has said so or is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from notebook_accel import events, memory_files
from notebook_accel.environment import RankPlace
from notebook_accel.errors import LaunchError, NotebookAccelError, ProcessStartError, SupervisorLostError
from notebook_accel.launching.job import Job
from notebook_accel.launching.messages import Failure, RankDump, Reason, Starting
from notebook_accel.launching.ray import host, parts
from notebook_accel.launching.ray.cluster import Cluster, Node, Placement

__all__ = ["ClusterRun"]

_PATIENCE_S = 1.0  # of a host that has nothing to say
_SILENCE_S = 30.0  # after which one that should have answered is taken for dead
_START_DEADLINE_S = 120.0  # to install a runtime environment can take long


@dataclasses.dataclass(eq=False)
class _NodePart:
    """What is on one node.

    Attributes:
        node: The node.
        first: The rank that is local rank 0 there.
        actor: Its host.
        dumps: Where its ranks stand, until those of the other nodes are there.
        heard_s: When it has answered last, in seconds of ``time.monotonic()``.
        has_ended: Whether nothing more will come.
    """

    node: Node
    first: int
    actor: Any
    dumps: list[RankDump] | None = None
    heard_s: float = 0.0
    has_ended: bool = False

    @property
    def ranks(self) -> range:
        """The ranks that are there."""
        return range(self.first, self.first + len(self.node.bundles))


class ClusterRun:
    """One run on a cluster; also the job's control.

    Args:
        job: What is fed.
        cluster: Where it runs.
        payload: The sealed payload's descriptor; it is put into the cluster's object store here.
        result_files: The job's, one a rank.
        resources: What is reserved for each rank.
        environment: Variables of the launch's own.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        payload: int,
        result_files: Sequence[int],
        resources: Mapping[str, float],
        environment: Mapping[str, str],
    ) -> None:
        self._job = job
        self._cluster = cluster
        self._ray = cluster.ray
        self._payload = self._ray.put(pickle.PickleBuffer(memory_files.whole(payload)))
        self._result_files = result_files
        self._resources = resources
        self._environment = environment
        self._parts: list[_NodePart] = []
        self._wanted: parts.Tell | None = None  # by which somebody ends it
        self._reason: Reason = ""
        self._error: NotebookAccelError | None = None
        self._finished: set[int] = set()
        self._logs = _Logs(job.log_files)
        self._thread = threading.Thread(target=self._run, name=f"notebook-accel-ray-{job.id}", daemon=True)

    def start(self) -> None:
        """Starts the thread. It ends with the run."""
        self._thread.start()

    # What a job asks for -------------------------------------------------------------------------------------------

    def interrupt(self, *, escalate: bool) -> None:
        if escalate:
            self._wanted = self._wanted or "interrupt"
        self._tell("interrupt" if escalate else "interrupt only")

    def stop(self) -> None:
        self._wanted = self._wanted or "stop"
        self._tell("stop")

    def kill(self) -> None:
        self._wanted = self._wanted or "kill"
        self._tell("kill")

    def inspect(self) -> None:
        for part in self._parts:
            part.dumps = None
        self._tell("inspect")

    def respawn(self, rank: int) -> None:
        raise LaunchError(f"Rank {rank} can't be started again by itself: the run is on several machines.")

    def release(self) -> None:
        self._tell("release")

    def _tell(self, what: parts.Tell) -> None:
        for part in self._parts:
            if not part.has_ended and self._cluster.is_connected:
                part.actor.tell.remote(self._job.id, what)

    # The thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        restarts = 0
        while True:
            self._attempt(restarts)
            has_failed = self._error is not None or self._reason == "failed"
            if not has_failed or self._is_the_last(restarts):
                break
            restarts += 1
        self._payload = None  # who keeps the job shall not keep it in the cluster's memory
        self._job.end(self._reason, self._error)

    def _is_the_last(self, restarts: int) -> bool:
        """Whether nothing is started again after a failure."""
        is_used_up = restarts >= self._job.config.max_restarts
        would_fail_again = isinstance(self._error, LaunchError) or not self._cluster.is_connected
        return self._wanted is not None or is_used_up or would_fail_again

    def _attempt(self, restarts: int) -> None:
        before, self._reason, self._error = self._error, "", None
        self._finished.clear()
        placement: Placement | None = None
        lost = None if before is None else Failure(what=before.what.rstrip("."))
        self._job.start(
            Starting(
                job_id=self._job.id,
                restarts=restarts,
                first_rank=0,
                world_size=self._job.world_size,
                cause=lost,
            )
        )
        try:
            placement = self._cluster.reserve(
                self._job.world_size, self._resources, notice=self._notice, is_wanted=lambda: self._wanted is None
            )
            self._start_hosts(placement)
            self._launch(placement, restarts)
            self._follow()
            self._take_results()
        except NotebookAccelError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - Ray has errors of many kinds, and all mean that the run can't go on
            self._error = SupervisorLostError(
                "The run was lost on the cluster.", why=f"{type(error).__name__}: {str(error).strip()}"
            )
        finally:
            self._let_go(placement)
        if self._wanted is not None and not self._finished and not self._reason:  # it was ended before ranks were there
            self._reason, self._error = ("interrupted" if self._wanted == "interrupt" else "stopped"), None

    def _notice(self, text: str) -> None:
        self._job.deliver(0, events.Output(text=f"[{text}]"))

    def _start_hosts(self, placement: Placement) -> None:
        first = 0
        for node in placement.nodes:
            self._parts.append(_NodePart(node, first, self._cluster.host(node)))
            first += len(node.bundles)
        try:
            _refuse_differences([self._facts(part) for part in self._parts])
        except self._ray.exceptions.RayError as error:
            raise ProcessStartError(
                "What starts ranks on the cluster's nodes could not be started there.",
                why=str(error).strip().splitlines()[-1],
                fix="install notebook-accel and torch on every node, or engine_options={'runtime_env': {'pip': [...]}}",
            ) from None

    def _facts(self, part: _NodePart) -> parts.Facts:
        """What a host says of its node. One that has died since the last run, or never lived, is replaced once."""
        for is_last in (False, True):
            try:
                return msgspec.msgpack.decode(self._get(part.actor.facts.remote()), type=parts.Facts)
            except self._ray.exceptions.RayError:
                self._cluster.drop(part.actor)
                if is_last:
                    raise
                part.actor = self._cluster.host(part.node)
        raise AssertionError

    def _launch(self, placement: Placement, restarts: int) -> None:
        job = self._job
        port = self._get(self._parts[0].actor.listen.remote(job.id, job.config.main_process_port or 0))
        options = msgspec.json.encode(job.config)
        started = []
        for number, part in enumerate(self._parts):
            places = [
                RankPlace(rank, job.world_size, rank - part.first, len(part.ranks), self._parts[0].node.address, port)
                for rank in part.ranks
            ]
            environment = {**self._environment, **self._gpus(placement, part.node)}
            environment |= {
                "GROUP_RANK": str(number),
                "GROUP_WORLD_SIZE": str(len(self._parts)),
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
            }
            encoded = parts.encode(
                parts.Part(job_id=job.id, name=job.name, options=options, places=places, environment=environment)
            )
            started.append(part.actor.launch.remote(encoded, self._payload))
        self._get(started)
        if self._wanted is not None:  # somebody was quicker
            self._tell(self._wanted)

    def _gpus(self, placement: Placement, node: Node) -> dict[str, str]:
        gpus = self._resources.get("GPU", 0)
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._cluster.gpus_of(placement, node, gpus))} if gpus else {}

    def _follow(self) -> None:
        pending = {self._ask(part): part for part in self._parts}
        while pending:
            if not self._cluster.is_connected:  # a call would begin a cluster of its own
                raise ConnectionError("the notebook was disconnected from the cluster")
            ready, _ = self._ray.wait(list(pending), num_returns=1, timeout=_PATIENCE_S)
            for reference in ready:
                part = pending.pop(reference)
                try:
                    batch = parts.decode(self._ray.get(reference))
                except self._ray.exceptions.RayError as error:
                    self._gone(part, error)
                    continue
                part.heard_s = time.monotonic()
                for said in batch:
                    self._heard(part, said)
                if not part.has_ended:
                    pending[self._ask(part)] = part
            now_s = time.monotonic()
            for reference, part in list(pending.items()):
                if now_s - part.heard_s > _SILENCE_S:
                    del pending[reference]
                    self._gone(part, TimeoutError(f"it has not answered for {_SILENCE_S:g} s"))

    def _get(self, reference: Any) -> Any:
        """What a host answers.

        Raises:
            RayError: It is gone, or doesn't answer.
        """
        return self._ray.get(reference, timeout=_START_DEADLINE_S)

    def _ask(self, part: _NodePart) -> Any:
        part.heard_s = part.heard_s or time.monotonic()
        return part.actor.news.remote(self._job.id, _PATIENCE_S)

    def _heard(self, part: _NodePart, said: parts.FromHost) -> None:
        if isinstance(said, parts.Said):
            rank, event = part.first + said.rank, events.decode(bytes(said.event))
            self._job.deliver(rank, event)
            if isinstance(event, events.Output):
                self._logs.keep(rank, event, part.node.address)
            if isinstance(event, events.Finished):
                self._finished.add(rank)
                if len(self._finished) == self._job.world_size:
                    self._tell("release")
        elif isinstance(said, parts.Dumped):
            part.dumps = [msgspec.structs.replace(dump, rank=part.first + dump.rank) for dump in said.ranks]
            there = [other for other in self._parts if not other.has_ended]
            if all(other.dumps is not None for other in there):
                self._job.take_dumps([dump for other in there for dump in other.dumps or ()])
        else:
            self._part_ended(part, said)

    def _part_ended(self, part: _NodePart, ended: parts.Ended) -> None:
        part.has_ended = True
        if ended.what and self._error is None:
            self._error = ProcessStartError(ended.what, why=ended.why, fix=ended.fix)
        if (ended.reason or ended.what) and not self._reason:
            self._reason = ended.reason or "failed"
            self._tell("stop")

    def _gone(self, part: _NodePart, error: Exception) -> None:
        part.has_ended = True
        self._cluster.drop(part.actor)
        ranks = f"rank {part.first}" if len(part.ranks) == 1 else f"ranks {part.ranks[0]} to {part.ranks[-1]}"
        if self._error is None and not self._reason:
            self._error = SupervisorLostError(
                f"The node {part.node.address} has gone, and {ranks} of {self._job.world_size} with it.",
                why=str(error).strip().splitlines()[-1],
                fix="run the cell again; max_restarts lets a run go on by itself on what is left",
            )
        self._reason = self._reason or "failed"
        self._tell("kill")

    def _take_results(self) -> None:
        """Copies what the ranks have written; also after a failure, for what was to be pulled."""
        for part in self._parts:
            with contextlib.suppress(self._ray.exceptions.RayError):  # then there is none, which the job notices
                results = self._get(part.actor.results.remote(self._job.id))
                for rank, written in zip(part.ranks, results, strict=True):
                    data = memoryview(written)
                    if data.nbytes:
                        memory_files.fill(self._result_files[rank], data)

    def _let_go(self, placement: Placement | None) -> None:
        is_connected = self._cluster.is_connected
        for part in self._parts if is_connected else ():
            with contextlib.suppress(Exception):  # it is gone already
                part.actor.forget.remote(self._job.id)
        self._parts = []
        if placement is not None and is_connected:
            self._cluster.release(placement.group)


class _Logs:
    """The ranks' logs in the notebook's folder: what is said of those that they write on their nodes.

    Args:
        files: One a rank; none if there was no room for any.
    """

    def __init__(self, files: Sequence[pathlib.Path]) -> None:
        self._files = files

    def keep(self, rank: int, output: events.Output, address: str) -> None:
        """Adds what a rank has written. A disk that is full is no reason to stop."""
        if self._files:
            gap = (
                f"[{output.left_out:,} lines left out, which are in its log on {address}]\n" if output.left_out else ""
            )
            with contextlib.suppress(OSError), self._files[rank].open("a", encoding="utf-8") as file:
                file.write(f"{gap}{output.text}\n")


def _refuse_differences(facts: Sequence[parts.Facts]) -> None:
    here = host.versions()
    for node in facts:
        for name, version in node.versions.items():
            if version != here[name]:
                raise LaunchError(
                    f"The node {node.address} has {name} {version or 'not at all'}, the notebook {here[name]}.",
                    why="What is sent to the ranks is read by another version than has written it.",
                    fix=f"the same {name} on both, or engine_options={{'runtime_env': {{'pip': [...]}}}}",
                )

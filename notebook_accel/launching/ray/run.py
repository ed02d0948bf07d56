"""A run on a cluster, from the kernel: a thread that starts it on the nodes, hears of them, and makes one run of it.

The job is fed here as an agent feeds it. What is decided for the whole run is decided here: the ranks are let go when
all have finished, all are ended when one has failed, and it is over when every node has said so or is gone.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import pickle
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from notebook_accel.errors import LaunchError, NotebookAccelError, ProcessStartError, SupervisorLostError
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.ray import losses
from notebook_accel.launching.ray.cluster import Cluster, Placement
from notebook_accel.launching.ray.connection import Answer, NotWantedError
from notebook_accel.launching.ray.starting import NodePart, Starter
from notebook_accel.payload import memory_files
from notebook_accel.protocol import events, ray_messages
from notebook_accel.protocol.agent_messages import Failure, Reason, Starting

__all__ = ["ClusterRun"]

_PATIENCE_S = 1.0  # of a host that has nothing to say
_SILENCE_S = 30.0  # after which one that should have answered is taken for dead
_TRANSFER_DEADLINE_S = 1800.0  # of payload and results; Ray notices a node that has gone before
_FAREWELL_S = 10.0


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
        self._connection = cluster.connection
        self._payload = _put(cluster, payload)
        self._result_files = result_files
        self._resources = resources
        self._environment = environment
        self._parts: list[NodePart] = []
        self._is_launched = False
        self._wanted: ray_messages.Tell | None = None  # by which somebody ends it
        self._reason: Reason = ""
        self._error: NotebookAccelError | None = None
        self._finished: set[int] = set()
        self._logs = _Logs(job.log_files)
        self._orders: queue.SimpleQueue[ray_messages.Tell | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Starts the threads. They end with the run."""
        for number, act in enumerate((self._run, self._obey)):
            name = f"notebook-accel-ray-{self._job.id}-{number}"
            threading.Thread(target=act, name=name, daemon=True).start()

    # What a job asks for -------------------------------------------------------------------------------------------

    def interrupt(self, *, escalate: bool) -> None:
        if escalate:
            self._wanted = self._wanted or "interrupt"
        self._orders.put("interrupt" if escalate else "interrupt only")

    def stop(self) -> None:
        self._wanted = self._wanted or "stop"
        self._orders.put("stop")

    def kill(self) -> None:
        self._wanted = self._wanted or "kill"
        self._orders.put("kill")

    def inspect(self) -> None:
        if not self._is_launched:  # there is nobody yet who could be asked
            self._job.take_dumps(())
        for part in self._parts:
            part.dumps = None
        self._orders.put("inspect")

    def respawn(self, rank: int) -> None:
        raise LaunchError(f"Rank {rank} can't be started again by itself: the run is on several machines.")

    def release(self) -> None:
        self._orders.put("release")

    def _obey(self) -> None:
        """Passes on what the job was asked for: who asks may be the kernel's main thread, which must not be in Ray."""
        while (what := self._orders.get()) is not None:
            with self._connection.used():
                self._tell(what)

    # The thread ----------------------------------------------------------------------------------------------------

    def _tell(self, what: ray_messages.Tell) -> None:
        with contextlib.suppress(SupervisorLostError):  # the thread finds that out
            for part in self._parts:
                if not part.has_ended:
                    with self._connection.held():
                        part.actor.tell.remote(self._job.id, what)

    def _run(self) -> None:
        with self._connection.used():
            try:
                self._run_attempts()
            except BaseException as error:  # noqa: BLE001 - whatever it is, nobody waits for ever
                self._error = self._error or losses.of_run(error)
            # Who keeps the job, or its error, shall keep nothing in the cluster's memory.
            self._payload = None
            if self._error is not None:
                self._error.__traceback__ = self._error.__context__ = None
        self._orders.put(None)
        self._job.end(self._reason, self._error)

    def _run_attempts(self) -> None:
        restarts = 0
        while True:
            self._attempt(restarts)
            has_failed = self._error is not None or self._reason == "failed"
            if not has_failed or self._is_the_last(restarts):
                break
            restarts += 1

    def _is_the_last(self, restarts: int) -> bool:
        """Return whether nothing is started again after a failure."""
        is_used_up = restarts >= self._job.config.max_restarts
        would_fail_again = isinstance(self._error, LaunchError) or not self._connection.is_there
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
                self._job.world_size, self._resources, notice=self._notice, is_wanted=self._is_wanted
            )
            self._notice()  # it waits no more
            self._start(placement, restarts)
            self._follow()
            self._take_results()
        except NotWantedError:  # it was ended before ranks were there
            self._reason = "interrupted" if self._wanted == "interrupt" else "stopped"
        except NotebookAccelError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - Ray has errors of many kinds, and all mean that the run can't go on
            self._error = losses.of_run(error)
        finally:
            self._let_go(placement)

    def _is_wanted(self) -> bool:
        return self._wanted is None

    def _notice(self, *lines: str) -> None:
        self._job.deliver(0, events.Nodes(lines=list(lines), is_news=bool(lines)))

    def _start(self, placement: Placement, restarts: int) -> None:
        starter = Starter(self._job, self._cluster, placement, self._is_wanted)
        self._parts = starter.hosts()
        gpus = self._resources.get("GPU", 0)
        starter.launch(self._parts, self._payload, self._environment, restarts=restarts, gpus=gpus)
        self._is_launched = True
        if self._wanted is not None:  # somebody was quicker
            self._tell(self._wanted)

    def _follow(self) -> None:
        pending = {self._ask(part): part for part in self._parts}
        while pending:
            for answer in self._connection.first_of(pending, _PATIENCE_S):
                part = pending.pop(answer)
                try:
                    news = ray_messages.decode(self._connection.result(answer))
                except self._cluster.ray.exceptions.RayError as error:
                    self._gone(part, error)
                    continue
                part.heard(news.time_s, time.monotonic())
                for said in news.said:
                    self._heard(part, said)
                if not part.has_ended:
                    pending[self._ask(part)] = part
            now_s = time.monotonic()
            for answer, part in list(pending.items()):
                if now_s - part.heard_s > _SILENCE_S:
                    del pending[answer]
                    self._gone(part, TimeoutError(f"it has not answered for {_SILENCE_S:g} s"))

    def _ask(self, part: NodePart) -> Answer:
        part.asked_s = time.monotonic()
        part.heard_s = part.heard_s or part.asked_s
        return self._connection.ask(lambda: part.actor.news.remote(self._job.id, _PATIENCE_S))

    def _heard(self, part: NodePart, said: ray_messages.FromHost) -> None:
        if isinstance(said, ray_messages.Said):
            rank, event = part.first + said.rank, part.by_our_clock(events.decode(bytes(said.event)))
            self._job.deliver(rank, event)
            if isinstance(event, events.Output):
                self._logs.keep(rank, event, part.node.address)
            if isinstance(event, events.Finished):
                self._finished.add(rank)
                if len(self._finished) == self._job.world_size:
                    self._tell("release")
        elif isinstance(said, ray_messages.Dumped):
            part.dumps = [msgspec.structs.replace(dump, rank=part.first + dump.rank) for dump in said.ranks]
            there = [other for other in self._parts if not other.has_ended]
            if all(other.dumps is not None for other in there):
                self._job.take_dumps([dump for other in there for dump in other.dumps or ()])
        else:
            self._part_ended(part, said)

    def _part_ended(self, part: NodePart, ended: ray_messages.Ended) -> None:
        part.has_ended = True
        if ended.what and self._error is None:
            self._error = ProcessStartError(ended.what, why=ended.why, fix=ended.fix)
        if (ended.reason or ended.what) and not self._reason:
            self._reason = ended.reason or "failed"
            self._tell("stop")

    def _gone(self, part: NodePart, error: Exception) -> None:
        part.has_ended = True
        if self._error is None and not self._reason:
            ranks = f"rank {part.first}" if len(part.ranks) == 1 else f"ranks {part.ranks[0]} to {part.ranks[-1]}"
            ranks = f"{ranks} of {self._job.world_size}"
            self._error = losses.of_host(self._cluster, part.node, ranks, error)
        self._reason = self._reason or "failed"
        self._cluster.drop(part.actor)
        self._tell("kill")

    def _take_results(self) -> None:
        """Copies what the ranks have written; also after a failure, for what was to be pulled."""
        for part in self._parts:
            try:
                asked = self._connection.ask(
                    functools.partial(part.actor.results.remote, self._job.id, as_buffers=self._connection.is_driver)
                )
                [results] = self._connection.answers([asked], _TRANSFER_DEADLINE_S, lambda: True)
            except self._cluster.ray.exceptions.RayError as error:
                self._gone(part, error)
                continue
            for rank, written in zip(part.ranks, results, strict=True):
                data = memoryview(written)
                if data.nbytes:
                    memory_files.fill(self._result_files[rank], data)

    def _let_go(self, placement: Placement | None) -> None:
        there, self._parts, self._is_launched = self._parts, [], False
        if not self._connection.is_there:
            return
        with contextlib.suppress(Exception):  # some of it is gone already
            forget = [functools.partial(part.actor.forget.remote, self._job.id) for part in there]
            forgotten = [self._connection.ask(order) for order in forget]
            self._connection.answers(forgotten, _FAREWELL_S, lambda: True)
        if placement is not None:
            self._cluster.release(placement.group)


def _put(cluster: Cluster, payload: int) -> Any:
    """Puts the payload into the object store; Ray's reference to it."""
    data = pickle.PickleBuffer(memory_files.whole(payload))
    try:
        return cluster.connection.call(lambda: cluster.ray.put(data), _TRANSFER_DEADLINE_S)
    except cluster.ray.exceptions.RayError as error:
        raise LaunchError(
            "What is sent to the ranks could not be put into the cluster's object store.",
            why=losses.last_line(error),
            fix="ray start --object-store-memory=BYTES, or send less",
        ) from None


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

"""A node's host: the one actor that a notebook has on a node. It has an agent and a template, as a kernel has.

So ranks are started, read, interrupted, stopped and reaped on a node as on the kernel's machine, by the same code, and
as fast. Ray does what it is there for: it reserves what the ranks need, brings the payload, and kills the host when the
notebook or the node goes. The agent sees that its parent has gone, and ends the ranks.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pickle
import platform
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from notebook_accel import environment
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import NotebookAccelError
from notebook_accel.launching import logs
from notebook_accel.launching.kernel import local
from notebook_accel.launching.kernel.agent_process import NodePart
from notebook_accel.launching.kernel.engine import RunControl
from notebook_accel.payload import memory_files
from notebook_accel.protocol import events, ray_messages
from notebook_accel.protocol.agent_messages import Failure, OnDeath, RankDump, Reason, Starting

__all__ = ["NodeHost", "versions"]

_BATCH_PAUSE_S = 0.05


def versions() -> dict[str, str]:
    """Of what has to be the same in the notebook and on the nodes."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("torch", "notebook-accel"):
        found[name] = ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class NodeHost:
    """Runs the parts of runs that are on its node. An actor; the kernel calls its methods, several at a time.

    Args:
        address: Of this node, as other nodes reach it.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._engine = local.LocalEngine()
        self._runs: dict[str, _NodeRun] = {}
        self._listening: dict[str, socket.socket] = {}

    def facts(self) -> bytes:
        """What the kernel compares before it starts anything."""
        return ray_messages.encode(
            ray_messages.Facts(versions=versions(), address=self._address, host=socket.gethostname(), pid=os.getpid())
        )

    def listen(self, job_id: str, port: int) -> int:
        """Opens the socket of a run's store, which is on this node; its port.

        Raises:
            OSError: The port can't be used.
        """
        self._listening[job_id] = listening = socket.create_server((self._address, port), backlog=4096)
        return int(listening.getsockname()[1])

    def launch(self, encoded: bytes, payload: Any) -> None:
        """Starts this node's ranks of a run.

        Args:
            encoded: The ``Part``.
            payload: The run's sealed payload, a buffer in the node's object store.
        """
        part = msgspec.msgpack.decode(encoded, type=ray_messages.Part)
        run = self._runs[part.job_id] = _NodeRun(part, msgspec.json.decode(part.options, type=LaunchConfig))
        interface = environment.interface_of(self._address)
        of_interface = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
        variables = {**environment.sendable(), **of_interface, **part.environment}
        copied = memory_files.memory_file("notebook-accel-payload")
        listening = self._listening.pop(part.job_id, None)
        try:
            memory_files.fill(copied, memoryview(payload))
            memory_files.make_unwritable(copied)
            places = [(place, variables) for place in part.places]
            self._engine.launch_part(NodePart(run, copied, run.result_files, places, listening))
        finally:
            os.close(copied)
            if listening is not None:
                listening.close()

    def news(self, job_id: str, patience_s: float) -> bytes:
        """What has happened to a run since the last call: waits for it, but no longer than that."""
        said = self._runs[job_id].outbox.take(patience_s)
        return ray_messages.encode(ray_messages.News(time_s=time.monotonic(), said=said))

    def tell(self, job_id: str, what: ray_messages.Tell) -> None:
        """Passes on what the notebook wants."""
        run = self._runs.get(job_id)
        if run is None or run.control is None:
            return
        if what == "interrupt":
            run.control.interrupt(escalate=True)
        elif what == "interrupt only":
            run.control.interrupt(escalate=False)
        else:
            getattr(run.control, what)()

    def results(self, job_id: str, *, as_buffers: bool) -> list[Any]:
        """Each rank's result as it was written: as buffers, which Ray sends beside its pickle, or as bytes."""
        written = [memory_files.whole(file) for file in self._runs[job_id].result_files]
        return [pickle.PickleBuffer(data) if as_buffers else data.tobytes() for data in written]

    def forget(self, job_id: str) -> None:
        """The kernel has all that it wants of a run. What is still there of it is killed."""
        run = self._runs.pop(job_id, None)
        listening = self._listening.pop(job_id, None)
        if listening is not None:
            listening.close()
        if run is not None:
            if run.control is not None:
                run.control.kill()
            run.close()


class _Outbox:
    """What is to be told, in order. Samples that a newer one of the same rank has replaced are left out."""

    def __init__(self) -> None:
        self._waiting: list[tuple[ray_messages.FromHost, tuple[int, type] | None]] = []
        self._has_news = threading.Condition()

    def put(self, said: ray_messages.FromHost, sample_of: tuple[int, type] | None = None) -> None:
        with self._has_news:
            self._waiting.append((said, sample_of))
            self._has_news.notify_all()

    def take(self, patience_s: float) -> list[ray_messages.FromHost]:
        with self._has_news:
            self._has_news.wait_for(lambda: self._waiting, patience_s)
            is_urgent = any(sample_of is None for _, sample_of in self._waiting)
        if not is_urgent:
            time.sleep(_BATCH_PAUSE_S)  # then one message has the samples of many ranks
        with self._has_news:
            waiting, self._waiting = self._waiting, []
        newest = {sample_of: number for number, (_, sample_of) in enumerate(waiting) if sample_of is not None}
        return [
            said for number, (said, sample_of) in enumerate(waiting) if sample_of is None or newest[sample_of] == number
        ]


class _NodeRun:
    """Takes the place of a job for the agent's connection: what it is fed goes to the kernel."""

    on_death: OnDeath = "stop"

    def __init__(self, part: ray_messages.Part, config: LaunchConfig) -> None:
        self.id = part.job_id
        self.config = config
        self.world_size = len(part.places)
        self.log_folder = logs.make_folder(config.log_dir, part.name)
        self.result_files = [memory_files.memory_file(f"notebook-accel-result-{place.rank}") for place in part.places]
        self.outbox = _Outbox()
        self.control: RunControl | None = None

    def attach(self, control: RunControl) -> None:
        self.control = control

    def close(self) -> None:
        for descriptor in self.result_files:
            os.close(descriptor)

    def deliver(self, rank: int, event: events.Event) -> None:
        is_sample = isinstance(event, events.SAMPLES)
        said = ray_messages.Said(rank, msgspec.Raw(events.encode(event)))
        self.outbox.put(said, (rank, type(event)) if is_sample else None)

    def take_dumps(self, dumps: Sequence[RankDump]) -> None:
        self.outbox.put(ray_messages.Dumped(list(dumps)))

    def start(self, starting: Starting) -> None:
        raise NotImplementedError(f"{starting}: only elastic processes say this, and no part has one")

    def end(self, reason: Reason, error: NotebookAccelError | None = None, elsewhere: Failure | None = None) -> None:
        assert elsewhere is None, "only elastic processes know of other nodes"
        if error is None:
            self.outbox.put(ray_messages.Ended(reason=reason))
        else:
            self.outbox.put(ray_messages.Ended(reason=reason, what=error.what, why=error.why, fix=error.fix))

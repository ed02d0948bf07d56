"""The kernel's host on another machine, one per node. It runs an agent there and forwards the agent's frames unchanged.

So ranks on a node are started, read, interrupted, stopped and reaped by the same code as on the kernel's machine, and
as fast. The host adds what can't come from another machine: it opens a run's files, passes them to the agent with the
Launch message, and reports the node's facts. The engine must transfer the payload, and end the host when the kernel
goes. The agent then notices that its parent has gone, and ends the ranks.
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
from typing import Any, NamedTuple

from notebook_accel import environment
from notebook_accel.launching import logs
from notebook_accel.launching.kernel.agent_process import AgentProcess
from notebook_accel.launching.processes import resume_if_stopped
from notebook_accel.payload import memory_files
from notebook_accel.protocol.channel import ClosedError, close_all


class NodeFacts(NamedTuple):
    """The versions, variables and import path of a node."""

    versions: dict[str, str]  # versions of Python, torch and this package, by name; empty if not installed
    variables: dict[str, str]
    sys_path: list[str]


def versions() -> dict[str, str]:
    """Return the versions that must be the same in the notebook and on the nodes."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("torch", "notebook-accel"):
        found[name] = ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class NodeHost:
    """Runs the parts of runs on its node, which other nodes reach at ``address``. The kernel calls it concurrently."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._agent: AgentProcess | None = None
        self._parts: dict[str, _OpenPart] = {}

    def facts(self) -> tuple[Any, ...]:
        """Return the fields of ``NodeFacts`` as plain values, which other versions of this package can unpickle too."""
        interface = environment.interface_of(self._address)
        of_interface = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
        return versions(), {**environment.sendable(), **of_interface}, environment.import_path()

    def open(self, part_id: str, name: str, log_dir: str, ranks: int, port: int | None) -> tuple[int, str, int]:
        """Open the files of a part of a run, and start the agent unless it runs.

        ``port`` is the port of the ranks' store, 0 for any; ``None`` if the store is on another node.

        Returns:
            The agent's pid, the folder of the logs (empty if it could not be made), and the store's port.

        Raises:
            OSError: The port can't be used, or the system refuses a file or process.
        """
        with contextlib.ExitStack() as opened, self._lock:
            listening = None if port is None else socket.create_server((self._address, port), backlog=4096)
            if listening is not None:
                opened.callback(listening.close)
            if self._agent is None or self._agent.has_ended.is_set:
                self._drop_agent()
                self._agent = AgentProcess()
            files: list[int] = []
            opened.callback(close_all, files)
            for rank in range(ranks):
                files.append(memory_files.memory_file(f"notebook-accel-result-{rank}"))
            self._parts[part_id] = _OpenPart(self._agent, files, listening)
            opened.pop_all()
        folder = logs.make_folder(log_dir, name)
        used_port = 0 if listening is None else int(listening.getsockname()[1])
        return self._agent.process.pid, "" if folder is None else str(folder), used_port

    def launch(self, part_id: str, body: bytes, payload: Any) -> None:
        """Send the agent a part's Launch message with its descriptors. The payload is a buffer."""
        part = self._parts[part_id]
        copied = memory_files.memory_file("notebook-accel-payload")
        try:
            memory_files.fill(copied, memoryview(payload))
            memory_files.make_unwritable(copied)
            listening = [] if part.listening is None else [part.listening.fileno()]
            part.agent.connection.send(body, [copied, *part.result_files, *listening])
        finally:
            os.close(copied)
        if part.listening is not None:
            part.listening.close()

    def write(self, agent_pid: int, body: bytes) -> None:
        """Send the agent a message. Raise ``ClosedError`` if it has gone."""
        self._running(agent_pid).connection.send(body)

    def read(self, agent_pid: int, patience_s: float) -> tuple[float, bytes]:
        """Wait for bytes from the agent. Return this node's ``time.monotonic()`` and the bytes, empty if none came.

        Raise ``ClosedError`` if the agent has gone. Only one thread may read at a time, to keep the bytes in order.
        """
        agent = self._running(agent_pid)
        agent.connection.set_receive_deadline(patience_s)
        data = agent.connection.receive_bytes()
        if not data:
            resume_if_stopped(agent_pid)
        return time.monotonic(), data

    def last_words(self) -> str:
        return "" if self._agent is None else logs.last_words(self._agent.log)

    def results(self, part_id: str, *, as_buffers: bool) -> list[Any]:
        """Return the content of each rank's result file: as buffers for a pickle, or as bytes."""
        written = [memory_files.whole(file) for file in self._parts[part_id].result_files]
        return [pickle.PickleBuffer(data) if as_buffers else data.tobytes() for data in written]

    def close(self, part_id: str, kill: bytes) -> None:
        """Forget a part, and send the agent ``kill``, the message that kills its ranks."""
        with self._lock:
            part = self._parts.pop(part_id, None)
            if part is None:
                return
            part.close()
            with contextlib.suppress(OSError):  # the agent has gone
                part.agent.connection.send(kill)

    def _drop_agent(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _running(self, agent_pid: int) -> AgentProcess:
        agent = self._agent
        if agent is None or agent.process.pid != agent_pid:
            raise ClosedError("the agent has gone")
        return agent


class _OpenPart(NamedTuple):
    """A part of a run: its agent, its ranks' result files, and the ranks' store's listening socket if it is here."""

    agent: AgentProcess
    result_files: Sequence[int]
    listening: socket.socket | None

    def close(self) -> None:
        close_all(self.result_files)
        if self.listening is not None:
            self.listening.close()

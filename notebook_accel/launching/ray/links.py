"""The two ways in which Ray connects a notebook to a cluster, and in what they differ for us.

Ray Client (``ray://``) has no part of Ray's in the notebook: a process beside the cluster's head does there what the
notebook asks for. It goes on for half a minute after the notebook has gone, in case the network is back by then.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol

__all__ = ["Link", "current"]


class Link(Protocol):
    """How this process is connected.

    Attributes:
        job_id: Ray's name for what belongs to this connection.
        head: The address of the cluster's head if Ray ends this process when nobody answers there; else empty.
        lock: Taken by calls, and by ``ray.shutdown()``. The same thread may take it again.
        is_driver: Whether Ray is in this process: calls are its own, and what actors return is in its memory.
        lost_errors: What Ray raises when it can't be used any more; its own ``RayError`` are none of them.
    """

    job_id: str
    head: str
    lock: AbstractContextManager[Any]
    is_driver: bool
    lost_errors: tuple[type[Exception], ...]

    def is_there(self) -> bool:
        """Return whether it is still this connection."""


def current(ray: Any) -> Link:
    """The link that this process has now."""
    client = importlib.import_module("ray.util.client").ray
    return _ClientLink(ray, client) if client.is_connected() else _DriverLink(ray)


class _DriverLink:
    is_driver = True
    lost_errors: tuple[type[Exception], ...] = ()

    def __init__(self, ray: Any) -> None:
        self._module = importlib.import_module("ray._private.worker")
        self._node = weakref.ref(self._module.global_worker.node)
        self.lock: AbstractContextManager[Any] = self._module._connect_or_shutdown_lock
        context = ray.get_runtime_context()
        self.job_id = str(context.get_job_id())
        self.head = str(context.gcs_address)

    def is_there(self) -> bool:
        worker = self._module.global_worker
        return bool(worker.connected) and worker.node is self._node()


class _ClientLink:
    head = ""  # Ray Client gives up by itself, and ends no process
    is_driver = False

    def __init__(self, ray: Any, client: Any) -> None:
        self.lost_errors: tuple[type[Exception], ...] = (ConnectionError, importlib.import_module("grpc").RpcError)
        self._context = client.get_context()
        self._worker = weakref.ref(self._context.client_worker)
        self.lock: AbstractContextManager[Any] = threading.RLock()
        self.job_id = str(ray.get_runtime_context().get_job_id())

    def is_there(self) -> bool:
        worker = self._worker()
        if worker is None or worker is not self._context.client_worker:
            return False
        # It says that it is connected even when what has come from the server can't be repaired.
        return bool(worker.is_connected()) and worker.data_client.data_thread.is_alive()

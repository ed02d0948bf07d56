"""How a notebook's connection to a cluster comes about: the one that it has, or a new one, or why there is none."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

from notebook_accel import environment
from notebook_accel.errors import ConfigError
from notebook_accel.launching.ray.connection import Connection, why_not_reached

__all__ = ["connect"]

_CLIENT = "ray://"
_ATTEMPTS = 3

_current: Connection | None = None
_lock = threading.Lock()


def connect(address: str) -> Connection:
    """The connection that the notebook has, or a new one; it then stays so.

    Args:
        address: As ``RayOptions`` has it.

    Raises:
        ConfigError: Ray isn't installed, or there is no such cluster, or it can't be used from here.
    """
    global _current
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ConfigError(
            "engine='ray' needs Ray, which isn't installed here.", fix="pip install 'notebook-accel[ray]'"
        ) from None
    with _lock:
        if _current is not None and _current.is_there:
            return _current
        if _current is not None:
            _current.leave()
        if not ray.is_initialized():
            _give_up_lost_client()
            _connect(ray, address)
        _current = Connection(ray)
        _have_shutdown_wait(ray)
        return _current


@functools.cache  # once is enough
def _have_shutdown_wait(ray: Any) -> None:
    original = ray.shutdown

    @functools.wraps(original)
    def shutdown(*args: Any, **options: Any) -> None:
        known = _current
        if known is None or not known.is_there:
            original(*args, **options)
            return
        known.end("ray.shutdown() was called.")
        with known.lock:
            original(*args, **options)

    worker: Any = importlib.import_module("ray._private.worker")
    ray.shutdown = worker.shutdown = shutdown


def _give_up_lost_client() -> None:
    """One that has lost its server is in the way of every other connection."""
    client: Any = importlib.import_module("ray.util.client").ray
    if client.get_context().client_worker is not None:
        client.disconnect()


def _connect(ray: Any, address: str) -> None:
    asked = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    # Ray has breakpoint() open a debugger of its own, in the notebook too.
    as_it_is = {"PYTHONBREAKPOINT": os.environ.get("PYTHONBREAKPOINT")}
    if asked.startswith(_CLIENT):
        _refuse_without_grpc(asked)
    # It looks for a cluster that isn't there for minutes, and then ends the process.
    why = why_not_reached(asked.removeprefix(_CLIENT))
    if why:
        raise _not_found(asked, why)
    try:
        with environment.patched(as_it_is), _errors_only():
            _init(ray, address)
    except ConnectionAbortedError as error:
        raise ConfigError(
            f"The Ray cluster at {asked!r} could not start a process for this notebook.",
            why=_lines(error)[-1],
            fix="ray_client_server.err in the logs of the head says more",
        ) from None
    except (ConnectionError, ValueError, SystemExit) as error:
        raise _not_found(asked, _lines(error)[0]) from None
    except RuntimeError as error:
        raise ConfigError(
            f"The Ray cluster at {asked!r} can't be used from here.",
            why=" ".join(str(error).split()),
            fix="the same versions of Ray and Python here as there",
        ) from None


def _init(ray: Any, address: str) -> None:
    """Connects, again if Ray Client's server has failed.

    It forks a process for each client while threads of its are in gRPC, and some of these processes end at once.
    """
    for left in reversed(range(_ATTEMPTS)):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        except ConnectionAbortedError:
            if not left:
                raise
        else:
            return


def _refuse_without_grpc(address: str) -> None:
    try:
        importlib.import_module("grpc")
    except ImportError:
        raise ConfigError(
            f"The address {address!r} is Ray Client's, which needs grpcio, and that isn't installed here.",
            fix="pip install 'notebook-accel[ray]'",
        ) from None


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    """Ray warns of being initialised in a thread, which is of no interest to whoever reads the cell."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _not_found(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"No Ray cluster was found at {address!r}.",
        why=why,
        fix="ray start --head on a machine of yours, or engine_options={'address': 'host:port'}",
    )


def _lines(error: BaseException) -> list[str]:
    return (str(error).strip() or type(error).__name__).splitlines()

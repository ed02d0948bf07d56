"""The notebook's connection to a Ray cluster: making it, calling through it, and noticing its end. Runs in the kernel.

When the notebook is disconnected, a wait inside Ray goes on, or ends its thread. Ray also ends any process whose
cluster has had no head for a minute, even a kernel with all its variables. So nothing here waits inside Ray, and the
notebook is disconnected before that minute is over.

While ``ray.shutdown()`` runs in another thread, a call of Ray, or the release of a reference to one of its objects,
ends the process at once. A call after the shutdown starts a cluster. So calls hold the lock that Ray takes to connect
and disconnect, and ``ray.shutdown()`` first waits for runs to end.

Ray connects in two ways. As a driver, the notebook has Ray in its own process. With Ray Client (``ray://``), a process
beside the cluster's head acts for the notebook. That process lives half a minute longer than the notebook, in case the
network comes back.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

from notebook_accel import environment, interrupts
from notebook_accel.errors import ConfigError, LaunchError, SupervisorLostError
from notebook_accel.interrupts import Latch
from notebook_accel.launching.remote.run import NotWantedError

_T = TypeVar("_T")
Answer: TypeAlias = "concurrent.futures.Future[Any]"

_CLIENT = "ray://"
_INSTALL = "pip install -e '.[ray]' in the clone of notebook-accel"
_ATTEMPTS = 3
_LOOK_PERIOD_S = 0.25
_HEAD_PERIOD_S = 2.0
_HEAD_PATIENCE_S = 30.0  # half of Ray's patience: Ray accepts a head that is restarted in this time
_DIAL_TIMEOUT_S = 5.0
_CALL_PATIENCE_S = 60.0
_LEAVE_DEADLINE_S = 10.0
_LEAVE_PERIOD_S = 0.01


class ClusterConnection:
    """A connection to a cluster, watched until it ends. See ``_DriverLink`` for its attributes."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        client = importlib.import_module("ray.util.client").ray
        self._link: _ClientLink | _DriverLink = _ClientLink(ray, client) if client.is_connected() else _DriverLink(ray)
        self.job_id, self.lock, self.is_driver = self._link.job_id, self._link.lock, self._link.is_driver
        self._why_it_ended = ""
        self._users: set[object] = set()  # not a lock, which an interrupt of the main thread could leave taken
        self._has_ended = Latch()
        self._is_lost = False
        self._leaving = threading.Lock()
        self._posted: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="notebook-accel-ray-connection", daemon=True).start()
        threading.Thread(target=self._make_posted, name="notebook-accel-ray-posts", daemon=True).start()

    @property
    def is_there(self) -> bool:
        """True as long as the notebook has this connection."""
        if not self._has_ended.is_set and not self._link.is_there():
            self._end("ray.shutdown() was called, or Ray has lost the cluster.")
        return not self._has_ended.is_set

    def check(self) -> None:
        """Check that the connection has not ended.

        Raises:
            SupervisorLostError: The connection has ended.
        """
        if not self.is_there:
            raise SupervisorLostError(
                "The notebook is no longer connected to the cluster, and Ray ends what it had there.",
                why=self._why_it_ended,
                fix="run the cell again: it connects to engine_options' address, or ray.init(...) before it",
            )

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Enclose all of a thread's use of Ray, including the release of its references to Ray's objects."""
        user = object()
        self._users.add(user)
        try:
            yield
        finally:
            self._users.discard(user)

    def end(self, why: str) -> None:
        """End the connection for its users and wait until they have left. Call it before disconnecting the notebook."""
        self._end(why)
        deadline_s = time.monotonic() + _LEAVE_DEADLINE_S
        while self._users and time.monotonic() < deadline_s:
            time.sleep(_LEAVE_PERIOD_S)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Block ``ray.shutdown()`` in other threads during short calls.

        Raises:
            SupervisorLostError: The connection has ended.
        """
        with self.lock:
            self.check()
            try:
                yield
            except Exception as error:
                self._judge(error)
                raise

    def ask(self, what: Callable[[], Any]) -> Answer:
        """Call an actor, and return a future for its answer. ``what`` makes the call and returns Ray's reference.

        Raises:
            SupervisorLostError: The connection has ended.
        """
        with self.held():
            answer: Answer = what().future()
        return answer

    def post(self, what: Callable[[], object]) -> None:
        """Queue a call of an actor for another thread, and ignore its answer. Keeps the main thread out of Ray."""
        self._posted.put(what)

    def answers(
        self, answers: Sequence[Answer], patience_s: float, is_wanted: Callable[[], bool] = lambda: True
    ) -> list[Any]:
        """Wait for actors' answers as long as ``is_wanted`` returns true.

        Raises:
            SupervisorLostError: The connection has ended.
            NotWantedError: ``is_wanted`` has returned false.
            TimeoutError: The answers have not come in time.
            RayError: An actor can't answer.
        """
        pending, deadline_s = set(answers), time.monotonic() + patience_s
        while pending:
            if not is_wanted():
                raise NotWantedError
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"It has not answered for {patience_s:g} s.")
            self.check()
            done, _ = concurrent.futures.wait(pending, _LOOK_PERIOD_S, concurrent.futures.FIRST_COMPLETED)
            for answer in done:
                try:
                    answer.result()  # raises an actor's error before the others have answered
                except Exception as error:
                    self._judge(error)
                    raise
                pending.discard(answer)
        return [answer.result() for answer in answers]

    def leave(self) -> None:
        """Disconnect the notebook from a lost cluster, so that it can connect to another one."""
        with self._leaving:
            if self._is_lost and self._link.is_there():
                with contextlib.suppress(Exception):  # the connection is lost anyway
                    self.ray.shutdown()

    def call(self, what: Callable[[], _T], patience_s: float = _CALL_PATIENCE_S) -> _T:
        """Call a function of Ray that waits, such as for the cluster's resources, and return its result.

        Raises:
            SupervisorLostError: The connection has ended.
            LaunchError: The cluster has not answered in time.
        """
        # Without a head Ray would wait for ever, even after a shutdown, and then end the process.
        while why_not_reached(self._link.head):
            interrupts.check()
            self.check()
            self._has_ended.wait(_LOOK_PERIOD_S)
        self.check()
        deadline_s = time.monotonic() + patience_s

        def ask() -> _T:
            try:
                with self.used(), self.held():
                    return what()
            except SystemExit:  # Ray raises this in a thread that is inside it during a shutdown
                raise ConnectionError("Ray was shut down.") from None

        def look() -> None:
            self.check()
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"The cluster has not answered for {patience_s:g} s.", fix="ray status shows how it is"
                )

        try:
            return _in_thread(ask, look)
        except ConnectionError:
            self.check()
            raise

    def _judge(self, error: Exception) -> None:
        """Raise ``SupervisorLostError`` if Ray's error means that the connection has ended."""
        if isinstance(error, self._link.lost_errors) and not isinstance(error, self.ray.exceptions.RayError):
            self._lose(f"Ray Client has lost its server ({type(error).__name__}).")
        self.check()

    def _lose(self, why: str) -> None:
        self._is_lost = True
        self._end(why)

    def _end(self, why: str) -> None:
        self._why_it_ended = self._why_it_ended or why
        self._has_ended.set()
        self._posted.put(None)

    def _make_posted(self) -> None:
        for what in iter(self._posted.get, None):
            with self.used():
                with contextlib.suppress(Exception), self.held():  # ``answers`` reports the connection's end
                    what()
                del what

    def _watch(self) -> None:
        heard_s = dialled_s = time.monotonic()
        while self.is_there:
            self._has_ended.wait(_LOOK_PERIOD_S)
            if not self._link.head or time.monotonic() - dialled_s < _HEAD_PERIOD_S:
                continue
            dialled_s = time.monotonic()
            why = why_not_reached(self._link.head)
            heard_s = time.monotonic() if not why else heard_s
            if time.monotonic() - heard_s > _HEAD_PATIENCE_S and self.is_there:
                self._lose(
                    f"Its head at {self._link.head} has not answered for {_HEAD_PATIENCE_S:g} s ({why}). Ray ends a "
                    "process whose cluster has no head for a minute, so this one was disconnected."
                )
        self.leave()


class _DriverLink:
    is_driver = True  # Ray is in this process, so that actors' answers are in its memory
    lost_errors: tuple[type[Exception], ...] = ()  # the errors that mean a lost connection, except Ray's ``RayError``

    def __init__(self, ray: Any) -> None:
        self._module = importlib.import_module("ray._private.worker")
        self._node = weakref.ref(self._module.global_worker.node)
        # A reentrant lock that calls and ``ray.shutdown()`` hold.
        self.lock: AbstractContextManager[Any] = self._module._connect_or_shutdown_lock
        context = ray.get_runtime_context()
        self.job_id = str(context.get_job_id())
        self.head = str(context.gcs_address)  # when it is gone, Ray ends this process

    def is_there(self) -> bool:
        """Return whether this process still has this connection."""
        worker = self._module.global_worker
        return bool(worker.connected) and worker.node is self._node()


class _ClientLink:
    head = ""  # Ray Client never ends the process
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
        # is_connected() stays true even when the data channel from the server is broken beyond repair.
        return bool(worker.is_connected()) and worker.data_client.data_thread.is_alive()


def _in_thread(ask: Callable[[], _T], look: Callable[[], object] = lambda: None) -> _T:
    """Call a function of Ray in a thread, since it may hang, and return its result.

    ``look`` is called again and again meanwhile. What it raises ends the wait, as an interrupt does.
    """
    answers: list[_T] = []
    raised: list[BaseException] = []
    is_done = Latch()

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            raised.append(error)
        is_done.set()

    threading.Thread(target=run, name="notebook-accel-ray-call", daemon=True).start()
    while not is_done.wait(_LOOK_PERIOD_S):
        interrupts.check()
        look()
    for error in raised:
        raise error
    return answers[0]


# Connecting ---------------------------------------------------------------------------------------------------------

_current: ClusterConnection | None = None
_lock = threading.Lock()


def connect(address: str) -> ClusterConnection:
    """Return the notebook's connection, or connect to this address. See ``RayOptions``.

    Raises:
        ConfigError: Ray isn't installed, or the cluster doesn't exist or can't be used from here.
    """
    global _current
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise ConfigError("engine='ray' needs Ray, which isn't installed here.", fix=_INSTALL) from None
    with _lock:
        if _current is not None and _current.is_there:
            return _current
        if _current is not None:
            _current.leave()
        if not ray.is_initialized():
            _give_up_lost_client()
            _in_thread(lambda: _connect(ray, address))
        _current = ClusterConnection(ray)
        _have_shutdown_wait(ray)
        return _current


@functools.cache
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
    """Disconnect a client that has lost its server, since it blocks every new connection."""
    client: Any = importlib.import_module("ray.util.client").ray
    if client.get_context().client_worker is not None:
        client.disconnect()


def _connect(ray: Any, address: str) -> None:
    asked = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    # Ray makes breakpoint() open its own debugger, even in the notebook.
    as_it_is = {"PYTHONBREAKPOINT": os.environ.get("PYTHONBREAKPOINT")}
    if asked.startswith(_CLIENT):
        _refuse_without_grpc(asked)
    # Ray looks for a missing cluster for minutes, and then ends the process.
    why = why_not_reached(asked.removeprefix(_CLIENT))
    if why:
        raise _not_found(asked, why)
    try:
        with environment.patched(as_it_is), _errors_only():
            _init(ray, address)
    except ConnectionAbortedError as error:
        raise ConfigError(
            f"The Ray cluster at {asked!r} could not start a process for this notebook.",
            why=last_line(error),
            fix="ray_client_server.err in the logs of the head says more",
        ) from None
    except (ConnectionError, ValueError, SystemExit) as error:
        raise _not_found(asked, (str(error).strip() or type(error).__name__).splitlines()[0]) from None
    except RuntimeError as error:
        raise ConfigError(
            f"The Ray cluster at {asked!r} can't be used from here.",
            why=" ".join(str(error).split()),
            fix="the same versions of Ray and Python here as there",
        ) from None


def _init(ray: Any, address: str) -> None:
    """Connect, and retry if Ray Client's server fails.

    The server forks a process for each client while its threads are in gRPC, and some of these processes die at once.
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
            fix=_INSTALL,
        ) from None


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    """Silence Ray's warning about being initialised in a thread, which means nothing to the user."""
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


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text: after a node's traceback, this line names the cause."""
    return [type(error).__name__, *str(error).strip().splitlines()][-1]


def why_not_reached(address: str) -> str:
    """Return why nobody answers at an address; empty if somebody does, or for a keyword of Ray such as ``auto``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), _DIAL_TIMEOUT_S).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""

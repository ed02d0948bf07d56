"""The notebook's connection to a cluster: how it comes about, how its end is noticed, and waits that end with it.

A wait inside Ray doesn't end when the notebook is disconnected, or ends the thread; and a process whose cluster has no
head any more is ended by Ray after a minute, a notebook's kernel with all its variables too. So nothing here waits
inside Ray, and a notebook is disconnected before that.

A call of Ray, or the end of a reference to an object of its, while ``ray.shutdown()`` runs in another thread ends the
process at once; a call after it begins a cluster. So calls are made while the lock is held that Ray's connecting and
disconnecting take, and ``ray.shutdown()`` first has runs come to their ends.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

from notebook_accel import environment
from notebook_accel.errors import ConfigError, LaunchError, SupervisorLostError

__all__ = ["Answer", "Connection", "NotWantedError", "connect"]

_T = TypeVar("_T")
Answer: TypeAlias = "concurrent.futures.Future[Any]"

_LOOK_PERIOD_S = 0.25
_HEAD_PERIOD_S = 2.0
_HEAD_PATIENCE_S = 30.0  # half of Ray's: a head that is started again in this time is the same to it
_DIAL_TIMEOUT_S = 5.0
_CALL_PATIENCE_S = 60.0
_LEAVE_DEADLINE_S = 10.0


class NotWantedError(Exception):
    """Nobody wants what was waited for any more."""


class Connection:
    """A connection, which is watched until it ends.

    Args:
        ray: The library, connected.
    """

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        client = importlib.import_module("ray.util.client").ray
        self._client = client if client.is_connected() else None
        self._worker = importlib.import_module("ray._private.worker")
        self._node = weakref.ref(self._worker.global_worker.node) if self._client is None else None
        context = ray.get_runtime_context()
        self.job_id = str(context.get_job_id())
        self._head = "" if self._client else str(context.gcs_address)
        self._why_it_ended = ""
        self._users = 0
        self._is_free = threading.Condition()
        self._has_ended = threading.Event()
        threading.Thread(target=self._watch, name="notebook-accel-ray-connection", daemon=True).start()

    @property
    def is_there(self) -> bool:
        """Whether the notebook is still connected, and has been since then."""
        if not self._has_ended.is_set() and not self._is_the_same():
            self._end("ray.shutdown() was called, or Ray has lost the cluster.")
        return not self._has_ended.is_set()

    def check(self) -> None:
        """Raises what there is to say if it has ended.

        Raises:
            SupervisorLostError: It has.
        """
        if not self.is_there:
            raise SupervisorLostError(
                "The notebook is no longer connected to the cluster, and Ray ends what it had there.",
                why=self._why_it_ended,
                fix="run the cell again: it connects to engine_options' address, or ray.init(...) before it",
            )

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """For a thread that calls Ray, or has references to objects of its, which it gives up in here."""
        with self._is_free:
            self._users += 1
        try:
            yield
        finally:
            with self._is_free:
                self._users -= 1
                self._is_free.notify_all()

    def end(self, why: str) -> None:
        """Ends it for those that use it, before the notebook is disconnected, and waits until they have noticed."""
        self._end(why)
        with self._is_free:
            self._is_free.wait_for(lambda: self._users == 0, _LEAVE_DEADLINE_S)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Has another thread's ``ray.shutdown()`` wait, for calls that don't take long.

        Raises:
            SupervisorLostError: The connection has ended.
        """
        with self._worker._connect_or_shutdown_lock:
            self.check()
            yield

    def ask(self, what: Callable[[], Any]) -> Answer:
        """What will come of a call of an actor.

        Args:
            what: Calls it; gives Ray's reference to the answer.

        Raises:
            SupervisorLostError: The connection has ended.
        """
        with self.held():
            answer: Answer = what().future()
        return answer

    def first_of(self, answers: Collection[Answer], patience_s: float) -> set[Answer]:
        """Those of some answers that are there; waits for the first of them, and no longer than that.

        Raises:
            SupervisorLostError: The connection has ended.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            self.check()
            left_s = deadline_s - time.monotonic()
            done, _ = concurrent.futures.wait(
                answers, max(0.0, min(left_s, _LOOK_PERIOD_S)), concurrent.futures.FIRST_COMPLETED
            )
            if done or left_s <= 0:
                return done

    def answers(self, answers: Sequence[Answer], patience_s: float, is_wanted: Callable[[], bool]) -> list[Any]:
        """What actors answer.

        Args:
            answers: As ``ask`` gives them.
            patience_s: How long to wait, in all.
            is_wanted: Whether anybody still waits for them.

        Raises:
            SupervisorLostError: The connection has ended.
            NotWantedError: Nobody does.
            TimeoutError: They have not come in time.
            RayError: What one of them is instead of an answer.
        """
        pending, deadline_s = set(answers), time.monotonic() + patience_s
        while pending:
            if not is_wanted():
                raise NotWantedError
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"It has not answered for {patience_s:g} s.")
            for answer in self.first_of(pending, _LOOK_PERIOD_S):
                answer.result()  # raises what speaks against waiting for the others
                pending.discard(answer)
        return [answer.result() for answer in answers]

    def call(self, what: Callable[[], _T], patience_s: float = _CALL_PATIENCE_S) -> _T:
        """Asks Ray something for which it waits by itself: what the cluster has, for instance.

        Args:
            what: Asks it.
            patience_s: How long to wait.

        Raises:
            SupervisorLostError: The connection has ended meanwhile, or before it.
            LaunchError: Nothing has come of it in time.
        """
        answer: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def ask() -> None:
            try:
                with self.used(), self.held():
                    answer.set_result(what())
            except SystemExit:  # so Ray ends a thread that is inside it when it is shut down
                answer.set_exception(ConnectionError("Ray was shut down."))
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits
                answer.set_exception(error)

        # Ray would ask for ever, even after a shutdown, and then end the process.
        while _why_not_reached(self._head):
            self.check()
            self._has_ended.wait(_LOOK_PERIOD_S)
        self.check()
        threading.Thread(target=ask, name="notebook-accel-ray-call", daemon=True).start()
        if not self.first_of([answer], patience_s):
            raise LaunchError(f"The cluster has not answered for {patience_s:g} s.", fix="ray status shows how it is")
        if isinstance(answer.exception(), ConnectionError):
            self.check()
        return answer.result()

    def _is_the_same(self) -> bool:
        if self._client is not None:
            return bool(self._client.is_connected())
        worker = self._worker.global_worker
        return bool(worker.connected) and self._node is not None and worker.node is self._node()

    def _end(self, why: str) -> None:
        self._why_it_ended = self._why_it_ended or why
        self._has_ended.set()

    def _watch(self) -> None:
        heard_s = dialled_s = time.monotonic()
        while self.is_there:
            self._has_ended.wait(_LOOK_PERIOD_S)
            if not self._head or time.monotonic() - dialled_s < _HEAD_PERIOD_S:
                continue
            dialled_s = time.monotonic()
            why = _why_not_reached(self._head)
            heard_s = time.monotonic() if not why else heard_s
            if time.monotonic() - heard_s > _HEAD_PATIENCE_S and self.is_there:
                self._end(
                    f"Its head at {self._head} has not answered for {_HEAD_PATIENCE_S:g} s ({why}). Ray ends a process "
                    "whose cluster has no head for a minute, so this one was disconnected."
                )
                with contextlib.suppress(Exception):  # there is nobody who could hear of it
                    self.ray.shutdown()


_current: Connection | None = None
_lock = threading.Lock()


def connect(address: str) -> Connection:
    """The connection that the notebook has, or a new one; it then stays so.

    Args:
        address: As ``RayOptions`` has it.

    Raises:
        ConfigError: Ray isn't installed, or there is no such cluster.
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
        if not ray.is_initialized():
            _connect(ray, address)
        _current = Connection(ray)
        _have_shutdown_wait(ray)
        return _current


@functools.cache  # once is enough
def _have_shutdown_wait(ray: Any) -> None:
    original = ray.shutdown

    @functools.wraps(original)
    def shutdown(*args: Any, **options: Any) -> None:
        if _current is not None and _current.is_there:
            _current.end("ray.shutdown() was called.")
        original(*args, **options)

    worker: Any = importlib.import_module("ray._private.worker")
    ray.shutdown = worker.shutdown = shutdown


def _connect(ray: Any, address: str) -> None:
    asked = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    # Ray has breakpoint() open a debugger of its own, in the notebook too.
    as_it_is = {"PYTHONBREAKPOINT": os.environ.get("PYTHONBREAKPOINT")}
    # It looks for a cluster that isn't there for minutes, and then ends the process.
    why = _why_not_reached(asked.removeprefix("ray://"))
    if why:
        raise _not_found(asked, why)
    try:
        with environment.patched(as_it_is), _errors_only():
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (ConnectionError, ValueError, SystemExit) as error:
        raise _not_found(asked, (str(error) or type(error).__name__).splitlines()[0]) from None


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


def _why_not_reached(address: str) -> str:
    """Why nobody answers at an address; empty if somebody does, or if it is no address but a word of Ray's."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), _DIAL_TIMEOUT_S).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""

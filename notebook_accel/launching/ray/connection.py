"""The notebook's connection to a cluster: how its end is noticed, and waits that end with it.

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
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from notebook_accel.errors import LaunchError, SupervisorLostError
from notebook_accel.launching.ray import links
from notebook_accel.uninterruptible import Latch

__all__ = ["Answer", "Connection", "NotWantedError", "why_not_reached"]

_T = TypeVar("_T")
Answer: TypeAlias = "concurrent.futures.Future[Any]"

_LOOK_PERIOD_S = 0.25
_HEAD_PERIOD_S = 2.0
_HEAD_PATIENCE_S = 30.0  # half of Ray's: a head that is started again in this time is the same to it
_DIAL_TIMEOUT_S = 5.0
_CALL_PATIENCE_S = 60.0
_LEAVE_DEADLINE_S = 10.0
_LEAVE_PERIOD_S = 0.01


class NotWantedError(Exception):
    """Nobody wants what was waited for any more."""


class Connection:
    """A connection, which is watched until it ends.

    Args:
        ray: The library, connected.

    Attributes:
        ray: The same.
        job_id: Ray's name for what belongs to this connection.
        lock: Taken by calls, and by ``ray.shutdown()``.
        is_driver: Whether Ray is in this process: calls are its own, and what actors return is in its memory.
    """

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self._link = links.current(ray)
        self.job_id, self.lock, self.is_driver = self._link.job_id, self._link.lock, self._link.is_driver
        self._why_it_ended = ""
        self._users: set[object] = set()  # which needs no lock that an interrupt of the main thread could leave taken
        self._has_ended = Latch()
        self._is_lost = False
        self._leaving = threading.Lock()
        threading.Thread(target=self._watch, name="notebook-accel-ray-connection", daemon=True).start()

    @property
    def is_there(self) -> bool:
        """True if the notebook is still connected, and has been since then."""
        if not self._has_ended.is_set and not self._link.is_there():
            self._end("ray.shutdown() was called, or Ray has lost the cluster.")
        return not self._has_ended.is_set

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
        user = object()
        self._users.add(user)
        try:
            yield
        finally:
            self._users.discard(user)

    def end(self, why: str) -> None:
        """Ends it for those that use it, before the notebook is disconnected, and waits until they have noticed."""
        self._end(why)
        deadline_s = time.monotonic() + _LEAVE_DEADLINE_S
        while self._users and time.monotonic() < deadline_s:
            time.sleep(_LEAVE_PERIOD_S)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Has another thread's ``ray.shutdown()`` wait, for calls that don't take long.

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
                self.result(answer)  # raises what speaks against waiting for the others
                pending.discard(answer)
        return [answer.result() for answer in answers]

    def result(self, answer: Answer) -> Any:
        """What an actor has answered.

        Raises:
            SupervisorLostError: The connection has ended instead.
            RayError: What it is instead of an answer.
        """
        try:
            return answer.result()
        except Exception as error:
            self._judge(error)
            raise

    def leave(self) -> None:
        """Disconnects the notebook if what was lost of the connection is in the way of another one."""
        with self._leaving:
            if self._is_lost and self._link.is_there():
                with contextlib.suppress(Exception):  # there is nobody who could hear of it
                    self.ray.shutdown()

    def call(self, what: Callable[[], _T], patience_s: float = _CALL_PATIENCE_S) -> _T:
        """Asks Ray something for which it waits by itself: what the cluster has, for instance.

        Args:
            what: Asks it.
            patience_s: How long to wait.

        Raises:
            SupervisorLostError: The connection has ended meanwhile, or before it.
            LaunchError: Nothing has come of it in time.
        """
        call = _Call(what)
        # Ray would ask for ever, even after a shutdown, and then end the process.
        while why_not_reached(self._link.head):
            self.check()
            self._has_ended.wait(_LOOK_PERIOD_S)
        self.check()
        threading.Thread(target=call.make, args=(self,), name="notebook-accel-ray-call", daemon=True).start()
        deadline_s = time.monotonic() + patience_s
        while not call.is_done.wait(_LOOK_PERIOD_S):
            self.check()
            if time.monotonic() > deadline_s:
                raise LaunchError(
                    f"The cluster has not answered for {patience_s:g} s.", fix="ray status shows how it is"
                )
        if isinstance(call.raised, ConnectionError):
            self.check()
        return call.result()

    def _judge(self, error: Exception) -> None:
        """Raises that the connection has ended if that is what an error of Ray's comes from."""
        if isinstance(error, self._link.lost_errors) and not isinstance(error, self.ray.exceptions.RayError):
            self._lose(f"Ray Client has lost its server ({type(error).__name__}).")
        self.check()

    def _lose(self, why: str) -> None:
        self._is_lost = True
        self._end(why)

    def _end(self, why: str) -> None:
        self._why_it_ended = self._why_it_ended or why
        self._has_ended.set()

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


class _Call(Generic[_T]):
    """Something that Ray is asked in a thread of its own."""

    def __init__(self, what: Callable[[], _T]) -> None:
        self._what = what
        self._answers: list[_T] = []
        self.raised: BaseException | None = None
        self.is_done = Latch()

    def make(self, connection: Connection) -> None:
        """In the thread."""
        try:
            with connection.used(), connection.held():
                self._answers.append(self._what())
        except SystemExit:  # so Ray ends a thread that is inside it when it is shut down
            self.raised = ConnectionError("Ray was shut down.")
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self.raised = error
        self.is_done.set()

    def result(self) -> _T:
        """What has come of it."""
        if self.raised is not None:
            raise self.raised
        return self._answers[0]


def why_not_reached(address: str) -> str:
    """Why nobody answers at an address; empty if somebody does, or if it is no address but a word of Ray's."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), _DIAL_TIMEOUT_S).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""

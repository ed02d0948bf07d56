"""Real ranks for tests: processes that run one function after another.

They are forks of a *nursery*, ``python -m tests.training.ranks <descriptor>``: a process with one thread that has only
imported torch. So ranks start at once, and torch is imported once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing.connection
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, ClassVar, TypeVar

import pytest

_DEADLINE_S = 90.0
_START_DEADLINE_S = 60.0
_REQUEST_BYTES = 1 << 20
_FIXTURES = {1: "one_rank", 2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}
_Test = TypeVar("_Test", bound=Callable[..., None])
_BY_CHANCE = random.SystemRandom()  # Hypothesis seeds the usual numbers, in all processes of a test run alike


def free_port() -> int:
    """Return a port that nothing uses.

    It isn't one of those that the system gives to programs which ask for any: a kernel that another test starts may
    have been told to listen on such a port in a second.
    """
    while True:
        port = _BY_CHANCE.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Ranks:
    """A rank for each environment.

    Args:
        environments: Each rank's environment variables, in addition to those of this process.
    """

    _late: ClassVar[set[Ranks]] = set()

    def __init__(self, environments: list[dict[str, str]]) -> None:
        self._own = contextlib.ExitStack()
        nursery = Nursery.shared or self._own.enter_context(contextlib.closing(Nursery()))
        self._nursery = nursery
        self._environments = environments
        self._start()

    def _start(self) -> None:
        self._ranks = [self._nursery.fork({**os.environ, **variables}) for variables in self._environments]

    @classmethod
    def replace_late(cls) -> None:
        """Replace the ranks of which one was late, so that a test that shares them doesn't fail too."""
        while cls._late:
            late = cls._late.pop()
            late._end()
            port = {"MASTER_PORT": str(free_port())}
            late._environments = [variables | port for variables in late._environments]
            late._start()

    def run(self, function: Callable[..., Any], *args: Any, deadline_s: float = _DEADLINE_S) -> list[Any]:
        """Return the values of ``function(*args)`` by rank.

        The function has to be at the top of a module, since it is sent by name.

        Raises:
            Exception: The exception of the lowest rank in which the function raised.
            ChildProcessError: A rank has ended.
            TimeoutError: A rank didn't return in time.
        """
        return [_value(reply) for reply in self.replies(function, *args, deadline_s=deadline_s)]

    def replies(self, function: Callable[..., Any], *args: Any, deadline_s: float = _DEADLINE_S) -> list[Any]:
        """Return the values by rank like ``run``, or the exceptions that ``function`` raised there."""
        assert self not in self._late, "one of these ranks was late, and they can't be used any more"
        self._late.add(self)  # until all have replied: the test's time limit can end it here
        for _, connection in self._ranks:
            _send(connection, (function, args))
        deadline = time.monotonic() + deadline_s
        replies: dict[int, Any] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        while waiting:
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = f"ranks {sorted(waiting.values())} didn't return from {function.__name__} within {deadline_s} s"
                raise TimeoutError(f"{late}; the others returned {replies}")
            for connection in ready:
                rank = waiting.pop(connection)
                replies[rank] = self._reply(rank, connection)
        self._late.remove(self)
        return [replies[rank] for rank in sorted(replies)]

    def _reply(self, rank: int, connection: Connection) -> Any:
        try:
            return _receive(connection)
        except EOFError:
            exit_code = self._nursery.end(self._ranks.pop(rank)[0])
            message = f"rank {rank} has ended with exit code {exit_code}; a crash printed its stack"
            raise ChildProcessError(message) from None

    def close(self) -> None:
        self._late.discard(self)
        self._end()
        self._own.close()

    def _end(self) -> None:
        for pid, connection in self._ranks:
            connection.close()
            self._nursery.end(pid)


class Nursery:
    """A process that forks ranks, and waits for those that it has killed.

    Attributes:
        shared: The nursery that all tests use, ``None`` if there is none.
    """

    shared: ClassVar[Nursery | None] = None

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(_START_DEADLINE_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.training.ranks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                # One thread; and GPUs are counted through NVML only, so that forks can still use them.
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                },
            )

    def fork(self, variables: dict[str, str]) -> tuple[int, Connection]:
        """Fork a rank with exactly these environment variables."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._requests, [pickle.dumps(variables)], [theirs.fileno()])
        return self._reply(), Connection(ours.detach())

    def end(self, pid: int) -> int:
        """Kill a rank if it is still running, and return its exit code, negative if a signal has ended it."""
        self._requests.send(pickle.dumps(pid))
        return self._reply()

    def close(self) -> None:
        self._requests.close()  # ends the nursery and its ranks
        self._process.wait(_START_DEADLINE_S)

    def _reply(self) -> int:
        number: int = pickle.loads(self._requests.recv(_REQUEST_BYTES))
        return number


def _send(connection: Connection, thing: Any) -> None:
    # Not connection.send: with torch it moves tensors through shared memory, which tests would leave behind.
    connection.send_bytes(pickle.dumps(thing))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _value(reply: Any) -> Any:
    if isinstance(reply, Exception):
        print(reply.in_rank)
        raise reply
    return reply


def group(size: int, **variables: str) -> Ranks:
    """Start ranks that find each other through rank 0's store."""
    port = str(free_port())
    return Ranks([
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
            **variables,
        }
        for rank in range(size)
    ])  # fmt: skip


@contextlib.contextmanager
def running(size: int, **variables: str) -> Iterator[Ranks]:
    ranks = group(size, **variables)
    try:
        yield ranks
    finally:
        ranks.close()


def on_ranks(number: int) -> Callable[[_Test], _Test]:
    """Mark a test whose body runs in each of so many ranks that stay, with the arguments that the test gets.

    Pytest doesn't explain the assertions there, so the printed traceback of one that fails shows the variables.
    """
    fixture = _FIXTURES[number]
    return lambda test: pytest.mark.usefixtures(fixture)(pytest.mark.on_ranks(fixture)(test))


@contextlib.contextmanager
def caught_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Return the warnings of the body, each as often as it comes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def _nurse(requests: socket.socket) -> None:
    """Run a nursery until the process that started it is gone."""
    _import_what_ranks_need()
    assert len(os.listdir("/proc/self/task")) == 1  # a fork has only one of the threads
    gc.freeze()
    alive: set[int] = set()
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 1)
        if not request:
            break
        asked = pickle.loads(request)
        if isinstance(asked, dict):
            pid = os.fork()
            if not pid:
                requests.close()
                _begin(asked, descriptors[0])
            os.close(descriptors[0])
            alive.add(pid)
            reply = pid
        else:
            reply = _kill(asked)
            alive.discard(asked)
        requests.send(pickle.dumps(reply))
    for pid in alive:
        _kill(pid)


def _import_what_ranks_need() -> None:
    import hypothesis  # noqa: F401  tests import it, and ranks import tests
    import numpy  # noqa: F401
    import torch
    import torch._dynamo  # the first optimizer imports it
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    import notebook_accel.training.accelerator  # noqa: F401

    torch.set_num_threads(1)


def _kill(pid: int) -> int:
    os.kill(pid, signal.SIGKILL)  # no wait yet, so the number is still this process's
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _begin(variables: dict[str, str], descriptor: int) -> None:
    """Run a rank in the forked process."""
    import numpy

    try:
        os.environ.clear()
        os.environ.update(variables)
        faulthandler.enable()  # a crash in native code says where it was called
        random.seed()  # as in a process that wasn't forked
        numpy.random.seed()
        _serve(Connection(descriptor))
    finally:
        os._exit(0)


def _serve(connection: Connection) -> None:
    while True:
        try:
            function, args = _receive(connection)
        except EOFError:
            return
        try:
            _send(connection, function(*args))
        except Exception as error:  # noqa: BLE001  the test gets any exception
            explained = traceback.TracebackException.from_exception(
                error, capture_locals=isinstance(error, AssertionError)
            )
            error.in_rank = "".join(explained.format())  # type: ignore[attr-defined]  # tracebacks don't pickle
            _send(connection, error)
        if sys.version_info < (3, 11):
            gc.collect()  # leaving a loop early leaves a cycle from contextlib, which holds a loader's workers


if __name__ == "__main__":
    _nurse(socket.socket(fileno=int(sys.argv[1])))

"""Real ranks for tests: processes that run a function each, over and over, so that torch is imported once a rank.

``python -m tests.training.ranks <descriptor>`` is one of them.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

_DEADLINE_S = 60.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Ranks:
    """As many ranks as there are environments.

    Args:
        environments: The variables of each.
    """

    def __init__(self, environments: list[dict[str, str]]) -> None:
        self._ranks = [_start(variables) for variables in environments]

    def run(self, function: Callable[..., Any], *args: Any, deadline_s: float = _DEADLINE_S) -> list[Any]:
        """What ``function(*args)`` returns in each rank.

        The function has to be one of a module's, since it is sent by name.

        Raises:
            Exception: What it raised in the lowest of the ranks where it raised.
            TimeoutError: A rank didn't return in time.
        """
        return [_value(reply) for reply in self.replies(function, *args, deadline_s=deadline_s)]

    def replies(self, function: Callable[..., Any], *args: Any, deadline_s: float = _DEADLINE_S) -> list[Any]:
        """Like ``run``, with the exceptions in place of the values of the ranks that raised."""
        for _, connection in self._ranks:
            _send(connection, (function, args))
        deadline = time.monotonic() + deadline_s
        replies = []
        for rank, (_, connection) in enumerate(self._ranks):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                others = [_receive(other) for _, other in self._ranks[rank + 1 :] if other.poll(0)]
                raise TimeoutError(
                    f"rank {rank} didn't return from {function.__name__} within {deadline_s} s; after it came {others}"
                )
            replies.append(_receive(connection))
        return replies

    def close(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.wait()


def _start(variables: dict[str, str]) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.ranks", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **variables},
        )
    return process, Connection(ours.detach())


def _send(connection: Connection, thing: Any) -> None:
    # Not connection.send: torch has taught that to move tensors through shared memory, which tests would leave behind.
    connection.send_bytes(pickle.dumps(thing))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _value(reply: Any) -> Any:
    if isinstance(reply, Exception):
        print(reply.in_rank)
        raise reply
    return reply


def group(size: int, **variables: str) -> Ranks:
    """Ranks that find each other through rank 0's store."""
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


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args = _receive(connection)
        except EOFError:
            return
        try:
            _send(connection, function(*args))
        except Exception as error:  # noqa: BLE001  whatever it is, the test gets it
            error.in_rank = traceback.format_exc()  # tracebacks don't pickle
            _send(connection, error)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))

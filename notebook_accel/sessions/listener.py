"""The socket through which ranks join their session. It lies in a folder that only this user can read.

Each rank proves with a secret that it belongs to the session. Inherited socket pairs wouldn't do, since a rank that is
restarted has to join too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import os
import pathlib
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator

from notebook_accel.errors import LaunchError
from notebook_accel.launching import logs
from notebook_accel.launching.processes import pidfd_open
from notebook_accel.protocol import session_messages as messages
from notebook_accel.protocol.channel import ClosedError, Connection, peer_of
from notebook_accel.uninterruptible import Latch

_HELLO_DEADLINE_S = 5.0
_POLL_PERIOD_S = 0.1
_NAME = "session"


@dataclasses.dataclass(eq=False)
class JoinedRank:
    """A rank that has joined.

    Attributes:
        rank: The rank's number.
        connection: The connection to it.
        pidfd: A reference to its process, which holds even if the process ID is reused.
        was_taken: Set once the rank's connection is served.
    """

    rank: int
    connection: Connection
    pidfd: int
    was_taken: Latch = dataclasses.field(default_factory=Latch)

    def close(self) -> None:
        self.connection.close()
        os.close(self.pidfd)


class Listener:
    """The session's end of the socket that ranks join through.

    Attributes:
        folder: The socket's folder.
        secret: Ranks send it to prove that they belong to the session.

    Raises:
        LaunchError: The folder can't be made.
    """

    def __init__(self) -> None:
        folder = logs.make_folder("", "session")
        if folder is None:
            raise LaunchError(
                "The folder for the session's socket could not be made among the temporary files.",
                fix="make room there, or set TMPDIR to another folder",
            )
        self.folder: pathlib.Path = folder
        self.secret = secrets.token_bytes(32)
        self._hold = logs.hold(str(folder))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short_path(folder) as path:
            self._socket.bind(path)
        self._socket.listen(1024)
        self._socket.settimeout(_POLL_PERIOD_S)

    def close(self) -> None:
        """Stop listening and remove the folder."""
        self._socket.close()
        if self._hold is not None:
            os.close(self._hold)
        shutil.rmtree(self.folder, ignore_errors=True)

    def joining(self, count: int, timeout_s: float, check: Callable[[], None]) -> Iterator[JoinedRank]:
        """Yield ranks as they join, until ``count`` have.

        Args:
            count: Number of ranks to wait for.
            timeout_s: Deadline for all of them together.
            check: Called repeatedly; it raises if waiting is useless.

        Raises:
            LaunchError: Some ranks didn't join in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while count:
            check()
            if time.monotonic() > deadline_s:
                raise LaunchError(f"{count} of the session's ranks have not joined within {timeout_s:g} s.")
            with contextlib.suppress(TimeoutError):
                joined = self._checked(self._socket.accept()[0])
                if joined is not None:
                    count -= 1
                    yield joined

    def _checked(self, sock: socket.socket) -> JoinedRank | None:
        """Check a new connection. Return the rank behind it, or ``None`` for anything else."""
        pid, uid = peer_of(sock)
        connection = Connection(sock)
        connection.set_receive_deadline(_HELLO_DEADLINE_S)
        with contextlib.suppress(ClosedError, ProcessLookupError, ValueError):  # msgspec's errors are ValueErrors
            frames = connection.receive()
            hello = messages.hello.decode(frames[0].body) if frames else None
            if hello is not None and uid == os.getuid() and hmac.compare_digest(hello.secret, self.secret):
                connection.set_receive_deadline(0)
                return JoinedRank(hello.rank, connection, pidfd_open(pid))
        connection.close()
        return None


def join_session(folder: str, hello: messages.Hello) -> Connection:
    """Connect a rank to its session."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short_path(pathlib.Path(folder)) as path:
        sock.connect(path)
    connection = Connection(sock)
    connection.send(messages.encode(hello))
    return connection


@contextlib.contextmanager
def _short_path(folder: pathlib.Path) -> Iterator[str]:
    """Yield a path to the folder's socket that is short enough for the system, however long the folder's path is."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{_NAME}"
    finally:
        os.close(descriptor)

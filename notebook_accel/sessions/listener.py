"""The socket through which ranks join their session, in a folder that only this user can read. Both sides use it.

Each rank proves that it belongs to the session with a secret from that folder. Inherited socket pairs wouldn't do,
since a restarted rank must join too. In a detached session, all ranks join each kernel that attaches.
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

from notebook_accel.errors import LaunchError
from notebook_accel.interrupts import Latch
from notebook_accel.launching import logs
from notebook_accel.launching.processes import pidfd_open
from notebook_accel.launching.run_folders import RunFolder, short_path
from notebook_accel.protocol import session_messages as messages
from notebook_accel.protocol.channel import ClosedError, Connection, peer_of

_HELLO_DEADLINE_S = 5.0
_POLL_PERIOD_S = 0.1
_NAME, _SECRET = "session", "secret"


@dataclasses.dataclass(eq=False)
class JoinedRank:
    """A rank that has joined."""

    rank: int
    connection: Connection
    pidfd: int  # a descriptor of its process, valid even if the pid is reused
    kept: messages.RetainedState | None = None  # its state from earlier kernels; ``None`` for a fresh process
    was_taken: Latch = dataclasses.field(default_factory=Latch)  # set once its connection is served

    def close(self) -> None:
        self.connection.close()
        os.close(self.pidfd)


class Listener:
    """The session's end of the socket that ranks join through, in ``folder``.

    ``run`` is the folder of a detached session; ``None`` makes a temporary folder.

    Raises:
        LaunchError: The folder can't be made or written.
        RunError: Another kernel listens for the detached session's ranks.
    """

    def __init__(self, run: RunFolder | None = None) -> None:
        self._is_temporary = run is None
        if run is None:
            self.folder, self._hold = _temporary_folder()
        else:
            self.folder, self._hold = run.path, run.hold_for_kernel()
        self._secret = secrets.token_bytes(32)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._remove_files()  # left behind by a kernel that was killed
            (self.folder / _SECRET).touch(mode=0o600)
            (self.folder / _SECRET).write_bytes(self._secret)
            with short_path(self.folder / _NAME) as path:
                self._socket.bind(path)
            self._socket.listen(1024)
        except OSError as error:
            self.close()
            raise LaunchError(f"The session's socket can't be made in {self.folder}: {error.strerror}.") from None
        self._socket.settimeout(_POLL_PERIOD_S)

    def close(self) -> None:
        """Stop listening, and remove the files and a temporary folder."""
        self._socket.close()
        self._remove_files()
        if self._is_temporary:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._hold is not None:
            os.close(self._hold)

    def close_in_fork(self) -> None:
        """Close the descriptors in a fork of this process, which may outlive it."""
        self._socket.close()
        if self._hold is not None:
            os.close(self._hold)

    def _remove_files(self) -> None:
        for name in (_NAME, _SECRET):
            (self.folder / name).unlink(missing_ok=True)

    def accept(self) -> JoinedRank | None:
        """Wait a moment for a rank of this session that joins, and return it; ``None`` if none comes."""
        try:
            sock, _ = self._socket.accept()
        except TimeoutError:
            return None
        pid, uid = peer_of(sock)
        connection = Connection(sock)
        connection.set_receive_deadline(_HELLO_DEADLINE_S)
        with contextlib.suppress(ClosedError, ProcessLookupError, ValueError):  # msgspec's errors are ValueErrors
            frames = connection.receive()
            hello = messages.decode_hello(frames[0].body) if frames else None
            if hello is not None and uid == os.getuid() and hmac.compare_digest(hello.secret, self._secret):
                connection.set_receive_deadline(0)
                return JoinedRank(hello.rank, connection, pidfd_open(pid), hello.kept)
        connection.close()
        return None


def _temporary_folder() -> tuple[pathlib.Path, int | None]:
    """Make a folder, and return it with a descriptor that protects it from removal."""
    folder = logs.make_folder("", "session")
    if folder is None:
        raise LaunchError(
            "The folder for the session's socket could not be made among the temporary files.",
            fix="make room there, or set TMPDIR to another folder",
        )
    return folder, logs.hold(str(folder))


def read_secret(folder: str) -> bytes:
    """Return the secret of the kernel that listens in the folder, or was the last to listen; an OSError if none was."""
    return pathlib.Path(folder, _SECRET).read_bytes()


def join_session(folder: str, hello: messages.Hello) -> Connection:
    """Connect a rank to its session. Raise an OSError if nobody listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection = Connection(sock)
    try:
        with short_path(pathlib.Path(folder, _NAME)) as path:
            sock.connect(path)
        connection.send(messages.encode(hello))
    except OSError:
        connection.close()
        raise
    return connection

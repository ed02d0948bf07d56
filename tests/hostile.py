"""A process of the same user that means harm: it finds what listens, connects, and writes what it shouldn't."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import secrets
import socket
import struct
import threading
from typing import NamedTuple

from tests import processes

_LISTENS = {"tcp": "0A", "tcp6": "0A"}
_TIMEOUT_S = 2.0
_ROUNDS = 3


class Listener(NamedTuple):
    """A listening socket. ``address`` is a TCP port's numeric address, or the name of a Unix socket."""

    family: str
    address: str
    port: int
    pid: int


def listeners(root_pid: int) -> set[Listener]:
    """Everything that listens in a process and those below it."""
    owners = {}
    for pid in (root_pid, *(process.pid for process in processes.descendants(root_pid))):
        with contextlib.suppress(OSError):  # it has just ended
            for link in pathlib.Path("/proc", str(pid), "fd").iterdir():
                with contextlib.suppress(OSError):
                    owners[os.readlink(link)] = pid
    return {
        Listener(family, address, port, owners[f"socket:[{inode}]"])
        for family, address, port, inode in (*_tcp("tcp"), *_tcp("tcp6"), *_unix())
        if f"socket:[{inode}]" in owners
    }


def _tcp(family: str) -> list[tuple[str, str, int, str]]:
    rows = [line.split() for line in pathlib.Path("/proc/net", family).read_text().splitlines()[1:]]
    found = []
    for row in rows:
        if row[3] == _LISTENS[family]:
            host, port = row[1].split(":")
            words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
            packed = struct.pack(f"={len(words)}I", *words)
            name = socket.inet_ntop(socket.AF_INET if family == "tcp" else socket.AF_INET6, packed)
            found.append((family, name, int(port, 16), row[9]))
    return found


def _unix() -> list[tuple[str, str, int, str]]:
    rows = [line.split(maxsplit=7) for line in pathlib.Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [("unix", (*row, "")[7], 0, row[6]) for row in rows if int(row[3], 16) & 0x10000]  # SO_ACCEPTCON


class _Bomb:
    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self._path),)


def messages(bomb: pathlib.Path) -> list[bytes]:
    """Return data to send, one connection each: nothing, noise, and pickles that make a folder if loaded.

    No message begins with eight bytes that are a small number, least byte first: gloo takes whoever sends the number
    of a connection before the rank's peer does for that peer (docs/security.md).
    """
    loaded = pickle.dumps(_Bomb(bomb))
    framed = [
        struct.pack("!IH", len(loaded), 0) + loaded,  # as our own channel has it
        struct.pack("!Q", len(loaded)) + loaded,  # as multiprocessing and others have it
        struct.pack("<Q", len(loaded)) + loaded,
        struct.pack("!i", len(loaded)) + loaded,
    ]
    return [
        b"",
        b"\0" * 7 + b"\1" * 57,
        b"\xff" * 64,
        secrets.token_bytes(1 << 16),
        loaded,
        *framed,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 7,
    ]


class Attack:
    """Attacks everything that begins to listen below a process, until it is stopped.

    Attributes:
        attacked: What was found and connected to, and how often.
    """

    def __init__(self, root_pid: int, bomb: pathlib.Path, *, spare: set[Listener]) -> None:
        self.attacked: dict[Listener, int] = {}
        self._root_pid = root_pid
        self._messages = messages(bomb)
        self._spare = {listener[:3] for listener in spare}
        self._held: list[socket.socket] = []  # connections that stay open, and say nothing more
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(30)
        for connection in self._held:
            connection.close()

    def targets(self) -> set[Listener]:
        """Return the sockets that listen now and haven't been attacked often enough."""
        now = {listener for listener in listeners(self._root_pid) if listener[:3] not in self._spare}
        return {listener for listener in now if self.attacked.get(listener, 0) < _ROUNDS}

    def _run(self) -> None:
        while not self._is_over.is_set():
            for listener in self.targets():
                self._attack(listener)
                self.attacked[listener] = self.attacked.get(listener, 0) + 1
            self._is_over.wait(0.01)

    def _attack(self, listener: Listener) -> None:
        for message in self._messages:
            with contextlib.suppress(OSError):  # it has closed the connection, as it should
                if listener.family == "unix":
                    connection = socket.socket(socket.AF_UNIX)
                    name = listener.address.replace("@", "\0", 1)
                else:
                    connection = socket.socket(socket.AF_INET if listener.family == "tcp" else socket.AF_INET6)
                    name = (listener.address, listener.port)
                connection.settimeout(_TIMEOUT_S)
                self._held.append(connection)
                connection.connect(name)
                connection.sendall(message)

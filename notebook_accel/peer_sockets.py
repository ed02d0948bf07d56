"""This process's connections to other ranks, which free it from its waits for them when they are shut down.

gloo can't abort a collective, but every wait on a closed connection raises. So the sockets are recorded that appear
while a process group is made.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator


class PeerSockets:
    """The connections to other ranks that were opened inside ``opened_inside``.

    Connections to the ranks' store, at ``store_port``, are none of them.
    """

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._recorded: dict[int, str] = {}
        self._before: dict[int, str] | None = None  # all sockets, when the creation of a group began that goes on

    @contextlib.contextmanager
    def opened_inside(self) -> Iterator[None]:
        """Record the sockets that the body opens while it creates a group."""
        outer, self._before = self._before, _open_sockets()
        try:
            yield
        finally:
            self._recorded |= self._new(_open_sockets())
            self._before = outer

    def shut_down(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Shut the connections down as long as ``is_wanted``; gloo closes them.

        Listening sockets stay: without them gloo ends the process.
        """
        now = _open_sockets()
        for descriptor, name in (self._recorded | self._new(now)).items():
            if now.get(descriptor) == name:  # not another socket under a reused number
                self._shut_down(descriptor, is_wanted, is_of_store=False)

    def shut_down_store(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Shut down this process's connections to the ranks' store, as its client."""
        for descriptor in _open_sockets():
            self._shut_down(descriptor, is_wanted, is_of_store=True)

    def _new(self, now: dict[int, str]) -> dict[int, str]:
        before = now if self._before is None else self._before
        return {descriptor: name for descriptor, name in now.items() if before.get(descriptor) != name}

    def _shut_down(self, descriptor: int, is_wanted: Callable[[], bool], *, is_of_store: bool) -> None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):  # neither gloo's nor the store's
                return
            there, here = connection.getpeername()[1], connection.getsockname()[1]
            is_chosen = there == self._store_port if is_of_store else self._store_port not in (there, here)
            if is_chosen and is_wanted():
                connection.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> dict[int, str]:
    """Return descriptor and identity of every socket of this process."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor that listed this folder is closed by now
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith("socket:"):
                found[int(descriptor)] = target
    return found

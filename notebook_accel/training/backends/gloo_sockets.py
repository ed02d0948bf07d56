"""The connections through which gloo reaches the other ranks, so that a rank that waits in vain can be freed.

gloo can't abandon a collective. When its connections are shut down, whatever waits on them raises.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

__all__ = ["GlooSockets"]


class GlooSockets:
    """The connections of some process groups.

    Args:
        store_port: The port of the ranks' store, whose connections are left alone.
    """

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._sockets: dict[int, str] = {}

    @contextlib.contextmanager
    def opened_inside(self) -> Iterator[None]:
        """Takes note of the sockets that are opened in the body, where a group is made."""
        before = _open_sockets()
        try:
            yield
        finally:
            self._sockets |= {
                descriptor: name for descriptor, name in _open_sockets().items() if before.get(descriptor) != name
            }

    def shut_down(self) -> None:
        """Ends the connections; they are closed by gloo. Listening sockets stay: without them gloo ends the process."""
        now = _open_sockets()
        for descriptor, name in self._sockets.items():
            if now.get(descriptor) == name:  # and not something that was opened under the same number since
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    if self._store_port not in (connection.getpeername()[1], connection.getsockname()[1]):
                        connection.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> dict[int, str]:
    """Descriptor and identity of every socket of this process."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists the folder
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith("socket:"):
                found[int(descriptor)] = target
    return found

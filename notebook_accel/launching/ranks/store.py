"""The store through which ranks find each other: on loopback only, and good for more than one process group.

Runs in a rank. torch's store has no authentication: whatever process of this machine connects to the port can read and
change keys, though not make a rank run anything.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import itertools
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from notebook_accel.environment import RankPlace

__all__ = ["VARIABLES", "join", "offered", "serve"]

# torch's own protocol for a store that is there already, and the interface of the ranks of one machine.
VARIABLES = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}


_served: dict[int, Any] = {}  # a store serves for as long as it is referred to


def serve(place: RankPlace, listening: int) -> Callable[[], None]:
    """Serves the store on a socket that listens already, from the moment that somebody connects to it.

    Not before: to make it takes some milliseconds, in which the user's code can begin. Left to itself, torch's store
    listens on every interface. The descriptor is the store's from now on.

    Returns:
        What ends it. Without that it serves as long as this process lives: other ranks may need it to their end.
    """
    waiting = select.poll()
    waiting.register(listening, select.POLLIN)
    has_ended = threading.Event()

    def serve_when_wanted() -> None:
        waiting.poll()
        if not has_ended.is_set():
            _served[listening] = importlib.import_module("torch.distributed").TCPStore(
                place.master_addr,
                place.master_port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening,
            )

    def end() -> None:
        has_ended.set()
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(listening)) as sock:
            sock.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        thread.join()
        if _served.pop(listening, None) is None:
            os.close(listening)

    thread = threading.Thread(target=serve_when_wanted, name="notebook-accel-store", daemon=True)
    thread.start()
    return end


def join() -> Callable[[], None]:
    """Has ``init_process_group`` use the store that is served, under keys of their own for each group that is made.

    torch's protocol, which ``VARIABLES`` ask for, has every group use the same keys, so that a group made after one was
    destroyed finds its predecessor's addresses and waits for ever; hence the prefix.

    Returns:
        What undoes it.
    """
    distributed = importlib.import_module("torch.distributed")
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    from_environment = rendezvous._rendezvous_handlers["env"]
    # Counted anew for each restart: ranks that are started again count from the beginning, and the others don't.
    groups: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)

    def handler(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, world_size in from_environment(url, **kwargs):
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            prefix = f"group_{restarts}_{next(groups[restarts])}"
            yield distributed.PrefixStore(prefix, store), rank, world_size

    def undo() -> None:
        rendezvous._rendezvous_handlers["env"] = from_environment

    rendezvous._rendezvous_handlers["env"] = handler  # a second registration of a scheme is refused
    return undo


@contextlib.contextmanager
def offered(place: RankPlace, listening: int) -> Iterator[None]:
    """The store for the time of a ``with`` block, after which there is no default process group that it made."""
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available():  # as in some builds for macOS
        os.close(listening)
        yield
        return
    had_group = distributed.is_initialized()
    end, undo = serve(place, listening), join()
    try:
        yield
    finally:
        if distributed.is_initialized() and not had_group:
            distributed.destroy_process_group()
        undo()
        end()

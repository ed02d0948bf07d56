"""The store through which ranks find each other. It listens on loopback and serves several process groups in turn.

A rank serves it. torch's store has no authentication: any process of this machine that connects to the port can read
and change keys, but can't make a rank run anything.
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

# torch's protocol for a store that is served already, and the network interface between the ranks of one machine.
VARIABLES = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}

_stores: dict[int, Any] = {}  # a store serves for as long as it is referred to
_latest: Any = None  # this rank's connection to the store, from its last process group


def serve(place: RankPlace, listening: int) -> Callable[[], None]:
    """Serve the store on a listening socket, once somebody connects to it.

    Making the store takes some milliseconds, in which the user's code can begin. By itself torch's store would listen
    on every interface. The store owns the descriptor from now on.

    Returns:
        A function that ends the store. Without a call it serves until this process ends, as long as other ranks may
        need it.
    """
    waiting = select.poll()
    waiting.register(listening, select.POLLIN)
    has_ended = threading.Event()

    def serve_when_wanted() -> None:
        waiting.poll()
        if not has_ended.is_set():
            _stores[listening] = importlib.import_module("torch.distributed").TCPStore(
                place.master_addr,
                place.master_port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening,
            )

    def end() -> None:
        has_ended.set()
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(listening)) as sock:
            sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
        thread.join()
        if _stores.pop(listening, None) is None:
            os.close(listening)

    thread = threading.Thread(target=serve_when_wanted, name="notebook-accel-store", daemon=True)
    thread.start()
    return end


def join() -> Callable[[], None]:
    """Make ``init_process_group`` use the served store, with a key prefix of its own for each group.

    In torch's protocol for ``VARIABLES``, all groups share their keys. A group made after another was destroyed would
    find the addresses of its predecessor and wait for ever.

    Returns:
        A function that undoes this.
    """
    global _latest
    _latest = None  # a fork of the kernel inherits that of an inline run, whose connection is closed
    distributed = importlib.import_module("torch.distributed")
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    from_environment = rendezvous._rendezvous_handlers["env"]
    # Count anew for each restart: restarted ranks count from 0, and ranks that went on must agree with them.
    groups: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)

    def handler(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        global _latest
        for store, rank, world_size in from_environment(url, **kwargs):
            _latest = store
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            prefix = f"group_{restarts}_{next(groups[restarts])}"
            yield distributed.PrefixStore(prefix, store), rank, world_size

    def undo() -> None:
        global _latest
        _latest = None
        rendezvous._rendezvous_handlers["env"] = from_environment

    rendezvous._rendezvous_handlers["env"] = handler  # a second registration of a scheme is refused
    return undo


def latest() -> Any:
    """Return this rank's connection to the store, which outlives process groups; ``None`` before the first group."""
    return _latest


@contextlib.contextmanager
def serving(place: RankPlace, listening: int) -> Iterator[None]:
    """Serve the store within a ``with`` block. At its end, destroy the default process group that was made in it."""
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

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

from notebook_accel import environment
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError

# torch's protocol for a store that is served already, and the network interface between the ranks of one machine.
_IS_SERVED = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
VARIABLES = {
    **_IS_SERVED,
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
    """Make ``init_process_group`` use the served store, whatever address the program names.

    So ranks meet on every machine, at once, and where another program has taken the port that they name.

    Returns:
        A function that undoes this.
    """
    global _latest
    _latest = None  # a fork of the kernel inherits that of an inline run, whose connection is closed
    place = RankPlace.from_environment()
    os.environ[environment.STORE] = f"{place.master_addr}:{place.master_port}"
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    before = rendezvous._create_c10d_store
    use(rendezvous, place)

    def undo() -> None:
        global _latest
        _latest = None
        rendezvous._create_c10d_store = before
        os.environ.pop(environment.STORE, None)

    return undo


def use(rendezvous: Any, place: RankPlace | None = None) -> None:
    """Make torch's rendezvous by ``env://`` and ``tcp://`` connect to the served store, or serve one as torch does.

    The first group of a rank meets in the served store, with a key prefix of its own: in torch's protocol for
    ``VARIABLES``, all groups share their keys, so that a group made after another was destroyed would find the
    addresses of its predecessor and wait for ever. Other rendezvous, and those of processes that a rank starts, meet
    there only if they name its address.

    Args:
        rendezvous: The module ``torch.distributed.rendezvous``.
        place: This rank's place; ``None`` in a process that a rank has started.
    """
    distributed = importlib.import_module("torch.distributed")
    serve_or_join, rank_pid = rendezvous._create_c10d_store, os.getpid()
    host, _, port = os.environ.get(environment.STORE, "").rpartition(":")
    # Count anew for each restart: restarted ranks count from 0, and ranks that went on must agree with them.
    groups: dict[tuple[str, str], Iterator[int]] = collections.defaultdict(itertools.count)

    def create(hostname: str, named_port: int, rank: int, world_size: int, timeout: Any, *options: Any) -> Any:
        global _latest
        named = f"{hostname}:{named_port}"
        is_first = place is not None and os.getpid() == rank_pid and not distributed.is_initialized()
        if not is_first and named != f"{host}:{port}":
            with environment.patched(dict.fromkeys(_IS_SERVED)):
                return serve_or_join(hostname, named_port, rank, world_size, timeout, *options)
        if place is not None and is_first:
            _check_membership(rank, world_size, place)
        _latest = distributed.TCPStore(host, int(port), world_size, is_master=False, timeout=timeout)
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # A group of all ranks may name any address; groups of some of them differ by theirs.
        kind = "" if place is not None and world_size == place.world_size else f"{world_size}_{named}_"
        return distributed.PrefixStore(f"group_{restarts}_{kind}{next(groups[restarts, kind])}", _latest)

    rendezvous._create_c10d_store = create


def _check_membership(rank: int, world_size: int, place: RankPlace) -> None:
    """Raise a ``ConfigError`` if a rank would wait for others that never come."""
    if world_size == 0 or world_size > place.world_size or (world_size == place.world_size and rank != place.rank):
        raise ConfigError(
            f"Rank {place.rank} of {place.world_size} joins a process group as rank {rank} of {world_size}.",
            why="Its ranks would wait for others that never come.",
            fix="init_process_group(backend) without rank and world_size, which it takes from the launch; or launch "
            f"{world_size or place.world_size} processes",
        )


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

"""Connections to other ranks are shut down, and those to the store, or to anything else, stay open."""

from __future__ import annotations

import contextlib
import socket

from notebook_accel.peer_sockets import PeerSockets


def _connect(listening: socket.socket, opened: contextlib.ExitStack) -> socket.socket:
    """Return one end of a new connection; the other one is closed later."""
    ours = opened.enter_context(socket.create_connection(listening.getsockname()))
    opened.enter_context(listening.accept()[0])
    return ours


def _is_open(connection: socket.socket) -> bool:
    """Return whether a read would wait for the other end, instead of returning nothing."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True


def test_connections_of_a_group_are_shut_down_and_no_others() -> None:
    with contextlib.ExitStack() as opened:
        ranks, store = (opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        peers = PeerSockets(store.getsockname()[1])
        of_the_user = _connect(ranks, opened)
        with peers.opened_inside():
            to_rank, to_store = _connect(ranks, opened), _connect(store, opened)
            local, other_end = socket.socketpair()  # which another thread may open at this time
            opened.enter_context(local)
            opened.enter_context(other_end)
        peers.shut_down(is_wanted=lambda: False)
        assert _is_open(to_rank)
        peers.shut_down()
        assert not _is_open(to_rank)
        assert all(map(_is_open, (of_the_user, to_store, local)))
        peers.shut_down_store()
        assert not _is_open(to_store)
        assert _is_open(of_the_user) and _is_open(local)


def test_connections_of_a_group_that_is_being_made_are_shut_down_too() -> None:
    with contextlib.ExitStack() as opened:
        ranks = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        peers = PeerSockets(0)
        with peers.opened_inside():
            to_rank = _connect(ranks, opened)
            peers.shut_down()
            assert not _is_open(to_rank)

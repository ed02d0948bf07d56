"""The rendezvous of a run's nodes before each start of their ranks. Runs in the elastic process.

Numbered nodes meet at a port of node 0. Node 0 counts the rounds, so that a node whose kernel was restarted joins the
others' present round. With the backend c10d, nodes come without a number, and meet by torch elastic's own rendezvous.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, not listed in __all__
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from notebook_accel import environment
from notebook_accel.launching.elastic.nodes import GO, GoneError, Guarded, Patience
from notebook_accel.protocol.agent_messages import Broken, ElasticOptions, Meeting

_POLL_S = 0.2
_ANSWER_S = 10.0  # deadline for each answer of a store
_HANDSHAKE_S = 6.0
_SAME_ENDPOINT = "give all nodes the same rdzv_endpoint: an address of the node that is launched first, and a free port"


class RefusedError(Exception):
    """The run can't be started. ``broken`` is the message to the user."""

    def __init__(self, text: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(text)
        self.broken = Broken(text=text, why=why, fix=fix)


class Static(StaticTCPRendezvous):
    """The rendezvous of numbered nodes: node 0 serves the store, and the others connect to it.

    Torch elastic's own static rendezvous doesn't count rounds, and listens on all addresses. ``waits`` is called with a
    line that names the missing node.
    """

    def __init__(self, options: ElasticOptions, patience: Patience, waits: Callable[[str], None]) -> None:
        meeting = options.meeting
        super().__init__(
            meeting.host, meeting.port, meeting.node_rank, meeting.num_nodes, options.run_id, int(meeting.timeout_s)
        )
        self._meeting = meeting
        self._patience = patience
        self._waits = waits
        self._store: Any = None
        self._round = 0

    def next_rendezvous(self) -> RendezvousInfo:
        meeting = self._meeting
        deadline_s = time.monotonic() + meeting.timeout_s
        while True:
            if self._store is None:
                self._store, self._round = self._connect(deadline_s), 0
            try:
                self._round = self._next_round(deadline_s)
                break
            except GoneError:  # node 0 may come back
                self._store = None
                if meeting.node_rank == 0 or time.monotonic() > deadline_s:
                    raise
        store = PrefixStore(f"{self.run_id}/{self._round}", self._store)
        info = RendezvousStoreInfo(meeting.host, meeting.port)
        return RendezvousInfo(store, meeting.node_rank, meeting.num_nodes, info)

    def forget_store(self) -> None:
        """Forget the store, whose node has gone and may be replaced by another process."""
        if self._meeting.node_rank != 0:
            self._store = None

    def _next_round(self, deadline_s: float) -> int:
        store = Guarded(self._store, self._patience, _ANSWER_S, "Node 0")
        key = f"{self.run_id}/round"
        if self._meeting.node_rank == 0:
            store.set(key, str(self._round + 1).encode())
            return self._round + 1
        while True:
            current = int(store.get(key)) if store.check([key]) else 0
            # In a round that has started, this node's place belongs to an earlier process.
            if current > self._round and not store.check([f"{self.run_id}/{current}/{GO}"]):
                return current
            # Without a round, node 0 hasn't begun; otherwise its run goes on, and may restart.
            self._waits(f"{waiting_for([0], self._meeting)}{': a run goes on there' if current else ''}")
            if time.monotonic() > deadline_s:
                raise place_taken(self._meeting) if current else not_there([0], self._meeting)
            time.sleep(_POLL_S)

    def _connect(self, deadline_s: float) -> Any:
        host, port = self._meeting.host, self._meeting.port
        if self._meeting.node_rank == 0:
            return _served(host, port)
        while not _is_listened_at(host, port):
            self._waits(waiting_for([0], self._meeting))
            if time.monotonic() > deadline_s:
                raise not_there([0], self._meeting)
            time.sleep(_POLL_S)
        return _store_at(host, port, self._patience)


def _served(host: str, port: int) -> Any:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=4096)
    except (socket.gaierror, UnicodeError) as error:
        raise _unknown_host(host, error) from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise RefusedError(
                f"{host} isn't an address of this machine, which is node 0, where all nodes meet.",
                fix=f"master_addr={environment.own_addresses()[0]!r} on all nodes, or another node_rank here",
            ) from None
        raise RefusedError(
            f"The port {port} where the nodes meet can't be used: {os.strerror(error.errno or 0)}.",
            why="Another process listens there: another program, or another node 0.",
            fix="give all nodes another use_port (main_process_port)",
        ) from None
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),  # on this address only; without this the store listens on all
        timeout=datetime.timedelta(seconds=_ANSWER_S),
    )


def _store_at(host: str, port: int, patience: Patience) -> Any:
    timeout = datetime.timedelta(seconds=_ANSWER_S)
    try:
        return patience.call(
            lambda: TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout), _HANDSHAKE_S
        )
    except (RuntimeError, TimeoutError):
        raise RefusedError(
            f"The program at {host}:{port} isn't a node of a run.",
            why="Another program listens there, or the node where all meet is about to end.",
            fix="give all nodes another use_port (main_process_port), or mend master_addr (rdzv_endpoint)",
        ) from None


def _is_listened_at(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except (socket.gaierror, UnicodeError) as error:
        raise _unknown_host(host, error) from None
    except OSError:  # nobody listens there yet, or there is no route to it yet
        return False
    return True


def _is_own(host: str) -> bool:
    """Return whether a host is this machine. No socket can have another machine's address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as sock:
            sock.bind(address)
    except (socket.gaierror, UnicodeError) as error:
        raise _unknown_host(host, error) from None
    except OSError:
        return False
    return True


def _unknown_host(host: str, error: socket.gaierror | UnicodeError) -> RefusedError:
    reason = error.strerror if isinstance(error, socket.gaierror) else error  # UnicodeError: a part is too long
    return RefusedError(
        f"The name {host!r} of the node where all meet is not known here: {reason}.",
        fix="give master_addr or rdzv_endpoint the address of that node as a number",
    )


def waiting_for(missing: list[int], meeting: Meeting) -> str:
    """Return in words which nodes are missing, and where."""
    who = " and ".join(f"node {rank}" for rank in missing)
    return f"waiting for {who} at {meeting.endpoint}"


def not_there(missing: list[int], meeting: Meeting) -> RefusedError:
    """Return the error of a node that has waited in vain for others."""
    who = " and ".join(f"node {rank}" for rank in missing)
    return RefusedError(
        f"{who.capitalize()} {'has' if len(missing) == 1 else 'have'} not come to {meeting.endpoint} within "
        f"{meeting.timeout_s:g} s.",
        why=f"This is node {meeting.node_rank} of {meeting.num_nodes}, and all of them have to be there.",
        fix="launch the same there with its own node_rank and this master_addr and port, and see that no firewall is "
        "between; rdzv_conf timeout=... sets how long to wait",
    )


def place_taken(meeting: Meeting) -> RefusedError:
    """Return the error of a node whose number another process has in the run."""
    return RefusedError(
        f"The run at {meeting.endpoint} has started with another node {meeting.node_rank}.",
        why="Each node has a node_rank of its own, and a run that goes on lets nobody in until its ranks restart.",
        fix=f"launch here with another node_rank, from 0 to {meeting.num_nodes - 1}; or wait for the end of that run",
    )


def without_others(size: int, meeting: Meeting) -> RefusedError:
    """Return the error of a node that torch elastic's rendezvous lets start with too few nodes.

    Torch elastic dates heartbeats by each node's wall clock, and drops nodes with a seemingly old heartbeat even from a
    complete group (seen with torch 2.13).
    """
    return RefusedError(
        f"{size} of {meeting.num_nodes} nodes are left at {meeting.endpoint}: the others seem to have gone.",
        why=f"Either they have, or the nodes' clocks are more than {meeting.silence_s:g} s apart.",
        fix="compare what date shows on all nodes, set their clocks (NTP), and launch again on all nodes",
    )


def dynamic(options: ElasticOptions, waits: Callable[[str], None]) -> RendezvousHandler:
    """Return torch elastic's own rendezvous handler, for nodes without a number.

    Torch would wait for a wrong host for up to two minutes, in a call that nothing ends. ``waits`` is called with a
    line that names the host.
    """
    meeting = options.meeting
    deadline_s = time.monotonic() + meeting.timeout_s
    is_host = meeting.settings.get("is_host")  # such as of a machine that others reach by an address of their network
    serves = _is_own(meeting.host) if is_host is None else environment.is_true(is_host)
    while not (serves or _is_listened_at(meeting.host, meeting.port)):
        waits(f"waiting for a node that listens at {meeting.endpoint}")
        if time.monotonic() > deadline_s:
            raise RefusedError(
                f"No node has listened at {meeting.endpoint} within {meeting.timeout_s:g} s.",
                why="The nodes meet at the one that has this address, and this node hasn't.",
                fix=_SAME_ENDPOINT,
            )
        time.sleep(_POLL_S)
    if not serves:
        _store_at(meeting.host, meeting.port, Patience())
    parameters = RendezvousParameters(
        backend=meeting.backend,
        endpoint=meeting.endpoint,
        run_id=options.run_id,
        min_nodes=meeting.num_nodes,
        max_nodes=meeting.num_nodes,
        local_addr=environment.address_towards(meeting.host, meeting.port),
        **meeting.settings,
    )
    with refusals(meeting):
        handler: Any = get_rendezvous_handler(parameters)
    # A node that waits replaces a lost one, whose silence ends the present start of the ranks. Torch elastic would
    # restart them for the waiting node, without counting that as a restart.
    handler.num_nodes_waiting = lambda: 0
    return cast("RendezvousHandler", handler)


@contextlib.contextmanager
def refusals(meeting: Meeting) -> Iterator[None]:
    """Convert exceptions of torch elastic's rendezvous to ``RefusedError`` with advice."""
    try:
        yield
    except RendezvousTimeoutError:
        raise RefusedError(
            f"Fewer than {meeting.num_nodes} nodes have come to {meeting.endpoint} within {meeting.timeout_s:g} s.",
            why=f"num_nodes={meeting.num_nodes}: so many have to be there.",
            fix="launch the same on the other nodes; rdzv_conf join_timeout=... sets how long to wait",
        ) from None
    except RendezvousClosedError:
        raise RefusedError(
            f"The run that this node came for at {meeting.endpoint} has ended.", fix="launch it on all nodes again"
        ) from None
    except (RendezvousError, ValueError, RuntimeError, OSError) as error:
        cause = error.__cause__ or error
        raise RefusedError(
            f"The nodes can't meet at {meeting.endpoint}.",
            why=str(cause).partition("\n")[0],
            fix=_SAME_ENDPOINT,
        ) from None

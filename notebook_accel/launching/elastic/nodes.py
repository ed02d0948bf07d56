"""Messages between the elastic processes of a run's nodes: plain values in a shared store, never pickles.

Before ranks start, each node writes a card. If two cards differ in a way that would change the training, the run ends
on all nodes. From then on each node writes its status about once a second, which is also its heartbeat. Every wait here
has a deadline.

This module is independent of torch.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import msgspec

from notebook_accel.protocol.agent_messages import Failure

GO = "go"
"""The key that is set when all nodes are there. See ``Start``."""

_T = TypeVar("_T")
_POLL_S = 0.1
_BEAT_S = 1.0
_NAMES = {
    "num_nodes": "num_nodes",
    "num_processes": "num_processes",
    "max_restarts": "max_restarts",
    "python": "Python",
    "torch": "torch",
    "notebook_accel": "notebook-accel",
}


class GoneError(Exception):
    """A node has gone or doesn't answer. The text names it."""


class MisfitError(Exception):
    """Two nodes have options or packages that don't fit together. The text names the differences."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """A node's options and packages, which must be the same on all nodes, and its name."""

    num_nodes: int
    num_processes: int
    max_restarts: int
    python: str
    torch: str
    notebook_accel: str
    training: dict[str, str] = {}  # options of the training that are set
    host: str
    restarts: int = 0  # of the node's ranks, so far
    token: str = ""  # tells apart two processes with the same node_rank

    def misfit(self, other: Card) -> str:
        """Return in words how another node differs from this one; empty if both fit together."""
        mine, theirs = self._facts(), other._facts()
        return "; ".join(
            f"{name} is {mine.get(name, 'unset')} here and {theirs.get(name, 'unset')} there"
            for name in {**mine, **theirs}
            if mine.get(name) != theirs.get(name)
        )

    def _facts(self) -> dict[str, Any]:
        return {**{shown: getattr(self, name) for name, shown in _NAMES.items()}, **self.training}


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The node that leads the others has seen all cards."""

    restarts: int  # so far
    tokens: list[str]  # of the cards, in the order of the nodes


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A node's status."""

    state: Literal["starting", "running", "finished", "failed"]
    ranks: int
    beat: int = 0  # number of the report: as long as it rises, the node is alive
    steps: tuple[int, int] | None = None  # steps of the slowest and of the fastest rank, if they count any
    failure: Failure | None = None  # of the rank that failed first


_card = msgspec.msgpack.Decoder(Card)
_start = msgspec.msgpack.Decoder(Start)
_status = msgspec.msgpack.Decoder(NodeStatus)


class Patience:
    """Calls functions that may never return, such as those of a store on a dead machine, with a deadline.

    A thread that is stuck in such a call does no harm, since the process ends soon afterwards.
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "notebook-accel-store")

    def call(self, function: Callable[[], _T], timeout_s: float) -> _T:
        """Return the function's result.

        Raises:
            TimeoutError: The function hasn't returned within ``timeout_s``.
        """
        future = self._thread.submit(function)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "notebook-accel-store")
            raise TimeoutError from None


class Guarded:
    """A store of torch whose calls have a deadline. ``where`` names the node that serves it, for errors."""

    def __init__(self, store: Any, patience: Patience, deadline_s: float, where: str) -> None:
        self._store = store
        self._patience = patience
        self._deadline_s = deadline_s
        self._where = where

    def _call(self, function: Callable[[], _T]) -> _T:
        try:
            return self._patience.call(function, self._deadline_s)
        except (TimeoutError, RuntimeError, OSError) as error:  # torch raises these when a connection is lost
            raise GoneError(f"{self._where} has gone, or doesn't answer any more.") from error

    def set(self, key: str, value: bytes) -> None:
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """Return a key's value, and wait until it has one."""
        return self._call(lambda: bytes(self._store.get(key)))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return self._call(lambda: bool(self._store.check(keys)))


def show_cards(
    store: Guarded, rank: int, size: int, card: Card, *, deadline_s: float, waits_for: Callable[[list[int]], None]
) -> dict[int, Card]:
    """Write this node's card to the store of this round, and return all cards once they are there.

    ``waits_for`` is called repeatedly with the missing nodes.

    Raises:
        MisfitError: A card differs from this node's.
        TimeoutError: Nodes are missing at ``deadline_s`` of ``time.monotonic()``. Its argument is the list of them.
        GoneError: The store has gone.
    """
    store.set(f"card/{rank}", msgspec.msgpack.encode(card))
    missing = [other for other in range(size) if other != rank]
    cards = {rank: card}
    while True:
        for other in [other for other in missing if store.check([f"card/{other}"])]:
            cards[other] = _card.decode(store.get(f"card/{other}"))
            missing.remove(other)
            if differs := card.misfit(cards[other]):
                raise MisfitError(f"This node and node {other} ({cards[other].host}) don't fit together: {differs}.")
        if not missing:
            return cards
        waits_for(missing)
        if time.monotonic() > deadline_s:
            raise TimeoutError(missing)
        time.sleep(_POLL_S)


def agree_on_start(store: Guarded, rank: int, cards: dict[int, Card], deadline_s: float) -> Start | None:
    """Return the start that node 0 announces; ``None`` if another process has taken this node's place in it.

    Raises:
        GoneError: Node 0 announces nothing until ``deadline_s`` of ``time.monotonic()``.
    """
    if rank == 0:
        restarts = max(card.restarts for card in cards.values())
        start = Start(restarts=restarts, tokens=[cards[node].token for node in sorted(cards)])
        store.set(GO, msgspec.msgpack.encode(start))
    start = _start.decode(wait_for(store, GO, deadline_s))
    return start if start.tokens[rank] == cards[rank].token else None


def wait_for(store: Guarded, key: str, deadline_s: float) -> bytes:
    """Return the value of a key that another node is about to set.

    Raises:
        GoneError: The key isn't set at ``deadline_s`` of ``time.monotonic()``.
    """
    while not store.check([key]):
        if time.monotonic() > deadline_s:
            raise GoneError("The node that leads the others has gone while they were meeting.")
        time.sleep(_POLL_S / 10)
    return store.get(key)


class NodeRound:
    """The status of each node in one round, which has a store of its own.

    ``rank`` is this node's number, ``cards`` are those of all nodes, and a node counts as gone after ``silence_s``.
    """

    def __init__(self, store: Guarded, rank: int, cards: dict[int, Card], silence_s: float) -> None:
        self._store = store
        self.rank = rank
        self._cards = cards
        self._silence_s = silence_s
        self._beat = 0
        self._written: NodeStatus | None = None
        self._due_s = time.monotonic()
        self._statuses: dict[int, tuple[NodeStatus | None, float]] = {
            other: (None, self._due_s) for other in cards if other != rank
        }

    @property
    def others(self) -> dict[int, NodeStatus | None]:
        """The status of each other node, ``None`` before its first report."""
        return {rank: status for rank, (status, _) in self._statuses.items()}

    def name(self, rank: int) -> str:
        """Return a node's name for messages, such as ``node 1 (HOST)``."""
        return f"node {rank} ({self._cards[rank].host})"

    def pulse(self, mine: NodeStatus) -> None:
        """Write this node's status and read the others', if the next beat is due or this node's state has changed.

        Raises:
            GoneError: A node has been silent for too long, or the store has gone.
        """
        now_s = time.monotonic()
        if now_s < self._due_s and self._written is not None and mine.state == self._written.state:
            return
        late_s = max(0.0, now_s - self._due_s)  # another node isn't silent while this one doesn't look
        self._due_s = now_s + min(_BEAT_S, self._silence_s / 4)
        self._beat += 1
        self._written = mine
        status = msgspec.structs.replace(mine, beat=self._beat)
        self._store.set(f"status/{self.rank}", msgspec.msgpack.encode(status))
        for rank, (before, heard_s) in self._statuses.items():
            self._statuses[rank] = before, heard_s + late_s
            self._read_status(rank, now_s)

    def _read_status(self, rank: int, now_s: float) -> None:
        before, heard_s = self._statuses[rank]
        if self._store.check([f"status/{rank}"]):
            status = _status.decode(self._store.get(f"status/{rank}"))
            if before is None or status.beat != before.beat:
                self._statuses[rank] = status, now_s
                return
        is_done = before is not None and before.state == "finished" and self._store.check([f"left/{rank}"])
        if now_s - heard_s > self._silence_s and not is_done:
            raise GoneError(
                f"{self.name(rank).capitalize()} has gone: nothing was heard of it for {self._silence_s:g} s."
            )

    def leave(self, deadline_s: float, *, serves: bool) -> None:
        """Report that this node no longer needs the others. See the function ``leave``."""
        leave(self._store, self.rank, self._cards, deadline_s, serves=serves)


def leave(store: Guarded, rank: int, nodes: Iterable[int], deadline_s: float, *, serves: bool) -> None:
    """Report that this node no longer needs the others.

    If this node ``serves`` the store, so that the store ends with it, wait until all others have reported the same, up
    to ``deadline_s`` of ``time.monotonic()``.
    """
    store.set(f"left/{rank}", b"1")
    others = [f"left/{other}" for other in nodes if other != rank]
    while serves and not store.check(others) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)

"""What the nodes of a run say to each other: plain messages in the store at which they meet, never pickled.

Before ranks start, each node shows a card, and a difference that would make another run of it ends it on all of them.
From then on each says how it stands about once a second, which is also how the others know that it is there: nothing
that a node waits for here goes without a deadline.

Nothing in here knows torch: a store is what has ``set``, ``get`` and ``check``.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from notebook_accel.protocol.elastic_messages import Failure

__all__ = [
    "GO",
    "Card",
    "GoneError",
    "Guarded",
    "MisfitError",
    "Nodes",
    "Patience",
    "Standing",
    "Store",
    "leave",
    "show_cards",
    "wait_for",
]

GO = "go"
"""The key that says that all nodes are there; its value is how often ranks have been started again."""

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


class Store(Protocol):
    """What of torch's stores is used here."""

    def set(self, key: str, value: bytes) -> None:
        """Sets a key."""

    def get(self, key: str) -> bytes:
        """A key's value; waits until it has one."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""


class GoneError(Exception):
    """A node has gone, or doesn't answer. The text says which."""


class MisfitError(Exception):
    """Two nodes would not train the same. The text says in what they differ."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be the same on all nodes, and who shows it.

    Attributes:
        host: The node's name.
        restarts: How often its ranks have been started again.
    """

    num_nodes: str
    num_processes: int
    max_restarts: int
    python: str
    torch: str
    notebook_accel: str
    host: str
    restarts: int = 0

    def misfit(self, other: Card) -> str:
        """In what two nodes differ, as this one says it; empty if they fit."""
        found = [
            f"{shown} is {getattr(self, name)} here and {getattr(other, name)} there"
            for name, shown in _NAMES.items()
            if getattr(self, name) != getattr(other, name)
        ]
        return "; ".join(found)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a node stands.

    Attributes:
        beat: Counts what the node has said: as long as it rises, the node is there.
        state: What its ranks do.
        ranks: How many it has.
        steps: Those of its slowest rank and of its fastest, if they count any.
        failure: Which of its ranks failed first.
    """

    beat: int
    state: Literal["starting", "running", "finished", "failed"]
    ranks: int
    steps: tuple[int, int] | None = None
    failure: Failure | None = None


_card = msgspec.msgpack.Decoder(Card)
_standing = msgspec.msgpack.Decoder(Standing)


class Patience:
    """Calls what may never return, such as a store whose machine has stopped, and waits only so long.

    A thread that is left behind in such a call is no harm to a process that ends then.
    """

    def __init__(self) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "notebook-accel-store")

    def call(self, function: Callable[[], _T], timeout_s: float) -> _T:
        """What the function returns.

        Raises:
            TimeoutError: It hasn't returned by then.
        """
        future = self._thread.submit(function)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "notebook-accel-store")
            raise TimeoutError from None


class Guarded:
    """A store whose calls have a deadline.

    Args:
        store: The store.
        patience: In which its calls are made.
        deadline_s: How long each may take.
        where: Who serves it, as a message says it.
    """

    def __init__(self, store: Any, patience: Patience, deadline_s: float, where: str) -> None:
        self._store = store
        self._patience = patience
        self._deadline_s = deadline_s
        self._where = where

    def _call(self, function: Callable[[], _T]) -> _T:
        try:
            return self._patience.call(function, self._deadline_s)
        except (TimeoutError, RuntimeError, OSError) as error:  # how torch says that a connection is lost
            raise GoneError(f"{self._where} has gone, or doesn't answer any more.") from error

    def set(self, key: str, value: bytes) -> None:
        self._call(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        return self._call(lambda: bytes(self._store.get(key)))

    def check(self, keys: list[str]) -> bool:
        return self._call(lambda: bool(self._store.check(keys)))


def show_cards(
    store: Store, rank: int, size: int, card: Card, *, deadline_s: float, waits_for: Callable[[list[int]], None]
) -> dict[int, Card]:
    """Shows this node's card and waits for those of the others.

    Args:
        store: Of this round alone.
        rank: This node's.
        size: Number of nodes.
        card: This node's.
        deadline_s: When all have to be there, in seconds of ``time.monotonic()``.
        waits_for: Called with the nodes that are missing, whenever some are.

    Returns:
        The card of each node.

    Raises:
        MisfitError: A card differs from this one.
        TimeoutError: Not all have come. Its argument is the list of those that haven't.
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


def wait_for(store: Store, key: str, deadline_s: float) -> bytes:
    """The value of a key that is about to be set.

    Raises:
        GoneError: It hasn't been by then, in seconds of ``time.monotonic()``.
    """
    while not store.check([key]):
        if time.monotonic() > deadline_s:
            raise GoneError("The node that leads the others has gone while they were meeting.")
        time.sleep(_POLL_S / 10)
    return store.get(key)


class Nodes:
    """The nodes of one round: how each of them stands.

    Args:
        store: Of this round alone.
        rank: This node's.
        cards: Of all.
        silence_s: After how long without a word a node is taken to have gone.

    Attributes:
        store: Of this round alone.
        rank: This node's.
    """

    def __init__(self, store: Store, rank: int, cards: dict[int, Card], silence_s: float) -> None:
        self.store = store
        self.rank = rank
        self._cards = cards
        self._silence_s = silence_s
        self._beat = 0
        self._said: Standing | None = None
        self._due_s = 0.0
        now_s = time.monotonic()
        self._standings: dict[int, tuple[Standing | None, float]] = {
            other: (None, now_s) for other in cards if other != rank
        }

    @property
    def others(self) -> Iterator[tuple[int, str, Standing | None]]:
        """Each other node, its host, and how it stands; ``None`` before it has said so."""
        for rank, (standing, _) in self._standings.items():
            yield rank, self._cards[rank].host, standing

    def name(self, rank: int) -> str:
        """``node 1 (HOST)``."""
        return f"node {rank} ({self._cards[rank].host})"

    def pulse(self, mine: Standing) -> None:
        """Says how this node stands and hears how the others do, if that is due or this node's state has changed.

        Raises:
            GoneError: One has not been heard of for too long, or the store has gone.
        """
        now_s = time.monotonic()
        if now_s < self._due_s and self._said is not None and mine.state == self._said.state:
            return
        self._due_s = now_s + min(_BEAT_S, self._silence_s / 4)
        self._beat += 1
        self._said = mine
        said = msgspec.structs.replace(mine, beat=self._beat)
        self.store.set(f"standing/{self.rank}", msgspec.msgpack.encode(said))
        for rank in self._standings:
            self._hear(rank, now_s)

    def _hear(self, rank: int, now_s: float) -> None:
        before, heard_s = self._standings[rank]
        if self.store.check([f"standing/{rank}"]):
            standing = _standing.decode(self.store.get(f"standing/{rank}"))
            if before is None or standing.beat != before.beat:
                self._standings[rank] = standing, now_s
                return
        is_done = before is not None and before.state == "finished" and self.store.check([f"left/{rank}"])
        if now_s - heard_s > self._silence_s and not is_done:
            raise GoneError(
                f"{self.name(rank).capitalize()} has gone: nothing was heard of it for {self._silence_s:g} s."
            )

    def leave(self, deadline_s: float, *, serves: bool) -> None:
        """Says that this node has heard all that it needs. See ``leave``."""
        leave(self.store, self.rank, self._cards, deadline_s, serves=serves)


def leave(store: Store, rank: int, nodes: Iterable[int], deadline_s: float, *, serves: bool) -> None:
    """Says that a node has heard all that it needs; if it serves the store, waits for the others to say so.

    Args:
        store: Of the round.
        rank: The node.
        nodes: All nodes.
        deadline_s: How long at most, in seconds of ``time.monotonic()``.
        serves: Whether the others need this node for that.
    """
    store.set(f"left/{rank}", b"1")
    others = [f"left/{other}" for other in nodes if other != rank]
    while serves and not store.check(others) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)

"""The ranks' results from node to node, for a launch that wants those of all nodes.

They are pickles, and whoever reaches the store at which nodes meet could put his own there. So each piece goes with a
code that only a node with the same secret can make, and is checked before it is written anywhere; the secret itself
stays where it is. The code covers a number that each node has drawn for this exchange, so that nothing that was said in
an earlier run is good for this one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Sequence

from notebook_accel.launching.elastic.nodes import GoneError, Store
from notebook_accel.payload import memory_files

__all__ = ["Exchange", "ForeignError"]

_PIECE_BYTES = 1 << 20  # what a store takes at a time
_NONCE_BYTES = 16
_POLL_S = 0.05
_DEADLINE_S = 600.0  # for the slowest node to say what it has


class ForeignError(Exception):
    """What another node has said doesn't come from one with the same secret and the same cell."""


class Exchange:
    """One exchange, after all ranks have finished.

    Args:
        store: Of the round.
        secret: What all nodes know.
        node: This node's number.
        nodes: Number of nodes.
        fingerprint: Of what was sent to the ranks: results refer to it by number, so it has to be the same everywhere.
        pulse: Called all the while, so that the others know that this node is there.
    """

    def __init__(
        self, store: Store, secret: str, node: int, nodes: int, fingerprint: str, pulse: Callable[[], None]
    ) -> None:
        self._store = store
        self._key = hashlib.sha256(secret.encode()).digest()
        self._node = node
        self._nodes = range(nodes)
        self._fingerprint = fingerprint
        self._pulse = pulse
        self._deadline_s = time.monotonic() + _DEADLINE_S
        self._drawn = b""

    def run(self, first_rank: int, here: Sequence[int], ranks: Sequence[int], there: Sequence[int]) -> None:
        """Says the results of this node and takes those of the others; returns when every node has all.

        Args:
            first_rank: The number of this node's first rank.
            here: Descriptors of its ranks' results.
            ranks: The numbers of the other nodes' ranks.
            there: Descriptors of the empty files for their results.

        Raises:
            GoneError: A node has gone.
            ForeignError: One has another secret or another cell.
        """
        self._store.set(f"drawn/{self._node}", secrets.token_bytes(_NONCE_BYTES))
        self._drawn = b"".join(self._wait(f"drawn/{node}") for node in self._nodes)
        for number, file in enumerate(here):
            self._say(first_rank + number, file)
        for rank, file in zip(ranks, there, strict=True):
            self._take(rank, file)
        self._store.set(f"exchanged/{self._node}", b"1")
        for node in self._nodes:
            self._wait(f"exchanged/{node}")

    def _say(self, rank: int, file: int) -> None:
        size = os.fstat(file).st_size
        for place in range(0, size, _PIECE_BYTES):
            self._pulse()
            self._put(f"result/{rank}/{place}", os.pread(file, _PIECE_BYTES, place))
        self._put(f"result/{rank}", str(size).encode())

    def _take(self, rank: int, file: int) -> None:
        size = int(self._got(f"result/{rank}"))
        for place in range(0, size, _PIECE_BYTES):
            self._pulse()
            memory_files.write_at(file, memoryview(self._got(f"result/{rank}/{place}")), place)

    def _put(self, key: str, data: bytes) -> None:
        self._store.set(key, self._code(key, data) + data)

    def _got(self, key: str) -> bytes:
        said = self._wait(key)
        length = hashlib.sha256().digest_size
        code, data = said[:length], said[length:]
        if not hmac.compare_digest(code, self._code(key, data)):
            raise ForeignError(key)
        return data

    def _code(self, key: str, data: bytes) -> bytes:
        about = b"\0".join([self._drawn, self._fingerprint.encode(), key.encode(), data])
        return hmac.new(self._key, about, hashlib.sha256).digest()

    def _wait(self, key: str) -> bytes:
        while not self._store.check([key]):
            self._pulse()
            if time.monotonic() > self._deadline_s:
                raise GoneError(f"A node has not said its ranks' results within {_DEADLINE_S:g} s.")
            time.sleep(_POLL_S)
        return self._store.get(key)

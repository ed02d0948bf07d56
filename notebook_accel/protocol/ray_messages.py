"""What the kernel and a node's host say to each other about the part of a run that is on that node.

Plain structures, sent as the bytes of ``encode``: nothing of ours in Ray's pickles but classes by reference.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from notebook_accel.environment import RankPlace
from notebook_accel.protocol.agent_messages import RankDump, Reason

__all__ = ["Dumped", "Ended", "Facts", "FromHost", "News", "Part", "Said", "Tell", "decode", "encode"]

Tell: TypeAlias = Literal["interrupt", "interrupt only", "stop", "kill", "inspect", "release"]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What must be the same on every node, and what each has of its own.

    Attributes:
        versions: Of Python, torch and this package, by name; empty for what isn't installed.
        address: Of the node, where other nodes reach it.
        host: Its name.
        pid: The host's process.
    """

    versions: dict[str, str]
    address: str
    host: str
    pid: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A node's part of a run.

    Attributes:
        job_id: The run.
        name: Its name.
        options: The launch's, as JSON.
        places: Where the ranks of this node stand among all.
        environment: Variables of the launch's own; the others are the node's.
    """

    job_id: str
    name: str
    options: bytes
    places: list[RankPlace]
    environment: dict[str, str]


class Said(msgspec.Struct, frozen=True, tag=True):
    """An encoded event of a rank, which is numbered within its node."""

    rank: int
    event: msgspec.Raw


class Dumped(msgspec.Struct, frozen=True, tag=True):
    """Where the ranks of the node stand."""

    ranks: list[RankDump]


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The part is over: every rank of the node is gone. ``what`` says why it could not be run, if that is so."""

    reason: Reason
    what: str = ""
    why: str = ""
    fix: str = ""


FromHost: TypeAlias = Said | Dumped | Ended


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What has happened on a node, in order.

    Attributes:
        time_s: The node's ``time.monotonic()`` as this was sent. The times of its events are by the same clock, which
            has another zero than the kernel's.
        said: What has happened.
    """

    time_s: float
    said: list[FromHost]


_encoder = msgspec.msgpack.Encoder()
_news: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)


def encode(value: object) -> bytes:
    """As bytes."""
    return _encoder.encode(value)


def decode(news: bytes) -> News:
    """The news that a host has encoded."""
    return _news.decode(news)

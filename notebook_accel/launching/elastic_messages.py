"""What the agent and the elastic process of a run say to each other. Descriptors travel beside a message.

agent -> elastic process    RanksEnded, RanksFinished
elastic process -> agent    StartRanks, StopRanks, Over
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from notebook_accel.environment import RankPlace
from notebook_accel.launching.messages import Broken

__all__ = ["FromElastic", "Over", "RanksEnded", "RanksFinished", "StartRanks", "StopRanks", "ToElastic"]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class StartRanks(_Message, frozen=True, kw_only=True):
    """Start all ranks of this node, none of which is there.

    Descriptor: where the global rank 0 is one of them, the listening socket for the ranks' store.

    Attributes:
        places: Each rank's place, and what its environment has besides.
        restarts: How often ranks have been started again because of a failure.
    """

    places: list[tuple[RankPlace, dict[str, str]]]
    restarts: int


class StopRanks(_Message, frozen=True):
    """Stop the ranks of this node, and say ``RanksEnded`` when they are gone."""


class Over(_Message, frozen=True, kw_only=True):
    """Nothing more will be started: the elastic process goes.

    Attributes:
        has_succeeded: Whether every rank has finished, on all nodes. Then those here may go.
        refusal: Why the run could not be started, if that is how it ends.
    """

    has_succeeded: bool = False
    refusal: Broken | None = None


class RanksEnded(_Message, frozen=True):
    """All ranks of this node are gone, and not all have finished."""


class RanksFinished(_Message, frozen=True):
    """Every rank of this node has its result, and waits to be let go."""


FromElastic: TypeAlias = StartRanks | StopRanks | Over
ToElastic: TypeAlias = RanksEnded | RanksFinished

for_agent: msgspec.msgpack.Decoder[FromElastic] = msgspec.msgpack.Decoder(FromElastic)
for_elastic: msgspec.msgpack.Decoder[ToElastic] = msgspec.msgpack.Decoder(ToElastic)

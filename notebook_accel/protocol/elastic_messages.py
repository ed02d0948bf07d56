"""What the agent and the elastic process of a run say to each other. Descriptors travel beside a message.

agent -> elastic process    RanksStand, RanksEnded, RanksFinished, Leave
elastic process -> agent    StartRanks, StopRanks, AboutNodes, Over

Both write at any time, so two messages can cross. Each one about ranks therefore says which attempt it is about, and
whoever reads about another attempt than its own drops that: it was written before its writer knew better. The agent
answers every StartRanks with RanksStand or Leave, and every StopRanks of a present attempt with RanksEnded.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from notebook_accel.environment import RankPlace
from notebook_accel.protocol.agent_messages import AboutNodes, Broken, Failure

__all__ = [
    "AboutNodes",
    "Failure",
    "FromElastic",
    "Leave",
    "Over",
    "RanksEnded",
    "RanksFinished",
    "RanksStand",
    "StartRanks",
    "StopRanks",
    "ToElastic",
]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class _OfAttempt(_Message, frozen=True, kw_only=True):
    """A message about the ranks of one attempt. The elastic process counts its attempts from 1."""

    attempt: int


class StartRanks(_OfAttempt, frozen=True, kw_only=True):
    """Start all ranks of this node, none of which is there.

    Descriptor: where the global rank 0 is one of them, the listening socket for the ranks' store.

    Attributes:
        places: Each rank's place, and what its environment has besides.
        restarts: How often ranks have been started again because of a failure.
        cause: The failure on another node because of which they are, if it was there.
    """

    places: list[tuple[RankPlace, dict[str, str]]]
    restarts: int
    cause: Failure | None = None


class StopRanks(_OfAttempt, frozen=True, kw_only=True):
    """Stop the ranks of this node, and say ``RanksEnded`` when they are gone."""


class Over(_Message, frozen=True, kw_only=True):
    """Nothing more will be started: the elastic process goes.

    Attributes:
        has_succeeded: Whether every rank has finished, on all nodes. Then those here may go.
        refusal: Why the run could not be started, if that is how it ends.
        failure: The failure on another node that it ends by, if it does.
    """

    has_succeeded: bool = False
    refusal: Broken | None = None
    failure: Failure | None = None


class RanksStand(_OfAttempt, frozen=True, kw_only=True):
    """The ranks of this node are being started, or have done more steps.

    Attributes:
        steps: Those of the slowest rank and of the fastest, ``None`` if they count none yet.
    """

    steps: tuple[int, int] | None = None


class RanksEnded(_OfAttempt, frozen=True, kw_only=True):
    """All ranks of this node are gone, and not all have finished.

    Attributes:
        failure: Which one failed first, ``None`` if none did, and they were stopped.
    """

    failure: Failure | None = None


class Leave(_Message, frozen=True, kw_only=True):
    """The run ends here, since somebody wants it: tell the other nodes why, and go."""

    why: str


class RanksFinished(_OfAttempt, frozen=True, kw_only=True):
    """Every rank of this node has its result, and waits to be let go."""


FromElastic: TypeAlias = StartRanks | StopRanks | AboutNodes | Over
ToElastic: TypeAlias = RanksStand | RanksEnded | RanksFinished | Leave

for_agent: msgspec.msgpack.Decoder[FromElastic] = msgspec.msgpack.Decoder(FromElastic)
for_elastic: msgspec.msgpack.Decoder[ToElastic] = msgspec.msgpack.Decoder(ToElastic)

"""Messages between the agent and the elastic process of a run. Descriptors travel beside a message.

agent -> elastic process    RanksStand, RanksEnded, RanksFinished, Leave
elastic process -> agent    StartRanks, StopRanks, Over, and the event Nodes

Both send at any time, so two messages can cross. Each message about ranks therefore has the number of the attempt, and
its reader drops outdated messages, of another attempt than the present one. The agent answers every StartRanks with
RanksStand or Leave, and every StopRanks of the present attempt with RanksEnded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from notebook_accel.protocol.agent_messages import Broken, Failure, Place
from notebook_accel.protocol.events import Nodes


class _ElasticMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class _OfAttempt(_ElasticMessage, frozen=True, kw_only=True):
    """A message about the ranks of one attempt. The elastic process counts its attempts from 1."""

    attempt: int


class StartRanks(_OfAttempt, frozen=True, kw_only=True):
    """Start all ranks of this node, none of which exists.

    Descriptor: the listening socket of the ranks' store, if the global rank 0 is one of them.
    """

    places: list[Place]
    restarts: int  # number of restarts so far that a failure caused
    cause: Failure | None = None  # the failure that caused this restart, if it was on another node


class StopRanks(_OfAttempt, frozen=True, kw_only=True):
    """Stop the ranks of this node, and send ``RanksEnded`` when they are gone."""


class Over(_ElasticMessage, frozen=True, kw_only=True):
    """The elastic process ends and starts nothing more."""

    has_succeeded: bool = False  # every rank on all nodes has finished, so that the ranks here may exit
    refusal: Broken | None = None  # the reason why the run couldn't be started, if that ends it
    failure: Failure | None = None  # the failure on another node, if that ends it


class RanksStand(_OfAttempt, frozen=True, kw_only=True):
    """The ranks of this node are being started, or have done more steps."""

    steps: tuple[int, int] | None = None  # of the slowest and of the fastest rank; ``None`` if they count none yet


class RanksEnded(_OfAttempt, frozen=True, kw_only=True):
    """All ranks of this node are gone, and not all have finished."""

    failure: Failure | None = None  # the failure of the rank that failed first; ``None`` if they were stopped


class Leave(_ElasticMessage, frozen=True, kw_only=True):
    """Tell the other nodes why the run ends here, and exit."""

    why: str


class RanksFinished(_OfAttempt, frozen=True, kw_only=True):
    """Every rank of this node has its result and waits for its release."""


FromElastic: TypeAlias = StartRanks | StopRanks | Nodes | Over
ToElastic: TypeAlias = RanksStand | RanksEnded | RanksFinished | Leave

decode_for_agent: Callable[[bytes], FromElastic] = msgspec.msgpack.Decoder(FromElastic).decode
decode_for_elastic: Callable[[bytes], ToElastic] = msgspec.msgpack.Decoder(ToElastic).decode

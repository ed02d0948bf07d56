"""What a run's elastic process is told at its start."""

from __future__ import annotations

import msgspec

__all__ = ["Elastic", "Meeting"]


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how the nodes of a run meet.

    Attributes:
        num_nodes: As it was asked for.
        least: How many nodes there have to be.
        most: How many there may be.
        node_rank: This node's number, where the nodes are numbered.
        backend: Torch elastic's name for the way.
        host: Where.
        port: Its TCP port.
        timeout_s: How long they wait for each other.
        silence_s: After how long without a word a node is taken to have gone.
        settings: For torch elastic's own rendezvous.
    """

    num_nodes: str
    least: int
    most: int
    node_rank: int
    backend: str
    host: str
    port: int
    timeout_s: float
    silence_s: float
    settings: dict[str, str] = {}


class Elastic(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's elastic process has to know; the options of these names are in ``LaunchConfig``.

    Attributes:
        meeting: Where the nodes meet, ``None`` if this is the only one.
        secret: With which nodes prove whose results they bring; empty if each keeps its own.
        fingerprint: Of what was sent to the ranks by value.
    """

    max_restarts: int
    monitor_interval_s: float
    run_id: str
    meeting: Meeting | None = None
    secret: str = ""
    fingerprint: str = ""

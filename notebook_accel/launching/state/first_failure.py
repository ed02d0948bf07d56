"""Decides which of several failures of a run was the first, for all who ask. Imports nothing that only Linux has."""

from __future__ import annotations

from collections.abc import Mapping

from notebook_accel.protocol import events


def first_failed(failed: Mapping[int, events.Failed], died_s: Mapping[int, float] = {}) -> int | None:
    """Return the rank that failed first, ``None`` if none has. Ranks that failed for lack of a peer come last.

    Args:
        failed: The exceptions of ranks.
        died_s: When other ranks have exited without a result, in seconds of the same clock as the exceptions.
    """
    order = {rank: (each.lost_peer, each.time_s, rank) for rank, each in failed.items()}
    order |= {rank: (False, time_s, rank) for rank, time_s in died_s.items()}
    return min(order, key=order.__getitem__, default=None)

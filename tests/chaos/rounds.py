"""Rounds of a chaos test, each of a seed of its own, for the test's share of the lane's time.

The lane takes two minutes from a fixed seed. ``NOTEBOOK_ACCEL_CHAOS_S=3600`` and ``NOTEBOOK_ACCEL_CHAOS_SEED=7`` in the
environment make it other ones.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from notebook_accel.errors import NotebookAccelError

DURATION_S = float(os.environ.get("NOTEBOOK_ACCEL_CHAOS_S", "120"))
SEED = os.environ.get("NOTEBOOK_ACCEL_CHAOS_SEED", "0")

_Kind = TypeVar("_Kind")


def play(
    title: str,
    share: float,
    kinds: Sequence[_Kind],
    one_round: Callable[[_Kind, random.Random, int], str],
    capsys: pytest.CaptureFixture[str],
    *,
    least: int = 1,
) -> None:
    """Play rounds: each kind once, in a random order, before any comes again.

    Args:
        title: What the rounds are of.
        share: The test's share of the lane's time.
        kinds: What may happen.
        one_round: Plays a round of this kind, which has a number, and returns what happened.
        capsys: The output of the test, beside which each round is told.
        least: The number of rounds that are played however long they take.
    """
    ends_s = time.monotonic() + share * DURATION_S
    order: list[_Kind] = []
    rounds = 0
    while rounds < least or time.monotonic() < ends_s:
        rng = random.Random(f"{title}-{SEED}-{rounds}")
        order = order or rng.sample(kinds, len(kinds))
        kind = order.pop()
        try:
            said = one_round(kind, rng, rounds)
        except (AssertionError, NotebookAccelError) as error:
            raise AssertionError(f"{title}, seed {SEED}, round {rounds} ({kind}):\n{error}") from error
        rounds += 1
        with capsys.disabled():
            print(f"\n{title}, seed {SEED}, round {rounds}: {said}", end="")

"""Detached runs whose kernel is killed at random moments, for some seconds. ``test_launching`` has the variables."""

from __future__ import annotations

import pathlib
import random
import time

import pytest

from tests.behaviour.test_detached import MOMENTS, one_round
from tests.chaos.test_launching import DURATION_S, SEED

_SHARE_S = 0.15 * DURATION_S


@pytest.mark.chaos
@pytest.mark.usefixtures("state_home")
@pytest.mark.timeout(DURATION_S + 240)
def test_kernels_that_are_killed_take_nothing_along(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends_s = time.monotonic() + _SHARE_S
    rounds = 0
    while time.monotonic() < ends_s:
        rng = random.Random(f"{SEED}-{rounds}")
        moment = MOMENTS[rounds % len(MOMENTS)]
        try:
            said = one_round(moment, tmp_path / f"round-{rounds}", rng)
        except AssertionError as error:
            raise AssertionError(f"seed {SEED}, round {rounds} ({moment}):\n{error}") from error
        rounds += 1
        with capsys.disabled():
            print(f"\ndetached, seed {SEED}, round {rounds}: {said}", end="")
    assert rounds >= 1

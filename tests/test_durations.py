"""Durations as people read them."""

from __future__ import annotations

import pytest

from notebook_accel import durations


@pytest.mark.parametrize(("seconds", "words"), [
    (0.041, "0.04 s"), (3.21, "3.2 s"), (9.99, "10.0 s"), (10.0, "00:10"), (125.9, "02:05"), (3725.0, "1:02:05"),
])  # fmt: skip
def test_how_long_something_took(seconds: float, words: str) -> None:
    assert durations.in_words(seconds) == words


@pytest.mark.parametrize(("seconds", "words"), [(0.9, "00:00"), (59.9, "00:59"), (3600.0, "1:00:00")])
def test_minutes_and_hours(seconds: float, words: str) -> None:
    assert durations.in_minutes(seconds) == words

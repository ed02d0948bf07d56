"""Ranks that all tests of the training runtime share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training import ranks


@pytest.fixture(scope="package")
def two_ranks() -> Iterator[ranks.Ranks]:
    with ranks.running(2) as running:
        yield running


@pytest.fixture(scope="package")
def three_ranks() -> Iterator[ranks.Ranks]:
    with ranks.running(3) as running:
        yield running

"""Collectives between two XLA devices, which on the CPU are those of one process, with a thread for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.training import ranks
from tests.xla import work
from tests.xla.conftest import one_rank

pytestmark = [pytest.mark.xla, pytest.mark.timeout(300)]
_DEADLINE_S = 200.0


@pytest.fixture(scope="module")
def two_devices() -> Iterator[ranks.Ranks]:
    with one_rank(CPU_NUM_DEVICES="2") as running:
        yield running


def test_sums_gathers_and_broadcasts(two_devices: ranks.Ranks) -> None:
    [by_rank] = two_devices.run(work.collectives, deadline_s=_DEADLINE_S)
    for total, rows, flags, received in by_rank:
        assert total.tolist() == [3.0, 4.0]
        assert rows.tolist() == [[0.0, 0.0], [torch.inf, 0.0], [1.0, 10.0], [torch.inf, 0.0]]
        assert flags.dtype is torch.bool and flags.tolist() == [True, True, False, True]
        assert received.tolist() == [1, 7]


def test_gradients_are_averaged_by_one_collective(two_devices: ranks.Ranks) -> None:
    [(by_rank, counts)] = two_devices.run(work.gradients, deadline_s=_DEADLINE_S)
    for rank, (own, synced) in enumerate(by_rank):
        assert torch.equal(own, torch.full((3, 2), 1.0 + rank))
        assert torch.equal(synced, torch.full((3, 2), 1.5))
    assert counts == [1, 1]

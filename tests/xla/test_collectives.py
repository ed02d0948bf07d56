"""Collectives between two XLA devices, which on the CPU are those of one process, with a thread for each."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.training import ranks
from tests.xla import work
from tests.xla.conftest import PJRT, one_rank

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


def test_gradients_of_layers_that_learn_later_are_averaged(two_devices: ranks.Ranks) -> None:
    [by_rank] = two_devices.run(work.gradients_of_a_model_that_changes, deadline_s=_DEADLINE_S)
    for unfrozen, of_added, added in by_rank:
        assert added.item() == 2.0  # rank 0's
        assert torch.equal(unfrozen, torch.full((3, 2), 2 * 1.5))
        assert of_added.item() == 3 * (2 * 1.5 + 1) + 1


def test_torch_xla_itself_ends_a_process_whose_threads_are_ranks() -> None:
    """Why they are refused. Once this fails, that is worth another look: see ``pjrt.py``."""
    program = pathlib.Path(__file__).with_name("two_threads.py")
    variables = {**os.environ, **PJRT, "CPU_NUM_DEVICES": "2"}
    ended = subprocess.run([sys.executable, program], env=variables, capture_output=True, check=False, timeout=200)
    assert ended.returncode == -signal.SIGABRT
    assert b"Expected 2 threads to join the rendezvous, but only 1 of them arrived" in ended.stderr

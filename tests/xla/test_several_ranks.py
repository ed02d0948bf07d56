"""Several ranks with an XLA device each, that PJRT doesn't join: as CPUs are, and the cores of a TPU v2 or v3."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch

from notebook_accel.errors import CollectiveError
from tests.training import ranks
from tests.xla import work, work_together
from tests.xla.conftest import PJRT

pytestmark = [pytest.mark.xla, pytest.mark.timeout(300)]
_DEADLINE_S = 200.0

# What a notebook of Kaggle's has on a v5e-8, as seen in 2026: it tells one process that it has the whole TPU.
_OF_A_NOTEBOOK_SERVICE = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_PROCESS_ADDRESSES": "local",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[ranks.Ranks]:
    """Each sees two devices, as on a chip of two cores, and computes on the first."""
    with ranks.running(2, **PJRT, CPU_NUM_DEVICES="2") as running:
        yield running


@pytest.mark.parametrize(("batch", "steps"), [(8, 1), (4, 2)])
def test_they_train_like_one_with_their_batches_together(two_ranks: ranks.Ranks, batch: int, steps: int) -> None:
    epochs = 4
    both = two_ranks.run(work_together.train, batch, steps, epochs, deadline_s=_DEADLINE_S)
    expected = work_together.in_one_process(16, epochs)
    for found in both:
        assert found["place"] == ("xla:0", 2, 2)
        for parameter, like in zip(found["parameters"], expected, strict=True):
            assert torch.allclose(parameter, like, atol=1e-5)
        assert len(set(found["compiled"][1:])) == 1  # all in the first epochs
        # The gradients, once a step: not once a batch, nor once a parameter.
        assert set(found["read"]) == {work_together.ROWS // 16}


def test_collectives_of_tensors_and_objects(two_ranks: ranks.Ranks) -> None:
    inf = float("inf")
    for found in two_ranks.run(work_together.collectives, deadline_s=_DEADLINE_S):
        assert found == {
            "rows": [[0.0, inf], [1.0, inf]],
            "flags": [True, False],
            "sum": 3,
            "mean": 1.5,
            "sent": 2,
            "padded": [1.0, 0.0, 1.0, 1.0],
            "seen": [0, 1, 2, 3, 4],
            "objects": ["of 0", "of 1"],
            "device": "xla:0",
        }


def test_resumed_training_equals_uninterrupted_training(two_ranks: ranks.Ranks, folder: pathlib.Path) -> None:
    both = two_ranks.run(work.resume, folder, deadline_s=_DEADLINE_S)
    for uninterrupted, resumed in both:
        assert len(uninterrupted) == 1
        assert resumed == uninterrupted
    assert both[0] != both[1]  # each has batches of its own


def test_ranks_with_gradients_of_different_parameters_are_told(two_ranks: ranks.Ranks) -> None:
    for reply in two_ranks.replies(work_together.one_sided, deadline_s=_DEADLINE_S):
        assert isinstance(reply, CollectiveError)
        assert "3 on rank 0, 6 on rank 1" in str(reply)
    two_ranks.run(work_together.collectives, deadline_s=_DEADLINE_S)  # they still meet


# By the newer names, and set for a process before.
_BY_OTHER_NAMES = {
    **{name: value for name, value in _OF_A_NOTEBOOK_SERVICE.items() if not name.endswith(("_HOST_BOUNDS", "_ID"))},
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,4,1",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "CLOUD_TPU_TASK_ID": "0",
    "TPU_PROCESS_PORT": "8476",
    "TPU_VISIBLE_CHIPS": "0",
}


@pytest.mark.parametrize("variables", [_OF_A_NOTEBOOK_SERVICE, _BY_OTHER_NAMES])
def test_what_a_service_has_set_for_one_process_does_not_bind_the_ranks(
    two_ranks: ranks.Ranks, variables: dict[str, str]
) -> None:
    topologies, _ = two_ranks.run(work_together.topologies, variables, 8, True, deadline_s=_DEADLINE_S)
    assert len(topologies) == 8
    for rank, found in enumerate(topologies):
        addresses = found["TPU_PROCESS_ADDRESSES"].split(",")
        assert len(addresses) == 8 and addresses[rank].endswith(":" + found["TPU_PROCESS_PORT"])
        assert (found["TPU_PROCESS_BOUNDS"], found["TPU_CHIPS_PER_PROCESS_BOUNDS"]) == ("2,4,1", "1,1,1")
        assert (found["TPU_VISIBLE_CHIPS"], found["CLOUD_TPU_TASK_ID"]) == (str(rank), str(rank))


def test_ranks_that_are_not_joined_have_a_chip_each(two_ranks: ranks.Ranks) -> None:
    variables = {"TPU_VISIBLE_CHIPS": "0,1,2,3", "TPU_PROCESS_ADDRESSES": "local"}
    topologies, _ = two_ranks.run(work_together.topologies, variables, 4, False, deadline_s=_DEADLINE_S)
    for rank, found in enumerate(topologies):
        assert found == {
            "TPU_VISIBLE_CHIPS": str(rank),
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
            "TPU_PROCESS_ADDRESSES": "local",
        }

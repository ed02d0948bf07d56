"""Training on an XLA device."""

from __future__ import annotations

import itertools
import pathlib

import pytest

from notebook_accel.errors import ConfigError
from tests.training import ranks
from tests.xla import work
from tests.xla.conftest import one_rank

pytestmark = [pytest.mark.xla, pytest.mark.timeout(300)]
_DEADLINE_S = 200.0


def test_steps_are_compiled_at_first_and_not_again(rank: ranks.Ranks) -> None:
    [found] = rank.run(work.train, deadline_s=_DEADLINE_S)
    assert found["device"] == "xla:0"
    assert found["kept"] and found["on_device"]  # so the optimizer has what the model computes with
    assert sum(found["losses"][-2:]) < 0.8 * sum(found["losses"][:2])
    warm = found["compiled"][3:]  # the first steps' graphs: an optimizer without state, and one with it
    assert 1 <= warm[0] <= 3
    assert set(warm) == {warm[0]}
    assert found["says"][0] and not any(found["says"][4:])  # what the panel says of it
    graphs = found["executed"][1:]
    assert {later - earlier for earlier, later in itertools.pairwise(graphs)} == {1}
    assert found["threads"] == []  # the loader's are gone


def test_accumulation_compiles_a_window_once_and_reads_nothing_back(rank: ranks.Ranks) -> None:
    [found] = rank.run(train_with_accumulation, deadline_s=_DEADLINE_S)
    warm = found["compiled"][8:]
    assert set(warm) == {warm[0]}
    [(read, batches)] = rank.run(work.transfers, 4, deadline_s=_DEADLINE_S)
    assert (read, batches) == (0, 32)


def train_with_accumulation() -> dict[str, object]:
    return work.train(epochs=3, steps=4, batch=8)


def test_resumed_training_equals_uninterrupted_training(rank: ranks.Ranks, folder: pathlib.Path) -> None:
    [(uninterrupted, resumed)] = rank.run(work.resume, folder, deadline_s=_DEADLINE_S)
    assert len(uninterrupted) == 5
    assert resumed == uninterrupted  # dropout, which the device draws, included


def test_a_leaf_learns_without_a_loader(rank: ranks.Ranks) -> None:
    assert rank.run(work.leaf, deadline_s=_DEADLINE_S) == [("xla:0", 0.25, True)]


def test_batches_come_whole_and_a_failure_is_raised(rank: ranks.Ranks) -> None:
    [(seen, error)] = rank.run(work.nested, deadline_s=_DEADLINE_S)
    assert seen[0] == ("xla:0", [[0.0, 0.0], [1.0, 1.0]], [0, 1], ["image 0", "image 1"])
    assert len(seen) == 1  # the batch that was read ahead went with the failure
    assert error == "no such image"


def test_packed_batch_keeps_its_sizes_on_the_host(rank: ranks.Ranks) -> None:
    assert rank.run(work.packed, deadline_s=_DEADLINE_S) == [("xla:0", "cpu")]


def test_changed_shapes_are_named_once(rank: ranks.Ranks) -> None:
    [[short, evaluation]] = rank.run(work.warned, deadline_s=_DEADLINE_S)
    assert "changed from (16, 8), (16,) to (8, 8), (8,)" in short and "drop_last=True" in short
    assert "have the shape (12, 8), (12,)" in evaluation and "training and evaluation" in evaluation


def test_one_rank_alone_needs_no_others(rank: ranks.Ranks) -> None:
    assert rank.run(work.alone, deadline_s=_DEADLINE_S) == [[[0, 1, 2], [0, 1, 2], [0, 1, 2], ["a"]]]


def test_set_seed_seeds_the_device_and_a_wait_changes_nothing(rank: ranks.Ranks) -> None:
    [(first, other, again)] = rank.run(work.seeded, deadline_s=_DEADLINE_S)
    assert first == again != other


@pytest.mark.parametrize(("downcast", "double"), [(False, "bf16"), (True, "f32")])
def test_bf16_is_what_the_device_computes_in(downcast: bool, double: str) -> None:
    with one_rank() as fresh:
        [(single, found, name, loss)] = fresh.run(work.dtypes, downcast, deadline_s=_DEADLINE_S)
        assert (single, found, name) == ("bf16", double, "bf16")
        assert loss < 0.6
        if not downcast:
            with pytest.raises(ConfigError, match="another form of bf16"):
                fresh.run(work.other_precision, deadline_s=_DEADLINE_S)

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_accel.training import collectives, process_group
from tests.training.ranks import Ranks

SIZES_BYTES = [0, 1, 4000, 5000, 10, 100_000, 99_999, 3_000_000, 2]


def scatter_sizes() -> list[Any]:
    """Return what this rank gets when rank 0 has longer and longer objects for rank 1."""
    backend = process_group.join(cpu=True)
    found = []
    for size_bytes in SIZES_BYTES:
        values = [f"{size_bytes}", bytes(size_bytes)] if backend.place.rank == 0 else None
        found.append(collectives.scatter_object(backend, values))
    return found


def test_each_rank_gets_its_own_however_long_it_is(two_ranks: Ranks) -> None:
    assert two_ranks.run(scatter_sizes) == [
        [str(size_bytes) for size_bytes in SIZES_BYTES],
        [bytes(size_bytes) for size_bytes in SIZES_BYTES],
    ]


def scatter(by_rank: list[Any]) -> Any:
    backend = process_group.join(cpu=True)
    return collectives.scatter_object(backend, by_rank if backend.place.rank == 0 else None)


things = st.none() | st.integers() | st.text() | st.lists(st.binary())


@settings(deadline=None, max_examples=30)
@given(by_rank=st.lists(things, min_size=3, max_size=3))
def test_anything_that_pickles(three_ranks: Ranks, by_rank: list[Any]) -> None:
    assert three_ranks.run(scatter, by_rank) == by_rank


def test_tensors(two_ranks: Ranks) -> None:
    by_rank = [torch.arange(6).view(2, 3).t(), {"half": torch.ones(3, dtype=torch.bfloat16)}]
    first, second = two_ranks.run(scatter, by_rank)
    assert torch.equal(first, by_rank[0])
    assert torch.equal(second["half"], by_rank[1]["half"])


def test_alone_it_is_the_only_one() -> None:
    assert collectives.scatter_object(process_group.join(cpu=True), ["mine"]) == "mine"

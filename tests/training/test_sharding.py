"""The samples that each rank gets, compared with a plain computation of those that it should get."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from notebook_accel import Accelerator, DataLoaderConfiguration, environment
from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.training.sharding import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    Tail,
    chain_of,
    dispatched_rounds,
)
from tests.training.datasets import Numbers, SizedStream
from tests.training.ranks import on_ranks

lengths = st.integers(0, 40)
sizes = st.integers(1, 5)
worlds = st.integers(1, 4)


def shards(samples: int, batch_size: int, world_size: int, *, drop_last: bool = False, **options: Any) -> list[Any]:
    sampler = BatchSampler(SequentialSampler(range(samples)), batch_size, drop_last)
    return [BatchSamplerShard(sampler, world_size, rank, **options) for rank in range(world_size)]


def filled(samples: list[int], multiple: int) -> list[int]:
    """Return the samples, with the first ones repeated until their number is a multiple."""
    missing = -len(samples) % multiple
    return [*samples, *itertools.islice(itertools.cycle(samples[:multiple]), missing)] if samples else []


def chunks(samples: list[int], size: int) -> list[list[int]]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


@settings(deadline=None, max_examples=300)
@given(lengths, sizes, worlds, st.booleans(), st.booleans(), st.booleans())
def test_ranks_take_batches_in_turn_and_the_tail_is_filled_from_the_front(
    n: int, size: int, world: int, drop_last: bool, even: bool, split: bool
) -> None:
    """A stream is shared out like a dataset. With ``split`` ranks take parts of each batch."""
    batch_size = size * world if split else size
    samples = list(range(n))
    if drop_last:
        samples = samples[: n // (size * world) * size * world]
    elif even:
        samples = filled(samples, size * world)
    options = {"drop_last": drop_last, "split_batches": split, "even_batches": even}
    for rank, shard in enumerate(shards(n, batch_size, world, **options)):
        own = slice(rank * size, (rank + 1) * size)
        expected = [cut for taken in chunks(samples, size * world) if (cut := taken[own])]
        assert (list(shard), len(shard)) == (expected, len(expected))
        assert not drop_last or shard.tails == {}
        stream = IterableDatasetShard(SizedStream(n), batch_size, drop_last, world, rank, split, even)
        assert list(stream) == list(itertools.chain(*expected))
        assert len(stream) == sum(map(len, expected))


@settings(deadline=None)
@given(lengths, sizes, worlds, st.booleans())
def test_tail_says_which_samples_of_the_last_round_are_real(n: int, size: int, world: int, split: bool) -> None:
    batch_size = size * world if split else size
    ours = shards(n, batch_size, world, split_batches=split)
    shares = [list(shard) for shard in ours]
    rounds = max(map(len, shares))
    (tail,) = {shard.tails.get(rounds - 1) for shard in ours}
    last_round = [share[-1] for share in shares if share]
    numbers = tail.rows_kept([*map(len, last_round)]) if tail else map(len, last_round)
    kept = [sample for share, rows in zip(last_round, numbers, strict=True) for sample in share[:rows]]
    whole = n // (size * world) * size * world
    assert kept == list(range(whole if n > whole else max(0, whole - size * world), n))


def test_a_last_round_that_is_dispatched_as_accelerate_does_it() -> None:
    (shard, *_), stream = shards(13, 4, 2), IterableDatasetShard(SizedStream(13), 4, num_processes=2)
    for dealt in (shard, stream):
        assert [shares for shares, _ in dispatched_rounds(dealt)][1] == [[8, 9, 10, 11], [12, 0, 1, 2]]
        with environment.patched({environment.COMPAT: "accelerate"}):
            rounds = list(dispatched_rounds(dealt))
        assert rounds[0] == ([[0, 1, 2, 3], [4, 5, 6, 7]], None)
        assert rounds[1] == ([[8, 9, 10], [11, 12, 0]], Tail((3, 2), (3, 3)))


@pytest.mark.parametrize(("gathered", "kept"), [
    ([4, 4], [3, 1]), ([8, 8], [6, 2]), ([0, 4], [0, 1]), ([1, 1], [1, 1]), ([4, 5], [4, 5])
])  # fmt: skip
def test_rows_are_kept_by_whole_samples(gathered: list[int], kept: list[int]) -> None:
    assert Tail(real_by_rank=(3, 1), sizes=(4, 4)).rows_kept(gathered) == kept


class Buckets:
    """A batch sampler without a batch size, whose batches differ in size."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3], [4, 5]])

    def __len__(self) -> int:
        return 3


def test_split_batches_needs_a_batch_size_that_divides() -> None:
    with pytest.raises(ConfigError, match="a batch of 5 into 2 equal parts"):
        shards(10, 5, 2, split_batches=True)
    with pytest.raises(ConfigError, match="no batch_size"):
        BatchSamplerShard(Buckets(), 2, 0, split_batches=True)


def test_split_batches_refuses_a_short_batch_in_the_middle() -> None:
    class Uneven(Buckets):
        batch_size = 4

    with pytest.raises(TrainingError, match="isn't of its size, 4"):
        list(BatchSamplerShard(Uneven(), 4, 0, split_batches=True))


def test_sampler_without_an_end() -> None:
    shard = BatchSamplerShard(([i] for i in itertools.count()), 2, 1)
    assert list(itertools.islice(shard, 3)) == [[1], [3], [5]]
    with pytest.raises(TypeError):
        len(shard)


def test_stream_is_told_its_epoch() -> None:
    dataset = Numbers(3)
    IterableDatasetShard(dataset).set_epoch(4)
    IterableDatasetShard(iter([1])).set_epoch(4)
    assert dataset.epochs == [4]


# Samplers


def test_seedable_sampler_depends_on_seed_and_epoch_only() -> None:
    sampler = SeedableRandomSampler(range(20), data_seed=3)
    torch.manual_seed(1)
    first, second = list(sampler), list(sampler)
    torch.manual_seed(2)
    sampler.set_epoch(0)
    assert [list(sampler), list(sampler)] == [first, second]
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert first == torch.randperm(20, generator=torch.Generator().manual_seed(3)).tolist()


def test_skipping_leaves_all_else_as_it_is() -> None:
    inner = BatchSampler(SequentialSampler(range(9)), 2, drop_last=False)
    skipping = SkipBatchSampler(inner, 3)
    assert list(skipping) == list(skipping) == [[6, 7], [8]]
    assert (len(skipping), skipping.batch_size, skipping.drop_last) == (2, 2, False)
    assert (list(SkipBatchSampler(inner, 7)), len(SkipBatchSampler(inner, 7))) == ([], 0)
    assert list(chain_of(skipping)) == [skipping, inner, inner.sampler]
    assert list(copy.deepcopy(skipping)) == [[6, 7], [8]]


def test_skipping_batches_that_have_no_end() -> None:
    assert list(itertools.islice(SkipBatchSampler(([i] for i in itertools.count()), 2), 2)) == [[2], [3]]


def seedable(seed: int) -> DataLoader[Any]:
    return DataLoader(range(8), batch_size=4, sampler=SeedableRandomSampler(range(8), data_seed=seed))


@pytest.mark.parametrize("use_seedable_sampler", [True, False])
@on_ranks(2)
def test_a_seedable_sampler_keeps_its_order_on_several_ranks(use_seedable_sampler: bool) -> None:
    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=use_seedable_sampler)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(seedable(7 + accelerator.process_index))  # rank 0's counts
    plain = seedable(7)
    for _ in range(3):
        expected = [batch.tolist() for batch in plain]
        assert [accelerator.gather(batch).tolist() for batch in loader] == expected

"""The order in which samples are read."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from notebook_accel import Accelerator, DataLoaderConfiguration
from notebook_accel.training.sharding import SeedableRandomSampler, SkipBatchSampler, chain_of
from tests.training.ranks import Ranks


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


@pytest.mark.parametrize("options", [{}, {"use_seedable_sampler": True}])
def test_a_seedable_sampler_keeps_its_order(options: dict[str, Any]) -> None:
    config = DataLoaderConfiguration(**options)
    prepared = Accelerator(cpu=True, dataloader_config=config).prepare(seedable(7))
    plain = seedable(7)
    for _ in range(3):
        assert [batch.tolist() for batch in prepared] == [batch.tolist() for batch in plain]


def read_together(use_seedable_sampler: bool) -> list[Any]:
    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=use_seedable_sampler)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(seedable(7 + accelerator.process_index))  # rank 0's counts
    return [[accelerator.gather(batch).tolist() for batch in loader] for _ in range(3)]


@pytest.mark.parametrize("use_seedable_sampler", [True, False])
def test_a_seedable_sampler_keeps_its_order_on_several_ranks(two_ranks: Ranks, use_seedable_sampler: bool) -> None:
    plain = seedable(7)
    expected = [[batch.tolist() for batch in plain] for _ in range(3)]
    assert two_ranks.run(read_together, use_seedable_sampler) == [expected] * 2

"""Batches that rank 0 reads for all ranks are those that each rank would read by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, get_worker_info

from notebook_accel.errors import TrainingError
from notebook_accel.training import collectives, process_group
from notebook_accel.training.accumulation import GradientAccumulationPlugin, GradientState
from notebook_accel.training.data import DataLoaderConfiguration, shard_dataloader
from notebook_accel.training.loaders import DataLoaderDispatcher, DataLoaderShard
from tests.training.datasets import Numbers, Stream
from tests.training.ranks import on_ranks


class Failing(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 9:
            raise ValueError(f"no number {index}")
        return index


class Many(Numbers):
    """A dataset that reads several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class SharedStream(Stream):
    """A stream of which each worker reads its part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        return iter(range(info.id, self.length, info.num_workers))


class OfRank(Stream):
    """A stream that differs between ranks, so that rank 0's can be told from the others."""

    def __iter__(self) -> Iterator[int]:
        rank = int(os.environ["RANK"])
        return iter(range(100 * rank, 100 * rank + self.length))


def share(loader: DataLoader[Any], **options: Any) -> tuple[DataLoaderShard, GradientState]:
    state = GradientState(GradientAccumulationPlugin(num_steps=1))
    backend = process_group.join(cpu=True)
    return shard_dataloader(loader, backend=backend, config=DataLoaderConfiguration(**options)), state


def read(shard: DataLoaderShard, state: GradientState) -> list[Any]:
    """Return each batch as a list, and whether it is known as the last."""
    return [(batch.tolist() if isinstance(batch, torch.Tensor) else batch, state.end_of_dataloader) for batch in shard]


def loader_of(kind: str, n: int, size: int) -> DataLoader[Any]:
    batches = BatchSampler(SequentialSampler(range(n)), size, drop_last=True)
    kinds: dict[str, Any] = {
        "numbers": lambda: DataLoader(Numbers(n), batch_size=size),
        "many": lambda: DataLoader(Many(n), batch_size=size),
        "shuffled": lambda: DataLoader(Numbers(n), batch_size=size, shuffle=True),
        "stream": lambda: DataLoader(Stream(n), batch_size=size),
        "dropping": lambda: DataLoader(Stream(n), batch_size=size, drop_last=True),
        "batch sampler": lambda: DataLoader(Numbers(n), batch_sampler=batches),
        "single": lambda: DataLoader(Numbers(n), batch_size=None),
        "single stream": lambda: DataLoader(Stream(n), batch_size=None),
        "objects": lambda: DataLoader(Numbers(n), batch_size=size, collate_fn=lambda samples: {"is": str(samples)}),
    }
    loader: DataLoader[Any] = kinds[kind]()
    return loader


KINDS = ["numbers", "many", "shuffled", "stream", "dropping", "batch sampler", "single", "single stream", "objects"]
CASES = [
    *((kind, options) for kind in KINDS for options in ({}, {"even_batches": False})),
    *((kind, {"split_batches": True}) for kind in ("numbers", "stream", "batch sampler")),
    ("shuffled", {"use_seedable_sampler": True}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
@on_ranks(2)
def test_batches_are_those_that_each_rank_would_read(kind: str, options: dict[str, Any]) -> None:
    for n in (1, 4, 5, 8, 11, 12):
        ways = []
        for dispatch in (False, True):
            torch.manual_seed(n)
            shard, state = share(loader_of(kind, n, 4), **options, dispatch_batches=dispatch)
            assert isinstance(shard, DataLoaderDispatcher) == dispatch
            length = None if "stream" in kind or kind == "dropping" else len(shard)
            ways.append((length, [read(shard, state) for _ in range(2)]))
        sharded, dispatched = ways
        assert dispatched == sharded


WORKERS: dict[str, Any] = {
    "own": lambda: DataLoader(OfRank(7), batch_size=2),
    "persistent": lambda: DataLoader(Stream(7), batch_size=2, num_workers=1, persistent_workers=True),
    "shared": lambda: DataLoader(SharedStream(10), batch_size=2, num_workers=2),  # each worker's last round is short
}


def gather_epoch(shard: DataLoaderShard, state: GradientState) -> list[int]:
    backend = process_group.current()
    return [n for batch in shard for n in collectives.gather_for_metrics(backend, batch, state.tail).tolist()]


@pytest.mark.parametrize("kind", ["own", "persistent"])
@on_ranks(2)
def test_streams_are_dispatched_unless_told_otherwise(kind: str) -> None:
    shard, state = share(WORKERS[kind]())
    for _ in range(2):
        assert gather_epoch(shard, state) == list(range(7))


@on_ranks(2)
def test_a_stream_that_each_rank_reads_for_itself() -> None:
    assert gather_epoch(*share(WORKERS["own"](), dispatch_batches=False)) == [0, 1, 102, 103, 4, 5, 106]


@pytest.mark.parametrize("even", [True, pytest.param(False, marks=pytest.mark.slow)])
@on_ranks(2)
def test_each_sample_once_where_workers_share_a_stream(even: bool) -> None:
    shard, state = share(WORKERS["shared"](), even_batches=even)
    for _ in range(2):
        assert sorted(gather_epoch(shard, state)) == list(range(10))


@on_ranks(2)
def test_what_rank_0_cannot_read_is_told_to_all() -> None:
    shard, state = share(DataLoader(Failing(12), batch_size=2), dispatch_batches=True)
    kind = ValueError if process_group.current().place.rank == 0 else TrainingError
    with pytest.raises(kind, match="no number 9"):
        read(shard, state)
    assert gather_epoch(*share(WORKERS["own"]())) == list(range(7))


@on_ranks(2)
def test_break() -> None:
    shard, state = share(DataLoader(Stream(20), batch_size=2))
    rank = process_group.current().place.rank
    assert next(iter(shard)).tolist() == [[0, 1], [2, 3]][rank]
    assert not state.in_dataloader
    assert read(shard, state)[-1] == ([[16, 17], [18, 19]][rank], True)

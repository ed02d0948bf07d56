"""Tests that ``gather_for_metrics`` returns each sample of an epoch exactly once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from notebook_accel import Accelerator, DataLoaderConfiguration, skip_first_batches
from notebook_accel.training.sharding import BatchSamplerShard
from tests.training.datasets import Numbers, Stream
from tests.training.ranks import Ranks, on_ranks


class Batches:
    """A batch sampler of given batches, with a ``batch_size`` or without one."""

    def __init__(self, sizes: list[int], batch_size: int | None) -> None:
        ends = list(itertools.accumulate(sizes, initial=0))
        self.batches = [list(range(*pair)) for pair in itertools.pairwise(ends)]
        if batch_size is not None:
            self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), max_size=12), st.sampled_from([None, 5]), st.integers(1, 4), st.booleans())
def test_batches_of_any_sizes(sizes: list[int], batch_size: int | None, world: int, even: bool) -> None:
    sampler = Batches(sizes, batch_size)
    rounds = list(BatchSamplerShard(sampler, world, 0, even_batches=even).rounds())
    found = []
    for shares, tail in rounds:
        rows = [*map(len, shares), *[0] * (world - len(shares))]
        assert tail is not None or len(set(rows)) == 1  # otherwise they couldn't be gathered
        numbers = tail.rows_kept(rows) if tail else rows
        found += [sample for share, number in zip(shares, numbers, strict=False) for sample in share[:number]]
    assert found == list(range(sum(sizes)))
    for rank in range(world):
        shard = BatchSamplerShard(sampler, world, rank, even_batches=even)
        assert list(shard) == [shares[rank] for shares, _ in rounds if rank < len(shares)]
        own = [tail for shares, tail in rounds if rank < len(shares)]
        assert [shard.tails.get(number) for number in range(len(own))] == own


class StreamOfBatches(IterableDataset[torch.Tensor]):
    """A stream of batches of given sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor(batch) for batch in Batches(self.sizes, None)])


class DatasetOfBatches(Dataset[torch.Tensor]):
    """A dataset each item of which is a batch."""

    def __init__(self, sizes: list[int]) -> None:
        self.batches = list(Batches(sizes, None))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.batches[index])


@pytest.mark.parametrize("sizes", [[4, 4, 3], [2, 1], [4, 1, 2, 3, 3]])
@pytest.mark.parametrize("dispatch", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["stream", "dataset", "a size", "no size", "a worker"])
@on_ranks(2)
def test_batches_of_different_sizes(kind: str, dispatch: bool, sizes: list[int]) -> None:
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    workers = {"num_workers": 1} if kind == "a worker" else {}
    loaders: dict[str, Any] = {
        "stream": lambda: DataLoader(StreamOfBatches(sizes), batch_size=None),
        "dataset": lambda: DataLoader(DatasetOfBatches(sizes), batch_size=None),
        "a size": lambda: DataLoader(Numbers(sum(sizes)), batch_sampler=Batches(sizes, 4)),  # type: ignore[arg-type]
    }
    made = loaders.get(kind) or (
        lambda: DataLoader(Numbers(sum(sizes)), batch_sampler=Batches(sizes, None), **workers)  # type: ignore[arg-type]
    )
    loader = accelerator.prepare(made())
    samples = list(range(sum(sizes)))
    for _ in range(2):
        assert gathered(accelerator, loader) == (samples, [str(sample) for sample in samples])


def prepared(kind: str, n: int, size: int, options: dict[str, Any]) -> Any:
    dispatch = {"dispatched": True, "dispatched stream": True, "stream": False}.get(kind)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch, **options))
    dataset: Any = Stream(n) if "stream" in kind else Numbers(n)
    return accelerator, accelerator.prepare(DataLoader(dataset, batch_size=size))


def gathered(accelerator: Any, batches: Any) -> tuple[list[int], list[str]]:
    """Return the samples of an epoch, as tensors and as objects; another tensor has two rows for each sample."""
    tensors: list[int] = []
    objects: list[str] = []
    for batch in batches:
        found = accelerator.gather_for_metrics({"ids": batch, "tokens": batch.repeat_interleave(2)})
        assert found["tokens"].tolist() == found["ids"].repeat_interleave(2).tolist()
        tensors += found["ids"].tolist()
        objects += accelerator.gather_for_metrics([str(sample) for sample in batch.tolist()])
    return tensors, objects


def epochs_of(kind: str, n: int, size: int, skip: int, options: dict[str, Any]) -> list[Any]:
    """Gather a whole epoch, one after a break, the rest of one, and one with another loader inside."""
    accelerator, loader = prepared(kind, n, size, options)
    inner_n = size * accelerator.num_processes if "even_batches" in options else size + 1
    inner = accelerator.prepare(DataLoader(Numbers(inner_n), batch_size=size))
    whole = gathered(accelerator, loader)
    for batch in loader:
        accelerator.gather_for_metrics(batch)
        break
    assert len(accelerator.gather(torch.zeros(7))) == len(accelerator.gather_for_metrics(torch.zeros(7)))
    again = gathered(accelerator, loader)
    rest = gathered(accelerator, skip_first_batches(loader, skip))
    nested = []
    for batch in loader:
        assert gathered(accelerator, inner)[0] == list(range(inner_n))
        nested += accelerator.gather_for_metrics(batch).tolist()
    return [whole, again, rest, nested]


def assert_each_sample_once(found: list[Any], n: int, first: int) -> None:
    samples = list(range(n))
    objects = [str(sample) for sample in samples]
    assert found == [(samples, objects), (samples, objects), (samples[first:], objects[first:]), samples]


drawn_cases = {
    "kind": st.sampled_from(["dataset", "stream", "dispatched", "dispatched stream"]),
    "n": st.integers(0, 24),
    "size": st.integers(1, 9),
    "skip": st.integers(0, 3),
    "how": st.sampled_from(["even", "ragged", "split"]),
}
drawn = settings(deadline=None, max_examples=12)


def assert_metrics_are_exact(running: Ranks, world: int, kind: str, n: int, size: int, skip: int, how: str) -> None:
    options: dict[str, Any] = {"even": {}, "ragged": {"even_batches": False}, "split": {"split_batches": True}}[how]
    batch_size = size * world if how == "split" else size
    if how == "ragged":
        n += -n % (size * world)  # every rank has a batch in the last round, if perhaps a shorter one
        n -= min(size - 1, n, 1)
    for found in running.run(epochs_of, kind, n, batch_size, skip, options):
        assert_each_sample_once(found, n, min(n, skip * size * world))


@drawn
@given(**drawn_cases)
def test_two_ranks(two_ranks: Ranks, kind: str, n: int, size: int, skip: int, how: str) -> None:
    assert_metrics_are_exact(two_ranks, 2, kind, n, size, skip, how)


@pytest.mark.slow
@drawn
@given(**drawn_cases)
def test_three_ranks(three_ranks: Ranks, kind: str, n: int, size: int, skip: int, how: str) -> None:
    assert_metrics_are_exact(three_ranks, 3, kind, n, size, skip, how)


def test_one_rank() -> None:
    for kind, n, size in itertools.product(["dataset", "stream", "dispatched"], (1, 4, 10), (1, 3)):
        assert_each_sample_once(epochs_of(kind, n, size, 1, {}), n, min(n, size))


@on_ranks(2)
def test_the_loader_of_another_accelerator() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(Numbers(5), batch_size=2))
    second = Accelerator(cpu=True)
    assert [row for batch in loader for row in second.gather_for_metrics(batch).tolist()] == list(range(5))

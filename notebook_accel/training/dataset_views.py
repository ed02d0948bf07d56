"""Datasets that read another one in a way of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import Dataset, IterableDataset

from notebook_accel.training.loader_position import EpochCounter
from notebook_accel.training.sharding import (
    IterableDatasetShard,
    MarkedBatch,
    Round,
    Tail,
    dispatched_rounds,
    sample_count,
)

__all__ = [
    "EpochStream",
    "LoaderStream",
    "MarkedCollate",
    "MarkedStream",
    "ReadRound",
    "RoundDataset",
    "RoundStream",
]


class ReadRound(NamedTuple):
    """The batches of one round, in order of rank, with the number of samples of each."""

    batches: list[Any]
    sizes: list[int]
    tail: Tail | None


class _View:
    """Whatever is asked of it, or set on it, is the other dataset's.

    A ``worker_init_fn`` tells its worker's dataset what to read, and finds this one in its place.

    Args:
        dataset: The other dataset.
        own: What belongs to this one.
    """

    _dataset: Any

    def __init__(self, dataset: Any, **own: Any) -> None:
        self.__dict__.update(own, _dataset=dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if "_dataset" not in self.__dict__:  # the object is being made
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


class LoaderStream(_View, IterableDataset[Any]):
    """The batches of a loader that iterates in a way of its own."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)


class EpochStream(_View, IterableDataset[Any]):
    """A stream that learns which epoch it is where it is read.

    A worker process that outlives an epoch has a copy of the stream, which ``set_epoch`` of the original doesn't reach.

    Args:
        dataset: The stream, with a method ``set_epoch``.
        epochs: A shared counter.
    """

    _epochs: EpochCounter

    def __init__(self, dataset: Any, epochs: EpochCounter) -> None:
        super().__init__(dataset, _epochs=epochs)

    def __iter__(self) -> Iterator[Any]:
        self._dataset.set_epoch(self._epochs.running)
        return iter(self._dataset)


class MarkedStream(_View, IterableDataset[Any]):
    """A share of a stream whose samples know their round.

    The stream may be read in a worker process, which sees the last round come but can't tell the loader other than with
    the samples.
    """

    _shard: IterableDatasetShard

    def __init__(self, shard: IterableDatasetShard) -> None:
        super().__init__(shard.dataset, _shard=shard)

    def __len__(self) -> int:
        return len(self._shard)

    def __iter__(self) -> Iterator[MarkedBatch]:
        for share, tail in self._shard.own_shares():
            for sample in share:
                yield MarkedBatch(sample, tail)


class MarkedCollate:
    """Makes a batch of marked samples; a batch never spans two rounds."""

    def __init__(self, collate: Callable[[Any], Any], *, is_batch: bool) -> None:
        self._collate = collate
        self._is_batch = is_batch

    def __call__(self, marked: Any) -> MarkedBatch:
        if not self._is_batch:
            return MarkedBatch(self._collate(marked.batch), marked.tail)
        return MarkedBatch(self._collate([sample for sample, _ in marked]), marked[-1].tail)


class RoundDataset(_View, Dataset[ReadRound]):
    """Rounds of all ranks, read and collated at once; its indices are rounds of indices.

    Args:
        dataset: What has an item for each index.
        collate: Makes a batch of samples.
        is_batch: Whether a share is a list of indices or a single one.
    """

    _collate: Callable[[Any], Any]
    _is_batch: bool

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], *, is_batch: bool) -> None:
        super().__init__(dataset, _collate=collate, _is_batch=is_batch)

    def __getitem__(self, indices: Round) -> ReadRound:
        batches = [self._collate(self._samples(share)) for share in indices.shares]
        return ReadRound(batches, [sample_count(share) for share in indices.shares], indices.tail)

    def _samples(self, share: Any) -> Any:
        if not self._is_batch:
            return self._dataset[share]
        if hasattr(self._dataset, "__getitems__"):  # several at once, as torch reads them
            return self._dataset.__getitems__(share)
        return [self._dataset[index] for index in share]


class RoundStream(_View, IterableDataset[ReadRound]):
    """Rounds of all ranks, read and collated at once.

    Args:
        shard: Deals out the stream.
        collate: Makes a batch of samples.
        is_batch: Whether a share is made into a batch or is a single sample.
    """

    _shard: IterableDatasetShard
    _collate: Callable[[Any], Any]
    _is_batch: bool

    def __init__(self, shard: IterableDatasetShard, collate: Callable[[Any], Any], *, is_batch: bool) -> None:
        super().__init__(shard.dataset, _shard=shard, _collate=collate, _is_batch=is_batch)

    def __iter__(self) -> Iterator[ReadRound]:
        for shares, tail in dispatched_rounds(self._shard):
            batches = [self._collate(share if self._is_batch else share[0]) for share in shares]
            yield ReadRound(batches, [len(share) for share in shares], tail)

"""Dataset wrappers that set the epoch, mark samples with their round, or yield whole rounds."""

from __future__ import annotations

import dataclasses
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


class ReadRound(NamedTuple):
    """The batches of one round, in order of rank, with the number of samples of each."""

    batches: list[Any]
    sizes: list[int]
    tail: Tail | None


class _DatasetView:
    """A dataset wrapper that forwards reading and setting of attributes, except for its ``own`` ones.

    So a ``worker_init_fn`` that sets attributes of its worker's dataset, which is the wrapper, reaches the dataset.
    """

    def __init__(self, dataset: Any, **own: Any) -> None:
        self.__dict__.update(own, _dataset=dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if "_dataset" not in self.__dict__:  # the object is being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


class LoaderStream(_DatasetView, IterableDataset[Any]):
    """A stream of the batches of a loader with an ``__iter__`` of its own."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dataset)


class EpochStream(_DatasetView, IterableDataset[Any]):
    """A stream whose ``set_epoch`` is called in the process that reads it, with the epoch of a shared counter.

    A worker process that outlives an epoch has a copy of the stream, which ``set_epoch`` of the original doesn't reach.
    """

    def __init__(self, dataset: Any, epochs: EpochCounter) -> None:
        super().__init__(dataset, _epochs=epochs)

    def __iter__(self) -> Iterator[Any]:
        self._dataset.set_epoch(self._epochs.running)
        return iter(self._dataset)


class MarkedStream(_DatasetView, IterableDataset[Any]):
    """One rank's share of a stream, each sample with the ``Tail`` of its round.

    Only the process that reads the stream knows its last round, so a worker sends the ``Tail`` along with the samples.
    """

    def __init__(self, shard: IterableDatasetShard) -> None:
        super().__init__(shard.dataset, _shard=shard)

    def __len__(self) -> int:
        return len(self._shard)

    def __iter__(self) -> Iterator[MarkedBatch]:
        for share, tail in self._shard.own_shares():
            for sample in share:
                yield MarkedBatch(sample, tail)


@dataclasses.dataclass(frozen=True)
class MarkedCollate:
    """A ``collate_fn`` for marked samples. A batch never spans two rounds."""

    collate: Callable[[Any], Any]
    is_batch: bool

    def __call__(self, marked: Any) -> MarkedBatch:
        if not self.is_batch:
            return MarkedBatch(self.collate(marked.batch), marked.tail)
        return MarkedBatch(self.collate([sample for sample, _ in marked]), marked[-1].tail)


class RoundDataset(_DatasetView, Dataset[ReadRound]):
    """A dataset whose items are rounds of all ranks, read and collated. Its indices are rounds of indices.

    With ``is_batch`` a rank's share is a list of indices, otherwise a single index.
    """

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


class RoundStream(_DatasetView, IterableDataset[ReadRound]):
    """A stream of the rounds of all ranks, read and collated. Without ``is_batch`` a share is a single sample."""

    def __init__(self, shard: IterableDatasetShard, collate: Callable[[Any], Any], *, is_batch: bool) -> None:
        super().__init__(shard.dataset, _shard=shard, _collate=collate, _is_batch=is_batch)

    def __iter__(self) -> Iterator[ReadRound]:
        for shares, tail in dispatched_rounds(self._shard):
            batches = [self._collate(share if self._is_batch else share[0]) for share in shares]
            yield ReadRound(batches, [len(share) for share in shares], tail)

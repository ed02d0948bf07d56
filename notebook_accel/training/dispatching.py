"""Loaders that only rank 0 reads, for data that other ranks can't read or would read differently."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Sampler

from notebook_accel.errors import TrainingError
from notebook_accel.training import collectives
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.dataset_views import ReadRound, RoundDataset, RoundStream
from notebook_accel.training.loaders import DataLoaderShard, kept_options
from notebook_accel.training.sharding import (
    BatchSamplerShard,
    IterableDatasetShard,
    MarkedBatch,
    Round,
    Tail,
    dispatched_rounds,
)

__all__ = ["DataLoaderDispatcher"]


class DataLoaderDispatcher(DataLoaderShard):
    """A loader that rank 0 reads for all ranks, sending each its batches.

    Batches are those of a ``DataLoaderShard``, and have to pickle. Each is sent while ranks work on the one before.

    Args:
        source: The loader that it was made from.
        dataset: The dataset to read.
        backend: This rank's backend.
        shard: Deals out the batches.
        options: As for ``DataLoaderShard``.
    """

    def __init__(
        self,
        source: DataLoader[Any],
        dataset: Any,
        *,
        backend: Backend,
        shard: BatchSamplerShard | IterableDatasetShard,
        **options: Any,
    ) -> None:
        super().__init__(source, dataset, shard=shard, **{**options, "is_marked": True})
        self._arguments["backend"] = backend
        self._backend = backend
        self._reader = _reader(source, shard, self.skipped) if backend.place.rank == 0 else None

    def _read(self) -> Iterator[MarkedBatch]:
        messages = None if self._reader is None else self._messages(self._reader)
        while True:
            message = collectives.scatter_object(self._backend, None if messages is None else next(messages))
            if isinstance(message, _Failure):
                if messages is not None:
                    next(messages)  # raises it
                message.raise_elsewhere()
            if message is None:
                return
            yield message
            if message.tail is not None and message.tail.missing:  # no further message: some ranks wait for none
                return

    def _messages(self, reader: DataLoader[ReadRound]) -> Iterator[list[Any]]:
        """Yield the messages that rank 0 sends, one for each rank, round by round, and a last one."""
        world_size = self._backend.place.world_size
        try:
            rounds = _incomplete_last(reader, world_size)
            if isinstance(self.shard, IterableDatasetShard):
                rounds = itertools.islice(rounds, self.skipped, None)  # a stream has to be read to be skipped
            for batches, _, tail in rounds:
                yield [*(MarkedBatch(batch, tail) for batch in batches), *[None] * (world_size - len(batches))]
        except Exception as error:
            yield [_Failure(f"{type(error).__name__}: {error}")] * world_size
            raise
        yield [None] * world_size


class _Failure(NamedTuple):
    """Tells the other ranks that rank 0 could not read a batch."""

    error: str

    def raise_elsewhere(self) -> None:
        raise TrainingError(
            f"Rank 0, which reads for all ranks, could not read the next batch: {self.error}",
            why="The loader is dispatched: dispatch_batches=True, or its dataset can only be iterated.",
        )


class _Rounds(Sampler[Round]):
    """A sampler that yields the rounds of all ranks."""

    def __init__(self, shard: BatchSamplerShard, skipped: int) -> None:
        self._shard = shard
        self._skipped = skipped

    def __iter__(self) -> Iterator[Round]:
        return itertools.islice(dispatched_rounds(self._shard), self._skipped, None)


def _reader(
    source: DataLoader[Any], shard: BatchSamplerShard | IterableDatasetShard, skipped: int
) -> DataLoader[ReadRound]:
    """Return the loader that reads the rounds. A worker process reads and collates a whole round at once."""
    collate = source.collate_fn
    options = {**kept_options(source), "collate_fn": _as_it_is, "pin_memory": False}
    if isinstance(shard, IterableDatasetShard):
        stream = RoundStream(shard, collate, is_batch=source.batch_size is not None)
        return DataLoader(stream, batch_size=None, **options)
    dataset = RoundDataset(source.dataset, collate, is_batch=source.batch_sampler is not None)
    return DataLoader(dataset, batch_size=None, sampler=_Rounds(shard, skipped), **options)


def _as_it_is(read: ReadRound) -> ReadRound:
    return read


def _incomplete_last(rounds: Iterable[ReadRound], world_size: int) -> Iterator[ReadRound]:
    """Yield the rounds with a batch for every rank, and then deal out again the batches that are left.

    Where several workers share a stream, each of them has a last round of its own, in the middle of the epoch.
    """
    left: list[tuple[Any, int]] = []
    for read in rounds:
        if len(read.batches) == world_size:
            yield read
        else:
            left.extend(zip(read.batches, read.sizes, strict=True))
    for start in range(0, len(left), world_size):
        dealt = left[start : start + world_size]
        sizes = [size for _, size in dealt]
        tail = Tail(sum(sizes), sum(sizes), ragged=True, missing=world_size - len(dealt))
        yield ReadRound([batch for batch, _ in dealt], sizes, tail)

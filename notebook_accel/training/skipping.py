"""Going on in the middle of an epoch: a loader without its first batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from notebook_accel.errors import ConfigError
from notebook_accel.training.loaders import DataLoaderShard, kept_options
from notebook_accel.training.samplers import SkipBatchSampler

__all__ = ["skip_first_batches"]


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """A loader of the same batches without the first ``num_batches``; ``dataloader`` stays as it is.

    What is skipped isn't read, unless the dataset can only be iterated. Of a prepared loader each rank's first batches
    are skipped; the rest of the epoch is what it would have been, with its last round, and the epochs of both loaders
    count as those of one.

    Args:
        dataloader: A prepared loader or any other.
        num_batches: How many batches to leave out.

    Raises:
        ConfigError: ``dataloader`` isn't a loader that this can be done with, or ``num_batches`` is no number from 0.
    """
    number: object = num_batches
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ConfigError(f"num_batches is {num_batches!r}.", fix="a whole number from 0")
    if isinstance(dataloader, DataLoaderShard):
        dataloader.position.tell(num_batches)
        return dataloader.skipping(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise ConfigError(
            f"skip_first_batches takes a torch.utils.data.DataLoader, not {type(dataloader).__name__}.",
            fix="itertools.islice(batches, num_batches, None) skips the first items of anything that can be iterated",
        )
    if isinstance(dataloader.dataset, IterableDataset):
        return _StreamFrom(dataloader, num_batches)
    if dataloader.batch_sampler is None:
        sampler = SkipBatchSampler(dataloader.sampler, num_batches)
        return DataLoader(dataloader.dataset, batch_size=None, sampler=sampler, **kept_options(dataloader))
    batches = SkipBatchSampler(dataloader.batch_sampler, num_batches)
    return DataLoader(dataloader.dataset, batch_sampler=batches, **kept_options(dataloader))


class _StreamFrom(DataLoader[Any]):
    """A loader of a stream that is read from the beginning, and yields batches from a later one on."""

    def __init__(self, source: DataLoader[Any], skipped: int) -> None:
        options = {"batch_size": source.batch_size, "drop_last": source.drop_last, **kept_options(source)}
        super().__init__(source.dataset, **options)
        self._skipped = skipped

    def __len__(self) -> int:
        return max(0, super().__len__() - self._skipped)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator here
        return itertools.islice(super().__iter__(), self._skipped, None)

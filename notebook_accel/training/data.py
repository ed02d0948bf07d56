"""Loaders: each rank's batches, on its device, with the end of the epoch known while its last batch is out."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from notebook_accel.errors import ConfigError
from notebook_accel.reporting import Counter
from notebook_accel.training import collectives
from notebook_accel.training.accumulation import GradientState
from notebook_accel.training.runtimes.runtime import Runtime
from notebook_accel.training.sharding import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SynchronizedSampler,
    Tail,
)
from notebook_accel.training.trees import send_to_device

__all__ = [
    "BatchSamplerShard",
    "DataLoaderConfiguration",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "prepare_data_loader",
]

_END: Any = object()


@dataclasses.dataclass(frozen=True)
class DataLoaderConfiguration:
    """How loaders are prepared.

    Attributes:
        split_batches: The loader's batch size is that of all ranks together, and each batch is cut into one part a
            rank. By default it is that of one rank, and ranks take whole batches.
        dispatch_batches: Only ``None`` and ``False``: every rank reads for itself.
        even_batches: Repeat samples from the beginning of an epoch at its end, so that all ranks have as many batches.
            Without it ranks can have different numbers of batches, and one that has more waits for the others in vain.
        use_seedable_sampler: Shuffle by the seed and the number of the epoch only.
        non_blocking: Don't wait for copies to the device. Loaders with ``pin_memory=True`` never do.

    Raises:
        ConfigError: ``dispatch_batches`` is true.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    non_blocking: bool = False

    def __post_init__(self) -> None:
        if self.dispatch_batches:
            raise ConfigError(
                "dispatch_batches=True isn't there yet.",
                why="Every rank reads its own share; reading on rank 0 for all ranks comes in a later version.",
                fix="leave dispatch_batches out",
            )


class DataLoaderShard(DataLoader[Any]):
    """A rank's share of a loader.

    While the last batch of an epoch is out, ``end_of_dataloader`` of the shared state is true: one batch is read ahead.
    Pickles as the loader that it was made from, since it means nothing outside its rank.

    Args:
        source: The loader that it was made from; what isn't changed here is taken from it.
        dataset: What is read.
        state: Shared with the rest of the training.
        to_device: Moves a batch to the device; ``None`` leaves batches where they are.
        before_epoch: Called on every rank when an epoch begins.
        is_marked: Whether each batch comes with the round that it is part of, as a ``_MarkedBatch``.
        options: What ``torch.utils.data.DataLoader`` is told besides.

    Attributes:
        source: The loader that it was made from.
        counter: How far the running epoch is, for whoever watches.
    """

    def __init__(
        self,
        source: DataLoader[Any],
        dataset: Any,
        *,
        state: GradientState,
        to_device: Callable[[Any], Any] | None = None,
        before_epoch: Callable[[], None] | None = None,
        is_marked: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(dataset, **{**_kept_options(source), **options})
        self.source = source
        self.counter = Counter()
        self._batches = options.get("batch_sampler", options.get("sampler"))
        self._gradients = state
        self._to_device = to_device
        self._before_epoch = before_epoch
        self._is_marked = is_marked
        self._next_epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Tells sampler and dataset which epoch is next, counted from 0. Without this, each epoch follows the last."""
        self._next_epoch = epoch
        batch_sampler = getattr(self._batches, "batch_sampler", self._batches)
        parts: tuple[Any, ...] = (batch_sampler, getattr(batch_sampler, "sampler", None), self.dataset)
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator here
        self._begin_epoch()
        with self._gradients.iterating(self.counter, self.counter.total) as current:
            batches = super().__iter__()
            following = self._fetch(batches)
            while following is not _END:
                batch = following
                following = self._fetch(batches)
                if following is _END:
                    current.is_last = True
                    current.tail = getattr(self._batches, "tail", None)
                if self._is_marked:
                    batch, current.tail = batch
                self.counter.step += 1
                yield batch

    def _begin_epoch(self) -> None:
        epoch = self._next_epoch
        self.set_epoch(epoch)
        self._next_epoch = epoch + 1
        if self._before_epoch is not None:
            self._before_epoch()
        self.counter.start(epoch=epoch + 1, total=self._length())

    def _fetch(self, batches: Iterator[Any]) -> Any:
        batch = next(batches, _END)
        # Copied when it is read, one step before it is used, so that the copy can go on while the model computes.
        return batch if self._to_device is None or batch is _END else self._to_device(batch)

    def _length(self) -> int | None:
        try:
            return len(self)
        except TypeError:  # a stream, or a sampler that doesn't know how long it is
            return None

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self.source,),)


def _kept_options(loader: DataLoader[Any]) -> dict[str, Any]:
    return {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "pin_memory_device": loader.pin_memory_device,
        "in_order": loader.in_order,
    }


def prepare_data_loader(
    loader: DataLoader[Any],
    *,
    runtime: Runtime,
    state: GradientState,
    config: DataLoaderConfiguration,
    device_placement: bool = True,
) -> DataLoaderShard:
    """This rank's share of ``loader``, with batches on the rank's device.

    Raises:
        ConfigError: The loader can't be shared out as it is, or not as ``config`` wants it.
    """
    if isinstance(loader, DataLoaderShard):  # prepared by another Accelerator
        loader = loader.source
    _refuse_custom_iteration(loader)
    to_device = None
    if device_placement and runtime.device.type != "cpu":
        to_device = functools.partial(
            send_to_device, device=runtime.device, non_blocking=config.non_blocking or loader.pin_memory
        )
    options = _stream_options if isinstance(loader.dataset, IterableDataset) else _sampler_options
    return DataLoaderShard(loader, state=state, to_device=to_device, **options(loader, runtime, config))


def _refuse_custom_iteration(loader: DataLoader[Any]) -> None:
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"prepare can't share out a {type(loader).__name__}.",
            why="It iterates in a way of its own, and prepare makes a torch.utils.data.DataLoader of its parts.",
            fix="put what it does into the dataset, the sampler or collate_fn, or leave it out of prepare",
        )


def _sampler_options(loader: DataLoader[Any], runtime: Runtime, config: DataLoaderConfiguration) -> dict[str, Any]:
    """How a rank reads its share of a dataset that has an item for each index."""
    place = runtime.place
    # With batch_size=None it is the sampler that says what is read at once.
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    batches: Any = _agreed_batches(getattr(loader, name), runtime, config)
    if place.world_size > 1:
        batches = BatchSamplerShard(batches, place.world_size, place.rank, config.split_batches, config.even_batches)
    options = {"dataset": loader.dataset, name: batches}
    return options if name == "batch_sampler" else {**options, "batch_size": None}


def _agreed_batches(batches: Any, runtime: Runtime, config: DataLoaderConfiguration) -> Any:
    """The same batches with a sampler that draws the same order on every rank."""
    sampler = getattr(batches, "sampler", None)
    if sampler is None:
        return _agreed_sampler(batches, runtime, config)
    agreed = _agreed_sampler(sampler, runtime, config)
    if agreed is sampler:
        return batches
    batches = copy.copy(batches)
    batches.sampler = agreed
    return batches


def _agreed_sampler(sampler: Any, runtime: Runtime, config: DataLoaderConfiguration) -> Any:
    from_rank_0 = functools.partial(collectives.broadcast_object, runtime)
    if config.use_seedable_sampler and isinstance(sampler, RandomSampler):
        seed = torch.initial_seed() if sampler.generator is None else sampler.generator.initial_seed()
        return SeedableRandomSampler(
            sampler.data_source, sampler.replacement, sampler.num_samples, seed=from_rank_0(seed)
        )
    if runtime.place.world_size == 1:
        return sampler
    if isinstance(sampler, DistributedSampler):
        raise ConfigError(
            "This loader's DistributedSampler gives each rank its share already.",
            why="prepare would share out that share once more.",
            fix="DataLoader(dataset, batch_size=..., shuffle=True), and prepare does the rest",
        )
    return SynchronizedSampler(sampler, from_rank_0) if hasattr(sampler, "generator") else sampler


def _stream_options(loader: DataLoader[Any], runtime: Runtime, config: DataLoaderConfiguration) -> dict[str, Any]:
    """How a rank reads its share of a dataset that can only be iterated."""
    place, dataset = runtime.place, cast(IterableDataset[Any], loader.dataset)
    options = {"dataset": dataset, "batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if place.world_size == 1:
        return options
    shard = IterableDatasetShard(
        dataset,
        batch_size=loader.batch_size or 1,
        drop_last=loader.drop_last,
        num_processes=place.world_size,
        process_index=place.rank,
        split_batches=config.split_batches,
        even_batches=config.even_batches,
    )
    generator = getattr(dataset, "generator", None)
    return {
        "dataset": _MarkedStream(shard),
        "batch_size": None if loader.batch_size is None else shard.share_size,
        "drop_last": loader.drop_last,
        "collate_fn": _MarkedCollate(loader.collate_fn, is_batch=loader.batch_size is not None),
        "is_marked": True,
        "before_epoch": functools.partial(_synchronize, generator, runtime)
        if isinstance(generator, torch.Generator)
        else None,
    }


def _synchronize(generator: torch.Generator, runtime: Runtime) -> None:
    generator.set_state(collectives.broadcast_object(runtime, generator.get_state()))


class _MarkedSample(NamedTuple):
    sample: Any
    tail: Tail | None


class _MarkedBatch(NamedTuple):
    batch: Any
    tail: Tail | None


class _MarkedStream(IterableDataset[_MarkedSample]):
    """A share of a stream whose samples know their round.

    The stream may be read in a worker process, which sees the last round come but can't tell the loader other than with
    the samples.
    """

    def __init__(self, shard: IterableDatasetShard) -> None:
        self._shard = shard

    def set_epoch(self, epoch: int) -> None:
        self._shard.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._shard)

    def __iter__(self) -> Iterator[_MarkedSample]:
        for share, tail in self._shard.shares():
            for sample in share:
                yield _MarkedSample(sample, tail)


class _MarkedCollate:
    """Makes a batch of marked samples; a batch never spans two rounds."""

    def __init__(self, collate: Callable[[Any], Any], *, is_batch: bool) -> None:
        self._collate = collate
        self._is_batch = is_batch

    def __call__(self, marked: Any) -> _MarkedBatch:
        if not self._is_batch:
            return _MarkedBatch(self._collate(marked.sample), marked.tail)
        return _MarkedBatch(self._collate([sample for sample, _ in marked]), marked[-1].tail)

"""Shard a user's loader: give each rank its share."""

from __future__ import annotations

import copy
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler

from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError
from notebook_accel.training import collectives, process_group, random_state
from notebook_accel.training.backends import group_recovery
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.dataset_views import EpochStream, LoaderStream, MarkedCollate, MarkedStream
from notebook_accel.training.loader_position import EpochCounter
from notebook_accel.training.loaders import Copying, DataLoaderDispatcher, DataLoaderShard, Feed, Uploading, unchanged
from notebook_accel.training.samplers import SeedableRandomSampler, SkipBatchSampler, SynchronizedSampler
from notebook_accel.training.sharding import BatchSamplerShard, IterableDatasetShard
from notebook_accel.training.trees import send_to_device

__all__ = ["DataLoaderConfiguration", "prepare_data_loader", "refuse_data", "refuse_slicing", "shard_dataloader"]


@dataclasses.dataclass(frozen=True)
class DataLoaderConfiguration:
    """Options for preparing loaders.

    Attributes:
        split_batches: Take the loader's batch size as that of all ranks together, and cut each batch into one part a
            rank. By default it is that of one rank, and ranks take whole batches.
        dispatch_batches: Have rank 0 read for all ranks and send each its batches. ``None`` does so for datasets that
            can only be iterated, which ranks could read differently; with ``False`` every rank reads the whole stream
            and takes its share.
        even_batches: Repeat samples from the beginning of an epoch at its end, so that all ranks have as many batches.
            Without it some ranks can have one batch more: fine for an evaluation without collectives; training needs
            ``join_uneven_inputs``.
        use_seedable_sampler: Shuffle by the seed and the number of the epoch only.
        data_seed: The seed for that. By default the one that torch was seeded with.
        non_blocking: Don't wait for copies to the device. Loaders with ``pin_memory=True`` never do.
        use_stateful_dataloader: Has no effect: all prepared loaders have ``state_dict`` and ``load_state_dict``,
            without torchdata.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        if self.data_seed is not None and not self.use_seedable_sampler:
            warnings.warn(
                "data_seed has no effect without use_seedable_sampler=True: loaders shuffle by torch's seed.",
                stacklevel=3,
            )


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Iterable[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: object = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
) -> DataLoaderShard:
    """Return this rank's share of a loader, without an ``Accelerator``.

    Args:
        dataloader: The loader.
        device: Destination of batches with ``put_on_device``; by default this rank's device.
        num_processes: Number of ranks to shard it over; by default those of this run.
        process_index: The rank that gets this share; by default this one.
        put_on_device: Move batches to the device.
        rng_types: Generators that get rank 0's state on every rank when an epoch begins.
        split_batches: See ``DataLoaderConfiguration``.
        dispatch_batches: See ``DataLoaderConfiguration``.
        even_batches: See ``DataLoaderConfiguration``.
        slice_fn_for_dispatch: Refused: rank 0 makes each rank's batch by itself.
        use_seedable_sampler: See ``DataLoaderConfiguration``.
        data_seed: See ``DataLoaderConfiguration``.
        non_blocking: See ``DataLoaderConfiguration``.
        use_stateful_dataloader: See ``DataLoaderConfiguration``.

    Raises:
        ConfigError: The loader can't be sharded, or not with these options.
    """
    refuse_slicing(slice_fn_for_dispatch)
    types = random_state.check_rng_types(rng_types or ())
    backend = process_group.join(cpu=device is not None and torch.device(device).type == "cpu")
    asked = {"world_size": num_processes, "rank": process_index}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    place = dataclasses.replace(backend.place, **given)
    config = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
    )
    target = None if not put_on_device else torch.device(device) if device is not None else backend.device
    return shard_dataloader(dataloader, backend=backend, config=config, device=target, place=place, rng_types=types)


def shard_dataloader(
    loader: DataLoader[Any],
    *,
    backend: Backend,
    config: DataLoaderConfiguration,
    device: torch.device | None = None,
    place: RankPlace | None = None,
    rng_types: Sequence[str] = (),
) -> DataLoaderShard:
    """Return one rank's share of ``loader``.

    Args:
        loader: The loader.
        backend: This rank's backend.
        config: The options.
        device: Destination of batches; ``None`` leaves them where they are.
        place: The rank that gets this share; by default this one.
        rng_types: Generators that get rank 0's state on every rank when an epoch begins.

    Raises:
        ConfigError: The loader can't be sharded, or not with these options.
    """
    if isinstance(loader, DataLoaderShard):  # prepared by another Accelerator
        loader = loader.source
    _refuse(loader, place or backend.place)
    sharing = _Sharing(loader, backend, config, place or backend.place)
    feed = None
    if device is not None and device.type != "cpu":
        feed = functools.partial(_feed, backend, device, non_blocking=config.non_blocking or loader.pin_memory)
    if _iterates_itself(loader):
        options = _as_it_is(loader)
    else:
        options = sharing.of_stream() if isinstance(loader.dataset, IterableDataset) else sharing.of_dataset()
    if rng_types:
        options["before_epoch"] = _synchronizing(backend, rng_types, loader, options.get("before_epoch"))
    epochs = options.setdefault("epochs", EpochCounter())
    if place in (None, backend.place):
        group_recovery.track_state(epochs)
    if sharing.dispatches:
        return DataLoaderDispatcher(loader, feed=feed, backend=backend, **options)
    return DataLoaderShard(loader, feed=feed, **options)


def _feed(backend: Backend, device: torch.device, *, non_blocking: bool) -> Feed:
    uploader = backend.uploader(non_blocking=non_blocking) if device == backend.device else None
    if uploader is not None:
        return Uploading(uploader, device)
    return Copying(functools.partial(send_to_device, device=device, non_blocking=non_blocking))


def _synchronizing(
    backend: Backend, rng_types: Sequence[str], loader: DataLoader[Any], before: Callable[[], None] | None
) -> Callable[[], None]:
    def synchronize() -> None:
        random_state.synchronize(backend, rng_types, loader.generator)
        if before is not None:
            before()

    return synchronize


def refuse_data(objects: Iterable[Any]) -> None:
    """Refuse datasets and samplers where loaders are expected: every rank would read all of them.

    Raises:
        ConfigError: One of ``objects`` is a dataset or a sampler.
    """
    for item in objects:
        if isinstance(item, (Dataset, Sampler)):
            raise ConfigError(
                f"prepare takes loaders, and {type(item).__name__} is {_kind_of(item)}.",
                why="It would be passed through as it is, and every rank would work on all of it.",
                fix="prepare(DataLoader(dataset, batch_size=...))",
            )


def refuse_slicing(slice_fn_for_dispatch: object) -> None:
    """Refuse a function that would cut a dispatched batch into the ranks' parts.

    Raises:
        ConfigError: A function was given.
    """
    if slice_fn_for_dispatch is not None:
        raise ConfigError(
            "slice_fn_for_dispatch isn't there.",
            why="Rank 0 makes each rank's batch by itself, with the loader's collate_fn, and cuts none.",
            fix="leave it out",
        )


def _kind_of(item: object) -> str:
    return "a dataset" if isinstance(item, Dataset) else "a sampler"


def _refuse(loader: Any, place: RankPlace) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"prepare_data_loader takes a torch.utils.data.DataLoader, not {type(loader).__name__}.",
            fix="DataLoader(dataset, batch_size=...)",
        )
    if _iterates_itself(loader) and place.world_size > 1:
        raise ConfigError(
            f"prepare can't shard a {type(loader).__name__}.",
            why="It iterates in a way of its own, and prepare makes a torch.utils.data.DataLoader of its parts.",
            fix="put what it does into the dataset, the sampler or collate_fn, or leave it out of prepare; "
            "one rank takes it as it is",
        )
    if not loader.in_order and place.world_size > 1:
        raise ConfigError(
            "A loader with in_order=False can't be sharded over several ranks.",
            why="Which batch is the last of an epoch, and which ranks work on the same round, would be left to chance.",
            fix="DataLoader(..., in_order=True)",
        )


def _iterates_itself(loader: DataLoader[Any]) -> bool:
    """Return whether the loader's class has an ``__iter__`` of its own."""
    return type(loader).__iter__ is not DataLoader.__iter__


def _as_it_is(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options for a loader with an ``__iter__`` of its own, on the only rank: batches stay as they are."""
    return {
        "dataset": LoaderStream(loader),
        "batch_size": None,
        "collate_fn": unchanged,
        "num_workers": 0,
        "prefetch_factor": None,
        "persistent_workers": False,
        "pin_memory": False,
        "timeout": 0,
        "multiprocessing_context": None,
        "generator": torch.Generator(),  # DataLoader draws from it, and the loader's own goes on as without that
    }


class _Sharing:
    """Makes the options of the ``DataLoaderShard`` or ``DataLoaderDispatcher`` for one loader."""

    def __init__(
        self, loader: DataLoader[Any], backend: Backend, config: DataLoaderConfiguration, place: RankPlace
    ) -> None:
        self._loader = loader
        self._backend = backend
        self._config = config
        self._place = place
        dispatches = isinstance(loader.dataset, IterableDataset)
        if config.dispatch_batches is not None:
            dispatches = config.dispatch_batches
        # This process can look at another rank's share, but can't communicate in its place.
        self.dispatches = dispatches and place.world_size > 1 and place == backend.place

    def of_dataset(self) -> dict[str, Any]:
        """Return the options for a dataset that has an item for each index."""
        loader, place, config = self._loader, self._place, self._config
        # With batch_size=None each item of the sampler is read at once.
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        options: dict[str, Any] = {"dataset": loader.dataset, name: self._agreed_batches(getattr(loader, name))}
        if name == "sampler":
            options["batch_size"] = None
        if place.world_size > 1:
            shard = BatchSamplerShard(
                options[name], place.world_size, place.rank, config.split_batches, config.even_batches
            )
            options |= {name: shard, "shard": shard}
        return options

    def _agreed_batches(self, batches: Any) -> Any:
        """Return the batch sampler with a sampler that draws one order on all ranks."""
        if isinstance(batches, SkipBatchSampler):
            return SkipBatchSampler(self._agreed_batches(batches.batch_sampler), batches.skip_batches)
        sampler = getattr(batches, "sampler", None)
        if sampler is None:
            return self._agreed_sampler(batches)
        agreed = self._agreed_sampler(sampler)
        if agreed is sampler:
            return batches
        batches = copy.copy(batches)
        batches.sampler = agreed
        return batches

    def _agreed_sampler(self, sampler: Any) -> Any:
        if isinstance(sampler, SeedableRandomSampler):
            agreed = copy.copy(sampler)  # with its seed, so that the order is that of the unprepared loader
            agreed.seed = self._from_rank_0(sampler.seed)
            return agreed
        if self._config.use_seedable_sampler and isinstance(sampler, RandomSampler):
            seedable = SeedableRandomSampler(
                sampler.data_source,
                sampler.replacement,
                sampler.num_samples,
                sampler.generator,
                data_seed=self._config.data_seed,
            )
            seedable.seed = self._from_rank_0(seedable.seed)
            return seedable
        if self._place.world_size == 1 or self.dispatches:
            return sampler
        if isinstance(sampler, DistributedSampler):
            raise ConfigError(
                "This loader's DistributedSampler gives each rank its share already.",
                why="prepare would shard that share once more.",
                fix="DataLoader(dataset, batch_size=..., shuffle=True), and prepare does the rest",
            )
        return SynchronizedSampler(sampler, self._from_rank_0) if hasattr(sampler, "generator") else sampler

    def of_stream(self) -> dict[str, Any]:
        """Return the options for a dataset that can only be iterated."""
        loader, place, config = self._loader, self._place, self._config
        dataset: Any = loader.dataset
        epochs = EpochCounter(is_shared=loader.persistent_workers)
        if loader.persistent_workers and hasattr(dataset, "set_epoch"):
            dataset = EpochStream(dataset, epochs)
        options = {"dataset": dataset, "batch_size": loader.batch_size, "drop_last": loader.drop_last, "epochs": epochs}
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
        return {
            **options,
            "dataset": MarkedStream(shard),
            "shard": shard,
            "batch_size": None if loader.batch_size is None else shard.share_size,
            "collate_fn": MarkedCollate(loader.collate_fn, is_batch=loader.batch_size is not None),
            "is_marked": True,
            "before_epoch": None if self.dispatches else self._synchronizing(getattr(dataset, "generator", None)),
        }

    def _synchronizing(self, generator: object) -> Callable[[], None] | None:
        """Return a function that gives a stream's generator rank 0's state, ``None`` if it has no generator."""
        if not isinstance(generator, torch.Generator):
            return None

        def synchronize() -> None:
            generator.set_state(self._from_rank_0(generator.get_state()))

        return synchronize

    def _from_rank_0(self, value: Any) -> Any:
        return collectives.broadcast_object(self._backend, value) if self._place == self._backend.place else value

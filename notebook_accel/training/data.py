"""Prepare a user's loader: give each rank its share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from notebook_accel import code_places
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError
from notebook_accel.training import collectives, process_group, random_state
from notebook_accel.training.backends import group_recovery
from notebook_accel.training.backends.backend import Backend, all_ranks, shares_samples
from notebook_accel.training.dataset_views import EpochStream, LoaderStream, MarkedCollate, MarkedStream
from notebook_accel.training.loader_position import EpochCounter, LoaderPosition
from notebook_accel.training.loaders import (
    DataLoaderDispatcher,
    DataLoaderShard,
    Feed,
    UploadingFeed,
    kept_options,
    unchanged,
)
from notebook_accel.training.sharding import (
    BatchSamplerShard,
    IterableDatasetShard,
    SamplerView,
    SeedableRandomSampler,
    chain_of,
    generators_of,
)
from notebook_accel.training.trees import leaves_of

# Samplers of torch's that draw nothing from global generators, and those that do so for their first index only.
_DRAWS_NOTHING = {BatchSampler, SeedableRandomSampler, SequentialSampler}
_DRAWS_AT_FIRST = {RandomSampler, SubsetRandomSampler, WeightedRandomSampler}


@dataclasses.dataclass
class DataLoaderConfiguration:
    """Settings of prepared loaders.

    Attributes:
        split_batches: Treat the loader's batch size as that of all ranks together, and cut each batch into one part per
            rank. By default it is the batch size of one rank, and ranks take whole batches.
        dispatch_batches: Make rank 0 read for all ranks and send each rank its batches. ``None`` does this for datasets
            that can only be iterated, which ranks could read differently; with ``False`` every rank reads the whole
            stream and takes its share.
        even_batches: Repeat samples from the beginning of an epoch at its end, so that all ranks have equally many
            batches. Without this some ranks can have one batch more, which is fine for evaluation without collectives;
            training then needs ``join_uneven_inputs``.
        use_seedable_sampler: With ``shuffle=True``, shuffle by the seed and the number of the epoch only.
        data_seed: The seed of ``use_seedable_sampler``. By default the one that torch was seeded with.
        non_blocking: Don't wait for copies to the device. Loaders with ``pin_memory=True`` never wait.
        use_stateful_dataloader: No effect: all prepared loaders have ``state_dict`` and ``load_state_dict``, without
            torchdata.
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
        num_processes: Number of ranks to shard the loader over; by default those of this run.
        process_index: The rank that gets this share; by default this one.
        put_on_device: Move batches to the device.
        rng_types: Random generators to synchronise from rank 0 at the start of each epoch.
        split_batches: See ``DataLoaderConfiguration``.
        dispatch_batches: See ``DataLoaderConfiguration``.
        even_batches: See ``DataLoaderConfiguration``.
        slice_fn_for_dispatch: Refused: rank 0 collates each rank's batch separately.
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
    own = backend.place
    world_size = own.world_size if num_processes is None else num_processes
    place = dataclasses.replace(own, world_size=world_size, rank=own.rank if process_index is None else process_index)
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
    """Return the share of ``loader`` for the rank at ``place``, by default this one; see ``prepare_data_loader``.

    Batches go to ``device``; with ``None`` they stay where they are.

    Raises:
        ConfigError: The loader can't be sharded, or not with these options.
    """
    if isinstance(loader, DataLoaderShard):  # prepared by another Accelerator
        loader = loader.source
    place = place or backend.place
    maker = _OptionsMaker(loader, backend, config, place)
    _refuse(loader, is_alone=maker.is_alone)
    feed = None
    if device is not None and device.type != "cpu":
        feed = functools.partial(_make_feed, backend, device, non_blocking=config.non_blocking or loader.pin_memory)
    if _has_own_iter(loader):
        options = _unchanged_options(loader)
    else:
        options = maker.for_stream() if isinstance(loader.dataset, IterableDataset) else maker.for_dataset()
    before_epoch = [*options.pop("before_epoch", ())]
    if rng_types:
        before_epoch.insert(0, lambda: random_state.synchronize(backend, rng_types, loader.generator))
    if shares_samples(backend):
        before_epoch.insert(0, functools.partial(random_state.agree, backend))
    options |= {"feed": feed, "before_epoch": before_epoch}
    position = options.setdefault("position", LoaderPosition(EpochCounter()))
    if place == backend.place:
        group_recovery.track_state(position.epochs)
    if maker.dispatches:
        return DataLoaderDispatcher(loader, backend=backend, **options)
    return DataLoaderShard(loader, **options)


def _make_feed(backend: Backend, device: torch.device, *, non_blocking: bool) -> Feed:
    uploader = backend.uploader(non_blocking=non_blocking) if device == backend.device else None
    return Feed(device, non_blocking=non_blocking) if uploader is None else UploadingFeed(uploader, device)


def refuse_data(objects: Iterable[Any]) -> None:
    """Raise ``ConfigError`` if one of ``objects`` is a dataset or a sampler, which every rank would read whole."""
    for item in objects:
        if isinstance(item, (Dataset, Sampler)):
            kind = "dataset" if isinstance(item, Dataset) else "sampler"
            raise ConfigError(
                f"prepare takes loaders, and {type(item).__name__} is a {kind}.",
                why="It would be passed through as it is, and every rank would work on all of it.",
                fix="prepare(DataLoader(dataset, batch_size=...))",
            )


def refuse_slicing(slice_fn_for_dispatch: object) -> None:
    """Raise ``ConfigError`` if a function is given that would slice a dispatched batch into the ranks' parts."""
    if slice_fn_for_dispatch is not None:
        raise ConfigError(
            "slice_fn_for_dispatch isn't supported.",
            why="Rank 0 makes each rank's batch by itself, with the loader's collate_fn, and cuts none.",
            fix="leave it out",
        )


def _refuse(loader: Any, *, is_alone: bool) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"prepare_data_loader takes a torch.utils.data.DataLoader, not {type(loader).__name__}.",
            fix="DataLoader(dataset, batch_size=...)",
        )
    if _has_own_iter(loader) and not is_alone:
        raise ConfigError(
            f"prepare can't shard a {type(loader).__name__}.",
            why="It iterates in a way of its own, and prepare makes a torch.utils.data.DataLoader of its parts.",
            fix="DataLoader(...): what prepare returns has state_dict and load_state_dict too"
            if hasattr(loader, "load_state_dict")
            else "put what it does into the dataset, the sampler or collate_fn, or leave it out of prepare; "
            "one rank takes it as it is",
        )
    if not loader.in_order and not is_alone:
        raise ConfigError(
            "A loader with in_order=False can't be sharded over several ranks.",
            why="The last batch of an epoch, and the ranks that work on the same round, would be left to chance.",
            fix="DataLoader(..., in_order=True)",
        )


def _has_own_iter(loader: DataLoader[Any]) -> bool:
    names = ("__iter__", "_get_iterator", "_index_sampler")
    return any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in names)


def _unchanged_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options for a loader with its own ``__iter__``, on a single rank: its batches stay unchanged."""
    generator = torch.Generator()  # so that no seed is drawn from the loader's own or the global one
    plain = DataLoader(LoaderStream(loader), batch_size=None, collate_fn=unchanged, generator=generator)
    return {"dataset": plain.dataset, "batch_size": None, **kept_options(plain)}


def _compared(rounds: Iterator[Any], dataset: Any, backend: Backend) -> Iterator[Any]:
    """Yield an epoch's rounds of indices, and warn if the ranks' first ones differ, or their datasets in what is known.

    No sample is read for it, since that could draw random numbers.
    """
    for number, indices in enumerate(rounds):
        if number == 0:
            own = [[index for index in leaves_of(indices) if isinstance(index, (int, str))]]
            with contextlib.suppress(TypeError, NotImplementedError):  # no length
                own.append([len(dataset)])
            while isinstance(dataset, Subset):
                own.append([*dataset.indices[:100]])
                dataset = dataset.dataset
            by_rank = collectives.gather_object(backend, [repr(own)])
            if len({*by_rank}) > 1 and all_ranks(backend).place.rank == 0:
                code_places.warn(
                    "The ranks have different datasets or samplers for one loader, and prepare gives each rank "
                    f"1/{len(by_rank)} of its own: the rest isn't read. Fix: the same dataset and sampler on all "
                    "ranks, or leave a loader out of prepare that gives each rank a share itself"
                )
        yield indices


@dataclasses.dataclass(frozen=True)
class _OptionsMaker:
    """Builds the options of the ``DataLoaderShard`` or ``DataLoaderDispatcher`` for one loader."""

    _loader: DataLoader[Any]
    _backend: Backend
    _config: DataLoaderConfiguration
    _place: RankPlace

    @property
    def _is_own_place(self) -> bool:
        """True if the share is for this process, which can't communicate in another rank's place."""
        return self._place == self._backend.place

    @property
    def is_alone(self) -> bool:
        """True if no other rank has a share of the loader's samples."""
        return self._place.world_size == 1 and not shares_samples(self._backend)

    @property
    def dispatches(self) -> bool:
        asked = self._config.dispatch_batches
        dispatches = isinstance(self._loader.dataset, IterableDataset) if asked is None else asked
        return dispatches and not self.is_alone and self._is_own_place

    def for_dataset(self) -> dict[str, Any]:
        """Return the options for a dataset that has an item for each index."""
        loader, place, config = self._loader, self._place, self._config
        # With batch_size=None each item of the sampler is one read of the dataset.
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        batches = getattr(loader, name)
        self._agree_on_seeds(batches)
        options: dict[str, Any] = {"dataset": loader.dataset, name: batches}
        if name == "sampler":
            options["batch_size"] = None
        if not self.is_alone:
            shard = BatchSamplerShard(batches, place.world_size, place.rank, config.split_batches, config.even_batches)
            if not self.dispatches:
                shard.drawn = functools.partial(self._drawn, batches, itertools.count())
            options |= {name: shard, "shard": shard}
        return options

    def _agree_on_seeds(self, batches: Any) -> None:
        """Give the seedable samplers of a batch sampler rank 0's seeds."""
        for sampler in chain_of(batches):
            is_random = type(sampler) is RandomSampler or "given_generator" in getattr(sampler, "__dict__", ())
            if self._config.use_seedable_sampler and is_random:
                SeedableRandomSampler.take_over(sampler, self._config.data_seed)
            if isinstance(sampler, SeedableRandomSampler):
                sampler.seed = self._from_rank_0(sampler.seed)
            if isinstance(sampler, DistributedSampler) and not self.is_alone:
                raise ConfigError(
                    "This loader's DistributedSampler gives each rank its share already.",
                    why="prepare would shard that share once more.",
                    fix="DataLoader(dataset, batch_size=..., shuffle=True), and prepare does the rest",
                )

    def _drawn(self, batches: Any, epochs: Iterator[int], make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the rounds of an epoch, which all ranks draw alike; see ``BatchSamplerShard``."""
        kinds = {type(part) for part in chain_of(batches) if not isinstance(part, (SamplerView, Sequence))}
        if kinds <= _DRAWS_NOTHING:
            return make()
        draws_anywhere = not kinds <= _DRAWS_NOTHING | _DRAWS_AT_FIRST
        generators = generators_of(chain_of(batches))
        rounds = random_state.drawn_as_rank_0(make, self._from_rank_0, generators, draws_anywhere=draws_anywhere)
        if next(epochs) or not self._is_own_place:
            return rounds
        return _compared(rounds, self._loader.dataset, self._backend)

    def for_stream(self) -> dict[str, Any]:
        """Return the options for a dataset that can only be iterated."""
        loader, place, config = self._loader, self._place, self._config
        dataset: Any = loader.dataset
        epochs = EpochCounter(is_shared=loader.persistent_workers)
        if loader.persistent_workers and hasattr(dataset, "set_epoch"):
            dataset = EpochStream(dataset, epochs)
        options = {
            "dataset": dataset,
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "position": LoaderPosition(epochs),
        }
        if self.is_alone:
            return options
        shard = IterableDatasetShard(
            dataset,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            num_processes=place.world_size,
            process_index=place.rank,
            split_batches=config.split_batches,
            even_batches=config.even_batches,
        )
        generator: Any = getattr(dataset, "generator", None)
        is_synchronized = isinstance(generator, torch.Generator) and not self.dispatches
        return {
            **options,
            "dataset": MarkedStream(shard),
            "shard": shard,
            "batch_size": None if loader.batch_size is None else shard.share_size,
            "collate_fn": MarkedCollate(loader.collate_fn, is_batch=loader.batch_size is not None),
            "is_marked": True,
            "before_epoch": [functools.partial(self._synchronize, generator)] if is_synchronized else [],
        }

    def _synchronize(self, generator: torch.Generator) -> None:
        generator.set_state(self._from_rank_0(generator.get_state()))

    def _from_rank_0(self, value: Any) -> Any:
        return collectives.broadcast_object(self._backend, value) if self._is_own_place else value

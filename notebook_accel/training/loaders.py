"""Prepared loaders, which yield batches on the device and know the last batch of an epoch in advance."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.distributed.algorithms.join import Join, Joinable
from torch.utils.data import DataLoader, IterableDataset, Sampler

from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.reporting import Counter
from notebook_accel.training import collectives, random_state
from notebook_accel.training.accumulation import GradientState
from notebook_accel.training.backends.backend import Backend, Uploader, all_ranks, shares_samples
from notebook_accel.training.compiling import without_own_wrapper
from notebook_accel.training.dataset_views import ReadRound, RoundDataset, RoundStream
from notebook_accel.training.loader_position import ACTIVE_ITERATIONS, Deal, LoaderPosition, ResumePoint
from notebook_accel.training.sharding import (
    BatchSamplerShard,
    IterableDatasetShard,
    MarkedBatch,
    Round,
    SamplerView,
    SeedableRandomSampler,
    SkipBatchSampler,
    Tail,
    chain_of,
    dispatched_rounds,
    generators_of,
    slices,
)
from notebook_accel.training.trees import leaves_of, map_leaves, send_to_device

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")
_END: Any = object()
_KEPT_OPTIONS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
)  # fmt: skip


class DataLoaderShard(DataLoader[Any]):
    """A rank's share of a loader.

    One batch is prefetched, so that ``GradientState.end_of_dataloader`` is true during the last batch of an epoch. The
    object pickles as its ``source``, since it is meaningless outside its rank.

    Args:
        source: The user's loader. Its options apply where none are given here.
        dataset: The dataset to read.
        position: The loader's position, shared with a loader that continues it.
        shard: The sampler or stream that deals out the batches; ``None`` for a single rank.
        feed: A function that creates the ``Feed`` of an iteration. By default batches stay where they are.
        before_epoch: Functions that are called on every rank when an epoch begins.
        is_marked: True if each batch comes with its round's ``Tail``, as a ``MarkedBatch``.
        skipped: Number of batches left out at the beginning of each epoch.
        sampler_skipped: Number of the sampler's batches to skip before the rest is dealt out to the ranks.
        options: Further arguments of ``torch.utils.data.DataLoader``.

    Attributes:
        counter: Progress of the running epoch, for reports.
    """

    def __init__(
        self,
        source: DataLoader[Any],
        dataset: Any,
        *,
        position: LoaderPosition,
        shard: BatchSamplerShard | IterableDatasetShard | None = None,
        feed: Callable[[], Feed] | None = None,
        before_epoch: Sequence[Callable[[], None]] = (),
        is_marked: bool = False,
        skipped: int = 0,
        sampler_skipped: int = 0,
        **options: Any,
    ) -> None:
        self._arguments = {
            "shard": shard,
            "feed": feed,
            "before_epoch": before_epoch,
            "is_marked": is_marked,
            "position": position,
            **options,
        }
        if skipped:
            options = {
                name: SkipBatchSampler(value, skipped) if name in ("batch_sampler", "sampler") else value
                for name, value in options.items()
            }
        super().__init__(dataset, **{**kept_options(source), **options})
        if "batch_sampler" in options:
            vars(self)["sampler"] = source.sampler  # torch makes one of its own, which nothing reads
        self.source = source
        self.shard = shard
        self.skipped = skipped
        self.sampler_skipped = sampler_skipped
        self.counter = Counter()
        self.position = position
        self._batches = options.get("batch_sampler", options.get("sampler"))
        self._feed = feed or Feed
        self._before_epoch = before_epoch
        self._is_marked = is_marked
        if position.epochs.passed_on is None:
            self.pass_epoch_on()

    @property
    def total_batch_size(self) -> int:
        """Number of samples in a batch of all ranks together; 1 per rank if the loader has no batch size."""
        shard = self.shard
        if shard is None:
            samplers = (self.batch_sampler, self.sampler)  # with batch_size=None, the sampler may yield batches
            sizes = [self.batch_size, *(getattr(sampler, "batch_size", None) for sampler in samplers)]
            return next(filter(None, [*sizes, self.source.batch_size]), 1)
        size = shard.batch_size or 1
        return size if shard.split_batches else size * shard.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Number of samples of all ranks together."""
        return len(self.source.dataset)  # type: ignore[arg-type]  # raises TypeError where the dataset has no length

    @property
    def epoch(self) -> int:
        """The running epoch, or else the next one, counted from 0. A resumed loop starts with this epoch."""
        return self.position.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, the number of batches handed out, and the random states that drew them."""
        state = self.position.state_dict(
            self._generators(), self._total(), self._deal, reuses_workers=self._reuses_workers
        )
        return {**state, "seeds": [sampler.seed for sampler in self._seedable_samplers()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration resume where ``state_dict`` was taken."""
        for sampler, seed in zip(self._seedable_samplers(), state.get("seeds", ()), strict=False):
            sampler.seed = seed
        self.position.load_state_dict(state, self._generators(), self._total(), self._deal)
        if self.position.epoch == self.position.epochs.following:  # otherwise the running epoch passes it on at its end
            self.pass_epoch_on()

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch of the sampler and the dataset, from 0. By default epochs count up.

        The loader calls their ``set_epoch`` as soon as an epoch is over, so that the program can call it afterwards.
        """
        self.position.set_epoch(epoch)
        self.pass_epoch_on()

    def skipping(self, num_batches: int) -> Self:
        """Return a loader without the first ``num_batches``, which shares this loader's position."""
        arguments: dict[str, Any] = {**self._arguments, "skipped": self.skipped + num_batches}
        return type(self)(self.source, self.dataset, **arguments)

    def _dealing_after(self, skipped: int) -> Self:
        """Return a loader that deals out the sampler's batches after the first ``skipped``."""
        shard: Any = self.shard
        shard = dataclasses.replace(shard, batch_sampler=SkipBatchSampler(shard.batch_sampler, skipped))
        arguments = {name: shard if value is self.shard else value for name, value in self._arguments.items()}
        return type(self)(self.source, self.dataset, **{**arguments, "sampler_skipped": skipped})

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator here
        resume_point = self.position.take_resume_point()
        if resume_point is None or resume_point.is_told:
            return self._iterate(resume_point)
        if resume_point.undealt:
            return self._dealing_after(resume_point.undealt)._iterate(resume_point)
        return self.skipping(resume_point.batches)._iterate(resume_point)

    def _iterate(self, resume_point: ResumePoint | None) -> Iterator[Any]:
        position = self.position
        # A batch that is read in this process may draw random numbers; reading it again would draw others.
        keeps_ahead = self.num_workers == 0
        reuses_workers = self._reuses_workers
        with (
            position.beginning(resume_point, self._generators(), reuses_workers=reuses_workers),
            _seeding_workers(self._reader, reuses_workers=reuses_workers),
        ):
            self._begin_epoch()
            batches = self._read()
            tails = {} if self._is_marked else getattr(self.shard, "tails", {})
            following = next(batches, _END)
        rounds_before = self._rounds_before
        if resume_point is not None and resume_point.ahead:
            following = self._restored(resume_point.ahead[0])
        with (
            ACTIVE_ITERATIONS.iterating(self.counter, self.counter.total) as current,
            position.running(current),
            contextlib.closing(self._feed()) as feed,
        ):
            current.loader, current.upload_next = self, feed.upload_next
            following = following if following is _END else feed.send(following)
            while following is not _END:
                batch = feed.take(following)
                following = next(batches, _END)
                if following is not _END:
                    following = feed.send(following)
                if keeps_ahead:
                    position.ahead = following
                if self._is_marked:
                    batch, current.tail = batch
                elif tails or current.tail is not None:
                    current.tail = tails.pop(self.counter.step - rounds_before, None)
                self.counter.step += 1
                if following is _END:
                    current.is_last = current.ends_window = True
                elif self._is_marked or tails:  # some ranks may have no batch when this rank has the following one
                    upcoming = following.tail if self._is_marked else tails.get(self.counter.step - rounds_before)
                    current.ends_window = upcoming is not None and upcoming.missing > 0
                ACTIVE_ITERATIONS.hand_out(current)
                yield batch
                position.go_on(current)
                if current.before_next is not None:
                    current.before_next()
            if current.tail is not None and self.shard is not None:
                share = self.total_batch_size // len(current.tail.sizes)
                own = (self.counter.step - 1) * share + current.tail.sizes[self.shard.process_index]
                ACTIVE_ITERATIONS.ended = current.moment, own, current.tail

    def __len__(self) -> int:
        length = super().__len__()
        return length if self._batches is not None else max(0, length - self.skipped)

    def _begin_epoch(self) -> None:
        if self.position.epochs.passed_on != self.position.epochs.following:
            self.pass_epoch_on()
        epoch = self.position.epochs.begin()
        for function in self._before_epoch:
            function()
        self.counter.start(epoch=epoch + 1, total=self._total())
        self.counter.step = self.skipped + self._rounds_before

    def pass_epoch_on(self) -> None:
        """Call ``set_epoch`` of the sampler and of the dataset, where they have it, with the next epoch."""
        self.position.epochs.passed_on = epoch = self.position.epochs.following
        for part in (*chain_of(self._batches), self.dataset):
            if hasattr(part, "set_epoch") and not isinstance(part, SamplerView):
                part.set_epoch(epoch)

    def _read(self) -> Iterator[Any]:
        batches = super().__iter__()
        # A stream's skipped batches still have to be read.
        return itertools.islice(batches, self.skipped, None) if self.skipped and self._batches is None else batches

    def _restored(self, ahead: Any) -> Any:
        """Return a checkpoint's prefetched batch in the form in which it was read."""
        return MarkedBatch(ahead[0], ahead[1] and Tail(*ahead[1])) if self._is_marked else ahead

    @property
    def _reader(self) -> DataLoader[Any] | None:
        """The loader that reads on this rank, ``None`` if another rank reads for this one."""
        return self

    @property
    def _reuses_workers(self) -> bool:
        """True if the next epoch reuses the workers of an earlier one, or did so in the run that this one continues."""
        if self._reader is None or not self.persistent_workers:
            return False
        saved = self.position.reuses_workers
        return self._reader._iterator is not None if saved is None else saved

    def _seedable_samplers(self) -> list[SeedableRandomSampler]:
        return [part for part in chain_of(self._batches) if isinstance(part, SeedableRandomSampler)]

    def _generators(self) -> list[torch.Generator]:
        """Return the generators, besides torch's global one, that draw the order of the batches."""
        return generators_of((self, *chain_of(self._batches), self.dataset, self.source.dataset))

    @property
    def _rounds_before(self) -> int:
        """Number of the epoch's rounds that the ranks of the saved run have taken."""
        return self._deal.rounds_of(self.sampler_skipped) if self.sampler_skipped else 0

    @property
    def _deal(self) -> Deal:
        """How samples are dealt out, to resume with another number of ranks."""
        shard = self.shard
        is_whole = isinstance(shard, BatchSamplerShard) and not shard.split_batches
        try:
            epoch_samples: int | None = self.total_dataset_length
        except TypeError:  # a stream
            epoch_samples = None
        return Deal(
            ranks=1 if shard is None else shard.num_processes,
            round_samples=self.total_batch_size,
            epoch_samples=epoch_samples,
            batch_samples=(shard.batch_size or 1) if is_whole and shard is not None else None,
            workers=max(1, self.num_workers) if isinstance(self.source.dataset, IterableDataset) else 1,
        )

    def _total(self) -> int | None:
        """Return the number of batches of an epoch, skipped ones included; ``None`` if unknown."""
        try:
            return self._rounds_before + self.skipped + len(self)
        except TypeError:  # a stream or a sampler without a length
            return None

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self.source,),)


@contextlib.contextmanager
def _seeding_workers(reader: DataLoader[Any] | None, *, reuses_workers: bool) -> Iterator[None]:
    """Let an epoch of ``reader``, which begins in the body, draw its order as in the run that this one continues.

    torch draws a seed for new workers from the generator that draws the order, and none for workers that it reuses.
    Where that run reused its workers and this one starts some, their seed comes from another generator.
    """
    if reader is None:
        yield
        return
    own = reader.generator
    if not reuses_workers:
        reader._iterator = None
    elif reader._iterator is None:
        reader.generator = torch.Generator()
        reader.generator.set_state(torch.get_rng_state())
    try:
        yield
    finally:
        reader.generator = own


def kept_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options of ``loader`` that a loader made from it keeps."""
    return {name: getattr(loader, name) for name in _KEPT_OPTIONS}


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader without the first ``num_batches``; ``dataloader`` stays as it is.

    Skipped batches aren't read, unless the dataset can only be iterated. With a prepared loader each rank skips its own
    first batches; the rest of the epoch, including the last round, and the epoch counter don't change.

    Args:
        dataloader: A prepared loader or any other.
        num_batches: Number of batches to leave out.

    Raises:
        ConfigError: ``dataloader`` isn't a ``DataLoader``, or ``num_batches`` isn't a whole number from 0.
    """
    if type(num_batches) is not int or num_batches < 0:
        raise ConfigError(f"num_batches is {num_batches!r}.", fix="a whole number from 0")
    if isinstance(dataloader, DataLoaderShard):
        dataloader.position.skip_by_hand(num_batches)
        return dataloader.skipping(num_batches)
    if not isinstance(dataloader, DataLoader):
        raise ConfigError(
            f"skip_first_batches takes a torch.utils.data.DataLoader, not {type(dataloader).__name__}.",
            fix="itertools.islice(batches, num_batches, None) skips the first items of anything that can be iterated",
        )
    if isinstance(dataloader.dataset, IterableDataset):
        return _SkippingStreamLoader(dataloader, num_batches)
    options = kept_options(dataloader)
    if dataloader.batch_sampler is None:
        options |= {"batch_size": None, "sampler": SkipBatchSampler(dataloader.sampler, num_batches)}
    else:
        options["batch_sampler"] = SkipBatchSampler(dataloader.batch_sampler, num_batches)
    return DataLoader(dataloader.dataset, **options)


class _SkippingStreamLoader(DataLoader[Any]):
    """A loader that reads a stream from the beginning and yields its batches without the first ones."""

    def __init__(self, source: DataLoader[Any], skipped: int) -> None:
        options = kept_options(source)
        super().__init__(source.dataset, batch_size=source.batch_size, drop_last=source.drop_last, **options)
        self._skipped = skipped

    def __len__(self) -> int:
        return max(0, super().__len__() - self._skipped)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its private iterator here
        return itertools.islice(super().__iter__(), self._skipped, None)


class Feed:
    """Transfers the batches of one iteration to a device, in the order of ``send``.

    This one copies each batch when it is sent, one step before its use. Without a device batches stay in place.
    """

    def __init__(self, device: torch.device | None = None, *, non_blocking: bool = False) -> None:
        self._device = device
        self._non_blocking = non_blocking

    def send(self, batch: Any) -> Any:
        """Accept a batch, and return the object to pass to ``take`` later."""
        return batch if self._device is None else send_to_device(batch, self._device, non_blocking=self._non_blocking)

    upload_next: Callable[[], None] | None = None  # starts the transfer of the sent batch, as ``take`` else does

    def take(self, held: Any) -> Any:
        """Return the batch on the device, given the object that ``send`` returned."""
        return held

    def close(self) -> None:
        """End the iteration."""


class UploadingFeed(Feed):
    """A feed that sends the tensors of each batch through a backend's uploader."""

    def __init__(self, uploader: Uploader, device: torch.device) -> None:
        super().__init__(device)
        self._uploader = uploader
        self.upload_next = uploader.begin

    def send(self, batch: Any) -> Any:
        self._uploader.send([leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)])
        return batch

    def take(self, held: Any) -> Any:
        tensors = iter(self._uploader.take())

        def placed(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return next(tensors)
            return leaf.to(self._device) if hasattr(leaf, "to") else leaf

        return map_leaves(placed, held)

    def close(self) -> None:
        self._uploader.close()


class DataLoaderDispatcher(DataLoaderShard):
    """A loader that rank 0 reads for all ranks, sending each rank its batches.

    Batches equal those of a ``DataLoaderShard``, and have to pickle. Each is sent while ranks work on the previous one.
    The arguments are those of ``DataLoaderShard``, and this rank's backend.
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
        reads = all_ranks(backend).place.rank == 0
        self._round_reader = _round_reader(source, shard, self.skipped) if reads else None

    @property
    def _reader(self) -> DataLoader[ReadRound] | None:
        return self._round_reader

    def _read(self) -> Iterator[MarkedBatch]:
        messages = None if self._reader is None else self._messages(self._reader)
        while True:
            message = collectives.scatter_object(self._backend, None if messages is None else next(messages))
            if isinstance(message, _ReadFailure):
                if messages is not None:
                    next(messages)  # raises the original exception
                raise TrainingError(
                    f"Rank 0, which reads for all ranks, could not read the next batch: {message.error}",
                    why="The loader is dispatched: dispatch_batches=True, or its dataset can only be iterated.",
                )
            if message is None:
                return
            yield message
            if message.tail is not None and message.tail.missing:  # ranks without a batch expect no further message
                return

    def _messages(self, reader: DataLoader[ReadRound]) -> Iterator[list[Any]]:
        """Yield for each round a list of rank 0's messages, one per rank, and at the end a list of ``None``."""
        world_size = self._backend.place.world_size
        try:
            rounds = _with_complete_rounds_first(reader, world_size)
            if isinstance(self.shard, IterableDatasetShard):
                rounds = itertools.islice(rounds, self.skipped, None)  # a stream's still have to be read
            if shares_samples(self._backend):
                rounds = random_state.drawn_apart(rounds)
            for batches, _, tail in rounds:
                yield [*(MarkedBatch(batch, tail) for batch in batches), *[None] * (world_size - len(batches))]
        except Exception as error:
            yield [_ReadFailure(f"{type(error).__name__}: {error}")] * world_size
            raise
        yield [None] * world_size


class _ReadFailure(NamedTuple):
    """A message to all ranks that rank 0 could not read a batch."""

    error: str


class _RoundSampler(Sampler[Round]):
    """A sampler that yields the rounds of all ranks."""

    def __init__(self, shard: BatchSamplerShard) -> None:
        self._shard = shard

    def __iter__(self) -> Iterator[Round]:
        return dispatched_rounds(self._shard)


def _round_reader(
    source: DataLoader[Any], shard: BatchSamplerShard | IterableDatasetShard, skipped: int
) -> DataLoader[ReadRound]:
    """Return the loader that reads the rounds. A worker process reads and collates a whole round at once."""
    collate = source.collate_fn
    options = {**kept_options(source), "collate_fn": unchanged, "pin_memory": False}
    if isinstance(shard, IterableDatasetShard):
        stream = RoundStream(shard, collate, is_batch=source.batch_size is not None)
        return DataLoader(stream, batch_size=None, **options)
    dataset = RoundDataset(source.dataset, collate, is_batch=source.batch_sampler is not None)
    return DataLoader(dataset, batch_size=None, sampler=SkipBatchSampler(_RoundSampler(shard), skipped), **options)


def unchanged(batch: _T) -> _T:
    """Return the batch unchanged. Worker processes can import this ``collate_fn``."""
    return batch


def _with_complete_rounds_first(rounds: Iterable[ReadRound], world_size: int) -> Iterator[ReadRound]:
    """Yield the rounds with a batch for every rank, then the remaining batches, regrouped.

    When several workers share a stream, each one's incomplete last round arrives in the middle of the epoch.
    """
    left: list[tuple[Any, int]] = []
    for read in rounds:
        if len(read.batches) == world_size:
            yield read
        else:
            left.extend(zip(read.batches, read.sizes, strict=True))
    for dealt in slices(left, world_size):
        sizes = [size for _, size in dealt]
        by_rank = (*sizes, *[0] * (world_size - len(dealt)))
        yield ReadRound([batch for batch, _ in dealt], sizes, Tail(by_rank, by_rank))


@contextlib.contextmanager
def join_uneven_inputs(
    joinables: Iterable[Any], even_batches: bool, *, loaders: Iterable[DataLoaderShard], state: GradientState
) -> Iterator[None]:
    """Let ranks that run out of batches take part in the remaining ranks' collectives, until all have run out.

    Uses torch's ``Join``: ranks without batches contribute zero gradients, and at the end all ranks have the model of a
    rank that took every step. Optimizer state, such as momentum, isn't synchronised.

    In the body ``loaders`` use this ``even_batches``, and ``state`` accepts missing batches.

    Raises:
        ConfigError: Something can't be joined, or a loader can't be changed now.
    """
    joinables = [without_own_wrapper(joinable) for joinable in joinables]
    for joinable in joinables:
        if not isinstance(joinable, Joinable):
            raise ConfigError(
                f"join_uneven_inputs takes prepared models, not {type(joinable).__name__}.",
                why="Its parameters don't learn, or prepare hasn't been called: no gradients are averaged.",
                fix="join_uneven_inputs([accelerator.prepare(model)])",
            )
        follow_changes = getattr(joinable, "_follow_changes", None)
        if follow_changes is not None:  # now, while all ranks take part
            follow_changes()
    join = Join(joinables, enable=not even_batches, throw_on_early_termination=False)
    changed = [loader for loader in loaders if loader.shard is not None and loader.shard.even_batches != even_batches]
    for loader in changed:
        if loader.persistent_workers and loader.batch_sampler is None:  # its workers wouldn't notice the change
            raise ConfigError(
                "even_batches can't be changed for a stream that is read by workers which outlive an epoch.",
                fix="DataLoader(..., persistent_workers=False), or DataLoaderConfiguration(even_batches=...)",
            )
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, state, "joins_uneven", state.joins_uneven)
        state.joins_uneven = True
        for loader in changed:
            shard: Any = loader.shard
            stack.callback(setattr, shard, "even_batches", shard.even_batches)
            shard.even_batches = even_batches
        with join:
            yield

"""Shard samples over ranks.

Batches are dealt out in rounds: all ranks work on a round at the same time, each on its share. Only the last round of
an epoch can be incomplete. Its ``Tail`` says how many of its samples are real, so that metrics can leave out samples
that were repeated to fill it.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import IterableDataset, RandomSampler, Sampler

from notebook_accel import environment
from notebook_accel.errors import ConfigError, TrainingError


class Tail(NamedTuple):
    """The last round of an epoch, if it differs from the others.

    Attributes:
        real: Number of samples that aren't repeated from earlier in the epoch; they come first.
        total: Number of samples over all ranks.
        ragged: True if the ranks' shares differ in size.
        missing: Number of ranks, the last ones, that have no share.
    """

    real: int
    total: int
    ragged: bool = False
    missing: int = 0

    def kept(self, gathered: int) -> int:
        """Return how many of ``gathered`` rows belong to real samples.

        A model may return several rows per sample, such as one per token. Rows that can't be divided evenly among the
        samples, such as one loss per rank, don't belong to samples: all are kept.
        """
        rows_each, left_over = divmod(gathered, self.total)
        return gathered if left_over else self.real * rows_each

    def missing_error(self, consequence: str, fix: str) -> TrainingError:
        """Return the error for a call in which ranks without a batch don't take part."""
        return TrainingError(
            f"In the last round of this epoch {self.missing} of the ranks have no batch, and {consequence}.",
            why="With even_batches=False nothing is repeated to give every rank as many batches.",
            fix=fix,
        )


class MarkedBatch(NamedTuple):
    """A batch, or a sample of it, with its round's ``Tail`` if that round is unlike the others."""

    batch: Any
    tail: Tail | None


class Round(NamedTuple):
    """The shares that all ranks work on at the same time.

    Attributes:
        shares: One share per rank, in order of rank; fewer if the last ranks have none.
        tail: The round's ``Tail``, ``None`` if the round is like the others.
    """

    shares: list[Any]
    tail: Tail | None


@dataclasses.dataclass(eq=False, repr=False)
class BatchSamplerShard(Sampler[Any]):
    """One rank's share of the batches of a batch sampler.

    Rank r of n takes batches r, r + n, r + 2n, ... With ``split_batches`` every batch is cut into n equal parts, and
    rank r takes the r-th.

    Args:
        batch_sampler: The sampler that yields the batches, the same on every rank. If it has no attribute
            ``batch_size``, its batches stay whole, whatever their sizes, and the last round is filled with whole ones.
        num_processes: Number of ranks.
        process_index: The rank that takes the share.
        split_batches: Cut each batch instead of dealing out whole ones.
        even_batches: Fill the last round from the beginning of the epoch, so that every rank has as many batches, all
            of the same size. If the batch sampler drops its last batch, an incomplete round is dropped instead.
        drawing_as_rank_0: Returns a context in which all ranks draw rank 0's random numbers, for the first batch of an
            epoch: samplers draw the whole order then.

    Attributes:
        tail: The ``Tail`` of the latest epoch's last batch, ``None`` if its round was like the others.
        rounds_of_all: Number of rounds in which every rank has a batch, once a further round is reached; else ``None``.

    Raises:
        ConfigError: ``split_batches``, and the batch size is unknown or can't be divided by the number of ranks.
    """

    batch_sampler: Iterable[Any]
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True
    drawing_as_rank_0: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __post_init__(self) -> None:
        self.batch_size: int | None = getattr(self.batch_sampler, "batch_size", None)
        self.drop_last: bool = getattr(self.batch_sampler, "drop_last", False)
        self.tail: Tail | None = None
        self.rounds_of_all: int | None = None
        self._share_size = _part_of(self.batch_size, self.num_processes) if self.split_batches else self.batch_size

    def __len__(self) -> int:
        batches = len(cast(Sized, self.batch_sampler))
        if self.split_batches:
            return batches - self._misses_last_batch() if batches else 0
        rounds, left_over = divmod(batches, self.num_processes)
        if self.drop_last or not left_over:
            return rounds
        return rounds + (self.even_batches or self.process_index < left_over)

    def _misses_last_batch(self) -> bool:
        """Return whether the last batch is cut into fewer parts than there are ranks, and this rank gets none."""
        sampler = getattr(self.batch_sampler, "sampler", None)
        if self.even_batches or self.drop_last or not isinstance(sampler, Sized):
            return False
        assert self.batch_size is not None and self._share_size is not None
        left_over = len(sampler) % self.batch_size
        return 0 < left_over <= self.process_index * self._share_size

    def __iter__(self) -> Iterator[Any]:
        self.rounds_of_all = None
        own_tail: Tail | None = None
        for number, (shares, tail) in enumerate(self.rounds()):
            if tail is not None and tail.missing:
                self.rounds_of_all = number
            if self.process_index < len(shares):
                own_tail = tail
                yield shares[self.process_index]
        self.tail = own_tail  # set before the loader sees the end of the epoch

    def rounds(self) -> Iterator[Round]:
        """Yield the shares of all ranks, round by round."""
        first: list[Any] | None = None
        held: list[Any] | None = None  # a round is held back until the next one shows that it isn't the last
        for shares in self._dealt():
            if held is not None:
                if len(held) != self.num_processes:
                    size = self.batch_size
                    raise TrainingError(
                        f"Before its last batch, the batch sampler yielded one that isn't of its size, {size}.",
                        why=f"split_batches cuts every batch into {self.num_processes} equal parts.",
                        fix="DataLoaderConfiguration(split_batches=False)",
                    )
                yield Round(held, None)
            first = first or shares
            held = shares
        if first is not None and held is not None:
            yield from self._last_round(held, first)

    def _dealt(self) -> Iterator[list[Any]]:
        batches = iter(self.batch_sampler)
        with self.drawing_as_rank_0():
            first = [*itertools.islice(batches, 1)]
        batches = itertools.chain(first, batches)
        if self.split_batches:
            assert self._share_size is not None
            for batch in batches:
                yield slices(batch, self._share_size)
        else:
            while shares := list(itertools.islice(batches, self.num_processes)):
                yield shares

    def _last_round(self, shares: list[Any], first: list[Any]) -> Iterator[Round]:
        missing = self.num_processes - len(shares)
        if self.drop_last and missing:
            return
        real = sum(map(sample_count, shares))
        tail = None
        if self.even_batches:
            shares = self._filled(shares, first)
            sizes = [sample_count(share) for share in shares]
            is_ragged = len(set(sizes)) > 1  # nobody knows the size that the batch sampler wants
            tail = Tail(real, sum(sizes), ragged=is_ragged) if is_ragged or real < sum(sizes) else None
        elif missing or len(set(map(sample_count, shares))) > 1:
            tail = Tail(real, real, ragged=True, missing=missing)
        yield Round(shares, tail)

    def _filled(self, shares: list[Any], first: list[Any]) -> list[Any]:
        missing = self.num_processes - len(shares)
        size = self._share_size
        if size is None:
            return [*shares, *itertools.islice(itertools.cycle(first), missing)]
        refill = itertools.cycle(itertools.chain.from_iterable(first))
        return [[*share, *itertools.islice(refill, max(0, size - len(share)))] for share in [*shares, *[[]] * missing]]


@dataclasses.dataclass(eq=False, repr=False)
class IterableDatasetShard(IterableDataset[Any]):
    """One rank's share of a dataset that can only be iterated.

    Every rank reads the whole stream, in rounds of one batch per rank, and yields its own share of each round. So the
    stream has to be the same on every rank.

    Args:
        dataset: The stream.
        batch_size: Number of samples in a batch of one rank; with ``split_batches``, of all ranks together.
        drop_last: Leave out a last round that is incomplete.
        num_processes: Number of ranks.
        process_index: The rank that takes the share.
        split_batches: Cut each batch instead of dealing out whole ones.
        even_batches: Fill an incomplete last round from the beginning of the stream.

    Raises:
        ConfigError: ``split_batches``, and the batch size can't be divided by the number of ranks.
    """

    dataset: Iterable[Any]
    batch_size: int = 1
    drop_last: bool = False
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True

    def __post_init__(self) -> None:
        self.share_size = _part_of(self.batch_size, self.num_processes) if self.split_batches else self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Pass the next epoch on to the dataset, if it has ``set_epoch``."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        samples = len(cast(Sized, self.dataset))
        rounds, left_over = divmod(samples, self.share_size * self.num_processes)
        if self.drop_last or not left_over:
            own = 0
        elif self.even_batches:
            own = self.share_size
        else:
            own = min(self.share_size, max(0, left_over - self.process_index * self.share_size))
        return rounds * self.share_size + own

    def __iter__(self) -> Iterator[Any]:
        for share, _ in self.own_shares():
            yield from share

    def own_shares(self) -> Iterator[tuple[list[Any], Tail | None]]:
        """Yield this rank's share of each round in which it has one, with the round's ``Tail``."""
        for shares, tail in self.rounds():
            if self.process_index < len(shares):
                yield shares[self.process_index], tail

    def rounds(self) -> Iterator[Round]:
        """Yield the shares of all ranks, round by round."""
        size, round_size = self.share_size, self.share_size * self.num_processes
        samples = iter(self.dataset)
        first: list[Any] | None = None
        while taken := list(itertools.islice(samples, round_size)):
            first = first or taken
            real = len(taken)
            if real < round_size and self.drop_last:
                return
            if real < round_size and self.even_batches:
                taken = [*taken, *itertools.islice(itertools.cycle(first), round_size - real)]
            shares = slices(taken, size)
            tail = None
            if real < round_size:
                missing = self.num_processes - len(shares)
                tail = Tail(real, len(taken), ragged=len(taken) < round_size, missing=missing)
            yield Round(shares, tail)


def dispatched_rounds(shard: BatchSamplerShard | IterableDatasetShard) -> Iterator[Round]:
    """Yield the rounds that rank 0 reads for all ranks.

    With ``NOTEBOOK_ACCEL_COMPAT=accelerate`` in the environment, the last round is cut into equal parts, and only as
    many samples are repeated as that needs, instead of filling each rank's batch.
    """
    rounds = shard.rounds()
    return _cut_evenly(rounds, shard.num_processes) if environment.follows_accelerate() else rounds


def _cut_evenly(rounds: Iterator[Round], num_processes: int) -> Iterator[Round]:
    for shares, tail in rounds:
        if tail is None or tail.ragged or not all(isinstance(share, list) for share in shares):
            yield Round(shares, tail)
            continue
        samples = list(itertools.chain.from_iterable(shares))  # the real ones come first
        size = -(-tail.real // num_processes)
        total = size * num_processes
        yield Round(slices(samples[:total], size), Tail(tail.real, total) if tail.real < total else None)


def _part_of(batch_size: int | None, num_processes: int) -> int:
    if batch_size is None:
        raise ConfigError(
            "split_batches can't be used with a batch sampler that has no batch_size.",
            why="Each batch is cut into as many equal parts as there are ranks, so its size must be known.",
            fix="DataLoaderConfiguration(split_batches=False)",
        )
    part, left_over = divmod(batch_size, num_processes)
    if left_over:
        raise ConfigError(
            f"split_batches can't cut a batch of {batch_size} into {num_processes} equal parts.",
            fix=f"a multiple of {num_processes}, such as {max(1, part) * num_processes}, or split_batches=False",
        )
    return part


def slices(items: Any, size: int) -> list[Any]:
    """Cut a sequence into slices of ``size`` items, the last of which may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def sample_count(batch: Any) -> int:
    """Return the number of samples in a batch: 1 for a bare index, which stands for a whole batch of the dataset."""
    return len(batch) if isinstance(batch, Sized) else 1


class SeedableRandomSampler(RandomSampler):
    """A sampler that shuffles epoch e by the seed ``seed + e``, so that the order depends on nothing else.

    Args:
        data_source: The dataset to sample from.
        replacement: Draw with replacement.
        num_samples: Number of samples in an epoch, by default that of the dataset.
        generator: The generator whose initial seed is used if there is no ``data_seed``.
        data_seed: The seed, the same on every rank. By default the one that torch was seeded with last.
    """

    def __init__(
        self,
        data_source: Sized,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator=torch.Generator())
        if data_seed is None:
            data_seed = torch.initial_seed() if generator is None else generator.initial_seed()
        self.seed = data_seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is iterated next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        self.epoch += 1
        yield from super().__iter__()


class SynchronizedSampler(Sampler[Any]):
    """A sampler that draws rank 0's order on every rank.

    Rank 0 takes the seed of an epoch's order from the global generator at the moment at which plain PyTorch does. So
    with the same global seed it draws the order that plain PyTorch draws in one process.

    ``sampler`` has an attribute ``generator``, which may be ``None``. ``from_rank_0`` broadcasts rank 0's argument;
    every rank calls it once an epoch.
    """

    def __init__(self, sampler: Any, from_rank_0: Callable[[Any], Any]) -> None:
        self._sampler = copy.copy(sampler)
        self.generator: torch.Generator | None = sampler.generator
        self._from_rank_0 = from_rank_0

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Pass the next epoch on to the sampler, if it has ``set_epoch``."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self.generator is None:
            seed = int(torch.empty((), dtype=torch.int64).random_().item())
            self._sampler.generator = torch.Generator().manual_seed(self._from_rank_0(seed))
        else:
            self.generator.set_state(self._from_rank_0(self.generator.get_state()))
        yield from self._sampler


class SkipBatchSampler(Sampler[Any]):
    """A batch sampler without its first batches. Other attributes are those of the wrapped sampler.

    Args:
        batch_sampler: The sampler to wrap.
        skip_batches: Number of batches to leave out.
    """

    def __init__(self, batch_sampler: Iterable[Any], skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __len__(self) -> int:
        return max(0, len(cast(Sized, self.batch_sampler)) - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.batch_sampler, self.skip_batches, None)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not set yet: the object is being created
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


def chain_of(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and the samplers nested in it, the outermost first."""
    while sampler is not None:
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def part_of(inputs: Any, rank: int, world_size: int, *, apply_padding: bool = False) -> Any:
    """Return one rank's part of ``inputs``: consecutive items.

    If the number of items isn't divisible by ``world_size``, the first ranks get one more.

    Args:
        inputs: A list, a tuple, a tensor ``(n, ...)``, an object with ``select`` such as a Hugging Face dataset, or a
            mapping of these, all of one length.
        rank: The rank that gets the part.
        world_size: Number of parts.
        apply_padding: Repeat the last item so that all parts have one length.

    Raises:
        TrainingError: ``inputs`` has another type, or its values have different lengths.
    """
    if world_size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items() if hasattr(value, "__len__")}
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{key!r} has {length}" for key, length in lengths.items())
            raise TrainingError(
                f"split_between_processes was given values of different lengths: {shown}.",
                why="Each rank gets the same items of all of them.",
                fix="make them equally long",
            )
        return {key: part_of(value, rank, world_size, apply_padding=apply_padding) for key, value in inputs.items()}
    if not isinstance(inputs, (list, tuple, torch.Tensor)) and not hasattr(inputs, "select"):
        raise TrainingError(
            f"split_between_processes can't cut {type(inputs).__name__} into parts.",
            fix="give it a list, a tuple, a tensor, or a dict of such",
        )
    each, extra = divmod(len(inputs), world_size)
    start = rank * each + min(rank, extra)
    end = start + each + (rank < extra)
    missing = each + bool(extra) - (end - start) if apply_padding and len(inputs) else 0
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):
        return inputs.select([*range(start, end), *[len(inputs) - 1] * missing])
    part, last = inputs[start:end], inputs[-1:]
    if isinstance(inputs, torch.Tensor):
        return torch.cat([part, *[last] * missing]) if missing else part
    return part + last * missing

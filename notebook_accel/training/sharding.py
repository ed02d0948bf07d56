"""Shard samples over ranks.

Batches are dealt out in rounds: all ranks work on a round at the same time, each on its share. Only the last round of
an epoch can be incomplete. Its ``Tail`` says how many of each rank's samples are real, so that metrics can leave out
samples that were repeated to fill it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, Sampler

from notebook_accel import environment
from notebook_accel.errors import ConfigError, TrainingError


class Tail(NamedTuple):
    """The samples of a round that is unlike the others, such as the last round of an epoch.

    Attributes:
        real_by_rank: Each rank's number of samples that aren't repeated from earlier in the epoch; they come first.
        sizes: Each rank's number of samples, 0 for the last ranks if they have no share. A share of 1 may be a whole
            batch, whose number of rows only its rank knows.
    """

    real_by_rank: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def real(self) -> int:
        """Number of samples of all ranks that aren't repeated."""
        return sum(self.real_by_rank)

    @property
    def missing(self) -> int:
        """Number of ranks, the last ones, that have no share."""
        return self.sizes.count(0)

    @property
    def may_differ_in_rows(self) -> bool:
        """True if the ranks' shares may have different numbers of rows."""
        return len(set(self.sizes)) > 1 or 1 in self.sizes

    def rows_kept(self, rows: Sequence[int]) -> list[int]:
        """Return how many of each rank's ``rows`` belong to real samples.

        A model may return several rows per sample, such as one per token. Rows that can't be divided evenly among the
        samples, such as one loss per rank, don't belong to samples: all are kept.
        """
        if any(count % max(size, 1) for count, size in zip(rows, self.sizes, strict=True)):
            return [*rows]
        return [
            real * count // max(size, 1) for real, count, size in zip(self.real_by_rank, rows, self.sizes, strict=True)
        ]

    def missing_error(self, consequence: str, fix: str) -> TrainingError:
        """Return the error for a call in which ranks without a batch don't take part."""
        return TrainingError(
            f"In the last round of this epoch {self.missing} of the ranks have no batch, and {consequence}.",
            why="With even_batches=False nothing is repeated to give every rank as many batches.",
            fix=fix,
        )


def tail_of(shares: Sequence[Any], ranks: int, real: Sequence[Any] | None = None) -> Tail:
    """Return the ``Tail`` of a round, given its shares and, if some samples of these are repeated, the real ones."""

    def by_rank(items: Sequence[Any]) -> tuple[int, ...]:
        return (*map(sample_count, items), *[0] * (ranks - len(items)))

    return Tail(by_rank(shares if real is None else real), by_rank(shares))


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


class SamplerView(Sampler[Any]):
    """A wrapper of a sampler. Attributes that aren't its ``_OWN`` are read and set in the wrapped ``batch_sampler``."""

    _OWN: ClassVar[tuple[str, ...]] = ("batch_sampler",)
    batch_sampler: Any

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":  # not set yet: the object is being created
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.batch_sampler, name, value)


@dataclasses.dataclass(eq=False, repr=False)
class BatchSamplerShard(SamplerView):
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
        drawn: Returns the items of the iterator that its argument makes, drawn with the same random numbers on every
            rank.

    Attributes:
        tails: The ``Tail`` of each round of the latest epoch that is unlike the others, by the round's number from 0.

    Raises:
        ConfigError: ``split_batches``, and the batch size is unknown or can't be divided by the number of ranks.
    """

    batch_sampler: Any
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True
    drawn: Callable[[Callable[[], Iterator[Any]]], Iterator[Any]] = lambda make: make()

    _OWN = ("batch_sampler", "num_processes", "process_index", "split_batches", "even_batches", "drawn", "tails")

    def __post_init__(self) -> None:
        self.tails: dict[int, Tail] = {}
        _ = self._share_size  # raises

    @property
    def batch_size(self) -> int | None:
        """The batch sampler's ``batch_size`` as it is now, ``None`` if it has none."""
        return getattr(self.batch_sampler, "batch_size", None)

    @property
    def drop_last(self) -> bool:
        """The batch sampler's ``drop_last`` as it is now."""
        return getattr(self.batch_sampler, "drop_last", False)

    @property
    def _share_size(self) -> int | None:
        return _part_of(self.batch_size, self.num_processes) if self.split_batches else self.batch_size

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
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
        self.tails = tails = dict[int, Tail]()
        return self._own_shares(self.rounds(), tails)

    def _own_shares(self, rounds: Iterator[Round], tails: dict[int, Tail]) -> Iterator[Any]:
        for number, (shares, tail) in enumerate(rounds):
            if tail is not None:
                tails[number] = tail
            if self.process_index < len(shares):
                yield shares[self.process_index]

    def rounds(self) -> Iterator[Round]:
        """Return the shares of all ranks, round by round."""
        return self._told_apart(self.drawn(self._dealt))

    def _told_apart(self, dealt: Iterator[list[Any]]) -> Iterator[Round]:
        """Yield the rounds, each with its ``Tail`` if it is unlike the others."""
        inner = next(part for part in chain_of(self.batch_sampler) if not isinstance(part, SamplerView))
        are_alike = type(inner) is BatchSampler
        first: list[Any] | None = None
        held: list[Any] | None = None  # a round is held back until the next one shows that it isn't the last
        for shares in dealt:
            if held is not None:
                if len(held) != self.num_processes:
                    raise TrainingError(
                        "Before its last batch, the batch sampler yielded one that isn't of its size, "
                        f"{self.batch_size}.",
                        why=f"split_batches cuts every batch into {self.num_processes} equal parts.",
                        fix="DataLoaderConfiguration(split_batches=False)",
                    )
                tail = None if are_alike else tail_of(held, self.num_processes)
                yield Round(held, tail if tail is not None and tail.may_differ_in_rows else None)
            first = first or shares
            held = shares
        if first is not None and held is not None:
            yield from self._last_round(held, first)

    def _dealt(self) -> Iterator[list[Any]]:
        batches = iter(self.batch_sampler)  # now, since some samplers draw their order here
        if self.split_batches:
            return (slices(batch, self._share_size or 1) for batch in batches)
        return iter(lambda: [*itertools.islice(batches, self.num_processes)], [])

    def _last_round(self, shares: list[Any], first: list[Any]) -> Iterator[Round]:
        if self.drop_last and len(shares) < self.num_processes:
            return
        dealt = self._filled(shares, first) if self.even_batches else shares
        tail = tail_of(dealt, self.num_processes, shares)
        is_alike = tail.real_by_rank == tail.sizes and len(set(tail.sizes)) == 1 and isinstance(shares[0], Sized)
        yield Round(dealt, None if is_alike else tail)

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
        batch_size: Number of samples in a batch of one rank; with ``split_batches``, of all ranks together. With
            ``None`` each item of the stream is a batch, whose size isn't known.
        drop_last: Leave out a last round that is incomplete.
        num_processes: Number of ranks.
        process_index: The rank that takes the share.
        split_batches: Cut each batch instead of dealing out whole ones.
        even_batches: Fill an incomplete last round from the beginning of the stream.

    Raises:
        ConfigError: ``split_batches``, and the batch size can't be divided by the number of ranks.
    """

    dataset: Iterable[Any]
    batch_size: int | None = 1
    drop_last: bool = False
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True

    def __post_init__(self) -> None:
        self.share_size = _part_of(self.batch_size, self.num_processes) if self.split_batches else self.batch_size or 1

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
            real_shares = slices(taken, size)
            if real < round_size and self.even_batches:
                taken = [*taken, *itertools.islice(itertools.cycle(first), round_size - real)]
            shares = slices(taken, size)
            is_alike = real == round_size and self.batch_size is not None
            yield Round(shares, None if is_alike else tail_of(shares, self.num_processes, real_shares))


def dispatched_rounds(shard: BatchSamplerShard | IterableDatasetShard) -> Iterator[Round]:
    """Yield the rounds that rank 0 reads for all ranks.

    With ``NOTEBOOK_ACCEL_COMPAT=accelerate`` in the environment, the last round is cut into equal parts, and only as
    many samples are repeated as that needs, instead of filling each rank's batch.
    """
    rounds = shard.rounds()
    return _cut_evenly(rounds, shard.num_processes) if environment.follows_accelerate() else rounds


def _cut_evenly(rounds: Iterator[Round], num_processes: int) -> Iterator[Round]:
    for shares, tail in rounds:
        if tail is None or len(set(tail.sizes)) > 1 or not all(isinstance(share, list) for share in shares):
            yield Round(shares, tail)
            continue
        pairs = [*zip(shares, tail.real_by_rank, strict=True)]
        real = [sample for share, count in pairs for sample in share[:count]]
        repeated = [sample for share, count in pairs for sample in share[count:]]
        size = -(-len(real) // num_processes)
        cut = slices([*real, *repeated][: size * num_processes], size)
        is_alike = len(real) == size * num_processes
        yield Round(cut, None if is_alike else tail_of(cut, num_processes, slices(real, size)))


def _part_of(batch_size: int | None, num_processes: int) -> int:
    if batch_size is None:
        raise ConfigError(
            "split_batches can't be used with a batch sampler or a loader that has no batch_size.",
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

    @classmethod
    def take_over(cls, sampler: RandomSampler, data_seed: int | None) -> None:
        """Turn a ``RandomSampler`` into one of this class, again with each ``prepare``. Its data stay as they are."""
        given = vars(sampler).setdefault("given_generator", sampler.generator)
        seed = cls(sampler.data_source, generator=given, data_seed=data_seed).seed
        sampler.__class__ = cls
        vars(sampler).update(seed=seed, epoch=0, generator=torch.Generator())

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is iterated next."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        self.epoch += 1
        yield from super().__iter__()


class SkipBatchSampler(SamplerView):
    """A batch sampler without its first batches. Other attributes are those of the wrapped sampler.

    Args:
        batch_sampler: The sampler to wrap.
        skip_batches: Number of batches to leave out.
    """

    _OWN = ("batch_sampler", "skip_batches")

    def __init__(self, batch_sampler: Iterable[Any], skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.batch_sampler, self.skip_batches, None)


def chain_of(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and the samplers nested in it, the outermost first."""
    while sampler is not None:
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def generators_of(parts: Iterable[Any]) -> list[torch.Generator]:
    """Return the ``torch.Generator`` of each of ``parts`` that has one as its ``generator``, each once."""
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(item): item for item in found if isinstance(item, torch.Generator)}.values())


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

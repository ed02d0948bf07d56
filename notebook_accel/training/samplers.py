"""Samplers that draw the same order on every rank, draw it from a seed, or skip the first batches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import RandomSampler, Sampler


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

    Args:
        sampler: A sampler with an attribute ``generator``, which may be ``None``.
        from_rank_0: A function that returns rank 0's argument on all ranks. Each calls it once an epoch.
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
    """A batch sampler without its first batches. It has the attributes of the wrapped one.

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
        if name == "batch_sampler":  # not set yet: the object is being made
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


def chain_of(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, the sampler that it wraps, the one that this wraps, and so on."""
    while sampler is not None:
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner

"""Datasets of numbers, each of which is its own index."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset[int]):
    """A dataset that records the indices that were read, and the epochs that were set."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Stream(IterableDataset[int]):
    """A stream of numbers in order, or in the order that a generator draws."""

    def __init__(self, length: int, generator: torch.Generator | None = None) -> None:
        self.length = length
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            return iter(range(self.length))
        return iter(torch.randperm(self.length, generator=self.generator).tolist())


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


class LongSizedStream(SizedStream):
    """A stream that ends before its length."""

    def __len__(self) -> int:
        return super().__len__() + 7

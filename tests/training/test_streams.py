"""Datasets that can only be iterated, read by workers: each rank's share of them, epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from notebook_accel.training import collectives, process_group
from tests.training.datasets import Stream
from tests.training.ranks import Ranks
from tests.training.test_data import prepare


def metrics_of_workers() -> Any:
    backend = process_group.join(cpu=True)
    loader = DataLoader(Stream(7), batch_size=2, num_workers=1)
    shard, state = prepare(loader, backend, dispatch_batches=False)
    return [collectives.gather_for_metrics(backend, batch, state.tail).tolist() for batch in shard]


def test_each_sample_once_when_a_worker_reads_the_stream(two_ranks: Ranks) -> None:
    assert two_ranks.run(metrics_of_workers) == [[[0, 1, 2, 3], [4, 5, 6]]] * 2


def test_a_persistent_workers_stream_learns_its_epoch() -> None:
    class Epochs(IterableDataset[int]):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch])

    shard, _ = prepare(DataLoader(Epochs(), num_workers=1, persistent_workers=True))
    epochs = [next(iter(shard)).item() for _ in range(2)]
    shard.set_epoch(7)
    assert [*epochs, next(iter(shard)).item(), next(iter(shard)).item()] == [0, 1, 7, 8]


class Drawing(IterableDataset[int]):
    """Numbers drawn one by one, in the workers."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        for number in range(12):
            yield 100 * number + int(torch.randint(100, (), generator=self.generator))


def persistent_streams() -> list[Any]:
    """Three epochs, the second of them left early."""
    backend = process_group.join(cpu=True)
    generator = torch.Generator().manual_seed(backend.place.rank)
    loader = DataLoader(Drawing(generator), batch_size=2, num_workers=1, persistent_workers=True)
    shard, state = prepare(loader, backend, dispatch_batches=False)
    epochs: list[list[int]] = []
    for epoch in range(3):
        epochs.append([])
        for batch in shard:
            everybodys = collectives.gather_for_metrics(backend, batch, state.tail).tolist()
            epochs[-1] += everybodys
            if epoch == 1:
                break
    return epochs


def test_persistent_workers_streams_stay_in_step(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(persistent_streams)
    assert first == second
    assert [[sample // 100 for sample in epoch] for epoch in first] == [list(range(12)), [0, 1, 2, 3], list(range(12))]
    assert first[0] != first[2]


class Told(IterableDataset[int]):
    """Each worker is told what to read, as torch's documentation has it."""

    start, end = 0, 8

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def tell(worker: int) -> None:
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    middle = (dataset.start + dataset.end) // 2
    dataset.start, dataset.end = [(dataset.start, middle), (middle, dataset.end)][worker]


def told_workers(dispatch: bool) -> list[int]:
    backend = process_group.join(cpu=True)
    loader = DataLoader(Told(), batch_size=2, num_workers=2, worker_init_fn=tell)
    shard, state = prepare(loader, backend, dispatch_batches=dispatch)
    return [sample for batch in shard for sample in collectives.gather_for_metrics(backend, batch, state.tail).tolist()]


@pytest.mark.parametrize("dispatch", [True, False])
def test_workers_are_told_what_to_read(two_ranks: Ranks, dispatch: bool) -> None:
    assert [sorted(found) for found in two_ranks.run(told_workers, dispatch)] == [list(range(8))] * 2

"""Prepared loaders: each rank's share of them, batch by batch and epoch by epoch."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    get_worker_info,
)

from notebook_accel import reporting
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError
from notebook_accel.reporting import Counter, Reporter
from notebook_accel.training import collectives, process_group
from notebook_accel.training.accelerator import Accelerator
from notebook_accel.training.accumulation import GradientAccumulationPlugin, GradientState
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.backends.single_process import SingleProcess
from notebook_accel.training.data import DataLoaderConfiguration, prepare_data_loader, shard_dataloader
from notebook_accel.training.loader_position import ACTIVE_ITERATIONS
from notebook_accel.training.loaders import DataLoaderShard
from tests.training.datasets import Numbers, Stream
from tests.training.ranks import on_ranks


def prepare(
    loader: DataLoader[Any], backend: Backend | None = None, **options: Any
) -> tuple[DataLoaderShard, GradientState]:
    state = GradientState(GradientAccumulationPlugin(num_steps=1))
    backend = backend or SingleProcess(RankPlace(), torch.device("cpu"))
    shard = shard_dataloader(loader, backend=backend, config=DataLoaderConfiguration(**options))
    return shard, state


def test_alone_it_yields_what_the_loader_yields() -> None:
    plain = DataLoader(Numbers(10), batch_size=3, shuffle=True)
    shard, _ = prepare(plain)
    torch.manual_seed(0)
    expected = [batch.tolist() for _ in range(2) for batch in plain]
    torch.manual_seed(0)
    assert [batch.tolist() for _ in range(2) for batch in shard] == expected
    assert isinstance(shard, DataLoader)
    assert len(shard) == 4


def test_steps_are_counted_as_they_come_out() -> None:
    shard, _ = prepare(DataLoader(Numbers(7), batch_size=3))
    counter = shard.counter
    for epoch in (1, 2):
        assert [(counter.epoch, counter.step, counter.total) for _ in shard] == [(epoch, n, 3) for n in (1, 2, 3)]
    endless, _ = prepare(DataLoader(Stream(4), batch_size=3))
    assert [(endless.counter.step, endless.counter.total) for _ in endless] == [(1, None), (2, None)]


class Row(Reporter):
    """A reporter that records the counters that were shown."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Counter] = []

    def begin(self, counter: Counter, epoch: int | None, total: int | None) -> None:
        super().begin(counter, epoch, total)
        self.rows.append(counter)

    def show(self, counter: Counter) -> None:
        super().show(counter)
        self.rows.append(counter)


def test_the_row_shows_the_loader_that_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row()
    monkeypatch.setattr(reporting, "_reporter", row)
    training, _ = prepare(DataLoader(Numbers(2)))
    evaluation, _ = prepare(DataLoader(Numbers(1)))
    for _ in training:
        assert row.rows[-1] is training.counter
        for _ in evaluation:
            assert row.rows[-1] is evaluation.counter
        assert row.rows[-1] is training.counter
    assert len(row.rows) == 5


def test_epochs_reach_sampler_and_dataset() -> None:
    shard, _ = prepare(DataLoader(dataset := Numbers(4)))
    for _ in range(2):
        list(shard)
    shard.set_epoch(7)
    for _ in range(2):
        next(iter(shard))
    assert dataset.epochs == [0, 1, 2, 7, 8, 9]
    assert shard.counter.epoch == 9
    with contextlib.suppress(ZeroDivisionError):
        for _ in shard:
            1 / 0  # noqa: B018
    held = iter(shard)
    next(held)
    ACTIVE_ITERATIONS.abandon()  # a session's rank does so after an error, whose traceback holds the iterator
    assert dataset.epochs.pop() == 11
    dataset.set_epoch(20)
    next(iter(shard))
    assert dataset.epochs[-2:] == [20, 12]


def test_outside_its_rank_it_is_the_loader_that_it_was() -> None:
    shard, _ = prepare(DataLoader(Numbers(4), batch_size=2))
    again = pickle.loads(cloudpickle.dumps(shard))
    assert type(again) is DataLoader
    assert [batch.tolist() for batch in again] == [[0, 1], [2, 3]]


def test_prepared_by_another_accelerator_it_is_shared_out_once() -> None:
    loader = DataLoader(Numbers(4), batch_size=2)
    first, _ = prepare(loader)
    again, state = prepare(first)
    assert again.source is loader
    assert [state.end_of_dataloader for _ in again] == [False, True]


def test_options_of_the_loader_are_kept() -> None:
    def double(samples: list[int]) -> list[int]:
        return [2 * sample for sample in samples]

    shard, _ = prepare(DataLoader(Numbers(4), batch_size=2, collate_fn=double, timeout=0))
    assert list(shard) == [[0, 2], [4, 6]]


def test_loader_that_iterates_in_its_own_way() -> None:
    class Own(DataLoader[Any]):
        epoch = 0

        def __len__(self) -> int:
            return super().__len__() + 1

        def __iter__(self) -> Any:
            yield torch.tensor([self.epoch])
            yield from super().__iter__()

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    def own() -> Own:
        return Own(Numbers(4), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(5))

    accelerator, plain = Accelerator(cpu=True), own()
    loader = accelerator.prepare(own())
    for epoch in range(2):
        plain.set_epoch(epoch)
        found = [(batch.tolist(), accelerator.gradient_state.end_of_dataloader) for batch in loader]
        expected = [batch.tolist() for batch in plain]
        assert found == list(zip(expected, [False, False, True], strict=True))
    assert (len(loader), loader.total_batch_size) == (3, 2)
    plain.set_epoch(2)
    assert [batch.tolist() for batch in accelerator.skip_first_batches(loader, 1)] == [b.tolist() for b in plain][1:]
    with pytest.raises(ConfigError, match="can't shard a Own"):
        prepare_data_loader(own(), num_processes=2, process_index=0)


def test_loader_with_an_iterator_of_its_own() -> None:
    class Doubled(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return ([batch, batch] for batch in super()._get_iterator())

    class Stateful(Doubled):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Resume where ``state`` was taken."""

    accelerator = Accelerator(cpu=True)
    found = [[x.tolist() for x in batch] for batch in accelerator.prepare(Doubled(Numbers(4), batch_size=2))]
    assert found == [[[0, 1]] * 2, [[2, 3]] * 2]
    with pytest.raises(ConfigError, match="can't shard a Doubled"):
        prepare_data_loader(Doubled(Numbers(4)), num_processes=2, process_index=0)
    with pytest.raises(ConfigError, match="what prepare returns has state_dict"):
        prepare_data_loader(Stateful(Numbers(4)), num_processes=2, process_index=0)


@pytest.mark.parametrize("kind", ["generator", "stream"])
@on_ranks(2)
def test_shuffling_agrees_although_the_ranks_seeds_differ(kind: str) -> None:
    backend = process_group.join(cpu=True)
    torch.manual_seed(backend.place.rank)
    data, generator = Numbers(24), torch.Generator().manual_seed(backend.place.rank)
    loaders: dict[str, Any] = {
        "generator": lambda: DataLoader(data, batch_size=2, shuffle=True, generator=generator),
        "stream": lambda: DataLoader(Stream(24, generator), batch_size=2),
    }
    shard, _ = prepare(loaders[kind](), backend, dispatch_batches=False)
    epochs = [[batch.tolist() for batch in shard] for _ in range(3)]
    for of_all in zip(*collectives.gather_object(backend, [epochs]), strict=True):
        assert sorted(n for epoch in of_all for batch in epoch for n in batch) == list(range(24))
        assert [len(epoch) for epoch in of_all] == [6, 6]
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("message", ["DistributedSampler", "in_order=True"])
@pytest.mark.parametrize("dispatches", [False, True])
@on_ranks(2)
def test_loaders_that_several_ranks_refuse(message: str, dispatches: bool) -> None:
    backend = process_group.join(cpu=True)
    loaders: dict[str, Any] = {
        "DistributedSampler": lambda: DataLoader(Numbers(8), batch_size=2, sampler=DistributedSampler(Numbers(8))),
        "in_order=True": lambda: DataLoader(Numbers(4), batch_size=2, in_order=False),
    }
    with pytest.raises(ConfigError, match=message):
        prepare(loaders[message](), backend, split_batches=True, dispatch_batches=dispatches)


def test_data_seed() -> None:
    options = {"use_seedable_sampler": True, "data_seed": 21}
    shard, _ = prepare(DataLoader(Numbers(20), batch_size=20, shuffle=True), **options)
    expected = torch.randperm(20, generator=torch.Generator().manual_seed(21))
    assert torch.equal(next(iter(shard)), expected)
    again, _ = prepare(shard, use_seedable_sampler=True, data_seed=22)
    assert torch.equal(next(iter(again)), torch.randperm(20, generator=torch.Generator().manual_seed(22)))
    with pytest.warns(UserWarning, match="no effect without use_seedable_sampler"):
        DataLoaderConfiguration(data_seed=21)


def test_sizes_of_all_ranks_together() -> None:
    for loader, size in [
        (DataLoader(Numbers(9), batch_size=2), 2),
        (DataLoader(Numbers(9), batch_sampler=BatchSampler(range(9), 3, drop_last=False)), 3),
        (DataLoader(Numbers(9), batch_size=None), 1),
    ]:
        assert prepare(loader)[0].total_batch_size == size
        assert prepare(loader)[0].total_dataset_length == 9
    for split, size in [(False, 8), (True, 4)]:
        assert share(DataLoader(Numbers(9), batch_size=4), split_batches=split).total_batch_size == size


def share(loader: DataLoader[Any], rank: int = 0, **options: Any) -> DataLoaderShard:
    return prepare_data_loader(loader, num_processes=2, process_index=rank, **options)


def test_the_share_of_a_rank_by_itself() -> None:
    torch.manual_seed(3)
    expected = [batch.tolist() for batch in DataLoader(Numbers(8), batch_size=2, shuffle=True)]
    for rank in range(2):
        torch.manual_seed(3)
        shard = share(DataLoader(Numbers(8), batch_size=2, shuffle=True), rank)
        assert [batch.tolist() for batch in shard] == expected[rank::2]
        stream = share(DataLoader(Stream(5), batch_size=2), rank)
        assert [batch.tolist() for batch in stream] == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]][rank]


def test_loaders_without_an_accelerator_tell_the_latest_one() -> None:
    state = GradientState(GradientAccumulationPlugin(num_steps=2))
    assert GradientState() is state
    loader = prepare_data_loader(DataLoader(Numbers(2)))
    assert [(state.in_dataloader, GradientState().end_of_dataloader) for _ in loader] == [(True, False), (True, True)]
    assert not state.in_dataloader
    assert (state.num_steps, state.remainder) == (2, -1)


@pytest.mark.parametrize(("given", "message"), [
    ([1, 2], "DataLoader, not list"),
    (Numbers(3), "DataLoader, not Numbers"),
    (DataLoader(Numbers(3), batch_size=3), "a batch of 3 into 2 equal parts"),
    (DataLoader(Stream(3), batch_size=3), "a batch of 3 into 2 equal parts"),
])  # fmt: skip
def test_loaders_that_cannot_be_shared_out(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        share(given, split_batches=True)


@pytest.mark.parametrize("given", [Numbers(3), Stream(3), RandomSampler(range(3))])
def test_what_is_prepared_is_a_loader(given: Any) -> None:
    with pytest.raises(ConfigError, match="prepare takes loaders"):
        Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1), given)


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
    """A stream of numbers that the workers draw one by one."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        for number in range(12):
            yield 100 * number + int(torch.randint(100, (), generator=self.generator))


@on_ranks(2)
def test_persistent_workers_streams_stay_in_step() -> None:
    """The second of three epochs is left early."""
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
    first, second = collectives.gather_object(backend, [epochs])
    assert first == second
    assert [[sample // 100 for sample in epoch] for epoch in first] == [list(range(12)), [0, 1, 2, 3], list(range(12))]
    assert first[0] != first[2]


class Halves(IterableDataset[int]):
    """A stream whose ``worker_init_fn`` sets the part that each worker reads, as in torch's documentation."""

    start, end = 0, 8

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def tell(worker: int) -> None:
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    middle = (dataset.start + dataset.end) // 2
    dataset.start, dataset.end = [(dataset.start, middle), (middle, dataset.end)][worker]


@pytest.mark.parametrize("dispatch", [True, False])
@on_ranks(2)
def test_workers_are_told_what_to_read(dispatch: bool) -> None:
    backend = process_group.join(cpu=True)
    loader = DataLoader(Halves(), batch_size=2, num_workers=2, worker_init_fn=tell)
    shard, state = prepare(loader, backend, dispatch_batches=dispatch)
    read = [n for batch in shard for n in collectives.gather_for_metrics(backend, batch, state.tail).tolist()]
    assert sorted(read) == list(range(8))

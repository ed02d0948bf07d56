from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from notebook_accel import reporting
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError
from notebook_accel.reporting import Counter, Reporter
from notebook_accel.training import collectives, process_group
from notebook_accel.training.accumulation import GradientAccumulationPlugin, GradientState
from notebook_accel.training.data import DataLoaderConfiguration, DataLoaderShard, prepare_data_loader
from notebook_accel.training.runtimes.runtime import Runtime
from notebook_accel.training.runtimes.single_process import SingleProcess
from tests.training.ranks import Ranks


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Stream(IterableDataset[int]):
    """Numbers in order, or in the order of a generator."""

    def __init__(self, length: int, generator: torch.Generator | None = None) -> None:
        self.length = length
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            return iter(range(self.length))
        return iter(torch.randperm(self.length, generator=self.generator).tolist())


def prepare(
    loader: DataLoader[Any], runtime: Runtime | None = None, **options: Any
) -> tuple[DataLoaderShard, GradientState]:
    state = GradientState(GradientAccumulationPlugin(num_steps=1))
    runtime = runtime or SingleProcess(RankPlace(), torch.device("cpu"))
    shard = prepare_data_loader(loader, runtime=runtime, state=state, config=DataLoaderConfiguration(**options))
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


def test_the_last_batch_is_known_while_it_is_out() -> None:
    shard, state = prepare(DataLoader(Numbers(7), batch_size=3))
    for _ in range(2):
        assert [state.end_of_dataloader for _ in shard] == [False, False, True]
        assert not state.end_of_dataloader


def test_break_leaves_nothing_active() -> None:
    shard, state = prepare(DataLoader(Numbers(2), batch_size=2))
    for _ in shard:
        assert state.end_of_dataloader
        break
    assert not state.end_of_dataloader
    next(iter(shard))
    assert not state.end_of_dataloader


def test_empty_loader() -> None:
    shard, state = prepare(DataLoader(Numbers(0), batch_size=2))
    assert list(shard) == []
    assert not state.end_of_dataloader


def test_steps_are_counted_as_they_come_out() -> None:
    shard, _ = prepare(DataLoader(Numbers(7), batch_size=3))
    counter = shard.counter
    for epoch in (1, 2):
        assert [(counter.epoch, counter.step, counter.total) for _ in shard] == [(epoch, n, 3) for n in (1, 2, 3)]
    endless, _ = prepare(DataLoader(Stream(4), batch_size=3))
    assert [(endless.counter.step, endless.counter.total) for _ in endless] == [(1, None), (2, None)]


class Row(Reporter):
    """Remembers which counters were shown."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Counter] = []

    def begin(self, counter: Counter, epoch: int | None, total: int | None) -> None:
        super().begin(counter, epoch, total)
        self.shown.append(counter)

    def show(self, counter: Counter) -> None:
        super().show(counter)
        self.shown.append(counter)


def test_the_row_shows_the_loader_that_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row()
    monkeypatch.setattr(reporting, "_reporter", row)
    training, state = prepare(DataLoader(Numbers(2)))
    evaluation = prepare_data_loader(
        DataLoader(Numbers(1)),
        runtime=SingleProcess(RankPlace(), torch.device("cpu")),
        state=state,
        config=DataLoaderConfiguration(),
    )

    for _ in training:
        assert row.shown[-1] is training.counter
        for _ in evaluation:
            assert row.shown[-1] is evaluation.counter
        assert row.shown[-1] is training.counter
    assert len(row.shown) == 5


def test_epochs_reach_sampler_and_dataset() -> None:
    shard, _ = prepare(DataLoader(dataset := Numbers(4)))
    for _ in range(2):
        list(shard)
    shard.set_epoch(7)
    for _ in range(2):
        next(iter(shard))
    assert dataset.epochs == [0, 1, 7, 7, 8]
    assert shard.counter.epoch == 9


def test_seedable_sampler() -> None:
    torch.manual_seed(4)
    shard, _ = prepare(DataLoader(Numbers(20), batch_size=20, shuffle=True), use_seedable_sampler=True)
    torch.rand(100)
    for epoch in range(2):
        expected = torch.randperm(20, generator=torch.Generator().manual_seed(4 + epoch))
        assert torch.equal(next(iter(shard)), expected)


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
        def __iter__(self) -> Any:
            return iter(["mine"])

    with pytest.raises(ConfigError, match="can't share out a Own"):
        prepare(Own(Numbers(4)))


def test_dispatching_is_not_there_yet() -> None:
    DataLoaderConfiguration(dispatch_batches=False)
    with pytest.raises(ConfigError, match="isn't there yet"):
        DataLoaderConfiguration(dispatch_batches=True)


def own_samplers(kind: str) -> Any:
    """Three epochs of what this rank reads."""
    runtime = process_group.join(cpu=True)
    torch.manual_seed(runtime.place.rank)
    data, generator = Numbers(24), torch.Generator().manual_seed(runtime.place.rank)
    loaders: dict[str, Any] = {
        "shuffle": lambda: DataLoader(data, batch_size=2, shuffle=True),
        "generator": lambda: DataLoader(data, batch_size=2, shuffle=True, generator=generator),
        "subset": lambda: DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(24))),
        "weighted": lambda: DataLoader(
            data, batch_size=2, sampler=WeightedRandomSampler([1.0] * 24, 24, replacement=False)
        ),
        "batch sampler": lambda: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, drop_last=True)),
        "workers": lambda: DataLoader(data, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True),
        "stream": lambda: DataLoader(Stream(24, generator), batch_size=2),
        "seedable": lambda: DataLoader(data, batch_size=2, shuffle=True),
    }
    shard, _ = prepare(loaders[kind](), runtime, use_seedable_sampler=kind == "seedable")
    return [[batch.tolist() for batch in shard] for _ in range(3)]


@pytest.mark.parametrize(
    "kind", ["shuffle", "generator", "subset", "weighted", "batch sampler", "workers", "stream", "seedable"]
)
def test_shuffling_agrees_although_the_ranks_seeds_differ(two_ranks: Ranks, kind: str) -> None:
    by_rank = two_ranks.run(own_samplers, kind)
    for epoch in range(3):
        read = [sample for rank in by_rank for batch in rank[epoch] for sample in batch]
        assert sorted(read) == list(range(24))
        assert len(by_rank[0][epoch]) == len(by_rank[1][epoch]) == 6
    assert by_rank[0][0] != by_rank[0][1] != by_rank[0][2]


def test_ranks_shuffle_as_one_process_does(two_ranks: Ranks) -> None:
    by_rank = two_ranks.run(own_samplers, "shuffle")
    torch.manual_seed(0)
    plain = DataLoader(Numbers(24), batch_size=2, shuffle=True)
    for epoch in range(3):
        expected = [batch.tolist() for batch in plain]
        assert [by_rank[0][epoch], by_rank[1][epoch]] == [expected[0::2], expected[1::2]]


def read(kind: str, n: int, batch_size: int | None, options: dict[str, Any]) -> Any:
    runtime = process_group.join(cpu=True)
    dataset: Any = Stream(n) if kind == "stream" else Numbers(n)
    shard, _ = prepare(DataLoader(dataset, batch_size=batch_size), runtime, **options)
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in shard]


@pytest.mark.parametrize("kind", ["dataset", "stream"])
def test_ranks_take_turns(two_ranks: Ranks, kind: str) -> None:
    assert two_ranks.run(read, kind, 7, 2, {}) == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    assert two_ranks.run(read, kind, 7, 2, {"even_batches": False}) == [[[0, 1], [4, 5]], [[2, 3], [6]]]
    assert two_ranks.run(read, kind, 7, 4, {"split_batches": True}) == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    assert two_ranks.run(read, kind, 3, None, {}) == [[0, 2], [1, 0]]


def test_split_batches_that_do_not_divide(two_ranks: Ranks) -> None:
    for error in two_ranks.replies(read, "dataset", 7, 3, {"split_batches": True}):
        assert isinstance(error, ConfigError)
        assert "a batch of 3 into 2 equal parts" in str(error)


def share_twice() -> None:
    runtime = process_group.join(cpu=True)
    prepare(DataLoader(Numbers(8), sampler=DistributedSampler(Numbers(8))), runtime)


def test_loader_that_is_shared_out_already(two_ranks: Ranks) -> None:
    for error in two_ranks.replies(share_twice):
        assert isinstance(error, ConfigError)
        assert "DistributedSampler" in str(error)


def metrics(cases: list[tuple[int, int]], options: dict[str, Any], streams: bool) -> list[Any]:
    """For each length and batch size: what the ranks gathered over an epoch, as tensors and as objects."""
    runtime = process_group.join(cpu=True)
    found = []
    for n, batch_size in cases:
        loader = DataLoader(Stream(n) if streams else Numbers(n), batch_size=batch_size)
        shard, state = prepare(loader, runtime, **options)
        tensors, objects = [], []
        for batch in shard:
            tree = {"ids": batch, "tokens": torch.stack([batch, batch], 1).reshape(-1)}
            gathered = collectives.gather_for_metrics(runtime, tree, state.tail)
            assert gathered["tokens"].tolist() == gathered["ids"].repeat_interleave(2).tolist()
            tensors += gathered["ids"].tolist()
            objects += collectives.gather_for_metrics(runtime, batch.tolist(), state.tail, use_gather_object=True)
        found.append((tensors, objects))
    return found


def test_each_sample_once_on_two_ranks(two_ranks: Ranks) -> None:
    cases = list(itertools.product(range(1, 41), range(1, 6)))
    for by_rank in two_ranks.run(metrics, cases, {}, False, deadline_s=110):
        for (n, _), found in zip(cases, by_rank, strict=True):
            assert found == (list(range(n)), list(range(n)))


def test_each_sample_once_on_three_ranks(three_ranks: Ranks) -> None:
    cases = list(itertools.product(range(1, 20), (1, 2, 3, 5)))
    for by_rank in three_ranks.run(metrics, cases, {}, False, deadline_s=110):
        for (n, _), found in zip(cases, by_rank, strict=True):
            assert found == (list(range(n)), list(range(n)))


@pytest.mark.parametrize(("options", "streams"), [
    ({}, True),
    ({"split_batches": True}, False),
    ({"split_batches": True}, True),
])  # fmt: skip
def test_each_sample_once_however_it_is_shared_out(two_ranks: Ranks, options: dict[str, Any], streams: bool) -> None:
    cases = list(itertools.product(range(1, 12), (2, 4)))
    for by_rank in two_ranks.run(metrics, cases, options, streams):
        for (n, _), found in zip(cases, by_rank, strict=True):
            assert found == (list(range(n)), list(range(n)))


def test_each_sample_once_with_ragged_last_batches(two_ranks: Ranks) -> None:
    cases = [(7, 2), (8, 2), (15, 4)]
    for streams in (False, True):
        for by_rank in two_ranks.run(metrics, cases, {"even_batches": False}, streams):
            for (n, _), found in zip(cases, by_rank, strict=True):
                assert found == (list(range(n)), list(range(n)))


def metrics_of_workers() -> Any:
    runtime = process_group.join(cpu=True)
    shard, state = prepare(DataLoader(Stream(7), batch_size=2, num_workers=1), runtime)
    return [collectives.gather_for_metrics(runtime, batch, state.tail).tolist() for batch in shard]


def test_each_sample_once_when_a_worker_reads_the_stream(two_ranks: Ranks) -> None:
    assert two_ranks.run(metrics_of_workers) == [[[0, 1, 2, 3], [4, 5, 6]]] * 2


def metrics_after_break() -> Any:
    runtime = process_group.join(cpu=True)
    shard, state = prepare(DataLoader(Numbers(3), batch_size=2), runtime)
    for _ in shard:
        break
    return len(collectives.gather_for_metrics(runtime, torch.zeros(50), state.tail))


def test_metrics_after_a_break_are_not_cut(two_ranks: Ranks) -> None:
    assert two_ranks.run(metrics_after_break) == [100, 100]

"""Checkpoints that another number of ranks loads."""

from __future__ import annotations

import itertools
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from notebook_accel import Accelerator, DataLoaderConfiguration, prepare_data_loader
from notebook_accel.utils import set_seed
from tests.training import sharded_programs
from tests.training.ranks import Ranks, caught_warnings
from tests.training.sharded_programs import Case


class Stream(IterableDataset[int]):
    """A stream of 23 numbers, of which each worker reads its part."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        yield from range(23) if worker is None else range(worker.id, 23, worker.num_workers)


States = list[dict[str, Any]]


def shares_of(make: Callable[[], DataLoader[Any]], ranks: int, states: States, **options: Any) -> list[Any]:
    """Return the loaders of all ranks of a run, which go on from the states of an earlier one if there are any."""
    torch.manual_seed(6 if states else 5)  # an epoch that goes on draws no new order
    loaders = [prepare_data_loader(make(), num_processes=ranks, process_index=rank, **options) for rank in range(ranks)]
    for rank, loader in enumerate(loaders if states else ()):
        loader.load_state_dict(states[rank if rank < len(states) else 0])
    return loaders


def read(loaders: list[Any], rounds: int | None = None) -> tuple[list[int], States]:
    """Return what all ranks read together in an epoch, or in its first rounds, and their states after these."""
    by_rank, states = [], []
    for loader in loaders:
        torch.manual_seed(5 if loader.state_dict()["begun"] is None else 6)
        running = iter(loader)
        by_rank.append([batch.tolist() for batch in itertools.islice(running, rounds)])
        states.append(loader.state_dict())
    return [n for batches in itertools.zip_longest(*by_rank, fillvalue=[]) for batch in batches for n in batch], states


@settings(deadline=None, max_examples=60)
@given(
    samples=st.integers(1, 60),
    worlds=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    batch_size=st.integers(1, 4),
    first=st.integers(0, 5),
    second=st.integers(0, 5),
    how=st.sampled_from(["plain", "generator", "seedable", "split"]),
)
@example(samples=16, worlds=[2, 1, 4], batch_size=1, first=1, second=0, how="split")
def test_each_sample_of_an_epoch_comes_once(
    samples: int, worlds: list[int], batch_size: int, first: int, second: int, how: str
) -> None:
    """A run goes on with another number of ranks, and again with another one."""
    options = {"even_batches": False, "use_seedable_sampler": how == "seedable", "split_batches": how == "split"}

    def make() -> DataLoader[int]:
        generator = torch.Generator().manual_seed(3) if how == "generator" else None
        size = 12 * batch_size if how == "split" else batch_size
        return DataLoader(range(samples), batch_size=size, shuffle=True, generator=generator)  # type: ignore[arg-type]

    whole, _ = read(shares_of(make, 1, [], **options))
    assert sorted(whole) == list(range(samples))
    seen: list[int] = []
    states: States = []
    for ranks, rounds in zip(worlds, (first, second), strict=False):
        possible = min(len(list(loader)) for loader in shares_of(make, ranks, states, **options))
        if rounds and possible:  # all ranks have as many batches when they save
            found, states = read(shares_of(make, ranks, states, **options), min(rounds, possible))
            seen += found
    assert seen + read(shares_of(make, worlds[-1], states, **options))[0] == whole


def test_a_stream_repeats_what_can_not_be_dealt_out_and_says_so() -> None:
    first, states = read(shares_of(lambda: DataLoader(Stream(), batch_size=3), 3, []), 1)
    assert first == list(range(9))
    with pytest.warns(UserWarning, match="1 samples of epoch 0 are repeated: the loader had yielded 9"):
        loaders = shares_of(lambda: DataLoader(Stream(), batch_size=4), 1, states)
    assert read(loaders)[0] == list(range(8, 23))
    assert read(shares_of(lambda: DataLoader(Stream(), batch_size=9), 1, states))[0] == list(range(9, 23))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_several_workers_read_begins_anew_and_says_so(workers: int) -> None:
    """Its workers have yielded different numbers of samples after an odd number of batches."""
    _, states = read(shares_of(lambda: DataLoader(Stream(), batch_size=2, num_workers=2), 2, []), 3)
    said = f"2 ranks had read a stream with 2 workers .*, and 1 ranks read it with {workers or 1} now"
    with pytest.warns(UserWarning, match=said):
        loaders = shares_of(lambda: DataLoader(Stream(), batch_size=2, num_workers=workers), 1, states)
    assert sorted(read(loaders)[0]) == list(range(23))


def read_samples(dispatches: bool, load: str | None, save: str | None) -> list[int]:
    """Return the samples that all ranks take together, after a checkpoint was loaded and until one is saved."""
    set_seed(5)
    config = DataLoaderConfiguration(dispatch_batches=dispatches)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(torch.arange(23), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    if load is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator.load_state(load)
    seen: list[int] = []
    for number, batch in enumerate(loader, start=1):
        seen += accelerator.gather_for_metrics(batch).tolist()
        if number == 2 and save is not None:
            accelerator.save_state(save)
            break
    return seen


@pytest.mark.parametrize("dispatches", [False, True])
def test_real_ranks_take_what_others_have_left(
    groups: dict[int, Ranks], tmp_path: pathlib.Path, dispatches: bool
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    [whole] = groups[1].run(read_samples, dispatches, None, None)
    seen = groups[2].run(read_samples, dispatches, None, first)[0]
    seen += groups[1].run(read_samples, dispatches, first, second)[0]
    by_rank = groups[2].run(read_samples, dispatches, second, None)
    assert by_rank[0] == by_rank[1]
    assert seen + by_rank[0] == whole
    assert sorted(whole) == list(range(23))


def numbers_after(folder: str, load: bool) -> Any:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    set_seed(9)  # on every rank, as programs do
    if not load:
        accelerator.save_state(folder)
        return torch.rand(3).tolist(), ""
    with caught_warnings() as caught:
        accelerator.load_state(folder)
    return torch.rand(3).tolist(), [str(warning.message) for warning in caught]


@pytest.mark.slow
def test_new_ranks_draw_numbers_of_their_own(groups: dict[int, Ranks], tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path / "state")
    ((expected, _),) = groups[1].run(numbers_after, folder, False)
    by_rank = groups[3].run(numbers_after, folder, True)
    numbers = [tuple(drawn) for drawn, _ in by_rank]
    assert list(numbers[0]) == expected
    assert len(set(numbers)) == 3
    text = "was saved by 1 of this run's 3 ranks: ranks 1 to 2 draw their random numbers afresh."
    assert [said for _, said in by_rank] == [[f"The checkpoint {folder} {text}"], [], []]
    assert groups[3].run(numbers_after, folder, True) == by_rank


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_training_goes_on_as_if_undisturbed(
    groups: dict[int, Ranks], tmp_path: pathlib.Path, saving: int, loading: int
) -> None:
    """It is saved inside an accumulation window."""
    folder, case = str(tmp_path / "state"), Case(sharded=False, window=2)
    (expected, losses), *_ = groups[saving].run(sharded_programs.saved, folder, case)
    (state, resumed), *_ = groups[loading].run(sharded_programs.loaded, folder, case)
    assert state == expected
    assert resumed == pytest.approx(losses, rel=0, abs=1e-6)
    assert len(losses) == sharded_programs.RESUMED_STEPS

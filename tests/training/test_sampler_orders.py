"""Tests that all ranks together draw the order that one process draws, whatever draws it, also after a resume."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from notebook_accel import Accelerator, DataLoaderConfiguration
from notebook_accel.training.sharding import SeedableRandomSampler
from notebook_accel.utils import set_seed
from tests.training.ranks import Ranks, on_ranks

_SAMPLES = 48


def slow(kind: str) -> Any:
    return pytest.param(kind, marks=pytest.mark.slow)


class Shuffled(Sampler[int]):
    """A sampler as people write it: it has no generator, and draws by Python's own."""

    def __len__(self) -> int:
        return _SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(_SAMPLES))
        random.shuffle(order)
        yield from order


class Buckets:
    """A batch sampler without a ``batch_size``."""

    def __len__(self) -> int:
        return _SAMPLES // 6

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(_SAMPLES).tolist()
        yield from (order[first : first + 6] for first in range(0, _SAMPLES, 6))


class Listed(Buckets):
    """A batch sampler that draws its order when ``iter`` is called, by the generator that ``draw`` uses."""

    def __init__(self, draw: Callable[[list[int]], list[int]]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[list[int]]:
        order = self.draw(list(range(_SAMPLES)))
        return iter([order[first : first + 6] for first in range(0, _SAMPLES, 6)])


class ShuffledBatches(BatchSampler):
    """A subclass of torch's that shuffles whole batches."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        random.shuffle(batches)
        return iter(batches)


class Anywhere(Buckets):
    """A batch sampler that draws each batch when it is asked for, by all generators."""

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(_SAMPLES))
        while left:
            numbers = [random.random(), float(np.random.rand()), torch.rand(()).item()]
            yield [left.pop(int(numbers[k % 3] * len(left))) for k in range(6)]


_OPTIONS: dict[str, Any] = {
    "weighted": lambda: {"batch_size": 6, "sampler": WeightedRandomSampler(torch.arange(1.0, _SAMPLES + 1), _SAMPLES)},
    "subset": lambda: {"batch_size": 6, "sampler": SubsetRandomSampler(range(_SAMPLES))},
    "subset in batches": lambda: {"batch_sampler": BatchSampler(SubsetRandomSampler(range(_SAMPLES)), 6, True)},
    "own sampler": lambda: {"batch_size": 6, "sampler": Shuffled()},
    "own batch sampler": lambda: {"batch_sampler": Buckets()},
    "listed by numpy": lambda: {"batch_sampler": Listed(lambda n: np.random.permutation(n).tolist())},
    "listed by python": lambda: {"batch_sampler": Listed(lambda n: random.sample(n, len(n)))},
    "shuffled batches": lambda: {"batch_sampler": ShuffledBatches(SubsetRandomSampler(range(_SAMPLES)), 6, True)},
    "anywhere": lambda: {"batch_sampler": Anywhere()},
    "batches as items": lambda: {"batch_size": None, "sampler": BatchSampler(RandomSampler(range(_SAMPLES)), 6, False)},
}


def loader_of(kind: str) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True)
    dataset = TensorDataset(torch.arange(_SAMPLES))
    return accelerator, accelerator.prepare(DataLoader(dataset, **_OPTIONS[kind]()))


def drawn(kind: str, device_specific: bool) -> list[list[int]]:
    set_seed(3, device_specific=device_specific)
    accelerator, loader = loader_of(kind)
    return [[n for (x,) in loader for n in accelerator.gather(x).tolist()] for _ in range(2)]


@pytest.mark.parametrize("kind", [kind for kind in _OPTIONS if kind != "anywhere"])
def test_ranks_draw_the_order_of_one_process(one_rank: Ranks, two_ranks: Ranks, kind: str) -> None:
    [expected] = one_rank.run(drawn, kind, False)
    assert expected[0] != expected[1] != sorted(expected[1])
    assert two_ranks.run(drawn, kind, False) == [expected, expected]
    # Also where each rank has random numbers of its own: those of rank 0 are seeded alike.
    assert two_ranks.run(drawn, kind, True) == [expected, expected]


def save(kind: str, folder: str) -> list[int]:
    set_seed(5)
    accelerator, loader = loader_of(kind)
    seen: list[int] = []
    for (x,) in loader:
        seen += accelerator.gather(x).tolist()
        if len(seen) == 24:
            accelerator.save_state(folder)
            break
    return seen


def load(kind: str, folder: str) -> list[int]:
    accelerator, loader = loader_of(kind)
    accelerator.load_state(folder)
    return [n for (x,) in loader for n in accelerator.gather(x).tolist()]


# Those whose order is drawn before the first batch, and that say how large a batch is.
@pytest.mark.parametrize("kind", [slow("subset"), "own sampler", "shuffled batches", slow("batches as items")])
def test_another_number_of_ranks_takes_what_is_left(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: pathlib.Path, kind: str
) -> None:
    for before, after in ((one_rank, two_ranks), (two_ranks, one_rank)):
        folder = str(tmp_path / f"{before is one_rank}")
        taken, rest = before.run(save, kind, folder)[0], after.run(load, kind, folder)[0]
        assert sorted(taken + rest) == list(range(_SAMPLES))


@pytest.mark.parametrize("kind", [
    slow("subset"), slow("own sampler"), "own batch sampler", "listed by numpy", slow("listed by python"),
    slow("shuffled batches"), "anywhere", "batches as items",
])  # fmt: skip
def test_as_many_ranks_take_what_is_left(two_ranks: Ranks, tmp_path: pathlib.Path, kind: str) -> None:
    (taken, whole), of_rank_1 = two_ranks.run(save_and_finish, kind, str(tmp_path / "state"))
    assert of_rank_1 == (taken, whole)
    assert sorted(whole) == list(range(_SAMPLES))
    assert two_ranks.run(load, kind, str(tmp_path / "state")) == [whole[len(taken) :]] * 2


def save_and_finish(kind: str, folder: str) -> tuple[list[int], list[int]]:
    """Return what was taken before a checkpoint, and a whole epoch, in which each rank draws numbers of its own."""
    set_seed(5, device_specific=True)
    accelerator, loader = loader_of(kind)
    taken: list[int] = []
    whole: list[int] = []
    for (x,) in loader:
        torch.rand(accelerator.process_index), random.random()
        whole += accelerator.gather(x).tolist()
        if len(whole) == 24:
            taken = [*whole]
            accelerator.save_state(folder)
    return taken, whole


class Curriculum(Sampler[int]):
    """A sampler that reads the epoch that the program sets."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(24, generator=generator).tolist())


class ByLength(BatchSampler):
    """A batch sampler that reads the data that its sampler has."""

    def __iter__(self) -> Iterator[list[int]]:
        data: Any = self.sampler.data_source  # type: ignore[attr-defined]
        batches = list(super().__iter__())
        return iter(sorted(batches, key=lambda batch: int(data[batch[0]][0])))


Change = Callable[[int, Any], None]


def _weighted() -> tuple[dict[str, Any], Change]:
    sampler = WeightedRandomSampler(torch.arange(1.0, _SAMPLES + 1), 24, generator=torch.Generator())
    return {"batch_size": 3, "sampler": sampler}, lambda epoch, _: setattr(
        sampler, "weights", (torch.arange(_SAMPLES) // 8 == epoch).float()
    )


def _subset_of_loader() -> tuple[dict[str, Any], Change]:
    sampler = SubsetRandomSampler(range(12))
    return {"batch_size": 3, "sampler": sampler}, lambda epoch, loader: setattr(
        loader.sampler, "indices", range(6 * epoch + 6)
    )


def _own_epochs() -> tuple[dict[str, Any], Change]:
    sampler = Curriculum()
    return {"batch_size": 3, "sampler": sampler}, lambda epoch, _: sampler.set_epoch(3 + 2 * epoch)


def _batch_size_of_loader() -> tuple[dict[str, Any], Change]:
    batches = BatchSampler(SubsetRandomSampler(range(24)), 2, False)
    return {"batch_sampler": batches}, lambda epoch, loader: setattr(loader.batch_sampler, "batch_size", 2 * epoch + 2)


def _another_sampler() -> tuple[dict[str, Any], Change]:
    batches = BatchSampler(range(24), 2, False)
    return {
        "batch_sampler": batches
    }, lambda epoch, _: setattr(batches, "sampler", SubsetRandomSampler(range(12))) if (epoch == 1) else None


def _data_source() -> tuple[dict[str, Any], Change]:
    return {"batch_sampler": ByLength(RandomSampler(TensorDataset(torch.arange(_SAMPLES))), 3, False)}, lambda *_: None


_PROGRAMS = {
    "weights": _weighted, "the loader's indices": _subset_of_loader, "epochs": _own_epochs,
    "the loader's batch size": _batch_size_of_loader, "its sampler's data": _data_source,
    "its sampler": _another_sampler,
}  # fmt: skip


def batches_of_program(kind: str, is_prepared: bool, dispatches: bool | None = None) -> list[list[list[int]]]:
    """Return the batches of three epochs of all ranks together, the sampler changed before each."""
    set_seed(3, device_specific=is_prepared)
    options, change = _PROGRAMS[kind]()
    loader: Any = DataLoader(TensorDataset(torch.arange(_SAMPLES)), **options)
    config = DataLoaderConfiguration(dispatch_batches=dispatches)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(loader) if is_prepared else loader
    epochs = []
    for epoch in range(3):
        change(epoch, loader)
        gathered = [accelerator.gather_for_metrics(x).tolist() if is_prepared else x.tolist() for (x,) in loader]
        epochs.append(gathered)
        assert len(loader) == len(gathered)
    return epochs


@pytest.mark.parametrize("dispatches", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", _PROGRAMS)
def test_changes_of_a_sampler_take_effect(two_ranks: Ranks, kind: str, dispatches: bool) -> None:
    plain = batches_of_program(kind, is_prepared=False)
    together = [[[*epoch[step], *epoch[step + 1]] for step in range(0, len(epoch), 2)] for epoch in plain]
    assert together[0] != together[1]
    assert two_ranks.run(batches_of_program, kind, True, dispatches) == [together] * 2


def own_epochs(folder: str, is_resumed: bool) -> list[int]:
    """Train on three epochs that the program numbers itself, with a checkpoint in the second, or go on from that."""
    accelerator = Accelerator(cpu=True)
    sampler = Curriculum()
    batches = BatchSampler(sampler, 3, drop_last=False)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(_SAMPLES)), batch_sampler=batches))
    if is_resumed:
        accelerator.load_state(folder)
    seen: list[int] = []
    for epoch in range(loader.epoch, 3):
        sampler.set_epoch(5 + epoch)
        for (x,) in loader:
            seen += accelerator.gather(x).tolist()
            if len(seen) == 36 and not is_resumed:
                accelerator.save_state(folder)
    return seen


def test_the_programs_own_epochs_at_a_resume(two_ranks: Ranks, tmp_path: pathlib.Path) -> None:
    whole, _ = two_ranks.run(own_epochs, str(tmp_path / "state"), False)
    expected = [torch.randperm(24, generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in (5, 6, 7)]
    assert whole == [n for order in expected for n in order]
    assert two_ranks.run(own_epochs, str(tmp_path / "state"), True) == [whole[36:]] * 2


def assert_order_follows_data_that_grow() -> None:
    torch.manual_seed(4)
    data = list(range(8))
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=True))  # type: ignore[arg-type]
    for epoch in range(3):
        order = list(SeedableRandomSampler(data, data_seed=4 + epoch))
        assert [n for x in loader for n in accelerator.gather_for_metrics(x).tolist()] == order
        data += range(len(data), len(data) + 3)


def test_a_seedable_sampler_of_one_process_follows_data_that_grow() -> None:
    assert_order_follows_data_that_grow()


@on_ranks(2)
def test_a_seedable_sampler_of_ranks_follows_data_that_grow() -> None:
    assert_order_follows_data_that_grow()

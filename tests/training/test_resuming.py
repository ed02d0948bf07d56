"""Training that was interrupted and resumed gives the same weights as uninterrupted training, to the bit."""

from __future__ import annotations

import contextlib
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from notebook_accel import Accelerator, DataLoaderConfiguration, environment, skip_first_batches
from notebook_accel.utils import set_seed
from tests.training.ranks import Ranks

_EPOCHS = 2


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread, since threads that wait for each other take most of the time on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


_SAMPLES = 22
Batch = tuple[torch.Tensor, torch.Tensor]


class Augmented(Dataset[Batch]):
    """A dataset whose samples are drawn anew from all generators each time they are read."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> Batch:
        noise = torch.randn(4) + random.random() + float(np.random.rand())
        return torch.full((4,), float(index)) / _SAMPLES + noise / 10, torch.tensor(index % 3)


class Stream(IterableDataset[Batch]):
    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(_SAMPLES, generator=self.generator) if self.generator else torch.arange(_SAMPLES)
        for index in order.tolist():
            yield torch.full((4,), float(index)) / _SAMPLES, torch.tensor(index % 3)


class Program:
    """A training program. It can be stopped after any micro-batch, and another instance goes on from the checkpoint.

    Args:
        kind: The kind of loader.
        steps: Number of micro-batches in an accumulation window.
        options: Options of ``DataLoaderConfiguration``.
    """

    def __init__(self, kind: str = "map", steps: int = 1, **options: Any) -> None:
        set_seed(7, device_specific=True)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = lr_scheduler.StepLR(optimizer, 5, gamma=0.7)
        generator = torch.Generator().manual_seed(3)
        loaders: dict[str, Any] = {
            "map": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True),
            "generator": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True, generator=generator),
            "workers": lambda: DataLoader(Fixed(), batch_size=2, shuffle=True, num_workers=1),
            "stream": lambda: DataLoader(Stream(generator), batch_size=2),
        }
        config = DataLoaderConfiguration(**options)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, dataloader_config=config)
        self.net, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loaders[kind](), scheduler
        )
        self.micro_batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"micro_batches": self.micro_batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.micro_batches = state["micro_batches"]

    def run(self, folder: pathlib.Path | None = None, *, stop_after: int | None = None) -> list[torch.Tensor]:
        """Train to the end, or save a checkpoint after ``stop_after`` micro-batches; return the weights."""
        for _ in range(self.loader.epoch, _EPOCHS):
            for x, y in self.loader:
                self.step(x, y)
                if self.micro_batches == stop_after:
                    self.accelerator.save_state(folder)
                    return []
            self.scheduler.scheduler.step()  # once an epoch besides
        return [parameter.detach().clone() for parameter in self.accelerator.unwrap_model(self.net).parameters()]

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        with self.accelerator.accumulate(self.net):
            self.accelerator.backward(F.cross_entropy(self.net(x), y))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.micro_batches += 1


class Fixed(Dataset[Batch]):
    """A dataset whose samples are the same each time."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> Batch:
        return torch.full((4,), float(index)) / _SAMPLES, torch.tensor(index % 3)


def resumed(folder: str, stop_after: int, kind: str, steps: int, options: dict[str, Any]) -> list[torch.Tensor]:
    """Return the weights of a program that is stopped, and finished by a new one from its checkpoint."""
    first = Program(kind, steps, **options)
    first.accelerator.register_for_checkpointing(first)
    first.run(pathlib.Path(folder), stop_after=stop_after)
    assert first.micro_batches == stop_after
    second = Program(kind, steps, **options)
    second.accelerator.register_for_checkpointing(second)
    torch.rand(5), random.random(), np.random.rand()  # whatever happens before doesn't matter
    second.accelerator.load_state(folder)
    assert second.micro_batches == stop_after
    return second.run()


def all_resumed(folder: str, kind: str, steps: int, options: dict[str, Any], stops: list[int]) -> Any:
    expected = Program(kind, steps, **options).run()
    differing = [
        stop
        for stop in stops
        if not all(map(torch.equal, resumed(f"{folder}/{stop}", stop, kind, steps, options), expected))
    ]
    return differing, len(expected)


@pytest.mark.parametrize(("kind", "steps", "options"), [
    ("map", 3, {}),
    ("generator", 4, {}),
    ("map", 1, {"use_seedable_sampler": True}),
    ("stream", 2, {}),
    pytest.param("workers", 1, {}, marks=pytest.mark.slow),
])  # fmt: skip
def test_after_a_micro_batch(tmp_path: pathlib.Path, kind: str, steps: int, options: dict[str, Any]) -> None:
    assert all_resumed(str(tmp_path), kind, steps, options, [1, 3, 10, 11, 12, 21, 22]) == ([], 4)


def test_epochs_that_reuse_workers() -> None:
    def prepared() -> Any:
        loader = DataLoader(range(8), shuffle=True, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
        return Accelerator(cpu=True).prepare(loader)

    def drawn_from(loader: Any) -> list[Any]:
        """Return the order of an epoch, and the loader's states before it, inside it and after it."""
        order, states = [], [loader.state_dict()]
        for batch in loader:
            order.append(batch.item())
            if len(order) == 3:
                states.append(loader.state_dict())
        return [order, *states, loader.state_dict()]

    def seeded(loader: Any) -> list[Any]:
        torch.manual_seed(7)
        return drawn_from(loader)

    first, second = prepared(), prepared()
    starting, before, _, _ = seeded(first)
    reusing, _, inside, after = seeded(first)
    second.load_state_dict(inside)
    assert drawn_from(second)[0] == reusing[3:]
    assert seeded(second)[0] == reusing != starting
    second.load_state_dict(before)
    assert seeded(second)[0] == starting
    third = prepared()
    third.load_state_dict(after)
    assert seeded(third)[0] == reusing


@pytest.mark.parametrize("has_generator", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_program_goes_on_with_the_next_epoch(workers: int, has_generator: bool) -> None:
    def prepared() -> Any:
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
        if has_generator:
            options["generator"] = torch.Generator().manual_seed(3)
        return Accelerator(cpu=True).prepare(DataLoader(range(8), shuffle=True, **options))  # type: ignore[arg-type]

    first, states = prepared(), {}
    for read, _ in enumerate(first, 1):
        states[read] = (first.state_dict(), torch.get_rng_state())
    expected = [[batch.item() for batch in first] for _ in range(2)]

    def resumed(read: int, go_on: Callable[[Any], Any]) -> list[list[int]]:
        """Return the order of the next two epochs after a checkpoint in the first one, which ``go_on`` leaves."""
        loader = prepared()
        state, random_numbers = states[read]
        loader.load_state_dict(state)
        torch.set_rng_state(random_numbers)
        return [[batch.item() for batch in batches] for batches in (go_on(loader), loader)]

    def with_next_epoch(loader: Any) -> Any:
        loader.set_epoch(1)
        return loader

    if not has_generator:  # torch's sampler draws once more from its own generator when the epoch ends
        assert resumed(3, with_next_epoch) == expected
    assert resumed(8, with_next_epoch) == expected
    assert resumed(8, lambda loader: skip_first_batches(loader, 0)) == expected


@pytest.mark.parametrize(("kind", "steps", "options"), [
    pytest.param("map", 2, {}, marks=pytest.mark.slow),
    ("generator", 4, {"split_batches": True}),
    ("stream", 2, {"dispatch_batches": False}),
    pytest.param("generator", 1, {"dispatch_batches": True}, marks=pytest.mark.slow),
])  # fmt: skip
def test_on_two_ranks(two_ranks: Ranks, tmp_path: pathlib.Path, kind: str, steps: int, options: dict[str, Any]) -> None:
    assert two_ranks.run(all_resumed, str(tmp_path), kind, steps, options, [1, 5, 6, 9]) == [([], 4)] * 2


@pytest.mark.parametrize(("stop_after", "skipped"), [(4, 4), (11, 0)])
def test_programs_that_skip_batches_by_hand(tmp_path: pathlib.Path, stop_after: int, skipped: int) -> None:
    """Batches are skipped once. A program that counts them over all epochs skips none after the last of an epoch."""
    Program().run(tmp_path / "state", stop_after=stop_after)
    program = Program()
    program.accelerator.load_state(tmp_path / "state")
    epochs = [program.accelerator.skip_first_batches(program.loader, skipped), program.loader]
    if stop_after == 11:
        program.scheduler.scheduler.step()
        epochs.pop()
    for batches in epochs:
        for x, y in batches:
            program.step(x, y)
        program.scheduler.scheduler.step()
    assert program.micro_batches == 22 - stop_after
    assert all(map(torch.equal, program.net.parameters(), Program().run()))


def test_another_epoch_is_read_from_its_beginning(tmp_path: pathlib.Path) -> None:
    Program().run(tmp_path / "state", stop_after=4)
    program = Program()
    program.accelerator.load_state(tmp_path / "state")
    program.loader.set_epoch(0)
    assert len(list(program.loader)) == 7
    program.accelerator.load_state(tmp_path / "state")
    program.loader.set_epoch(3)
    assert len(list(program.loader)) == 11
    with environment.patched({environment.COMPAT: "accelerate"}):
        program.accelerator.load_state(tmp_path / "state")
    assert len(list(program.loader)) == 11


def test_loader_of_other_data_begins_anew_and_says_so(tmp_path: pathlib.Path) -> None:
    Program().run(tmp_path / "state", stop_after=4)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(2), batch_size=1))
    with pytest.warns(UserWarning, match="had 11 batches when it was saved and has 2 now"):
        loader.load_state_dict({**Program().loader.state_dict(), "batches": 4, "begun": None})
    assert len(list(loader)) == 2


def test_saved_again_before_anything_was_read(tmp_path: pathlib.Path) -> None:
    expected = Program().run()
    Program().run(tmp_path / "state", stop_after=4)
    program = Program()
    program.accelerator.load_state(tmp_path / "state")
    program.accelerator.save_state(tmp_path / "again")
    last = Program()
    last.accelerator.load_state(tmp_path / "again")
    assert all(map(torch.equal, last.run(), expected))


def drawing_program(folder: pathlib.Path, stop_after: int) -> list[torch.Tensor]:
    """Train with noise from the generator that also draws the order; save after ``stop_after`` batches, or load."""
    generator = torch.Generator().manual_seed(3)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(6.0), batch_size=2, shuffle=True, generator=generator))
    if not stop_after:
        accelerator.load_state(folder)
    seen = []
    for _ in range(loader.epoch, 3):
        for batch in loader:
            seen.append(batch + torch.rand(2, generator=generator))
            if len(seen) == stop_after:
                accelerator.save_state(folder)
    return seen


@pytest.mark.parametrize("stop", [1, 3, 5, 8])
def test_a_program_draws_from_its_loaders_generator(tmp_path: pathlib.Path, stop: int) -> None:
    expected = drawing_program(tmp_path / "state", stop)[stop:]
    assert all(map(torch.equal, drawing_program(tmp_path / "state", 0), expected))


def summing_program(folder: pathlib.Path, stop_after: int) -> float:
    """Sum gradients of two batches by hand; save after ``stop_after`` batches, or load. Return the weight."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    net, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(torch.arange(6.0)[:, None]))
    if not stop_after:
        accelerator.load_state(folder)
    for number, batch in enumerate(loader, start=loader.state_dict()["batches"] + 1):
        accelerator.backward(net(batch).square().sum())
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if number == stop_after:
            accelerator.save_state(folder)
    return model.weight.item()


@pytest.mark.parametrize("stop", [2, 3])
def test_gradients_that_are_summed_by_hand_are_saved(tmp_path: pathlib.Path, stop: int) -> None:
    expected = summing_program(tmp_path / "state", stop)
    assert summing_program(tmp_path / "state", 0) == expected
    saved = torch.load(tmp_path / "state" / "rank_0.bin", weights_only=True)["gradients"]
    assert len(saved) == stop % 2  # those that a step has used aren't saved


def with_a_tensor(folder: str, stop_after: int) -> list[float]:
    """Train a model and a bare tensor, two batches a step; save after ``stop_after`` batches, or load."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1, bias=False)
    prompt = torch.zeros(2, requires_grad=True)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD([prompt, model.weight], lr=0.01, momentum=0.9)
    net, prompt, optimizer = accelerator.prepare(model, prompt, optimizer)
    batches = torch.arange(1.0, 13.0).view(6, 2, 1)
    first = 0 if stop_after else int(accelerator.load_state(folder)[-1])
    for number in range(first, 6):
        row = batches[number, accelerator.process_index : accelerator.process_index + 1]
        with contextlib.ExitStack() as local:
            for trained in (net, prompt) if number % 2 == 0 else ():
                local.enter_context(accelerator.no_sync(trained))
            accelerator.backward((net(row) + prompt.sum()).square().sum())
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        if number + 1 == stop_after:
            accelerator.save_state(folder)
    return [*prompt.tolist(), model.weight.item()]


@pytest.mark.parametrize("stop", [3, 4])
def test_a_prepared_tensor_is_part_of_a_checkpoint(two_ranks: Ranks, tmp_path: pathlib.Path, stop: int) -> None:
    folder = str(tmp_path / str(stop))
    expected = two_ranks.run(with_a_tensor, folder, stop)
    assert two_ranks.run(with_a_tensor, folder, 0) == expected
    assert expected[0] == expected[1]
    assert expected[0][0] != 0


def test_gradients_from_before_are_gone_after_loading(tmp_path: pathlib.Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, prompt = torch.nn.Linear(1, 1), torch.zeros(1, requires_grad=True)
    net, prompt, _ = accelerator.prepare(model, prompt, torch.optim.SGD([*model.parameters(), prompt], lr=0.1))
    accelerator.save_state(tmp_path / "state")
    accelerator.backward((net(torch.full((1, 1), torch.nan)) + prompt).sum())
    accelerator.load_state(tmp_path / "state")
    assert [parameter.grad for parameter in (*net.parameters(), prompt)] == [None] * 3


@pytest.mark.parametrize("leaves", [False, True])
def test_a_loop_in_which_a_checkpoint_is_loaded_goes_on_with_its_own_batches(
    tmp_path: pathlib.Path, leaves: bool
) -> None:
    accelerator = Accelerator(cpu=True)
    _, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.arange(4), batch_size=1))
    epochs = []
    for epoch in range(3):
        epochs.append([])
        for step, batch in enumerate(loader):
            epochs[-1].append(batch.item())
            if (epoch, step) == (0, 0):
                accelerator.save_state(tmp_path / "first")
            if (epoch, step) == (1, 1):
                accelerator.load_state(tmp_path / "first")
                if leaves:
                    break
            if (epoch, step) == (1, 2):
                accelerator.save_state(tmp_path / "second")
    # A loop that ends at once begins anew where the checkpoint was saved.
    whole = [0, 1, 2, 3]
    assert epochs == ([whole, [0, 1], [1, 2, 3]] if leaves else [whole] * 3)
    assert loader.epoch == (1 if leaves else 3)
    if not leaves:
        accelerator.load_state(tmp_path / "second")
        assert (loader.epoch, [batch.item() for batch in loader]) == (1, [3])


def loaded_in_the_last_batch(folder: str, even_batches: bool) -> list[list[int]]:
    """Return the batches of each loop, the second of which goes back to the first one in its last batch."""
    config = DataLoaderConfiguration(even_batches=even_batches)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    _, loader = accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.arange(7), batch_size=1))
    last = 7 // accelerator.num_processes  # of those that every rank has
    loops = []
    for loop in range(4):
        loops.append([])
        for step, batch in enumerate(loader, 1):
            loops[-1].append(batch.item())
            if (loop, step) == (0, 2):
                accelerator.save_state(folder)
            if (loop, step) == (1, last):
                accelerator.load_state(folder)
    return [*loops, [loader.epoch]]


def test_a_checkpoint_that_is_loaded_in_the_last_batch_is_continued_by_the_next_loop(
    two_ranks: Ranks, tmp_path: pathlib.Path
) -> None:
    whole = list(range(7))
    assert loaded_in_the_last_batch(str(tmp_path / "one"), even_batches=True) == [whole, whole, whole[2:], whole, [2]]
    first, second = [0, 2, 4, 6], [1, 3, 5]
    assert two_ranks.run(loaded_in_the_last_batch, str(tmp_path / "two"), False) == [
        [first, first, first[2:], first, [2]],
        [second, second, second[2:], second, [2]],
    ]


def test_a_pass_that_was_abandoned_does_not_move_the_position() -> None:
    loader = Accelerator(cpu=True).prepare(DataLoader(torch.arange(6), batch_size=1))
    abandoned, running = iter(loader), iter(loader)
    next(abandoned)
    next(running)
    abandoned.close()
    assert loader.epoch == 1
    assert loader.state_dict()["batches"] == 1


def test_a_position_that_an_earlier_version_saved_is_read() -> None:
    names = ("epoch", "batches", "length", "begun", "generators", "ahead", "is_told", "samples", "ranks")
    names += ("epoch_samples", "undealt", "workers", "reuses_workers")
    saved, loaded = (Accelerator(cpu=True).prepare(DataLoader(range(8), batch_size=2)) for _ in range(2))
    batches = iter(saved)
    next(batches)
    state = saved.state_dict()
    loaded.load_state_dict({name: state[name] for name in names})
    assert [batch.tolist() for batch in loaded] == [[2, 3], [4, 5], [6, 7]]

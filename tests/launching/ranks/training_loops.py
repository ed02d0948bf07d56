"""Training loops as users write them, without a line for this package. Each runs in a rank, and needs torch only."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from tqdm.auto import tqdm

import notebook_accel
from notebook_accel import estimate_memory, reporting

EPOCHS = 3


class Training:
    """A tiny model with its data: 64 samples of 4 numbers, in 16 batches."""

    def __init__(self) -> None:
        self.data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        self.loader = DataLoader(self.data, batch_size=4, shuffle=True)
        self.evaluation = DataLoader(self.data, batch_size=8)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.model(x), y)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        self.optimizer.step()

    def train(self, batches: Iterable[Any], *, looks: bool = False) -> None:
        """Do a step for each batch, and ``look`` after it if that is asked for."""
        for x, y in batches:
            self.step(x, y)
            if looks:
                look()

    def prepare(self, accelerator: Any) -> None:
        """Have an ``Accelerator`` prepare the model, the optimizer and the loader."""
        self.model, self.optimizer, self.loader = accelerator.prepare(self.model, self.optimizer, self.loader)


def look() -> None:
    """Sends the counters as they are now, as the sampling thread does five times a second."""
    reporting.reporter().catch_up()


def two_steps(group_size: int) -> list[tuple[str, str]]:
    """Train in a group of this size, or in none if it is 0. Return the file and the text of each warning."""
    made = Training()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimate_memory(made.model, num_processes=2)  # whose optimizer steps too
        if group_size:  # as a script for one process has it
            os.environ.update({"RANK": "0", "WORLD_SIZE": "1"} if group_size == 1 else {})
            torch.distributed.init_process_group("gloo")
        for x, y in itertools.islice(made.loader, 2):
            made.step(x, y)
    return [(warning.filename, str(warning.message)) for warning in caught]


def epochs_and_evaluations() -> None:
    made = Training()
    for _ in range(EPOCHS):
        made.train(made.loader)
        with torch.no_grad():
            for x, _ in made.evaluation:
                made.model(x)
                look()


def gradients_off_inside_the_evaluation() -> None:
    made = Training()
    made.train(made.loader)
    for x, _ in made.evaluation:
        made.model.eval()  # with each batch, as ignite does
        with torch.no_grad():
            made.model(x)
        look()


def evaluation_inside_an_epoch() -> None:
    made = Training()
    for number, (x, y) in enumerate(made.loader):
        made.step(x, y)
        if number % 5 == 0:
            made.model.eval()
            with torch.inference_mode():
                for held, _ in made.evaluation:
                    made.model(held)
            made.model.train()


def evaluation_that_is_not_asked_for_its_end() -> None:
    made = Training()
    for _ in range(EPOCHS):
        made.train(made.loader)
        evaluation = iter(made.evaluation)
        for _ in range(len(made.evaluation)):
            with torch.no_grad():
                made.model(next(evaluation)[0])


def evaluation_of_some_batches_after_each_step() -> None:
    made = Training()
    for x, y in made.loader:
        made.step(x, y)
        evaluation = iter(made.evaluation)  # it stays until the next one is made
        with torch.no_grad():
            for _ in range(3):
                made.model(next(evaluation)[0])


def left_early() -> None:
    made = Training()
    for _ in range(EPOCHS):
        made.train(itertools.islice(made.loader, 5))


def a_look_at_a_batch_first() -> None:
    made = Training()
    batches = iter(made.loader)  # it stays
    next(batches)
    made.train(made.loader)


def persistent_workers() -> None:
    made = Training()
    loader = DataLoader(made.data, batch_size=4, num_workers=1, persistent_workers=True)
    for _ in range(EPOCHS):
        made.train(loader)


class Shell:
    """Stands for a loader that isn't torch's, as fastai's do."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.d = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.d, name)


def loader_that_is_not_torchs() -> None:
    from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

    made = Training()
    for _ in range(EPOCHS):
        made.train(_SingleProcessDataLoaderIter(Shell(made.loader)))


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for x, y in super().__iter__():
            yield x * 2, y


def a_loader_of_the_users_own() -> None:
    made = Training()
    made.train(OwnLoader(made.data, batch_size=4))


class Stream(IterableDataset[Any]):
    def __init__(self, length: int | None) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        yield from zip(torch.randn(64, 4), torch.randn(64, 1), strict=True)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("nobody knows")
        return self.length


def a_stream() -> None:
    made = Training()
    made.train(DataLoader(Stream(None), batch_size=4))


def a_stream_that_is_longer_than_it_says() -> None:
    """Of its own, torch warns of this only where somebody has asked for the length; here warnings are errors."""
    made = Training()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.train(DataLoader(Stream(8), batch_size=4))


def accumulation() -> None:
    made = Training()
    for number, (x, y) in enumerate(made.loader):
        made.loss(x, y).backward()
        if number % 4 == 3:
            made.optimizer.step()
            made.optimizer.zero_grad()


def two_loaders_in_turns() -> None:
    made = Training()
    made.train(batch for batch, _ in zip(made.loader, made.evaluation, strict=False))


def two_optimizers_and_a_loader() -> None:
    made = Training()
    other = torch.optim.SGD(made.model.parameters(), lr=0.01)
    for x, y in made.loader:
        for _ in range(3):
            made.step(x, y)
        other.step()


def no_loader() -> None:
    made = Training()
    for _ in range(10):
        made.step(*made.data[:])


def two_optimizers_and_no_loader() -> None:
    made = Training()
    other = torch.optim.SGD(made.model.parameters(), lr=0.01)
    for _ in range(4):
        for _ in range(5):
            made.step(*made.data[:])
        other.step()


def closures() -> None:
    made = Training()
    optimizer = torch.optim.LBFGS(made.model.parameters(), max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = made.loss(*made.data[:])
        loss.backward()
        return loss

    for _ in range(10):
        optimizer.step(closure)  # type: ignore[arg-type]


def a_scaler() -> None:
    made, scaler = Training(), torch.amp.GradScaler("cpu")
    for _ in range(10):
        made.optimizer.zero_grad()
        scaler.scale(made.loss(*made.data[:])).backward()
        scaler.step(made.optimizer)
        scaler.update()


def full_batches_after_a_loader() -> None:
    epochs_and_evaluations()
    no_loader()


def bar_over_epochs() -> None:
    made = Training()
    for _ in tqdm(range(EPOCHS), mininterval=0):  # of its own it counts at most ten times a second
        made.train(made.loader, looks=True)


def bar_over_batches() -> None:
    made = Training()
    for _ in range(EPOCHS):
        made.train(tqdm(made.loader, desc="batches"), looks=True)


def bar_over_all_steps() -> None:
    made = Training()
    bar = tqdm(total=EPOCHS * 16)
    for _ in range(EPOCHS):
        for x, y in made.loader:
            made.step(x, y)
            bar.update()
            look()


def bars_of_phases() -> None:
    """The bar of the epochs and those of the phases are made before the loops, and reset by hand."""
    from tqdm.notebook import tqdm

    made = Training()
    epochs, training, _ = tqdm(total=EPOCHS), tqdm(total=16), tqdm(total=99, desc="evaluation")
    for _ in range(EPOCHS):
        for x, y in made.loader:
            made.step(x, y)
            training.update()
            look()
        training.reset()
        epochs.update()


def bar_over_enumerated_batches() -> None:
    made = Training()
    for _ in range(EPOCHS):
        made.train((batch for _, batch in tqdm(enumerate(made.loader))), looks=True)


def loader_after_a_bar_of_rich_that_was_left() -> None:
    from rich.progress import Progress

    with Progress() as progress:
        progress.update(progress.add_task("looking"), advance=3)  # of 100
    made = Training()
    made.train(made.loader, looks=True)


def prepared_beside_a_bar(epochs: Iterable[int], bar: Any = None) -> None:
    made = Training()
    made.prepare(notebook_accel.Accelerator(cpu=True))
    for _ in epochs:
        for x, y in made.loader:
            made.step(x, y)
            if bar is not None:
                bar.update()
            look()
        look()  # between two epochs


def prepared_beside_a_bar_over_all_steps() -> None:
    prepared_beside_a_bar(range(EPOCHS), tqdm(range(EPOCHS * 16)))


def prepared_inside_a_bar_over_epochs() -> None:
    prepared_beside_a_bar(tqdm(range(EPOCHS), mininterval=0))


def prepared() -> None:
    made = Training()
    made.prepare(notebook_accel.Accelerator(cpu=True))
    for _ in range(EPOCHS):
        made.train(made.loader)


def with_accelerate() -> None:
    import accelerate

    made, accelerator = Training(), accelerate.Accelerator(cpu=True)
    made.prepare(accelerator)
    for _ in range(EPOCHS):
        for x, y in made.loader:
            made.optimizer.zero_grad()
            accelerator.backward(made.loss(x, y))
            made.optimizer.step()


LOOPS: dict[Callable[[], None], tuple[int, int | None, int | None, int]] = {
    epochs_and_evaluations: (16, 16, 3, 3 * 16 + 3 * 8),
    gradients_off_inside_the_evaluation: (16, 16, 1, 16 + 8),
    evaluation_inside_an_epoch: (16, 16, 1, 16 + 4 * 8),
    evaluation_that_is_not_asked_for_its_end: (16, 16, 3, 3 * 16 + 3 * 8),
    evaluation_of_some_batches_after_each_step: (16, 16, 1, 16 + 16 * 3),
    left_early: (5, 16, 3, 15),
    a_look_at_a_batch_first: (16, 16, 1, 17),
    persistent_workers: (16, 16, 3, 48),
    a_loader_of_the_users_own: (16, 16, 1, 16),
    loader_that_is_not_torchs: (16, 16, 3, 48),
    a_stream: (16, None, 1, 16),
    a_stream_that_is_longer_than_it_says: (16, 2, 1, 16),
    accumulation: (16, 16, 1, 16),
    two_loaders_in_turns: (9, 16, 1, 9),
    two_optimizers_and_a_loader: (16, 16, 1, 16),
    no_loader: (10, None, None, 10),
    two_optimizers_and_no_loader: (20, None, None, 20),
    closures: (10, None, None, 10),
    a_scaler: (10, None, None, 10),
    full_batches_after_a_loader: (10, None, None, 3 * 24 + 10),
    bar_over_batches: (16, 16, None, 48),
    bar_over_all_steps: (48, 48, None, 48),
    bar_over_epochs: (16, 16, 3, 48),
    bar_over_enumerated_batches: (16, None, None, 48),
    loader_after_a_bar_of_rich_that_was_left: (16, 16, 1, 16),  # a bar counts from its first update
    prepared: (16, 16, 3, 48),
    with_accelerate: (16, 16, 3, 48),
}
"""Each loop with the step, the total and the epoch that its row shows in the end, and the steps over all loops."""


def loss_of_a_loop() -> float:
    made = Training()
    for x, y in made.loader:
        loss = made.loss(x, y)
        loss.backward()
    return loss.item()


def loss_that_is_scaled() -> float:
    made, scaler = Training(), torch.amp.GradScaler("cpu")
    loss = made.loss(*made.data[:])
    scaler.scale(loss).backward()
    return loss.item()


def divided_loss(accelerator: Any) -> float:
    made = Training()
    made.prepare(accelerator)
    for x, y in made.loader:
        with accelerator.accumulate(made.model):
            loss = made.loss(x, y)
            accelerator.backward(loss)
            made.optimizer.step()
    return loss.item()


def loss_that_accelerate_divides() -> float:
    import accelerate

    return divided_loss(accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4))


def loss_that_we_divide() -> float:
    return divided_loss(notebook_accel.Accelerator(cpu=True, gradient_accumulation_steps=4))


def loss_of_the_programs_own() -> float:
    made = Training()
    made.step(*made.data[:])
    reporting.report(loss=123.0)
    made.step(*made.data[:])
    return 123.0


def loss_of_many_fast_steps() -> float:
    weight = torch.zeros((), requires_grad=True)
    for (x,) in DataLoader(TensorDataset(torch.arange(2000.0)), batch_size=1):
        (weight + x.sum()).backward()
    return 1999.0


def no_loss_but_gradients() -> None:
    made = Training()
    outputs = made.model(made.data[:][0])
    outputs.backward(torch.ones_like(outputs))


LOSSES: tuple[Callable[[], float | None], ...] = (
    loss_of_a_loop,
    loss_of_many_fast_steps,
    loss_that_is_scaled,
    loss_that_accelerate_divides,
    loss_that_we_divide,
    loss_of_the_programs_own,
    no_loss_but_gradients,
)
"""Functions that return the loss that their row shows in the end."""

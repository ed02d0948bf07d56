"""Tests of rank 0's warnings of unprepared objects and wrong windows, and of schedules that ranks speed up."""

from __future__ import annotations

import functools
import logging
import pathlib
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Sampler, Subset, TensorDataset

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, environment
from notebook_accel.training import optimizers, unprepared_warnings
from notebook_accel.training.unprepared_warnings import schedule_hint
from tests.training.ranks import Ranks, caught_warnings, on_ranks


def warned(unprepared: str, steps: int, *, calls_model: bool = True, calls_backward: bool = True) -> list[str]:
    """Return the first words of each warning in a loop in which one object wasn't prepared."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = torch.nn.Linear(1, 1)
    parts: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(torch.ones(8, 1), batch_size=1),
    }
    parts |= {kind: accelerator.prepare(part) for kind, part in parts.items() if kind != unprepared}
    with caught_warnings() as caught:
        for x in parts["loader"]:
            with accelerator.accumulate(parts["model"]):
                loss = (parts["model"] if calls_model else model)(x).sum()
                accelerator.backward(loss) if calls_backward else loss.backward()
                parts["optimizer"].step()
                parts["optimizer"].zero_grad()
    assert all(warning.filename == __file__ for warning in caught)
    return [re.split(" has been| isn't| sums", str(warning.message))[0] for warning in caught]


OWN_BACKWARD, UNCALLED = {"calls_backward": False}, {"calls_model": False}


@pytest.mark.parametrize(("unprepared", "steps", "options", "expected"), [
    ("model", 2, {}, ["No model"]),
    ("optimizer", 2, {}, ["No optimizer"]),
    ("loader", 2, {}, ["No loader"]),
    ("nothing", 2, {}, []),
    ("nothing", 2, OWN_BACKWARD, ["loss.backward()"]),
    ("nothing", 1, OWN_BACKWARD, []),
    ("loader", 2, OWN_BACKWARD, ["loss.backward()", "No loader"]),
    ("loader", 1, OWN_BACKWARD, ["No loader"]),
    ("model", 2, OWN_BACKWARD, ["loss.backward()", "No model"]),
    ("model", 1, OWN_BACKWARD, ["No model"]),
    ("optimizer", 1, UNCALLED, ["The prepared model"]),
    ("optimizer", 1, UNCALLED | OWN_BACKWARD, ["The prepared model"]),
    ("nothing", 1, UNCALLED, []),  # the optimizer averages
    ("nothing", 1, UNCALLED | OWN_BACKWARD, []),
])  # fmt: skip
def test_on_two_ranks(
    two_ranks: Ranks, unprepared: str, steps: int, options: dict[str, bool], expected: list[str]
) -> None:
    assert two_ranks.run(functools.partial(warned, unprepared, steps, **options)) == [expected, []]


def test_on_one_rank() -> None:
    assert [warned(kind, 2) for kind in ("model", "optimizer", "loader")] == [[], ["No optimizer"], []]
    assert warned("optimizer", 1) == []


@on_ranks(2)
def test_another_training_beside_it_is_not_warned_of() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    other = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with caught_warnings() as caught:
        other(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert [str(warning.message) for warning in caught] == []


@on_ranks(2)
def test_steps_before_it_trains_are_not_warned_of() -> None:
    """Skip the first window's backward passes."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = torch.nn.Linear(1, 1)
    loader = DataLoader(torch.ones(8, 1), batch_size=1)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    with caught_warnings() as caught:
        for number, x in enumerate(loader):
            with accelerator.accumulate(net):
                loss = net(x).sum()
                if number > 1:
                    accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    assert [str(warning.message) for warning in caught] == []


def test_steps_of_another_training_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unprepared_warnings, "_untrained", weakref.WeakKeyDictionary())  # without other tests'
    looks: list[Any] = []
    known_parameters = optimizers.known_parameters

    def counted(prepared: Any) -> set[int]:
        looks.append(None)
        return known_parameters(prepared)

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    other = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    monkeypatch.setattr(optimizers, "known_parameters", counted)
    other(torch.ones(1, 1)).sum().backward()
    for _ in range(3):
        optimizer.step()
    assert len(looks) == 1
    monkeypatch.setattr(Accelerator, "_begin_training", lambda _, stepped: looks.append(stepped))
    accelerator.prepare(other)
    optimizer.step()
    assert len(looks) > 1
    assert looks[-1] is optimizer


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize(("scheduler", "ranks", "window", "text"), [
    (lambda: lr_scheduler.CosineAnnealingLR(sgd(), T_max=100), 1, 4, ""),
    (lambda: lr_scheduler.ReduceLROnPlateau(sgd()), 4, 1, ""),
    (
        lambda: lr_scheduler.CosineAnnealingLR(sgd(), T_max=100), 4, 1,
        (
            "With 4 ranks, each step of the optimizer advances CosineAnnealingLR by 4: "
            "its 100 steps end after 25 steps of the optimizer."
        ),
    ),
    (
        lambda: lr_scheduler.OneCycleLR(sgd(), max_lr=1.0, total_steps=25), 2, 3,
        (
            "With 2 ranks, each step of the optimizer advances OneCycleLR by 2: "
            "its 25 steps end after 13 steps of the optimizer, 39 batches of each rank."
        ),
    ),
    (
        lambda: lr_scheduler.LambdaLR(sgd(), lambda step: 1.0), 2, 1,
        "With 2 ranks, each step of the optimizer advances LambdaLR by 2.",
    ),
])  # fmt: skip
def test_schedule_hint(scheduler: Any, ranks: int, window: int, text: str) -> None:
    assert schedule_hint(scheduler(), ranks=ranks, window=window) == text


def hinted(**options: Any) -> list[str]:
    """Return the log messages of a scheduler that is prepared twice."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("notebook_accel")
    logger.addHandler(handler)
    try:
        accelerator = Accelerator(cpu=True, **options)
        optimizer = sgd()
        for _ in range(2):
            scheduler = accelerator.prepare(lr_scheduler.LinearLR(optimizer, total_iters=8))
            accelerator.prepare(scheduler)
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in records]


def test_rank_0_hints_once_a_schedule(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(hinted)
    assert len(first) == 2
    assert "its 8 steps end after 4 steps" in first[0]
    assert second == []
    assert two_ranks.run(functools.partial(hinted, split_batches=True)) == [[], []]


class OfRank(Sampler[int]):
    """A sampler that yields its rank's samples only."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * 8, self.rank * 8 + 8))


@pytest.mark.parametrize(("kind", "is_split"), [
    ("subset of a subset", True), ("length", True), ("sampler", True), ("half for all", False), ("own sampler", False),
])  # fmt: skip
@on_ranks(2)
def test_data_that_are_split_by_rank_already(kind: str, is_split: bool) -> None:
    """A loader of what may be this rank's part of 16 samples is read twice."""
    accelerator = Accelerator(cpu=True)
    data = TensorDataset(torch.arange(16))
    rank = accelerator.process_index
    loaders: dict[str, Any] = {
        "subset of a subset": lambda: DataLoader(
            Subset(Subset(data, range(rank, 16, 2)), range(6)), batch_size=2, shuffle=True
        ),
        "length": lambda: DataLoader(TensorDataset(torch.arange(16 - 4 * rank)), batch_size=16, shuffle=True),
        "sampler": lambda: DataLoader(data, batch_size=2, sampler=OfRank(rank)),
        "half for all": lambda: DataLoader(Subset(data, range(0, 16, 2)), batch_size=2, shuffle=True),
        "own sampler": lambda: DataLoader(data, batch_size=2, sampler=OfRank(0)),
    }
    loader = accelerator.prepare(loaders[kind]())
    with caught_warnings() as caught:
        for _ in range(2):
            for _ in loader:
                pass
    assert all(warning.filename == __file__ for warning in caught)
    expected = ["The ranks have different datasets or s"] * (is_split and accelerator.is_main_process)
    assert [str(warning.message)[:38] for warning in caught] == expected


def gathered_late(kind: str, samples: int, outer_batch: int | None) -> list[str]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(samples)), batch_size=2))
    outer: Any = [None, None]
    if outer_batch is not None:
        outer = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4 * outer_batch)), batch_size=outer_batch))
    with caught_warnings() as caught:
        for _ in outer:  # an evaluation in the middle of training
            seen = []
            losses = []
            for (x,) in loader:
                seen.append(accelerator.gather_for_metrics(x) if kind == "in the loop" else x)
                losses.append(x.float().mean())
            if kind == "tensor":
                accelerator.gather_for_metrics({"found": torch.cat(seen)})
            if kind == "objects":
                accelerator.gather_for_metrics([str(row.item()) for x in seen for row in x])
            accelerator.gather_for_metrics(torch.stack(losses).mean())
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message).partition(", and 3 of")[0] for warning in caught]


@pytest.mark.parametrize("outer_batch", [None, 3])
@pytest.mark.parametrize("kind", ["tensor", "objects", "in the loop"])
def test_metrics_that_are_gathered_after_the_loop(two_ranks: Ranks, kind: str, outer_batch: int | None) -> None:
    is_late = kind != "in the loop"
    expected = ["gather_for_metrics after the loop leaves nothing out"] * is_late
    found, of_rank_1 = two_ranks.run(gathered_late, kind, 13, outer_batch)
    assert (sorted({*found}), of_rank_1) == (expected, [])
    assert two_ranks.run(gathered_late, kind, 12, outer_batch) == [[], []]
    # The eight rows that rank 0 has seen could be those of an outer batch.
    assert two_ranks.run(gathered_late, kind, 13, 8) == [[], []]


def skipping_again(folder: str, batches: int, skips: str) -> list[str]:
    """Save after some of 10 batches, and go on from the checkpoint in a program that may skip them itself."""

    def prepared() -> tuple[Accelerator, Any, Any]:
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(torch.nn.Linear(1, 1), DataLoader(torch.ones(20, 1)))

    accelerator, model, loader = prepared()
    for step, x in enumerate(loader, 1):
        accelerator.backward(model(x).sum())
        if step == batches:
            accelerator.save_state(folder)
            break
    accelerator, model, loader = prepared()
    accelerator.load_state(folder)
    with caught_warnings() as caught, environment.patched({environment.COMPAT: ""}):
        rest = accelerator.skip_first_batches(loader, batches) if skips == "before" else loader
        for epoch in range(2):
            for step, x in enumerate(loader if epoch else rest):
                if epoch == 0 and skips == "inside" and step < batches:
                    continue
                accelerator.backward(model(x).sum())
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("batches", "skipped"), [pytest.param(3, 3, marks=pytest.mark.slow), (7, 3)])
def test_batches_that_are_skipped_twice(two_ranks: Ranks, tmp_path: pathlib.Path, batches: int, skipped: int) -> None:
    [said], of_rank_1 = two_ranks.run(skipping_again, str(tmp_path / "inside"), batches, "inside")
    assert said.startswith(
        f"load_state resumed epoch 0 after its first {batches} batches, and the program has skipped {skipped} more."
    )
    assert of_rank_1 == []
    for skips in ("before", "nothing"):
        assert two_ranks.run(skipping_again, str(tmp_path / skips), batches, skips) == [[], []]


def window(program: str, *, steps: int = 2, sharded: bool = False) -> list[str]:
    """Return the warnings of a program that accumulates gradients, with the line that each shows."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=steps,
        fsdp_plugin=FullyShardedDataParallelPlugin() if sharded else None,
    )
    nets: Any = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    optimizers: Any = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    *nets, one, two, loader = accelerator.prepare(*nets, *optimizers, DataLoader(torch.ones(12, 1), batch_size=1))

    def passes(net: Any, optimizer: Any, x: torch.Tensor, zero: Any, *, first: bool) -> None:
        zero() if first else None
        accelerator.backward(net(x).sum())
        optimizer.step()
        None if first else zero()

    def closure() -> torch.Tensor:
        loss: torch.Tensor = nets[0](x).sum()
        accelerator.backward(loss) if "inside" in program else None
        return loss

    with caught_warnings() as caught:
        for x in loader:
            if program == "a block each":
                for net, optimizer in zip(nets, (one, two), strict=True):
                    with accelerator.accumulate(net):
                        passes(net, optimizer, x, optimizer.zero_grad, first=False)
                continue
            with accelerator.accumulate(nets[0], nets[1]):
                if program.startswith("a closure"):
                    accelerator.backward(nets[0](x).sum()) if "outside" in program else None
                    one.step(closure)
                    one.zero_grad()
                elif program == "both after each other":
                    passes(nets[0], one, x, one.zero_grad, first=False)
                    passes(nets[1], two, x, two.zero_grad, first=False)
                elif program == "drops the window":  # such as for a bad loss
                    accelerator.backward(nets[0](x).sum())
                    one.zero_grad()
                elif program == "steps first":
                    one.step()
                    passes(nets[0], two, x, one.zero_grad, first=True)
                else:
                    zero = {"model": nets[0], "optimizer": one}[program.split(maxsplit=1)[0]].zero_grad
                    passes(nets[0], one, x, zero, first="first" in program)
    source = pathlib.Path(__file__).read_text().splitlines()
    assert {warning.filename for warning in caught} <= {__file__}
    return [f"{warning.message} | {source[warning.lineno - 1].strip()}" for warning in caught]


DROPPED = r"Only the last of 2 micro-batches counts .*zero_grad has dropped.*accelerator.backward\(net\(x\)"
SECOND = r"A second accumulate block .* 2 micro-batches.*accumulate\(first, second\).*accumulate\(net\)"
CLOSURE = r"Only the last of 2 micro-batches counts .*step\(closure\) calls.*one.step\(closure\)"


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "sharded"])
@pytest.mark.parametrize(("program", "expected"), [
    ("optimizer first", DROPPED),
    ("model first", DROPPED),
    ("optimizer last", ""),
    ("drops the window", ""),
    ("steps first", ""),
    ("both after each other", ""),
    ("a block each", SECOND),
    ("a closure with a pass inside", CLOSURE),
    ("a closure with a pass outside", ""),
])  # fmt: skip
def test_windows(two_ranks: Ranks, program: str, expected: str, sharded: bool) -> None:
    said, by_second = two_ranks.run(functools.partial(window, program, sharded=sharded))
    assert by_second == []
    if expected:
        [text] = said
        assert re.match(expected, text)
    else:
        assert said == []


@pytest.mark.parametrize("program", ["optimizer first", "a block each", "a closure with a pass inside"])
def test_programs_without_windows_are_right(two_ranks: Ranks, program: str) -> None:
    assert two_ranks.run(functools.partial(window, program, steps=1)) == [[], []]

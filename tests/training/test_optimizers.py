from __future__ import annotations

import linecache
import math
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch.optim import lr_scheduler

from notebook_accel.errors import TrainingError
from notebook_accel.training.accelerator import Accelerator
from notebook_accel.training.accumulation import GradientAccumulationPlugin, GradientState
from notebook_accel.training.optimizers import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    clip_grad_norm,
    parameters_of,
    prepare_optimizer,
    prepare_scheduler,
)
from notebook_accel.training.precision import LossScaler
from tests.training.ranks import caught_warnings, on_ranks


def make(steps: int = 1, **options: Any) -> tuple[torch.nn.Parameter, AcceleratedOptimizer, GradientState]:
    parameter = torch.nn.Parameter(torch.ones(2))
    state = GradientState(GradientAccumulationPlugin(num_steps=steps, **options))
    return parameter, prepare_optimizer(torch.optim.SGD([parameter], lr=0.1), state, None), state


def schedule(
    optimizer: AcceleratedOptimizer, state: GradientState, scheduler: Any, ranks: int = 1, follow: bool = True
) -> AcceleratedScheduler:
    return prepare_scheduler(scheduler, [optimizer], state, steps_per_call=ranks, step_with_optimizer=follow)


def falling(optimizer: AcceleratedOptimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step))


def test_nothing_moves_within_a_window() -> None:
    parameter, optimizer, state = make(2)
    for moved in (False, True):
        with state.accumulate([]):
            parameter.sum().backward()
            optimizer.step()
            assert (parameter.detach() != 1).all() == moved
            optimizer.zero_grad()
            assert (parameter.grad is None) == moved


def test_it_is_a_torch_optimizer_that_hides_nothing() -> None:
    parameter, optimizer, _ = make()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.defaults is optimizer.optimizer.defaults
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    parameter.sum().backward()
    optimizer.step()
    assert called == ["after"]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [0.1, 0.5]
    assert len(parameters_of([optimizer])) == 2
    saved = optimizer.state_dict()
    optimizer.param_groups[1]["lr"] = 0
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[1]["lr"] == 0.5
    optimizer.param_groups = optimizer.param_groups[:1]
    assert len(optimizer.optimizer.param_groups) == 1
    assert "SGD" in repr(optimizer)


def test_outside_its_rank_it_is_the_optimizer_that_it_was() -> None:
    _, optimizer, state = make()
    scheduler = schedule(optimizer, state, lr_scheduler.StepLR(optimizer.optimizer, 1))
    again = pickle.loads(cloudpickle.dumps({"optimizer": optimizer, "scheduler": scheduler}))
    assert type(again["optimizer"]) is torch.optim.SGD
    assert type(again["scheduler"]) is lr_scheduler.StepLR
    assert again["scheduler"].optimizer is again["optimizer"]


def test_prepared_by_another_accelerator_it_is_wrapped_once() -> None:
    _, optimizer, state = make()
    assert prepare_optimizer(optimizer, state, None).optimizer is optimizer.optimizer


@pytest.mark.parametrize("ranks", [1, 3])
def test_schedule_advances_by_the_number_of_ranks(ranks: int) -> None:
    _, optimizer, state = make(2)
    scheduler = schedule(optimizer, state, falling(optimizer), ranks)
    rates = []
    for _ in range(4):
        with state.accumulate([]):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.1 / (1 + ranks), 0.1 / (1 + ranks), 0.1 / (1 + 2 * ranks)])
    assert scheduler.last_epoch == 2 * ranks
    assert scheduler.get_last_lr() == [rates[-1]]


def test_schedule_planned_in_micro_batches_is_run_to_its_end() -> None:
    _, optimizer, state = make(3, adjust_scheduler=True)
    inner = lr_scheduler.OneCycleLR(optimizer.optimizer, max_lr=1.0, total_steps=9)
    scheduler = schedule(optimizer, state, inner)
    seen = []
    for _ in range(9):
        with state.accumulate([]):
            optimizer.step()
            scheduler.step()
            seen.append(scheduler.last_epoch)
    assert seen == [0, 0, 3, 3, 3, 6, 6, 6, 9]


def test_calls_of_an_unfinished_window_are_part_of_the_schedules_state() -> None:
    _, optimizer, state = make(3, adjust_scheduler=True)
    first, again = (schedule(optimizer, state, falling(optimizer)) for _ in range(2))
    for scheduler in (first, first, again):
        if scheduler is again:
            again.load_state_dict(first.state_dict())
        with state.accumulate([]):
            optimizer.step()
            scheduler.step()
    assert again.last_epoch == 3
    again.load_state_dict(first.scheduler.state_dict())
    assert again.last_epoch == 0


@pytest.mark.parametrize("kind", ["sequence", "chain", "chain in a sequence"])
def test_one_cycle_within_another_schedule_ends_where_it_ends(kind: str) -> None:
    _, optimizer, state = make()
    own = optimizer.optimizer
    cycle = lr_scheduler.OneCycleLR(own, max_lr=1.0, total_steps=4 if kind == "sequence" else 7)
    falls = lr_scheduler.ExponentialLR(own, gamma=0.9)
    chain = lr_scheduler.ChainedScheduler([falls, cycle], own)
    both: dict[str, Any] = {
        "sequence": lambda: lr_scheduler.SequentialLR(own, [falls, cycle], milestones=[3]),
        "chain": lambda: chain,
        "chain in a sequence": lambda: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(own), chain], own),
    }
    scheduler = schedule(optimizer, state, both[kind](), ranks=2)
    for _ in range(6):
        optimizer.step()
        scheduler.step()
    assert cycle.last_epoch == cycle.total_steps


def test_a_sequence_whose_milestone_is_too_late_says_so() -> None:
    _, optimizer, state = make()
    own = optimizer.optimizer
    cycle = lr_scheduler.OneCycleLR(own, max_lr=1.0, total_steps=3)
    both = lr_scheduler.SequentialLR(own, [cycle, lr_scheduler.ConstantLR(own)], milestones=[5])
    scheduler = schedule(optimizer, state, both, ranks=2)
    optimizer.step()
    scheduler.step()
    with pytest.raises(ValueError, match="Tried to step 4 times"):
        scheduler.step()


@pytest.mark.parametrize("metric", ["own", "mean", "rank 0's alone", "undefined"])
@on_ranks(2)
def test_ranks_that_pass_different_metrics_are_warned_of_once(metric: str) -> None:
    accelerator = Accelerator(cpu=True)
    net = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    net, optimizer, scheduler = accelerator.prepare(
        net, sgd, lr_scheduler.ReduceLROnPlateau(sgd, patience=0, factor=0.5)
    )
    rates = []
    with caught_warnings() as caught:
        for epoch in range(4):
            accelerator.backward(net(torch.ones(1, 1)).sum())
            optimizer.step()
            loss = torch.tensor(float(-epoch if accelerator.is_main_process else epoch))
            if metric == "mean":
                loss = accelerator.reduce(loss, "mean")
            if metric != "rank 0's alone" or accelerator.is_main_process:
                scheduler.step(loss if metric != "undefined" else math.nan)
            rates.append(optimizer.param_groups[0]["lr"])
    by_rank = accelerator.gather_for_metrics([rates], use_gather_object=True)
    is_told = metric == "own" and accelerator.is_main_process
    accelerator.end_training()
    assert metric != "own" or by_rank[0] != by_rank[1]
    said = [warning for warning in caught if "ReduceLROnPlateau" in str(warning.message)]
    assert len(said) == is_told
    for warning in said:
        assert "Rank 0 has passed -1 to ReduceLROnPlateau, rank 1 1:" in str(warning.message)
        assert 'accelerator.reduce(loss, "mean")' in str(warning.message)
        assert "scheduler.step(loss" in linecache.getline(warning.filename, warning.lineno)


@pytest.mark.parametrize("options", [{}, {"adjust_scheduler": True}])
def test_plateau_counts_its_own_calls(options: dict[str, bool]) -> None:
    _, optimizer, state = make(**options)
    inner = lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, patience=2, factor=0.5)
    scheduler = schedule(optimizer, state, inner, ranks=4)
    rates = []
    for _ in range(4):
        scheduler.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.05])


def test_a_schedule_waits_for_its_own_optimizer_only() -> None:
    (_, own, state), (_, other, _) = make(), make()
    scheduler = prepare_scheduler(falling(own), [other, own], state, steps_per_call=1, step_with_optimizer=True)
    for skipped, epoch in ((other, 1), (own, 1)):
        own.optimizer.step()
        skipped.step_was_skipped = True
        scheduler.step()
        assert scheduler.last_epoch == epoch


def test_scheduler_made_from_the_prepared_optimizer() -> None:
    parameter, optimizer, state = make(2)
    scheduler = schedule(optimizer, state, lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
    for _ in range(2):
        with state.accumulate([]):
            parameter.sum().backward()
            optimizer.step()
            scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert parameter.tolist() == pytest.approx([0.8, 0.8])


def test_overflow_skips_the_step_and_the_schedule() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    state = GradientState(GradientAccumulationPlugin(num_steps=1))
    scaler = LossScaler(torch.device("cpu"))
    optimizer = prepare_optimizer(torch.optim.SGD([parameter], lr=0.1), state, scaler)
    scheduler = schedule(optimizer, state, falling(optimizer))
    for factor, skipped, epoch in ((1.0, False, 1), (math.inf, True, 1), (1.0, False, 2)):
        scaler.scale(parameter.sum() * factor).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert (optimizer.step_was_skipped, scheduler.last_epoch) == (skipped, epoch)
    assert parameter.item() == pytest.approx(1 - 0.1 - 0.05)
    with pytest.raises(TrainingError, match="closure"):
        optimizer.step(lambda: None)


@pytest.mark.parametrize("with_scaler", [False, True])
def test_clipping_waits_for_the_end_of_the_window(with_scaler: bool) -> None:
    parameter, optimizer, state = make(2)
    scaler = LossScaler(torch.device("cpu")) if with_scaler else None
    norms = []
    for _ in range(2):
        with state.accumulate([]):
            loss = parameter.sum() * 3
            (loss if scaler is None else scaler.scale(loss)).backward()
            for _ in range(2):
                norm = clip_grad_norm(
                    (p for p in [parameter]), 1.0, 2.0, optimizers=[optimizer], state=state, scaler=scaler
                )
                norms.append(norm.item())
    once, twice = 3 * math.sqrt(2), 6 * math.sqrt(2)
    assert norms == pytest.approx([once, once, twice, 1.0], rel=1e-5)
    assert parameter.grad is not None
    assert parameter.grad.norm().item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(2, 1), lambda: torch.zeros(1, requires_grad=True)])
def test_optimizer_of_another_model_is_refused(make: Callable[[], Any]) -> None:
    model, other = make(), make()
    learned = [other] if isinstance(other, torch.Tensor) else other.parameters()
    with pytest.raises(TrainingError, match="made for another model"):
        Accelerator(cpu=True).prepare(model, torch.optim.SGD(learned, lr=0.1))


def test_optimizer_of_a_part_or_of_a_model_prepared_before_is_taken() -> None:
    model, other = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.ReLU()), torch.nn.Linear(2, 1)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(other)
    *_, of_part, of_other = accelerator.prepare(
        model, torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
    )
    assert of_part.param_groups[0]["params"][0] is model[0].weight
    assert of_other.param_groups[0]["params"][0] is other.weight

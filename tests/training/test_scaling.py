"""Tests of loss scaling on the CPU: whatever a program does between losses, steps see gradients of their real size."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_accel.training.accumulation import GradientAccumulationPlugin, GradientState
from notebook_accel.training.handlers import GradScalerKwargs
from notebook_accel.training.optimizers import (
    AcceleratedOptimizer,
    clip_grad_norm,
    clip_grad_value,
    prepare_optimizer,
    unscale,
)
from notebook_accel.training.precision import LossScaler

CPU = torch.device("cpu")
# Powers of two, so that scaling is exact and numbers can be compared bit by bit.
SLOPES = st.sampled_from([0.5, 1.0, -0.25, 2.0, math.inf, math.nan])
SETTINGS = GradScalerKwargs(init_scale=1024.0, growth_interval=2)


def parameters(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(count)]


def values(some: list[torch.nn.Parameter]) -> str:
    return repr([parameter.tolist() for parameter in some])  # as text, since NaN isn't equal to itself


def sgd(parameter: torch.nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD([parameter], lr=0.25)


def loss_of(parameter: torch.nn.Parameter, slope: float) -> torch.Tensor:
    """Return a loss with one gradient that may not be finite, and another one that is."""
    return (parameter * torch.tensor([slope, 0.5])).sum()


class Ours:
    """Training in fp16 like that of an ``Accelerator``."""

    def __init__(self, count: int) -> None:
        self.scaler = LossScaler(CPU, SETTINGS)
        self.state = GradientState(GradientAccumulationPlugin(num_steps=1))
        self.parameters = parameters(count)
        self.optimizers: list[AcceleratedOptimizer] = [
            prepare_optimizer(sgd(parameter), self.state, self.scaler) for parameter in self.parameters
        ]
        self._all = {"optimizers": self.optimizers, "state": self.state, "scaler": self.scaler}

    def backward(self, number: int, slope: float) -> None:
        self.scaler.scale(loss_of(self.parameters[number], slope)).backward()

    def unscale(self, number: int) -> None:
        unscale([self.optimizers[number]], self.scaler)

    def clip_norm(self, number: int) -> float:
        return float(clip_grad_norm([self.parameters[number]], 0.7, 2.0, **self._all))

    def clip_value(self, number: int) -> None:
        clip_grad_value([self.parameters[number]], 0.3, **self._all)

    def step(self, number: int) -> None:
        self.optimizers[number].step()

    def zero_grad(self, number: int, set_to_none: bool) -> None:
        self.optimizers[number].zero_grad(set_to_none)

    def checkpoint(self, number: int) -> None:
        self.scaler.state_dict()


class Unscaled:
    """Training without a scale that skips steps whose gradients were found not to be finite."""

    def __init__(self, count: int) -> None:
        self.parameters = parameters(count)
        self.optimizers = [sgd(parameter) for parameter in self.parameters]
        self._found: dict[int, bool] = {}

    def _look(self, *numbers: int) -> None:
        for number in numbers:
            gradient = self.parameters[number].grad
            self._found.setdefault(number, gradient is not None and not bool(gradient.isfinite().all()))

    def backward(self, number: int, slope: float) -> None:
        self._found.clear()
        loss_of(self.parameters[number], slope).backward()

    def unscale(self, number: int) -> None:
        self._look(number)

    def clip_norm(self, number: int) -> float:
        self._look(*range(len(self.parameters)))
        return float(torch.nn.utils.clip_grad_norm_([self.parameters[number]], 0.7))

    def clip_value(self, number: int) -> None:
        self._look(*range(len(self.parameters)))
        torch.nn.utils.clip_grad_value_([self.parameters[number]], 0.3)

    def step(self, number: int) -> None:
        self._look(number)
        if not self._found[number]:
            self.optimizers[number].step()

    def zero_grad(self, number: int, set_to_none: bool) -> None:
        self.optimizers[number].zero_grad(set_to_none)

    def checkpoint(self, number: int) -> None:
        pass


NUMBERS = st.integers(0, 2)
ACTIONS = st.one_of(
    st.tuples(st.just("backward"), NUMBERS, SLOPES),
    st.tuples(st.sampled_from(["unscale", "clip_norm", "clip_value", "step", "step", "checkpoint"]), NUMBERS),
    st.tuples(st.just("zero_grad"), NUMBERS, st.booleans()),
)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.lists(ACTIONS, min_size=3, max_size=30))
def test_in_any_order_a_step_sees_gradients_of_their_real_size(count: int, actions: list[Any]) -> None:
    ours, unscaled = Ours(count), Unscaled(count)
    for each in (ours, unscaled):  # torch refuses to unscale before there is a scale
        each.backward(0, 1.0)
    for action, number, *more in actions:
        if action == "clip_value" and ours.parameters[number % count].grad is None:
            continue  # torch refuses this call
        results = [getattr(each, action)(number % count, *more) for each in (ours, unscaled)]
        assert repr(results[0]) == repr(results[1])
        assert values(ours.parameters) == values(unscaled.parameters)


def test_a_skipped_step_is_skipped_once() -> None:
    ours = Ours(1)
    ours.backward(0, math.inf)
    assert not math.isfinite(ours.clip_norm(0))  # so the program skips the step
    ours.zero_grad(0, True)
    ours.backward(0, 1.0)
    assert math.isclose(ours.clip_norm(0), math.hypot(1, 0.5), rel_tol=1e-6)
    ours.step(0)
    assert not ours.optimizers[0].step_was_skipped
    assert ours.scaler.state_dict()["scale"] == 512
    moved = torch.tensor([1.0, 2.0]) - ours.parameters[0]
    assert math.isclose(moved.norm().item(), 0.25 * 0.7, rel_tol=1e-4)


def test_a_program_that_calls_the_scaler_itself() -> None:
    """Use the methods of torch's scaler, as code does that is written for it, beside torch's own."""
    torchs = torch.amp.GradScaler("cpu", **SETTINGS.to_kwargs())
    plain, ours = parameters(1), Ours(1)
    optimizer = sgd(plain[0])
    scales = []
    for slope in (0.5, math.inf, 0.25, 2.0, 0.5):
        torchs.scale(loss_of(plain[0], slope)).backward()
        torchs.unscale_(optimizer)
        torchs.step(optimizer)
        torchs.update()
        optimizer.zero_grad()
        ours.backward(0, slope)
        ours.scaler.unscale_(ours.optimizers[0])
        ours.scaler.step(ours.optimizers[0])
        ours.scaler.update()
        ours.zero_grad(0, True)
        scales.append(ours.scaler.get_scale())
        assert scales[-1] == torchs.get_scale()
        assert ours.scaler.state_dict() == torchs.state_dict()
        assert values(ours.parameters) == values(plain)
    assert len(set(scales)) > 1
    assert ours.scaler.is_enabled()
    assert ours.scaler.get_growth_interval() == SETTINGS.growth_interval
    ours.scaler.update(8.0)
    assert ours.scaler.get_scale() == 8.0

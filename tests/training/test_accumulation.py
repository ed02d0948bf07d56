from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from notebook_accel import environment
from notebook_accel.errors import ConfigError
from notebook_accel.reporting import Counter
from notebook_accel.training.accumulation import GradientAccumulationPlugin, GradientState, resolve
from notebook_accel.training.loader_position import ACTIVE_ITERATIONS


def state(steps: int, **options: Any) -> GradientState:
    return GradientState(GradientAccumulationPlugin(num_steps=steps, **options))


def windows(state: GradientState, batches: int, *, total: int | None, epochs: int = 1) -> list[tuple[bool, float]]:
    """Return for each micro-batch whether it syncs, and the gradient after a loss of slope 1."""
    parameter = torch.zeros(1, requires_grad=True)
    seen = []
    for _ in range(epochs):
        counter = Counter()
        with ACTIVE_ITERATIONS.iterating(counter, total) as current:
            for batch in range(batches):
                counter.step = batch + 1
                current.is_last = current.ends_window = batch == batches - 1
                ACTIVE_ITERATIONS.hand_out(current)
                with state.accumulate([], lambda: [parameter]):
                    state.divide(parameter.sum()).backward()
                    assert parameter.grad is not None
                    seen.append((state.sync_gradients, round(parameter.grad.item(), 6)))
                    if state.sync_gradients:
                        parameter.grad = None
    return seen


@pytest.mark.parametrize(("told", "steps", "num_steps", "counts"), [
    ("4", None, None, 4), ("", None, None, 1), ("1", None, None, 1), ("3", 3, None, 3), ("3", None, 3, 3),
])  # fmt: skip
def test_steps_are_those_of_the_launch_unless_said(
    told: str, steps: int | None, num_steps: int | None, counts: int
) -> None:
    plugin = GradientAccumulationPlugin(num_steps=num_steps)
    assert resolve(steps, plugin, {environment.GRADIENT_ACCUMULATION_STEPS: told}).num_steps == counts


def test_the_program_overrides_the_launch_with_a_warning() -> None:
    told = {environment.GRADIENT_ACCUMULATION_STEPS: "4"}
    for steps, plugin in ((1, None), (None, GradientAccumulationPlugin(num_steps=1))):
        with pytest.warns(UserWarning, match="launch sets gradient_accumulation_steps=4, but the Accelerator sets 1"):
            assert resolve(steps, plugin, told).num_steps == 1
    with pytest.raises(ConfigError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 'auto'"):
        resolve(None, None, {environment.GRADIENT_ACCUMULATION_STEPS: "auto"})


@pytest.mark.parametrize("total", [6, None, 5, 7])
def test_every_window_is_a_mean_whatever_the_loader_knows(total: int | None) -> None:
    seen = windows(state(4, scale_last_window=True), 6, total=total, epochs=2)
    assert [syncs for syncs, _ in seen] == [False, False, False, True, False, True] * 2
    assert [gradient for syncs, gradient in seen if syncs] == [1.0] * 4


@pytest.mark.parametrize("total", [6, None])
def test_last_window_as_accelerate_has_it(total: int | None) -> None:
    seen = windows(state(4), 6, total=total)
    assert [gradient for syncs, gradient in seen if syncs] == [1.0, 0.5]


def test_windows_can_go_on_over_the_end_of_the_loader() -> None:
    seen = windows(state(4, sync_with_dataloader=False), 6, total=6, epochs=2)
    assert [index for index, (syncs, _) in enumerate(seen) if syncs] == [3, 7, 11]
    assert [gradient for syncs, gradient in seen if syncs] == [1.0] * 3


def test_without_accumulate_the_loss_is_divided_and_every_step_counts() -> None:
    plain = state(4)
    assert plain.divide(torch.tensor(8.0)).item() == 2
    assert plain.sync_gradients


def test_one_step_leaves_the_loss_untouched() -> None:
    loss = torch.tensor(1.0)
    with (one := state(1)).accumulate([]):
        assert one.divide(loss) is loss
        assert one.sync_gradients


class Synced:
    """A stand-in for a model that averages its gradients."""

    def __init__(self) -> None:
        self.local = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.local += 1
        yield


@pytest.mark.parametrize(("options", "local"), [({}, 3), ({"sync_each_batch": True}, 0)])
def test_models_sync_at_the_end_of_a_window(options: dict[str, Any], local: int) -> None:
    models = [Synced(), Synced()]
    accumulating = state(4, **options)
    for _ in range(4):
        with accumulating.accumulate([*models, torch.nn.Linear(1, 1)]):
            pass
    assert [model.local for model in models] == [local, local]


@pytest.mark.parametrize("steps", [0, -1, 1.5, "two", True])
def test_steps_that_cannot_be(steps: Any) -> None:
    with pytest.raises(ConfigError, match="whole number from 1"):
        resolve(steps, None, {})
    with pytest.raises(ConfigError, match="whole number from 1"):
        GradientAccumulationPlugin(num_steps=steps)


def test_number_and_plugin_agree() -> None:
    assert resolve(3, None, {}).num_steps == 3
    assert resolve(1, GradientAccumulationPlugin(num_steps=3), {}).num_steps == 3
    assert resolve(3, GradientAccumulationPlugin(sync_with_dataloader=False), {}) == GradientAccumulationPlugin(
        num_steps=3, sync_with_dataloader=False
    )
    with pytest.raises(ConfigError, match="is 2, and the plugin's num_steps is 3"):
        resolve(2, GradientAccumulationPlugin(num_steps=3), {})


@pytest.mark.parametrize(("options", "gradient"), [({"scale_last_window": True}, 1.0), ({}, 0.5 + 2 / 3)])
def test_the_number_can_change_within_a_window(options: dict[str, Any], gradient: float) -> None:
    accumulating = state(2, **options)
    parameter = torch.zeros(1, requires_grad=True)
    synced = []
    for _ in range(3):
        with accumulating.accumulate([], lambda: [parameter]):
            accumulating.divide(parameter.sum()).backward()
        synced.append(accumulating.sync_gradients)
        accumulating.change_steps(3)
    assert synced == [False, False, True]
    assert parameter.grad is not None
    assert parameter.grad.item() == pytest.approx(gradient)


def test_a_pass_that_was_abandoned_says_nothing_about_the_next() -> None:
    accumulating = state(4)
    counter = Counter()
    with contextlib.ExitStack() as kept:  # a notebook keeps the traceback of the last exception like this
        abandoned = kept.enter_context(ACTIVE_ITERATIONS.iterating(counter, 1))
        abandoned.is_last = abandoned.ends_window = True
        ACTIVE_ITERATIONS.hand_out(abandoned)
        with ACTIVE_ITERATIONS.iterating(counter, 1) as current:
            ACTIVE_ITERATIONS.hand_out(current)
            assert not accumulating.end_of_dataloader
        assert not accumulating.end_of_dataloader
        assert not accumulating.in_dataloader
        ACTIVE_ITERATIONS.hand_out(abandoned)
        assert not state(4).end_of_dataloader

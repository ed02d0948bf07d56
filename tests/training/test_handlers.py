from __future__ import annotations

import datetime
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from notebook_accel import Accelerator
from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.training.accumulation import GradientAccumulationPlugin
from notebook_accel.training.handlers import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    Handlers,
    InitProcessGroupKwargs,
)
from tests.training.ranks import Ranks, caught_warnings, on_ranks


def test_each_kind_finds_its_place() -> None:
    given = (GradScalerKwargs(init_scale=2.0), AutocastKwargs(enabled=False))
    sorted_out = Handlers.from_list(given)
    assert (sorted_out.scaler, sorted_out.autocast) == given
    assert (sorted_out.ddp, sorted_out.group) == (DistributedDataParallelKwargs(), InitProcessGroupKwargs())
    assert Handlers.from_list(None) == Handlers()


@pytest.mark.parametrize(("given", "complaint"), [
    ([GradScalerKwargs(), GradScalerKwargs()], "two GradScalerKwargs"),
    ([{"init_scale": 2}], "has a dict"),
])  # fmt: skip
def test_handlers_that_can_not_be(given: list[Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Accelerator(kwargs_handlers=given)


@pytest.mark.parametrize(("make", "complaint"), [
    (lambda: InitProcessGroupKwargs(backend="mpi"), "backend='mpi'"),
    (lambda: InitProcessGroupKwargs(init_method="tcp://host"), "init_method='tcp://host'"),
    (lambda: InitProcessGroupKwargs(timeout=datetime.timedelta()), "timeout"),
    (lambda: DistributedDataParallelKwargs(comm_wrapper=DDPCommunicationHookType.POWER_SGD), "comm_wrapper"),
])  # fmt: skip
def test_settings_that_can_not_be(make: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as raised:
        make()
    assert raised.value.fix


class Skips(torch.nn.Module):
    """A model that doesn't use one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def gradients(settings: DistributedDataParallelKwargs) -> Any:
    own = Accelerator(cpu=True, kwargs_handlers=[settings])
    net = own.prepare(Skips())
    for _ in range(2):  # the second pass fails if the first one waited for the unused layer
        net.zero_grad()
        own.backward(net(torch.full((3, 4), 0.1 + own.process_index)).square().sum())
    model = own.unwrap_model(net)
    assert model.unused.weight.grad is None or not model.unused.weight.grad.any()
    return model.used.weight.grad.clone()


def all_gradients(hooks: list[DDPCommunicationHookType]) -> list[Any]:
    return [gradients(DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook=hook)) for hook in hooks]


def test_gradients_travel_as_told(two_ranks: Ranks) -> None:
    kinds = DDPCommunicationHookType
    first, second = two_ranks.run(all_gradients, [kinds.NO, kinds.FP16, kinds.POWER_SGD])
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)
    exact, fp16, power_sgd = first
    assert not torch.equal(fp16, exact)
    torch.testing.assert_close(fp16, exact, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(power_sgd, exact)  # PowerSGD begins to compress later


@on_ranks(2)
def test_a_late_sync_needs_to_know_what_is_used() -> None:
    own = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    net = own.prepare(Skips())
    with pytest.raises(TrainingError, match="find_unused_parameters") as raised, own.trigger_sync_in_backward(net):
        pass
    assert "outside of no_sync" in raised.value.fix


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch built for CUDA has the hook for every backend")
@on_ranks(2)
def test_a_hook_that_the_backend_lacks() -> None:
    with pytest.raises(ConfigError, match="BF16") as raised:
        all_gradients([DDPCommunicationHookType.BF16])
    assert "FP16" in raised.value.fix


@pytest.mark.parametrize(("seconds", "warnings"), [([50, 5], 1), ([50, 50], 0)])
@on_ranks(2)
def test_a_deadline_that_comes_too_late_is_warned_of(seconds: list[int], warnings: int) -> None:
    if dist.is_initialized():  # from an earlier test
        dist.destroy_process_group()
    with caught_warnings() as caught:
        for each in seconds:
            handler = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=each))
            accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    accelerator.wait_for_everyone()
    accelerator.end_training()
    assert len(caught) == warnings
    for warning in caught:
        assert re.search(r"has no effect.*end_training\(\)", str(warning.message), re.DOTALL)


def accumulate_with_a_static_graph(*, sync_each_batch: bool) -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=sync_each_batch)
    settings = DistributedDataParallelKwargs(static_graph=True)
    own = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, kwargs_handlers=[settings])
    net = own.prepare(torch.nn.Linear(4, 2))
    for _ in range(2):
        with own.accumulate(net):
            own.backward(net(torch.full((1, 4), float(own.process_index))).sum())


@on_ranks(2)
def test_a_static_graph_and_accumulation() -> None:
    accumulate_with_a_static_graph(sync_each_batch=True)
    with pytest.raises(TrainingError, match="static_graph") as raised:
        accumulate_with_a_static_graph(sync_each_batch=False)
    assert "sync_each_batch=True" in raised.value.fix

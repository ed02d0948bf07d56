from __future__ import annotations

import pytest
import torch

from notebook_accel import environment
from notebook_accel.errors import ConfigError
from notebook_accel.training.handlers import AutocastKwargs, GradScalerKwargs
from notebook_accel.training.precision import LossScaler, Precision

CPU = torch.device("cpu")


def test_argument_then_environment_then_no() -> None:
    launched = {environment.MIXED_PRECISION: "bf16"}
    assert Precision(None, CPU, {}).name == "no"
    assert Precision(None, CPU, launched).name == "bf16"
    assert Precision("no", CPU, launched).name == "no"


def test_unknown_precision_names_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"'fp8'") as raised:
        Precision("fp8", CPU, {})
    assert "'no', 'bf16', 'fp16'" in raised.value.fix


def test_fp16_on_a_cpu_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="needs a GPU") as raised:
        Precision("fp16", CPU, {})
    assert "bf16" in raised.value.fix


def test_autocast_as_told() -> None:
    x = torch.ones(2, 2)
    told = Precision("bf16", CPU, {}, autocast=AutocastKwargs(enabled=False))
    with told.autocast():
        assert (x @ x).dtype is torch.float32
        with told.autocast(AutocastKwargs()):
            assert (x @ x).dtype is torch.bfloat16
    with Precision("bf16", CPU, {}).autocast(AutocastKwargs(cache_enabled=False)):
        assert not torch.is_autocast_cache_enabled()


def test_downcasting_is_for_tpus_only() -> None:
    with pytest.warns(UserWarning, match="downcast_bf16=True has no effect on this device"):
        Precision("bf16", CPU, {}, downcast_bf16=True)


def test_a_device_that_computes_in_bf16_itself_needs_no_autocast() -> None:
    asked = []

    def computes_in(dtype: torch.dtype, *, downcast: bool) -> bool:
        asked.append((dtype, downcast))
        return True

    lowered = Precision("bf16", CPU, {}, downcast_bf16=True, computes_in=computes_in)
    assert (lowered.name, lowered.dtype) == ("bf16", None)
    assert Precision("no", CPU, {}, computes_in=computes_in).name == "no"
    assert asked == [(torch.bfloat16, True)]


def test_the_scale_goes_on_where_it_was() -> None:
    settings = GradScalerKwargs(init_scale=8.0, growth_interval=2)
    saved, loaded = LossScaler(CPU, settings), LossScaler(CPU)
    (parameter, optimizer), factors = parameter_and_optimizer(), []
    saved.scale(parameter.sum()).backward()
    saved.step(optimizer)
    loaded.load_state_dict(saved.state_dict())
    for scaler in (saved, loaded):
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.scale(parameter.sum())
        factors.append(scaler.factor)
    assert factors == [16, 16]


def test_scaling_can_be_left_out() -> None:
    assert Precision("fp16", torch.device("cuda"), {}, scaler=GradScalerKwargs(enabled=False)).scaler is None


def parameter_and_optimizer() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    parameter = torch.nn.Parameter(torch.ones(1))
    return parameter, torch.optim.SGD([parameter], lr=1.0)

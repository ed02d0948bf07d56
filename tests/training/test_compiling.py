"""Tests of models that ``prepare`` compiles: really by dynamo, with backends that need no C++ compiler."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from notebook_accel import Accelerator, ConfigError, environment, utils
from notebook_accel.training.compiling import DynamoBackend, TorchDynamoPlugin, compile_regions
from tests.training.ranks import on_ranks


class Blocks(torch.nn.Module):
    """A model with repeated blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(3))
        self.last = torch.nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.last(hidden)
        return logits


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """Return the number of graphs that dynamo has compiled since the last call."""
    counters = torch._dynamo.utils.counters
    found: int = counters["stats"]["unique_graphs"]
    counters.clear()
    return found


def test_a_prepared_model_is_compiled_and_unwraps_to_what_was_given(tmp_path: pathlib.Path) -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="EAGER")
    model = torch.nn.Linear(3, 2)
    net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert utils.is_compiled_module(net)
    assert accelerator.prepare(net) is net
    assert accelerator.unwrap_model(net) is model
    assert accelerator.unwrap_model(net, keep_torch_compile=False) is model
    assert [*accelerator.get_state_dict(net)] == ["weight", "bias"]
    graphs()
    with accelerator.accumulate(net):
        accelerator.backward(net(torch.ones(4, 3)).sum())
        optimizer.step()
    assert graphs() == 1
    accelerator.save_state(tmp_path)
    saved = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(tmp_path)
    assert torch.equal(model.weight, saved)


def test_another_accelerator_does_not_compile_it() -> None:
    model = torch.nn.Linear(3, 2)
    net = Accelerator(cpu=True, dynamo_backend="eager").prepare(model)
    assert Accelerator(cpu=True).prepare(net) is model
    again = Accelerator(cpu=True, dynamo_backend="aot_eager").prepare(net)
    assert again is not net
    assert again._orig_mod is model


def test_a_model_that_was_compiled_before_stays_as_it_is() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="aot_eager")
    compiled: Any = torch.compile(torch.nn.Linear(3, 2), backend="eager")
    in_place = torch.nn.Linear(3, 2)
    in_place.compile(backend="eager")
    assert accelerator.prepare(compiled) is compiled
    assert accelerator.unwrap_model(compiled) is compiled
    assert accelerator.prepare(in_place) is in_place


@on_ranks(2)
def test_a_model_with_a_compiled_part_unwraps() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    part: Any = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    model = torch.nn.Sequential(part, torch.nn.Linear(2, 1))
    net = accelerator.prepare(model)
    accelerator.backward(net(torch.ones(1, 2)).sum())
    plain = accelerator.unwrap_model(net, keep_fp32_wrapper=False)
    for keep in (True, False):
        assert accelerator.unwrap_model(net, keep_torch_compile=keep) is model
    assert type(plain) is torch.nn.Sequential
    assert plain[0] is part
    accelerator.end_training()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_whole_forward_pass_is_one_graph(precision: str) -> None:
    plugin = TorchDynamoPlugin(backend="eager", fullgraph=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, dynamo_plugin=plugin)
    plugin.fullgraph = False  # too late for this Accelerator
    model = Blocks()
    net = accelerator.prepare(model)
    graphs()
    logits = net(torch.ones(2, 4))
    assert graphs() == 1
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, model(torch.ones(2, 4)))
    assert accelerator.state.dynamo_plugin is not None
    assert accelerator.state.dynamo_plugin.to_kwargs() == {"backend": "eager", "fullgraph": True}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo's own
def test_regions_are_compiled_one_by_one_in_place() -> None:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model = Blocks()
    x = torch.ones(2, 4)
    expected, names = model(x), [*model.state_dict()]
    net = accelerator.prepare(model)
    assert net is model
    graphs()
    assert torch.equal(net(x), expected)
    assert graphs() == 3  # the first layer, one block in place of three, the last layer
    assert [*net.state_dict()] == names
    plain = accelerator.prepare(torch.nn.Linear(3, 2))  # has no blocks, so all of it is compiled
    assert utils.is_compiled_module(plain)
    assert compile_regions(torch.nn.Linear(3, 2), backend="eager")(torch.ones(1, 3)).shape == (1, 2)


def test_settings_of_the_launch() -> None:
    settings = {"BACKEND": "INDUCTOR", "MODE": "max-autotune", "USE_FULLGRAPH": "true", "USE_DYNAMIC": "False"}
    with environment.patched({f"ACCELERATE_DYNAMO_{name}": value for name, value in settings.items()}):
        plugin = Accelerator(cpu=True).state.dynamo_plugin
        assert plugin is not None
        assert plugin.to_kwargs() == {"backend": "inductor", "mode": "max-autotune", "fullgraph": True}
        assert Accelerator(cpu=True, dynamo_backend="no").state.dynamo_plugin.backend is DynamoBackend.NO
    with (
        environment.patched({"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "perhaps"}),
        pytest.raises(ConfigError, match="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION is 'perhaps'"),
    ):
        TorchDynamoPlugin()


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="dynamo_backend is 'ofi'") as raised:
        Accelerator(cpu=True, dynamo_backend="ofi")
    assert "'inductor'" in raised.value.fix
    with pytest.raises(ConfigError, match="both dynamo_backend and dynamo_plugin"):
        Accelerator(cpu=True, dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin())

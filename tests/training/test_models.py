from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar, NoReturn

import cloudpickle
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from notebook_accel import Accelerator
from notebook_accel.environment import RankPlace
from notebook_accel.training import process_group
from notebook_accel.training.models import prepare_model, unwrap_model
from notebook_accel.training.precision import Precision
from notebook_accel.training.runtimes.single_process import SingleProcess
from tests.training.ranks import Ranks

CPU = torch.device("cpu")


class Model(torch.nn.Module):
    subclasses: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Model.subclasses.append(cls)

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"logits": self.linear(x), "half": self.linear(x)}


def prepare(model: torch.nn.Module, precision: str = "bf16") -> torch.nn.Module:
    return prepare_model(model, SingleProcess(RankPlace(), CPU), Precision(precision, CPU, {}))


def test_alone_and_in_float32_it_is_the_model_itself() -> None:
    model = Model()
    assert prepare(model, "no") is model
    assert unwrap_model(model) is model


def test_forward_under_autocast_returns_float32() -> None:
    model, x = Model(), torch.randn(4, 3)
    net = prepare(model)
    exact, rounded = model(x)["logits"], net(x)["logits"]
    assert rounded.dtype is torch.float32
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(rounded, exact)
    assert torch.allclose(rounded, exact, atol=0.05)


def test_prepared_and_original_are_one_model() -> None:
    model = Model()
    net: Any = prepare(model)
    assert isinstance(net, Model)
    assert net.linear is model.linear
    assert list(net.state_dict()) == list(model.state_dict())
    net.eval()
    assert not model.training
    net(torch.ones(1, 3))
    assert model.calls == 1
    model.calls = 7
    assert net.calls == 7
    assert repr(net) == repr(model)
    assert Model.subclasses == []


def test_unwrapping_in_the_middle_of_training_changes_neither() -> None:
    model, x = Model(), torch.randn(4, 3)
    before = model(x)["logits"]
    net = prepare(model)
    rounded = net(x)["logits"]
    assert unwrap_model(net) is model
    assert torch.equal(model(x)["logits"], before)
    assert torch.equal(net(x)["logits"], rounded)
    kept = unwrap_model(net, keep_fp32_wrapper=True)
    assert torch.equal(kept(x)["logits"], rounded)


@pytest.mark.parametrize("again", [lambda net: pickle.loads(cloudpickle.dumps(net)), copy.deepcopy])
def test_a_copy_is_a_copy_of_the_original(again: Any) -> None:
    model, x = Model(), torch.randn(4, 3)
    copied = again(prepare(model))
    assert type(copied) is Model
    assert "forward" not in copied.__dict__
    assert torch.equal(copied(x)["logits"], model(x)["logits"])


def test_another_precision_replaces_the_first() -> None:
    model, x = Model(), torch.randn(4, 3)
    net = prepare(model)
    assert prepare(net, "no") is model
    assert unwrap_model(prepare(net)) is model
    assert torch.equal(net(x)["logits"], prepare(net)(x)["logits"])


def test_compiled_models_unwrap_to_what_was_prepared() -> None:
    model, x = Model(), torch.randn(4, 3)
    compiled = torch.compile(model, backend="eager")
    net = prepare(compiled)
    assert net(x)["logits"].dtype is torch.float32
    assert torch.equal(net(x)["logits"], prepare(model)(x)["logits"])
    assert unwrap_model(net) is compiled
    assert unwrap_model(net, keep_torch_compile=False) is model
    assert unwrap_model(compiled) is compiled
    assert unwrap_model(torch.compile(prepare(model), backend="eager")) is model


def in_a_group(precision: str) -> Any:
    runtime = process_group.join(cpu=True)
    torch.manual_seed(runtime.place.rank)
    model, frozen = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).requires_grad_(False)
    compiled = torch.compile(torch.nn.Linear(3, 2), backend="eager")
    chosen = Precision(precision, runtime.device, {})
    net, still, fast = (prepare_model(part, runtime, chosen) for part in (model, frozen, compiled))
    net(torch.full((1, 3), float(runtime.place.rank + 1))).sum().backward()
    assert unwrap_model(net) is model
    assert unwrap_model(still) is frozen
    assert unwrap_model(fast) is compiled
    assert prepare_model(net, runtime, Precision("no", runtime.device, {})) is not model
    kinds = [isinstance(part, DistributedDataParallel) for part in (net, still, fast)]
    assert model.weight.grad is not None
    return kinds, model.weight.tolist(), model.weight.grad.tolist()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_ranks_share_weights_and_average_gradients(two_ranks: Ranks, precision: str) -> None:
    first, second = two_ranks.run(in_a_group, precision)
    assert first == second
    assert first[0] == [True, False, True]
    assert first[2] == [[1.5] * 3] * 2


def with_a_group_of_ones_own() -> Any:
    runtime = process_group.join(cpu=True)
    own = DistributedDataParallel(torch.nn.Linear(3, 2), find_unused_parameters=True)
    plain = prepare_model(own, runtime, Precision("no", runtime.device, {}))
    rounding: Any = prepare_model(own, runtime, Precision("bf16", runtime.device, {}))
    with rounding.no_sync():
        assert not own.require_backward_grad_sync
    return plain is own, rounding.find_unused_parameters, rounding(torch.ones(1, 3)).dtype


def test_the_users_own_wrapper_is_kept(two_ranks: Ranks) -> None:
    assert two_ranks.run(with_a_group_of_ones_own) == [(True, True, torch.float32)] * 2


def after_the_end_of_its_group() -> Any:
    torch.manual_seed(process_group.rank_place().rank)
    first = Accelerator(cpu=True)
    net = first.prepare(torch.nn.Linear(2, 1))
    first.end_training()
    second = Accelerator(cpu=True)
    again = second.prepare(net)
    second.backward(again(torch.full((1, 2), float(second.process_index))).sum())
    gradient = second.unwrap_model(again).weight.grad
    second.end_training()
    return again is net, gradient.tolist()


def test_a_model_that_was_prepared_in_a_group_that_has_ended(two_ranks: Ranks) -> None:
    assert two_ranks.run(after_the_end_of_its_group) == [(False, [[0.5, 0.5]])] * 2


def only_evaluated() -> bool:
    return isinstance(Accelerator(cpu=True).prepare_model(torch.nn.Linear(1, 1), evaluation_mode=True), torch.nn.Linear)


def test_a_model_that_is_only_evaluated(two_ranks: Ranks) -> None:
    assert two_ranks.run(only_evaluated) == [True, True]


class Placed(torch.nn.Linear):
    """Refuses to be moved, as quantised models do and models that are on several devices."""

    def to(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise ValueError("`.to` is not supported")


@pytest.mark.parametrize(
    "names",
    [
        {"hf_device_map": {"first": 0, "second": "cpu"}},
        {"is_loaded_in_8bit": True},
        {"is_loaded_in_4bit": True},
        {"hf_device_map": {"": 0}, "is_quantized": True},
    ],
)
def test_model_that_was_placed_when_it_was_loaded_stays_where_it_is(names: dict[str, Any]) -> None:
    """The names are those that Transformers gives its models."""
    model = Placed(2, 2)
    vars(model).update(names)
    assert prepare(model, "no") is model
    vars(model).update(dict.fromkeys(names))
    vars(model)["hf_device_map"] = {"": 0}  # at one place, from which it can be moved
    with pytest.raises(ValueError, match="not supported"):
        prepare(model, "no")

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from typing import Any, ClassVar, NoReturn

import cloudpickle
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from notebook_accel import Accelerator
from notebook_accel.environment import RankPlace
from notebook_accel.training import process_group
from notebook_accel.training.backends.single_process import SingleProcess
from notebook_accel.training.models import DataParallelism, prepare_model, unwrap_model
from notebook_accel.training.precision import Precision
from tests.training.ranks import Ranks, on_ranks

CPU = torch.device("cpu")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


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

    def again(self, x: torch.Tensor) -> Any:
        return self(x)

    def note(self, *_: Any) -> None:
        """Serve as a hook."""


def prepare(model: torch.nn.Module, precision: str = "bf16") -> torch.nn.Module:
    return prepare_model(model, SingleProcess(RankPlace(), CPU), Precision(precision, CPU, {}), DataParallelism())


def saved_and_loaded(model: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_alone_and_in_float32_it_is_the_model_itself() -> None:
    model = Model()
    assert prepare(model, "no") is model
    assert unwrap_model(model) is model


def is_rounded(outputs: dict[str, torch.Tensor]) -> bool:
    """Return whether the model has computed in bf16; its outputs have to be float32."""
    logits = outputs["logits"]
    assert logits.dtype is torch.float32
    return torch.equal(logits, logits.bfloat16().float())


def test_forward_under_autocast_returns_float32() -> None:
    model, x = Model(), torch.randn(4, 3)
    exact = model(x)["logits"]
    rounded = prepare(model)(x)
    assert is_rounded(rounded)
    assert not torch.equal(rounded["logits"], exact)
    assert torch.allclose(rounded["logits"], exact, atol=0.05)


class Parent(torch.nn.Module):
    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> Any:
        return self.part(x)


@pytest.mark.parametrize("compiled", ["no", slow("before"), slow("in place"), "after"])
def test_autocast_stays_with_the_model(compiled: str) -> None:
    model, x = Model(), torch.randn(4, 3)
    given: Any = torch.compile(model, backend="eager") if compiled == "before" else model
    parent = Parent(given)
    if compiled == "in place":
        model.compile(backend="eager")
    assert not is_rounded(parent(x))
    net: Any = prepare(given)
    if compiled == "after":
        net = torch.compile(net, backend="eager")
    assert is_rounded(net(x))
    assert is_rounded(net.forward(x))
    assert is_rounded(unwrap_model(net)(x))
    assert is_rounded(parent(x))
    assert is_rounded(Parent(net)(x))
    assert is_rounded(copy.deepcopy(unwrap_model(given))(x))
    assert is_rounded(copy.deepcopy(Parent(given))(x))
    if compiled != "before":  # there it is the compiled one that autocasts, as with Accelerate
        assert is_rounded(unwrap_model(net).again(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["a forward of its own", "scripted", "traced", "parametrized since"])
def test_models_of_unusual_make(kind: str) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 2)), torch.randn(4, 3)
    given: Any = {"scripted": torch.jit.script, "traced": torch.fx.symbolic_trace}.get(kind, lambda model: model)(model)
    if kind == "a forward of its own":
        given.forward = functools.partial(model[0].forward)
    net: Any = prepare(given)
    if kind == "parametrized since":
        net = prepare(model[0])
        torch.nn.utils.parametrizations.weight_norm(net)
        assert prepare(net) is net
        assert torch.allclose(unwrap_model(net, keep_fp32_wrapper=False)(x), net(x), atol=0.05)
    assert is_rounded({"logits": net(x)})
    assert is_rounded({"logits": unwrap_model(net).forward(x)})
    if kind == "a forward of its own":
        assert is_rounded({"logits": copy.deepcopy(net)(x)})
        net.forward = lambda x: {"another": x}
        assert list(net(x)) == ["another"]


def test_a_parametrization_is_removed_from_a_model_that_autocasts() -> None:
    def is_autocast(model: torch.nn.Module) -> bool:
        outputs: torch.Tensor = model(x)
        return torch.equal(outputs, outputs.bfloat16().float())

    given, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    for name in ("weight", "bias"):
        parametrize.register_parametrization(given, name, torch.nn.Tanh())
    net: Any = prepare(given)
    assert is_autocast(net)
    assert is_autocast(copy.deepcopy(net))
    assert not is_autocast(unwrap_model(net, keep_fp32_wrapper=False))
    before = net(x)
    for name in ("bias", "weight"):
        parametrize.remove_parametrizations(net, name)
    assert sorted(dict(net.named_parameters())) == ["bias", "weight"]
    assert torch.equal(net(x), before)
    assert is_autocast(net)
    assert not is_autocast(unwrap_model(net, keep_fp32_wrapper=False))
    assert type(saved_and_loaded(net)) is torch.nn.Linear


def test_prepared_and_original_are_one_model() -> None:
    model = Model()
    shown, names = repr(model), list(model.state_dict())
    net: Any = prepare(model)
    assert net is model
    assert type(net).__name__ == "Model"
    assert inspect.signature(net.forward) == inspect.signature(Model().forward)
    assert inspect.signature(type(net).forward) == inspect.signature(Model.forward)
    assert repr(net) == shown
    for keep in (True, False):
        assert list(unwrap_model(net, keep_fp32_wrapper=keep).state_dict()) == names
    assert Model.subclasses == []


def test_unwrapping_in_the_middle_of_training_changes_neither() -> None:
    model, x = Model(), torch.randn(4, 3)
    before = model(x)["logits"]
    net = prepare(model)
    rounded = net(x)["logits"]
    plain: Any = unwrap_model(net, keep_fp32_wrapper=False)
    assert type(plain) is Model
    assert plain.linear is model.linear
    assert torch.equal(plain(x)["logits"], before)
    assert torch.equal(net(x)["logits"], rounded)
    plain.eval()
    assert not net.training
    assert plain.calls == model.calls == 4


@pytest.mark.parametrize("again", [lambda net: pickle.loads(cloudpickle.dumps(net)), saved_and_loaded])
@pytest.mark.parametrize("keep", [True, False])
def test_elsewhere_it_is_the_model_that_it_was(again: Any, keep: bool) -> None:
    model, x = Model(), torch.randn(4, 3)
    model.register_forward_hook(model.note)  # so that it refers to itself
    before = model(x)["logits"]
    for given in (prepare(model), unwrap_model(prepare(model), keep_fp32_wrapper=keep)):
        loaded = again(given)
        assert type(loaded) is Model
        assert "forward" not in vars(loaded)
        assert torch.equal(loaded(x)["logits"], before)
        (hook,) = loaded._forward_hooks.values()
        assert hook.__self__.linear is loaded.linear
    assert is_rounded(model(x))


def test_another_precision_replaces_the_first() -> None:
    model, x = Model(), torch.randn(4, 3)
    exact = model(x)["logits"]
    net = prepare(model)
    assert is_rounded(net(x))
    assert prepare(net, "no") is model
    assert type(model) is Model
    assert torch.equal(model(x)["logits"], exact)
    again = prepare(prepare(net))
    assert is_rounded(again(x))
    assert type(unwrap_model(again, keep_fp32_wrapper=False)) is Model


def test_compiled_models_unwrap_to_what_was_prepared() -> None:
    model, x = Model(), torch.randn(4, 3)
    compiled = torch.compile(model, backend="eager")
    net = prepare(compiled)
    assert torch.equal(net(x)["logits"], prepare(copy.deepcopy(model))(x)["logits"])
    assert unwrap_model(net) is compiled
    assert unwrap_model(net, keep_torch_compile=False) is model
    assert unwrap_model(compiled) is compiled
    assert not is_rounded(unwrap_model(net, keep_fp32_wrapper=False)(x))
    assert unwrap_model(torch.compile(prepare(model), backend="eager"), keep_torch_compile=False) is model


def in_a_group(precision: str) -> Any:
    backend = process_group.join(cpu=True)
    torch.manual_seed(backend.place.rank)
    model, frozen = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).requires_grad_(False)
    compiled = torch.compile(torch.nn.Linear(3, 2), backend="eager")
    chosen = Precision(precision, backend.device, {})
    net, still, fast = (prepare_model(part, backend, chosen, DataParallelism()) for part in (model, frozen, compiled))
    net(torch.full((1, 3), float(backend.place.rank + 1))).sum().backward()
    assert unwrap_model(net) is model
    assert unwrap_model(still) is frozen
    assert unwrap_model(fast) is compiled
    assert prepare_model(net, backend, Precision("no", backend.device, {}), DataParallelism()) is not model
    kinds = [isinstance(part, DistributedDataParallel) for part in (net, still, fast)]
    assert model.weight.grad is not None
    return kinds, model.weight.tolist(), model.weight.grad.tolist()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_ranks_share_weights_and_average_gradients(two_ranks: Ranks, precision: str) -> None:
    first, second = two_ranks.run(in_a_group, precision)
    assert first == second
    assert first[0] == [True, False, True]
    assert first[2] == [[1.5] * 3] * 2


@on_ranks(2)
def test_the_users_own_wrapper_is_kept() -> None:
    backend = process_group.join(cpu=True)
    own = DistributedDataParallel(torch.nn.Linear(3, 2), find_unused_parameters=True)
    plain = prepare_model(own, backend, Precision("no", backend.device, {}), DataParallelism())
    rounding: Any = prepare_model(own, backend, Precision("bf16", backend.device, {}), DataParallelism())
    with rounding.no_sync():
        assert not own.require_backward_grad_sync
    assert plain is own
    assert rounding.find_unused_parameters
    assert rounding(torch.ones(1, 3)).dtype is torch.float32


@on_ranks(2)
def test_a_model_that_was_prepared_in_a_group_that_has_ended() -> None:
    torch.manual_seed(process_group.rank_place().rank)
    first = Accelerator(cpu=True)
    net = first.prepare(torch.nn.Linear(2, 1))
    first.end_training()
    second = Accelerator(cpu=True)
    again = second.prepare(net)
    second.backward(again(torch.full((1, 2), float(second.process_index))).sum())
    gradient = second.unwrap_model(again).weight.grad
    second.end_training()
    assert again is not net
    assert gradient.tolist() == [[0.5, 0.5]]


@on_ranks(2)
def test_a_model_that_is_only_evaluated() -> None:
    model = torch.nn.Linear(1, 1)
    assert Accelerator(cpu=True).prepare_model(model, evaluation_mode=True) is model


class Placed(torch.nn.Linear):
    """A model that refuses to be moved, as quantised models do, and those on several devices."""

    def to(self, *_: Any, **__: Any) -> NoReturn:  # type: ignore[override]
        raise ValueError("`.to` is not supported")


@pytest.mark.parametrize("names", [
    {"hf_device_map": {"first": 0, "second": "cpu"}}, {"is_loaded_in_8bit": True}, {"is_loaded_in_4bit": True},
    {"hf_device_map": {"": 0}, "is_quantized": True},
])  # fmt: skip
def test_model_that_was_placed_when_it_was_loaded_stays_where_it_is(names: dict[str, Any]) -> None:
    """The attributes are those that Transformers sets on its models."""
    model = Placed(2, 2)
    vars(model).update(names)
    assert prepare(model, "no") is model
    vars(model).update(dict.fromkeys(names))
    vars(model)["hf_device_map"] = {"": 0}  # at one place, from which it can be moved
    with pytest.raises(ValueError, match="not supported"):
        prepare(model, "no")

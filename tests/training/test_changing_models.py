"""Models that change after prepare, or are trained without being called: ranks go on as one process would."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pathlib
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from notebook_accel.errors import TrainingError
from notebook_accel.training import models
from notebook_accel.training.backends import torch_distributed
from notebook_accel.training.gradients import TrainableParameters
from notebook_accel.utils import extract_model_from_parallel
from tests.training.ranks import Ranks, caught_warnings, on_ranks, running

pytestmark = pytest.mark.timeout(120)


@functools.cache
def _digits() -> TensorDataset:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return TensorDataset(torch.tensor(digits.data[:256]) / 16, torch.tensor(digits.target[:256]))


class Net(torch.nn.Sequential):
    def __init__(self, seed: int = 0, outputs: int = 10) -> None:
        torch.manual_seed(seed)
        # In float64, so that only another sum of gradients makes a difference that counts.
        super().__init__(torch.nn.Linear(64, 24), torch.nn.Tanh(), torch.nn.Linear(24, outputs))
        self.double()

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(x), y)


def _set_learning(model: torch.nn.Module, learns: bool) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(learns)


class Training:
    """Two epochs of a prepared ``Net``, which a program changes between the epochs or in each step."""

    def __init__(self, *, sharded: bool = False, frozen: str = "", **options: Any) -> None:
        plugin = FullyShardedDataParallelPlugin() if sharded else None
        self.accelerator = Accelerator(cpu=True, split_batches=True, fsdp_plugin=plugin, **options)
        self.net = Net()
        _set_learning(self.net if frozen == "all" else self.net[0], not frozen)
        self.head = Net(1) if frozen == "all" else None
        models = [self.net] if self.head is None else [self.net, self.head]
        optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], 0.1)
        loader = DataLoader(_digits(), batch_size=32)
        *self.models, self.optimizer, self.loader = self.accelerator.prepare(*models, optimizer, loader)

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        y = self.models[0](x)
        return y if self.head is None else self.models[1](torch.cat([y] * 7, 1)[:, :64])

    def epoch(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None) -> Iterator[None]:
        for x, y in self.loader:
            yield
            with self.accelerator.accumulate(*self.models):
                self.accelerator.backward(F.cross_entropy(self.outputs(x), y) if loss is None else loss(x, y))
                self.accelerator.clip_grad_norm_(self.net.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def run(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None) -> None:
        for _ in self.epoch(loss):
            pass

    def evaluate(self) -> None:
        with torch.no_grad():
            self.outputs(_digits().tensors[0][:4])

    def weights(self) -> list[float]:
        whole: list[Any] = [
            parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            for model in (self.net, self.head)
            if model is not None
            for parameter in model.parameters()
        ]
        return [float(value) for tensor in whole for value in tensor.detach().flatten()[::7]]


def unfreezes_a_whole_model(sharded: bool = False) -> list[float]:
    training = Training(sharded=sharded, frozen="all")
    training.run()
    _set_learning(training.net, True)
    training.run()
    if not sharded:  # nothing of the ranks travels with the model
        copied = pickle.loads(pickle.dumps(training.models[0]))
        assert (type(copied), len(copied._forward_pre_hooks)) == (Net, 0)
        assert torch.equal(copied[0].weight, training.net[0].weight)
    return training.weights()


def adds_a_layer(sharded: bool = False) -> list[float]:
    training = Training(sharded=sharded)
    training.run()
    torch.manual_seed(training.accelerator.process_index)  # the ranks begin with rank 0's weights all the same
    layer = torch.nn.Linear(10, 10).double()
    training.net.append(layer)
    training.optimizer.add_param_group({"params": layer.parameters()})
    training.run()
    return training.weights()


def freezes_halves_by_turns(sharded: bool = False) -> list[float]:
    training = Training(sharded=sharded, gradient_accumulation_steps=3)
    for step, _ in enumerate(training.epoch()):
        _set_learning(training.net[0], step % 6 < 3)
        _set_learning(training.net[2], step % 6 >= 3)
    return training.weights()


def casts_there_and_back(sharded: bool = False) -> list[float]:
    """Train after a cast of the model, or of what ``prepare`` returned, as after moves to the CPU and back."""
    training = Training(sharded=sharded)
    for model in (training.net, training.models[0]):
        training.run()
        model.float().double()
    training.run()
    return training.weights()


def loses_and_gets_buffers() -> list[float]:
    training = Training()
    prune.l1_unstructured(training.net[0], "weight", 0.5)
    training.optimizer.param_groups[0]["params"] = list(training.net.parameters())
    training.run()
    prune.remove(training.net[0], "weight")  # the model has no buffer any more
    training.run()
    training.net.register_buffer("mine", torch.full((1,), 1.0 + training.accelerator.process_index))
    training.run()
    return [*training.weights(), *training.net.mine.tolist()]


def has_an_auxiliary_model() -> list[float]:
    """A second model is called in the first micro-batch of each window only, and the first one in the second."""
    training = Training(gradient_accumulation_steps=2)
    other = Net(5)
    other, optimizer = training.accelerator.prepare(other, torch.optim.SGD(other.parameters(), 0.1))
    for step, (x, y) in enumerate(training.loader):
        with training.accelerator.accumulate(training.models[0], other):
            training.accelerator.backward(F.cross_entropy((training.models[0] if step % 2 else other)(x), y))
            for each in (training.optimizer, optimizer):
                each.step()
                each.zero_grad()
    return [*training.weights(), *(float(parameter.detach().sum()) for parameter in other.parameters())]


def toggles(after_the_call: bool) -> list[float]:
    """Accumulate as nanoGPT does: by the attribute of ``DistributedDataParallel``, and without ``accelerator``."""
    training = Training()
    [model] = training.models
    for step, (x, y) in enumerate(training.loader):
        model.require_backward_grad_sync = bool(step % 2) != after_the_call
        loss = F.cross_entropy(model(x), y) / 2
        model.require_backward_grad_sync = bool(step % 2)
        loss.backward()
        if step % 2:
            training.optimizer.step()
            training.optimizer.zero_grad()
    return training.weights()


def part_and_whole(sharded: bool = False) -> list[float]:
    """A model and its first layer are prepared, and both are called."""
    training = Training(sharded=sharded)
    accelerator = Accelerator(cpu=True, split_batches=True, fsdp_plugin=training.accelerator.state.fsdp_plugin)
    training.net = Net(3)
    optimizer = torch.optim.SGD(training.net.parameters(), 0.1)
    part, *training.models, training.optimizer = accelerator.prepare(training.net[0], training.net, optimizer)
    training.run(lambda x, y: F.cross_entropy(training.models[0](x), y) + part(x).square().mean())
    return training.weights()


@pytest.mark.parametrize("uses_made_again", [False, True])
@on_ranks(2)
def test_clipping_one_net_leaves_the_others_gradients_alone(uses_made_again: bool) -> None:
    """Only backward passes average, while one net has older gradients.

    With ``uses_made_again`` the other net is called before that net's backward pass, for both.
    """
    accelerator = Accelerator(cpu=True, split_batches=True)
    nets = [Net(1, 64), Net(2, 1)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    make, judge, *optimizers, loader = accelerator.prepare(*nets, *optimizers, DataLoader(_digits(), batch_size=32))
    with averages_of(make) as calls:
        for x, _ in loader:
            with torch.set_grad_enabled(uses_made_again):
                made = make(x)
            optimizers[1].zero_grad()
            accelerator.backward((judge(made.detach()) - judge(x)).mean())
            accelerator.clip_grad_norm_(judge.parameters(), 1.0)
            optimizers[1].step()
            optimizers[0].zero_grad()
            accelerator.backward(-judge(made if uses_made_again else make(x)).mean())
            accelerator.clip_grad_value_(make.parameters(), 1.0)
            optimizers[0].step()
    assert calls == []


def by_its_layers(training: Training, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, activation, last = training.accelerator.unwrap_model(training.models[0])
    return F.cross_entropy(last(activation(first(x))), y)


def by_its_method(training: Training, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = training.models[0].loss(x, y)
    return loss


def by_two_passes_after_one_call(training: Training, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    outputs = training.models[0](x)
    training.accelerator.backward(F.cross_entropy(outputs, y), retain_graph=True)
    return outputs.square().mean()


def by_two_passes_after_two_calls(training: Training, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, second = training.models[0](x), training.models[0](x / 2)
    training.accelerator.backward(F.cross_entropy(first, y))
    return F.cross_entropy(second, y)


@contextlib.contextmanager
def messages() -> Iterator[list[Any]]:
    """Return what is logged about gradients."""
    logged: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_distributed._logger, "warning", lambda *said: logged.append(said))
        yield logged


def is_not_called(loss: Callable[..., torch.Tensor], steps: int) -> list[float]:
    """Train by other calls than the prepared model's, of which rank 0 of several logs one message."""
    with messages() as logged:
        training = Training(gradient_accumulation_steps=steps)
        for _ in range(2):
            training.run(functools.partial(loss, training))
        is_told = training.accelerator.use_distributed and training.accelerator.is_main_process
        assert len(logged) == is_told
        return training.weights()


def calls_before_the_step() -> list[float]:
    """A call between the backward pass of a method's loss and the step, such as for a metric, averages nothing."""
    training = Training()
    for _ in training.epoch(training.models[0].loss):
        pass
    for x, y in training.loader:
        training.accelerator.backward(training.models[0].loss(x, y))
        training.models[0](x)
        training.optimizer.step()
    return training.weights()


def two_optimizers() -> list[float]:
    """Each layer has an optimizer of its own, and all gradients come from a second backward pass too."""
    training = Training()
    optimizers = [training.accelerator.prepare(torch.optim.SGD(training.net[at].parameters(), 0.1)) for at in (0, 2)]
    for x, y in training.loader:
        training.accelerator.backward(by_two_passes_after_one_call(training, x, y))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return training.weights()


def searches_by_method() -> list[float]:
    """A line search decides by the loss, which has to be alike on all ranks, how often it calls the closure."""
    training = Training()
    searching = torch.optim.LBFGS(training.net.parameters(), max_iter=3, line_search_fn="strong_wolfe")
    optimizer = training.accelerator.prepare(searching)
    for x, y in training.loader:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            loss = by_its_method(training, x, y)
            training.accelerator.backward(loss)
            return loss

        optimizer.step(closure)
    return training.weights()


def follows_in_a_copy() -> list[float]:
    """Return the weights of a copy of the prepared model, which follows it, and of the model that the copy resets."""
    training = Training()
    [model] = training.models
    target = copy.deepcopy(model)
    best = copy.deepcopy(target)
    assert target.loss.__func__ is Net.loss
    assert type(pickle.loads(pickle.dumps(target))) is type(training.accelerator.unwrap_model(target)) is Net
    for x, _ in training.loader:
        with torch.no_grad():
            goal = target(x)
        training.accelerator.backward((model(x) - goal - 1).square().mean())
        training.optimizer.step()
        training.optimizer.zero_grad()
        target.load_state_dict(model.state_dict())
    followed = [float(parameter.detach().sum()) for parameter in target.parameters()]
    model.load_state_dict(best.state_dict())
    return [*followed, *training.weights()]


def prepared_twice() -> list[float]:
    """The first wrapper of the model is still there and isn't called any more, as in a cell that runs again."""
    with messages() as logged:
        training = Training()
        first = training.models[0]
        accelerator = Accelerator(cpu=True, split_batches=True)
        training.models[0] = accelerator.prepare(training.net)
        assert training.models[0] is not first or accelerator.num_processes == 1
        training.run()
        assert logged == []
        return training.weights()


def sparse_on_one_rank() -> list[float]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    net = torch.nn.ModuleList([torch.nn.Embedding(5, 2, sparse=True).double()])
    net, optimizer = accelerator.prepare(net, torch.optim.SparseAdam(net.parameters(), 0.1))
    [table] = accelerator.unwrap_model(net)
    if accelerator.is_main_process:
        accelerator.backward(table(torch.tensor([1, 3])).sum() * accelerator.num_processes)
    optimizer.step()
    assert table.weight.grad.is_sparse
    weights: list[float] = table.weight.flatten().tolist()
    return weights


@on_ranks(2)
def test_a_prepared_model_has_the_methods_of_the_model_in_it() -> None:
    [model] = Training().models
    assert model.loss.__func__ is Net.loss
    assert type(model.module) is Net
    with pytest.raises(AttributeError, match="'_DataParallel' object has no attribute 'nothing'"):
        model.nothing  # noqa: B018


def data_parallel() -> list[str]:
    net = torch.nn.DataParallel(Net())
    assert type(extract_model_from_parallel(net)).__name__ == "Net"
    with caught_warnings() as caught:
        model = Accelerator(cpu=True).prepare(net)
    assert type(getattr(model, "module", model)).__name__ == "Net"
    return [str(warning.message) for warning in caught]


def test_data_parallel_is_left_out(one_rank: Ranks, two_ranks: Ranks) -> None:
    for [said] in two_ranks.run(data_parallel):
        assert "would use every GPU in each of the 2 ranks" in said
    assert one_rank.run(data_parallel) == [[]]  # it computes where it did before


@pytest.mark.parametrize("is_prepared", [False, True])
@on_ranks(2)
def test_saving_warns_of_models_that_have_come_apart(tmp_path: pathlib.Path, is_prepared: bool) -> None:
    """Train by a method of the model, with an optimizer that was or wasn't prepared, and save."""
    training = Training()
    optimizer = training.optimizer if is_prepared else training.optimizer.optimizer
    for x, y in training.loader:
        training.accelerator.backward(training.models[0].loss(x, y))
        optimizer.step()
    with caught_warnings() as caught:
        training.accelerator.save_state(tmp_path / "state")
    said = "Each rank has trained a model of its own: Net.0.weight, Net.0.bias, Net.2.weight, ... differ"
    assert_rank_0_warns(caught, "" if is_prepared else said)


@pytest.mark.parametrize("is_prepared", [False, True])
@on_ranks(2)
def test_a_parameter_beside_the_model_is_warned_of(is_prepared: bool) -> None:
    accelerator = Accelerator(cpu=True, split_batches=True)
    net, prompt = Net(), torch.nn.Parameter(torch.zeros(64, dtype=torch.float64))
    optimizer = torch.optim.SGD([prompt, *net.parameters()], 0.1)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(_digits(), batch_size=32))
    if is_prepared:
        prompt = accelerator.prepare(prompt)
    with caught_warnings() as caught:
        for x, y in loader:
            accelerator.backward(F.cross_entropy(net(x + prompt), y))
    said = "parameters that haven't been prepared, of shape (64,): each of the 2 ranks trains its own"
    assert_rank_0_warns(caught, "" if is_prepared else said)


def assert_rank_0_warns(caught: list[warnings.WarningMessage], text: str) -> None:
    """Check that one warning with this text, if any, names a line of this file, and that it is rank 0's."""
    texts = [str(warning.message) for warning in caught]
    assert [text in each for each in texts] == [True] * (text != "" and os.environ["RANK"] == "0"), texts
    assert {warning.filename for warning in caught} <= {__file__}


class Heads(torch.nn.Module):
    """A trunk with two heads, which are used by turns or together."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = Net(), torch.nn.ModuleList([torch.nn.Linear(10, 10).double() for _ in range(2)])

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> list[torch.Tensor]:
        y = self.trunk(x)
        return [self.heads[number](y) for number in used]


@pytest.mark.parametrize(
    ("together", "what", "fix"),
    [
        (False, "Heads didn't use heads.1.weight, heads.1.bias on this rank", "find_unused_parameters=True"),
        (True, "A second backward pass reached parameters", "accelerator.backward(first_loss + second_loss)"),
    ],
)
@on_ranks(2)
def test_what_ddp_can_not_do_is_said_in_words(together: bool, what: str, fix: str) -> None:
    accelerator = Accelerator(cpu=True)
    net, loader = accelerator.prepare(Heads(), DataLoader(_digits(), batch_size=32))
    with pytest.raises(TrainingError, match=what) as raised:
        for step, (x, y) in enumerate(loader):
            outputs = net(x, (0, 1) if together else (step % 2,))
            for number, output in enumerate(outputs):
                accelerator.backward(F.cross_entropy(output, y), retain_graph=number < len(outputs) - 1)
    assert fix in raised.value.fix


def test_tensors_in_the_places_of_parameters_are_no_change() -> None:
    class Looks(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            changed.append(followed.have_changed())
            return super().forward(x)

    net = Looks(2, 1)
    followed = TrainableParameters(net)
    torch.nn.Sequential(torch.nn.Tanh())  # something was registered somewhere
    changed: list[bool] = []
    others = {name: 2 * parameter for name, parameter in net.named_parameters()}
    torch.func.functional_call(net, others, (torch.ones(1, 2),))
    net.bias = torch.nn.Parameter(torch.ones(1))
    net(torch.ones(1, 2))
    assert changed == [False, True]
    assert followed.added() == [net.bias]


class Pair(torch.nn.Module):
    """Two heads, with methods that have the names of the wrapper's."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(64, size).double() for size in sizes])

    def loss(self, x: torch.Tensor, head: int) -> torch.Tensor:
        loss: torch.Tensor = self.heads[head](x).square().mean()
        return loss

    def average(self) -> str:
        return "the model's"

    explain = connect = average


def a_head_for_each_rank() -> list[float]:
    """Each rank trains one head of its own, by a method: a rank without a gradient counts as zeros."""
    accelerator = Accelerator(cpu=True)
    net = Pair(3, 4)
    prepared, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    assert prepared.average() == prepared.explain() == prepared.connect() == "the model's"
    ranks = accelerator.num_processes
    for head in range(2):
        if ranks == 1 or accelerator.process_index == head:
            accelerator.backward(prepared.loss(_digits().tensors[0][:8], head) * ranks / 2)
    optimizer.step()
    return [float(parameter.detach().sum()) for parameter in net.parameters()]


def computes_with_other_weights() -> list[float]:
    """As meta-learning does: with tensors in the parameters' places, after another module was made."""
    training = Training()
    training.run()
    torch.nn.Sequential(torch.nn.Linear(1, 1))
    [model], x = training.models, _digits().tensors[0][:8]
    with training.accelerator.no_sync(model):
        fast = {f"module.{name}": p.detach().clone().requires_grad_() for name, p in training.net.named_parameters()}
        torch.func.functional_call(model, fast, (x,)).sum().backward()
        torch.func.grad(lambda weights: torch.func.functional_call(model, weights, (x,)).sum())(
            {name: weight.detach() for name, weight in fast.items()}
        )
    training.run()
    return training.weights()


def joins_uneven_epochs(by_method: bool = False) -> list[float]:
    """Unfreeze a layer between two epochs of which one rank has a batch less."""
    loading = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    net = Net()
    _set_learning(net[0], False)
    loader = DataLoader(torch.utils.data.Subset(_digits(), range(24)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), loader)
    for _ in range(2):
        with accelerator.join_uneven_inputs([model]):
            for x, y in loader:
                accelerator.backward(model.loss(x, y) if by_method else F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        _set_learning(net, True)
    return [float(parameter.detach().sum()) for parameter in net.parameters()]


@pytest.mark.slow
def test_a_model_that_is_not_called_can_not_be_joined() -> None:
    with running(2) as ranks:
        for reply in ranks.replies(joins_uneven_epochs, True):
            assert isinstance(reply, TrainingError)
            assert "within join_uneven_inputs" in str(reply)


@on_ranks(2)
def test_communication_hooks_stay() -> None:
    training = Training(frozen="first")
    calls: list[object] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
        calls.append(state)
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

    training.models[0].register_comm_hook("state", hook)
    training.run()
    before = len(calls)
    _set_learning(training.net, True)
    training.run()
    assert 0 < before <= len(calls) - before


def local_steps() -> list[float]:
    """Local SGD by hand: calls in ``no_sync``, and steps outside of it."""
    training = Training()
    for x, y in training.loader:
        with training.accelerator.no_sync(training.models[0]):
            training.accelerator.backward(F.cross_entropy(training.models[0](x), y))
        training.optimizer.step()
        training.optimizer.zero_grad()
    return training.weights()


def test_steps_stay_local_where_that_is_asked_for(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(local_steps)
    assert first != second


def frozen_in_other_layouts() -> list[float]:
    """A model with weights that aren't contiguous, and that differ until it is unfrozen."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    net = torch.nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last).requires_grad_(False)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    net.requires_grad_(True)
    accelerator.backward(model(torch.full((1, 2, 4, 4), 1.0 + accelerator.process_index)).square().mean())
    optimizer.step()
    return net.weight.flatten().tolist()


def extended_group() -> list[float]:
    """An added layer is put into the optimizer's list itself, and the model is trained by its layers."""
    training = Training()
    training.run(functools.partial(by_its_method, training))
    torch.manual_seed(training.accelerator.process_index)
    layer = torch.nn.Linear(10, 10).double()
    training.net.append(layer)
    training.optimizer.param_groups[0]["params"] += layer.parameters()
    training.run(functools.partial(by_its_method, training))
    return training.weights()


_PROGRAMS: list[Callable[..., list[float]]] = [
    unfreezes_a_whole_model,
    adds_a_layer,
    freezes_halves_by_turns,
    casts_there_and_back,
    part_and_whole,
]


@pytest.mark.parametrize(
    "program",
    [
        *_PROGRAMS,
        *(
            pytest.param(functools.partial(program, True), id=f"{program.__name__}-sharded", marks=pytest.mark.slow)
            for program in _PROGRAMS
        ),
        loses_and_gets_buffers,
        has_an_auxiliary_model,
        functools.partial(toggles, False),
        functools.partial(toggles, True),
        functools.partial(is_not_called, by_its_layers, 1),
        functools.partial(is_not_called, by_two_passes_after_two_calls, 3),
        prepared_twice,
        sparse_on_one_rank,
        calls_before_the_step,
        two_optimizers,
        searches_by_method,
        follows_in_a_copy,
        a_head_for_each_rank,
    ],
)
def test_ranks_train_as_one_process_does(
    one_rank: Ranks, two_ranks: Ranks, program: Callable[..., list[float]]
) -> None:
    [alone] = one_rank.run(program)
    first, second = two_ranks.run(program)
    assert first == second
    assert first == pytest.approx(alone, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("program", [
    computes_with_other_weights, frozen_in_other_layouts, extended_group, joins_uneven_epochs,
])  # fmt: skip
def test_ranks_stay_alike(two_ranks: Ranks, program: Callable[[], list[float]]) -> None:
    first, second = two_ranks.run(program)
    assert first == second


@contextlib.contextmanager
def averages_of(model: torch.nn.Module) -> Iterator[list[object]]:
    """Return the gradients that are averaged for a step or a clip, beside those of backward passes."""
    average, calls = type(model)._average, []  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "_average", lambda self, them: (calls.append(them), average(self, them)))
        yield calls


@on_ranks(2)
def test_nothing_is_averaged_twice() -> None:
    training = Training()
    with averages_of(training.models[0]) as calls:
        training.run()
    assert calls == []


@on_ranks(2)
def test_only_added_layers_are_averaged_beside_the_shares() -> None:
    training = Training(sharded=True)
    training.run()
    training.evaluate()
    torch.nn.Sequential(torch.nn.Linear(1, 1))  # something was registered somewhere
    calls: list[object] = []
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "prepare_leaf", lambda leaf, _: calls.append(leaf))
        for _ in range(2):
            training.run()
            found.append(len(calls))
            training.net.append(torch.nn.Linear(10, 10).double())
    assert found == [0, 2]

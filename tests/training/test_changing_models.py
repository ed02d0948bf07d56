"""Models that change after prepare, or are trained without being called: ranks go on as one process would."""

from __future__ import annotations

import contextlib
import copy
import functools
import pathlib
import pickle
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
from tests.training.ranks import Ranks, caught_warnings, running

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


def replaces_a_layer(sharded: bool = False) -> list[float]:
    training = Training(sharded=sharded)
    training.run()
    torch.manual_seed(training.accelerator.process_index)
    training.net[2] = torch.nn.Linear(24, 10).double()
    training.evaluate()
    training.optimizer = training.accelerator.prepare(torch.optim.SGD(training.net.parameters(), 0.1))
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


def clipped_adversaries(uses_made_again: bool) -> int:
    """Return how many averages there were beside those of backward passes, while one net has older gradients.

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
    return len(calls)


@pytest.mark.parametrize("uses_made_again", [False, True])
def test_clipping_one_net_leaves_the_others_gradients_alone(two_ranks: Ranks, uses_made_again: bool) -> None:
    assert two_ranks.run(clipped_adversaries, uses_made_again) == [0, 0]


def adversaries() -> list[float]:
    """A generator learns against a discriminator that is frozen while it does."""
    accelerator = Accelerator(cpu=True, split_batches=True)
    nets = [Net(1, 64), Net(2, 1)]
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    loader = DataLoader(_digits(), batch_size=32)
    make, judge, *optimizers, loader = accelerator.prepare(*nets, *optimizers, loader)
    for x, _ in loader:
        made = make(x)
        for learner, loss in ((1, lambda x, made: judge(made.detach()) - judge(x)), (0, lambda _, made: -judge(made))):
            _set_learning(nets[1], learner == 1)
            optimizers[learner].zero_grad()
            accelerator.backward(loss(x, made).mean())
            optimizers[learner].step()
    return [float(parameter.detach().sum()) for net in nets for parameter in net.parameters()]


def by_its_layers(training: Training, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, activation, last = training.accelerator.unwrap_model(training.models[0])
    return F.cross_entropy(last(activation(first(x))), y)


def by_its_method(training: Training, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = training.models[0].loss(x, y)
    return loss


def by_turns(training: Training, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    training.turn = not getattr(training, "turn", False)  # type: ignore[attr-defined]
    return by_its_method(training, x, y) if training.turn else F.cross_entropy(training.models[0](x), y)  # type: ignore[attr-defined]


def by_a_call_and_its_method(training: Training, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    training.accelerator.backward(F.cross_entropy(training.models[0](x), y))
    return by_its_method(training, x / 2, y)


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


def uncalled(loss: Callable[..., torch.Tensor], **options: Any) -> tuple[list[float], int]:
    """Return the weights, and how many messages each rank has logged."""
    with messages() as logged:
        training = Training(**options)
        for _ in range(2):
            training.run(functools.partial(loss, training))
        return training.weights(), len(logged)


@pytest.mark.parametrize(
    ("loss", "steps"),
    [(by_its_layers, 1), (by_turns, 3), (by_a_call_and_its_method, 1), (by_two_passes_after_two_calls, 3)],
)
def test_models_that_are_not_called(
    one_rank: Ranks, two_ranks: Ranks, loss: Callable[..., torch.Tensor], steps: int
) -> None:
    train = functools.partial(uncalled, loss, gradient_accumulation_steps=steps)
    [(alone, _)] = one_rank.run(train)
    (first, logged), (second, by_second) = two_ranks.run(train)
    assert first == second
    assert first == pytest.approx(alone, rel=1e-6, abs=1e-9)
    assert (logged, by_second) == (1, 0)


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


def fits_by_method() -> list[float]:
    training = Training()
    optimizer = training.accelerator.prepare(torch.optim.LBFGS(training.net.parameters(), max_iter=3))
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


def prepared_twice() -> tuple[list[float], int]:
    """The first wrapper of the model is still there and isn't called any more, as in a cell that runs again."""
    with messages() as logged:
        training = Training()
        first = training.models[0]
        accelerator = Accelerator(cpu=True, split_batches=True)
        training.models[0] = accelerator.prepare(training.net)
        assert training.models[0] is not first or accelerator.num_processes == 1
        training.run()
        return training.weights(), len(logged)


def test_a_model_that_was_prepared_twice(one_rank: Ranks, two_ranks: Ranks) -> None:
    [(alone, _)] = one_rank.run(prepared_twice)
    for weights, logged in two_ranks.run(prepared_twice):
        assert weights == pytest.approx(alone, rel=1e-6, abs=1e-9)
        assert logged == 0


def sparse() -> list[float]:
    accelerator = Accelerator(cpu=True, split_batches=True)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(17, 8, sparse=True), torch.nn.Flatten(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(net.double().parameters(), 0.1)
    prepared, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(_digits(), batch_size=32))
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(accelerator.unwrap_model(prepared)((16 * x).long()), y))
        optimizer.step()
    return [float(parameter.detach().sum()) for parameter in net.parameters()]


def sparse_on_one_rank() -> tuple[bool, list[float]]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    net = torch.nn.ModuleList([torch.nn.Embedding(5, 2, sparse=True)])
    net, optimizer = accelerator.prepare(net, torch.optim.SparseAdam(net.parameters(), 0.1))
    [table] = accelerator.unwrap_model(net)
    if accelerator.is_main_process:
        accelerator.backward(table(torch.tensor([1, 3])).sum() * accelerator.num_processes)
    optimizer.step()
    return table.weight.grad.is_sparse if accelerator.num_processes > 1 else True, table.weight.flatten().tolist()


def test_sparse_gradients_of_one_rank(one_rank: Ranks, two_ranks: Ranks) -> None:
    [(_, alone)] = one_rank.run(sparse_on_one_rank)
    for is_sparse, weights in two_ranks.run(sparse_on_one_rank):
        assert is_sparse
        assert weights == pytest.approx(alone)


def attributes() -> list[Any]:
    training = Training()
    [model] = training.models
    found = [model.loss.__func__ is Net.loss, hasattr(model, "nothing"), type(model.module).__name__]
    try:
        model.nothing  # noqa: B018
    except AttributeError as error:
        found.append(str(error))
    return found


def test_a_prepared_model_has_the_methods_of_the_model_in_it(two_ranks: Ranks) -> None:
    expected = [True, False, "Net", "'_DataParallel' object has no attribute 'nothing'"]
    assert two_ranks.run(attributes) == [expected, expected]


def data_parallel() -> tuple[str, list[str]]:
    net = torch.nn.DataParallel(Net())
    assert type(extract_model_from_parallel(net)).__name__ == "Net"
    with caught_warnings() as caught:
        model = Accelerator(cpu=True).prepare(net)
    kind = type(getattr(model, "module", model)).__name__
    return kind, [str(warning.message) for warning in caught]


def test_data_parallel_is_left_out(one_rank: Ranks, two_ranks: Ranks) -> None:
    for kind, [said] in two_ranks.run(data_parallel):
        assert kind == "Net"
        assert "would use every GPU in each of the 2 ranks" in said
    assert one_rank.run(data_parallel) == [("Net", [])]  # it computes where it did before


def comes_apart(folder: str, *, is_prepared: bool) -> list[str]:
    """Train by a method of the model, with an optimizer that was or wasn't prepared, and save."""
    training = Training()
    optimizer = training.optimizer if is_prepared else training.optimizer.optimizer
    for x, y in training.loader:
        training.accelerator.backward(training.models[0].loss(x, y))
        optimizer.step()
    with caught_warnings() as caught:
        training.accelerator.save_state(folder)
    assert {warning.filename for warning in caught} <= {__file__}
    return [str(warning.message) for warning in caught]


def test_saving_warns_of_models_that_have_come_apart(two_ranks: Ranks, tmp_path: pathlib.Path) -> None:
    [said], by_second = two_ranks.run(functools.partial(comes_apart, str(tmp_path / "a"), is_prepared=False))
    assert "Each rank has trained a model of its own: Net.0.weight, Net.0.bias, Net.2.weight, ... differ" in said
    assert by_second == []
    assert two_ranks.run(functools.partial(comes_apart, str(tmp_path / "b"), is_prepared=True)) == [[], []]


def bare_parameter(*, is_prepared: bool) -> list[str]:
    accelerator = Accelerator(cpu=True, split_batches=True)
    net, prompt = Net(), torch.nn.Parameter(torch.zeros(64, dtype=torch.float64))
    optimizer = torch.optim.SGD([prompt, *net.parameters()], 0.1)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(_digits(), batch_size=32))
    if is_prepared:
        prompt = accelerator.prepare(prompt)
    with caught_warnings() as caught:
        for x, y in loader:
            accelerator.backward(F.cross_entropy(net(x + prompt), y))
    return [str(warning.message) for warning in caught]


def test_a_parameter_beside_the_model_is_warned_of(two_ranks: Ranks) -> None:
    [said], by_second = two_ranks.run(functools.partial(bare_parameter, is_prepared=False))
    assert "parameters that haven't been prepared, of shape (64,): each of the 2 ranks trains its own" in said
    assert by_second == []
    assert two_ranks.run(functools.partial(bare_parameter, is_prepared=True)) == [[], []]


class Heads(torch.nn.Module):
    """A trunk with two heads, which are used by turns or together."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.heads = Net(), torch.nn.ModuleList([torch.nn.Linear(10, 10).double() for _ in range(2)])

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> list[torch.Tensor]:
        y = self.trunk(x)
        return [self.heads[number](y) for number in used]


def by_turns_or_together(together: bool) -> str:
    accelerator = Accelerator(cpu=True)
    net, loader = accelerator.prepare(Heads(), DataLoader(_digits(), batch_size=32))
    try:
        for step, (x, y) in enumerate(loader):
            outputs = net(x, (0, 1) if together else (step % 2,))
            for number, output in enumerate(outputs):
                accelerator.backward(F.cross_entropy(output, y), retain_graph=number < len(outputs) - 1)
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("together", "what", "fix"),
    [
        (False, "Heads didn't use heads.1.weight, heads.1.bias on this rank", "find_unused_parameters=True"),
        (True, "A second backward pass reached parameters", "accelerator.backward(first_loss + second_loss)"),
    ],
)
def test_what_ddp_can_not_do_is_said_in_words(two_ranks: Ranks, together: bool, what: str, fix: str) -> None:
    for error in two_ranks.run(by_turns_or_together, together):
        assert what in error
        assert fix in error


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


def uneven(by_method: bool) -> str:
    """Unfreeze a layer between two epochs of which one rank has a batch less; return an error."""
    loading = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    net = Net()
    _set_learning(net[0], False)
    loader = DataLoader(torch.utils.data.Subset(_digits(), range(24)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1), loader)
    try:
        for _ in range(2):
            with accelerator.join_uneven_inputs([model]):
                for x, y in loader:
                    accelerator.backward(model.loss(x, y) if by_method else F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
            _set_learning(net, True)
    except TrainingError as error:
        return str(error)
    return str([float(parameter.detach().sum()) for parameter in net.parameters()])


def test_unfreezing_between_uneven_epochs(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(uneven, False)
    assert first == second
    assert first.startswith("[")


@pytest.mark.slow
def test_a_model_that_is_not_called_can_not_be_joined() -> None:
    with running(2) as ranks:
        for reply in ranks.replies(uneven, True):
            assert "within join_uneven_inputs" in str(reply)


def communication_hook() -> tuple[int, int]:
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
    return before, len(calls) - before


def test_communication_hooks_stay(two_ranks: Ranks) -> None:
    for before, after in two_ranks.run(communication_hook):
        assert 0 < before <= after


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
    replaces_a_layer,
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
        adversaries,
        calls_before_the_step,
        two_optimizers,
        fits_by_method,
        follows_in_a_copy,
        sparse,
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


@pytest.mark.parametrize("program", [computes_with_other_weights, frozen_in_other_layouts, extended_group])
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


def averages_after_passes() -> int:
    training = Training()
    with averages_of(training.models[0]) as calls:
        training.run()
        optimizer = training.accelerator.prepare(torch.optim.LBFGS(training.net.parameters(), max_iter=2))
        for x, y in training.loader:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(training.models[0](x), y)
                training.accelerator.backward(loss)
                return loss

            optimizer.step(closure)
    return len(calls)


def test_nothing_is_averaged_twice(two_ranks: Ranks) -> None:
    assert two_ranks.run(averages_after_passes) == [0, 0]


def averages_beside_the_shares() -> list[int]:
    """Return how many gradients are averaged beside the sharded ones, before and after a model gets another layer."""
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
    return found


def test_only_added_layers_are_averaged_beside_the_shares(two_ranks: Ranks) -> None:
    assert two_ranks.run(averages_beside_the_shares) == [[0, 2]] * 2

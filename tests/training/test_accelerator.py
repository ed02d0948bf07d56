"""Tests of the facade: ranks compute what one process computes."""

from __future__ import annotations

import contextlib
import copy
import io
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from notebook_accel import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin, environment
from notebook_accel.errors import ConfigError, TrainingError
from tests.training.ranks import Ranks

Batch = tuple[torch.Tensor, torch.Tensor]


class Flow(IterableDataset[Batch]):
    """A dataset without a length."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Batch]:
        return (self._data[index] for index in range(len(self._data)))


def materials(samples: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    data = TensorDataset(torch.randn(samples, 4), torch.randint(0, 3, (samples,)))
    return model, optimizer, data


def train(
    samples: int, batch_size: int, steps: int, *, flow: bool = False, shuffle: bool = False, **options: Any
) -> Any:
    """Train for two epochs as a user would; return the batches of this rank by epoch, and the weights."""
    model, optimizer, data = materials(samples)
    loader = DataLoader(Flow(data) if flow else data, batch_size=batch_size, shuffle=shuffle)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **options)
    scheduler = lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
    net, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    epochs: list[list[Batch]] = []
    for _ in range(2):
        epochs.append([])
        for x, y in loader:
            with accelerator.accumulate(net):
                epochs[-1].append((x, y))
                accelerator.backward(F.cross_entropy(net(x), y))
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return epochs, _weights(accelerator.unwrap_model(net))


def _weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def reference(samples: int, steps: int, by_rank: list[Any], full_windows: bool = True) -> list[torch.Tensor]:
    """Train on the same micro-batches in plain PyTorch, in one process."""
    model, optimizer, _ = materials(samples)
    scheduler = lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
    for of_ranks in zip(*by_rank, strict=True):
        rounds = list(zip(*of_ranks, strict=True))
        for start in range(0, len(rounds), steps):
            window = rounds[start : start + steps]
            length = steps if full_windows else len(window)
            for batches in window:
                for x, y in batches:
                    (F.cross_entropy(model(x), y) / len(batches) / length).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            for _ in by_rank:
                scheduler.step()
    return _weights(model)


def assert_equal(weights: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


PLUGIN = GradientAccumulationPlugin(num_steps=3)
CASES = [(24, 2, 1), (24, 2, 3), (23, 2, 1), (23, 2, 4), (13, 3, 2), (5, 4, 3), (3, 5, 2)]


@pytest.mark.parametrize(("samples", "batch_size", "steps"), CASES)
@pytest.mark.parametrize("flow", [False, True])
def test_one_process_computes_what_plain_pytorch_does(samples: int, batch_size: int, steps: int, flow: bool) -> None:
    epochs, weights = train(samples, batch_size, steps, flow=flow, shuffle=not flow)
    assert_equal(weights, reference(samples, steps, [epochs]))


def train_all(cases: list[tuple[int, int, int]], **options: Any) -> list[Any]:
    return [train(*case, **options) for case in cases]


def train_with_plugin(cases: list[tuple[int, int, int]], plugin: GradientAccumulationPlugin) -> list[Any]:
    return [train(samples, size, 1, gradient_accumulation_plugin=plugin) for samples, size, _ in cases]


def train_flow(cases: list[tuple[int, int, int]]) -> list[Any]:
    return train_all(cases, flow=True)


def train_shuffled(cases: list[tuple[int, int, int]]) -> list[Any]:
    return train_all(cases, shuffle=True)


@pytest.mark.parametrize("training", [train_flow, train_shuffled])
def test_two_ranks_compute_what_one_process_does(two_ranks: Ranks, training: Any) -> None:
    first, second = two_ranks.run(training, CASES)
    for (samples, _, steps), ours, theirs in zip(CASES, first, second, strict=True):
        expected = reference(samples, steps, [ours[0], theirs[0]])
        assert_equal(ours[1], expected)
        assert_equal(theirs[1], expected)


@pytest.mark.parametrize(("options", "full_windows"), [
    ({"scale_last_window": True}, False),
    ({"sync_each_batch": True}, True),
])  # fmt: skip
def test_two_ranks_with_a_plugin(two_ranks: Ranks, options: dict[str, bool], full_windows: bool) -> None:
    plugin = GradientAccumulationPlugin(num_steps=4, **options)
    first, second = two_ranks.run(train_with_plugin, CASES, plugin)
    for (samples, _, _), ours, theirs in zip(CASES, first, second, strict=True):
        assert_equal(ours[1], reference(samples, 4, [ours[0], theirs[0]], full_windows))


def test_the_notebook_cell() -> None:
    model, optimizer, data = materials(16)
    loader = DataLoader(data, batch_size=4)
    accelerator = Accelerator()
    net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(5):
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert accelerator.unwrap_model(net) is model
    assert sum(losses[-4:]) < sum(losses[:4])


def test_the_toy_program_of_accelerates_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.arange(1.0, 9.0)
    y = 2 * x
    weight = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(weight.weight)
    clone = copy.deepcopy(weight)
    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, loader = accelerator.prepare(
        weight, torch.optim.SGD(weight.parameters(), lr=0.02), DataLoader(TensorDataset(x, y), batch_size=2)
    )
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(inputs.view(-1, 1)), labels.view(-1, 1)))
            optimizer.step()
            optimizer.zero_grad()
    F.mse_loss(clone(x.view(-1, 1)), y.view(-1, 1)).backward()
    torch.optim.SGD(clone.parameters(), lr=0.02).step()
    for trained in (model, clone):
        accelerator.print(f"{trained.weight.mean().item():.5f}")
    assert capsys.readouterr().out == "2.04000\n2.04000\n"


def toy(steps: int) -> str:
    """Run the documentation's first program, whose model is a bare tensor; return the last line that it prints."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    y = 2 * x
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = torch.zeros((1, 1), requires_grad=True)
    if not accelerator.is_main_process:
        model.data.fill_(7)  # every rank begins with rank 0's weights
    clone = torch.zeros((1, 1), requires_grad=True)
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x) // steps // accelerator.num_processes)
    prepared = accelerator.prepare(model, torch.optim.SGD([model], lr=0.02), loader)
    assert prepared[0] is model
    assert accelerator.unwrap_model(model) is model
    _, optimizer, loader = prepared
    local = []
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(inputs.view(-1, 1) @ model, labels.view(-1, 1)))
            assert model.grad is not None
            local.append(bool(torch.equal(*accelerator.gather(model.grad).view(-1)[[0, -1]])))
            optimizer.step()
            optimizer.zero_grad()
    assert local == [False] * (steps - 1) + [True] or accelerator.num_processes == 1
    F.mse_loss(x.view(-1, 1) @ clone, y.view(-1, 1)).backward()
    torch.optim.SGD([clone], lr=0.02).step()
    return f"{model.mean().item():.5f} {clone.mean().item():.5f}"


def test_the_toy_program_with_a_bare_tensor(two_ranks: Ranks) -> None:
    assert toy(4) == "2.04000 2.04000"
    assert two_ranks.run(toy, 4) == ["2.04000 2.04000"] * 2
    assert two_ranks.run(toy, 2) == ["2.04000 2.04000"] * 2


def test_optimizer_of_another_tensor_is_refused() -> None:
    model, other = (torch.zeros(1, requires_grad=True) for _ in range(2))
    with pytest.raises(TrainingError, match="made for another model"):
        Accelerator(cpu=True).prepare(model, torch.optim.SGD([other], lr=0.1))


def test_tensors_that_do_not_learn_are_passed_through() -> None:
    data, result = torch.zeros(2), torch.zeros(2, requires_grad=True) * 2
    prepared = Accelerator(cpu=True).prepare(data, result)
    assert prepared[0] is data
    assert prepared[1] is result


def test_mixed_precision_of_the_launcher() -> None:
    with environment.patched({environment.MIXED_PRECISION: "bf16"}):
        accelerator = Accelerator()
    assert accelerator.mixed_precision == "bf16"
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    exact = model(x)
    net = accelerator.prepare(model)
    assert not torch.equal(net(x), exact)
    assert accelerator.unwrap_model(net) is model
    with accelerator.autocast():
        assert (x @ x.T).dtype is torch.bfloat16
    assert Accelerator(mixed_precision="no").prepare(model) is model


def test_prepare_keeps_order_passes_the_rest_through_and_works_once() -> None:
    model, optimizer, data = materials(4)
    loader = DataLoader(data)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    accelerator = Accelerator(mixed_precision="bf16")
    given = (scheduler, "text", loader, optimizer, None, model)
    prepared = accelerator.prepare(*given)
    assert [type(item).__name__ for item in prepared] == [
        "AcceleratedScheduler", "str", "DataLoaderShard", "AcceleratedOptimizer", "NoneType", "Sequential",
    ]  # fmt: skip
    assert prepared[1] is given[1]
    for again in (accelerator.prepare(*given), accelerator.prepare(*prepared)):
        assert all(one is other for one, other in zip(again, prepared, strict=True))
    single = DataLoader(data)
    assert accelerator.prepare(single) is accelerator.prepare(single)


def test_it_forgets_what_it_prepared() -> None:
    model, optimizer, _ = materials(4)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    before = accelerator.prepare(optimizer)
    with accelerator.accumulate(model):
        assert not accelerator.sync_gradients
    assert accelerator.free_memory(model, optimizer) == [None, None]
    assert accelerator.sync_gradients
    assert accelerator.prepare(optimizer) is not before
    accelerator.end_training()
    assert Accelerator(mixed_precision="bf16").num_processes == 1


def test_one_process_by_itself() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=3)
    assert (accelerator.num_processes, accelerator.process_index, accelerator.local_process_index) == (1, 0, 0)
    assert accelerator.is_main_process
    assert accelerator.is_local_main_process
    assert accelerator.sync_gradients
    assert accelerator.gradient_accumulation_steps == 3
    assert not accelerator.optimizer_step_was_skipped
    with accelerator.main_process_first(), accelerator.local_main_process_first():
        accelerator.wait_for_everyone()
    with accelerator.no_sync(torch.nn.Linear(1, 1)):
        pass
    tensor = torch.ones(2)
    for collective in (accelerator.gather, accelerator.broadcast, accelerator.pad_across_processes):
        assert collective(tensor) is tensor


@pytest.mark.parametrize(("options", "message"), [
    ({"mixed_precision": "fp8"}, "'fp8'"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
    ({"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": PLUGIN}, "num_steps is 3"),
])  # fmt: skip
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Accelerator(**options)


def speak() -> Any:
    accelerator = Accelerator(cpu=True)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        accelerator.print("once", 1, sep="-")

    @accelerator.on_main_process
    def main() -> int:
        """Doc."""
        return accelerator.process_index

    @accelerator.on_local_main_process
    def local() -> int:
        return accelerator.process_index

    mean = accelerator.reduce(torch.tensor([accelerator.process_index]), reduction="mean")
    total = accelerator.reduce(torch.tensor([accelerator.process_index]))
    accelerator.wait_for_everyone()
    assert main.__doc__ == "Doc."
    return output.getvalue(), main(), local(), mean.item(), total.item(), accelerator.num_processes


def test_two_ranks_together(two_ranks: Ranks) -> None:
    assert two_ranks.run(speak) == [("once-1\n", 0, 0, 0.5, 1, 2), ("", None, None, 0.5, 1, 2)]


def split() -> Any:
    _, optimizer, data = materials(8)
    accelerator = Accelerator(
        cpu=True, split_batches=True, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    loader, scheduler = accelerator.prepare(DataLoader(data, batch_size=4), lr_scheduler.StepLR(optimizer, 5))
    optimizer.step()
    scheduler.step()
    ids = accelerator.prepare(DataLoader(torch.arange(7), batch_size=4))
    return len(loader), scheduler.last_epoch, [accelerator.gather_for_metrics(batch).tolist() for batch in ids]


def test_schedules_of_their_own() -> None:
    _, optimizer, _ = materials(4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, step_scheduler_with_optimizer=False)
    scheduler = accelerator.prepare(lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    optimizer.step()
    for _ in range(3):
        with accelerator.accumulate():
            assert not accelerator.sync_gradients
            scheduler.step()
    assert scheduler.last_epoch == 3


def test_clipping_values() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    weight = torch.zeros(1, requires_grad=True)
    accelerator.prepare(torch.optim.SGD([weight]))
    clipped = []
    for _ in range(2):
        with accelerator.accumulate(weight):
            accelerator.backward(weight.sum() * 8)
            accelerator.clip_grad_value_(weight, 3.0)
            clipped.append(weight.grad.item())  # type: ignore[union-attr]
    assert clipped == [4, 3]


def test_a_model_that_is_left_where_it_is() -> None:
    model = torch.nn.Linear(1, 1, device="meta")  # such a model can't be moved
    assert Accelerator(cpu=True, device_placement=False).prepare(model) is model
    with pytest.raises(NotImplementedError):
        Accelerator(cpu=True).prepare(model)


def draw(rng_types: list[str]) -> list[float]:
    accelerator = Accelerator(cpu=True, rng_types=rng_types)
    loader = accelerator.prepare(DataLoader(torch.arange(4), shuffle=True))
    drawn = []
    for epoch in range(2):
        torch.manual_seed(10 * accelerator.process_index + epoch)
        for _ in loader:
            drawn.append(torch.rand(1).item())
    return drawn


def test_generators_that_are_synchronised_each_epoch(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(draw, ["torch"])
    assert first == second
    assert len(set(first)) == 4
    first, second = two_ranks.run(draw, [])
    assert set(first).isdisjoint(second)


def test_split_batches(two_ranks: Ranks) -> None:
    assert two_ranks.run(split) == [(2, 1, [[0, 1, 2, 3], [4, 5, 6]])] * 2


def test_another_accelerator_in_the_last_batch_leaves_the_window_alone() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, _, loader = accelerator.prepare(net, optimizer, DataLoader(torch.ones(3, 1), batch_size=1))
    synced = []
    for batch in loader:
        if accelerator.gradient_state.end_of_dataloader:
            other = Accelerator(cpu=True)
            assert not other.gradient_state.in_dataloader
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            synced.append(accelerator.sync_gradients)
    assert synced == [False, True, True]
    for _ in other.prepare(DataLoader(torch.ones(1, 1))):
        assert other.gradient_state.end_of_dataloader


def test_numpy_scalars_in_states_are_loaded(tmp_path: pathlib.Path) -> None:
    numpy = pytest.importorskip("numpy")
    rate = numpy.float64(0.25)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=rate, momentum=numpy.float32(0.5))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=numpy.float64(0.5))
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    accelerator.save_state(str(tmp_path / "saved"))
    optimizer.param_groups[0]["lr"] = 1.0
    scheduler.scheduler.gamma = 1.0
    accelerator.load_state(str(tmp_path / "saved"))
    assert optimizer.param_groups[0]["lr"] == rate
    assert isinstance(optimizer.param_groups[0]["lr"], numpy.float64)
    assert scheduler.scheduler.gamma == 0.5

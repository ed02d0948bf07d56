"""Tests of the facade. ``test_numbers`` has those of what ranks compute."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator, environment
from tests.training.ranks import Ranks, on_ranks


def materials() -> tuple[torch.nn.Module, torch.optim.Optimizer, TensorDataset]:
    model = torch.nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.2), TensorDataset(torch.randn(4, 4))


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


def test_tensors_that_do_not_learn_are_passed_through() -> None:
    data, result = torch.zeros(2), torch.zeros(2, requires_grad=True) * 2
    prepared = Accelerator(cpu=True).prepare(data, result)
    assert prepared[0] is data
    assert prepared[1] is result


def test_mixed_precision_of_the_launcher() -> None:
    with environment.patched({environment.MIXED_PRECISION: "bf16"}):
        accelerator = Accelerator()
    assert accelerator.mixed_precision == "bf16"
    with accelerator.autocast():
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype is torch.bfloat16


def test_prepare_keeps_order_passes_the_rest_through_and_works_once() -> None:
    model, optimizer, data = materials()
    loader = DataLoader(data)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    accelerator = Accelerator(mixed_precision="bf16")
    given = (scheduler, "text", loader, optimizer, None, model)
    prepared = accelerator.prepare(*given)
    assert [type(item).__name__ for item in prepared] == [
        "AcceleratedScheduler", "str", "DataLoaderShard", "AcceleratedOptimizer", "NoneType", "Linear",
    ]  # fmt: skip
    assert prepared[1] is given[1]
    for again in (accelerator.prepare(*given), accelerator.prepare(*prepared)):
        assert all(one is other for one, other in zip(again, prepared, strict=True))
    single = DataLoader(data)
    assert accelerator.prepare(single) is accelerator.prepare(single)


def test_it_forgets_what_it_prepared() -> None:
    model, optimizer, _ = materials()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    before = accelerator.prepare(optimizer)
    with accelerator.accumulate(model):
        assert not accelerator.sync_gradients
    assert accelerator.free_memory(model, optimizer) == [None, None]
    assert accelerator.sync_gradients
    assert accelerator.prepare(optimizer) is not before
    accelerator.end_training()
    assert Accelerator(mixed_precision="bf16").num_processes == 1


def test_schedules_of_their_own() -> None:
    _, optimizer, _ = materials()
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


@pytest.mark.parametrize("rng_types", [["torch"], []])
@on_ranks(2)
def test_generators_that_are_synchronised_each_epoch(rng_types: list[str]) -> None:
    accelerator = Accelerator(cpu=True, rng_types=rng_types)
    loader = accelerator.prepare(DataLoader(torch.arange(4), shuffle=True))
    drawn = []
    for epoch in range(2):
        torch.manual_seed(10 * accelerator.process_index + epoch)
        for _ in loader:
            drawn.append(torch.rand(1).item())
    by_both = {*accelerator.gather_for_metrics(drawn, use_gather_object=True)}
    assert len(by_both) == (4 if rng_types else 8)


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

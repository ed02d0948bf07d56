"""Training on a GPU: precision, ranks that share one, what a step costs."""

from __future__ import annotations

import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator, environment, find_executable_batch_size
from notebook_accel.launching.kernel.job import Job
from notebook_accel.training.handlers import GradScalerKwargs, InitProcessGroupKwargs
from tests import processes
from tests.behaviour import profiled_programs
from tests.gpu.test_gpu import gpus
from tests.training import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(gpus() == 0, reason="NOT TESTED: no NVIDIA GPU on this machine"),
]
BENCHMARK = pathlib.Path(__file__).parents[2] / "benchmarks" / "step_overhead.py"


def train(precision: str, handlers: tuple[object, ...] = ()) -> tuple[list[float], torch.nn.Module]:
    """Sixty steps of a small network on a rule that it can learn; the losses, and the model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    x = torch.randn(640, 16)
    data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers)
    net, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=32))
    losses = []
    for _ in range(3):
        for inputs, labels in loader:
            outputs = net(inputs)
            assert outputs.dtype is torch.float32
            loss = F.cross_entropy(outputs, labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.end_training()
    return losses, model


@pytest.mark.parametrize(("precision", "tolerance"), [("fp16", 0.01), ("bf16", 0.05)])
def test_half_precision_learns_what_float32_does(precision: str, tolerance: float) -> None:
    exact, _ = train("no")
    half, model = train(precision)
    assert half != exact
    assert half == pytest.approx(exact, abs=tolerance)
    assert half[-1] < half[0] / 2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_an_overflow_skips_the_step_and_the_schedule() -> None:
    scale = GradScalerKwargs(init_scale=2.0**10, growth_interval=1000)
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[scale])
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    net, optimizer, scheduler = accelerator.prepare(model, optimizer, StepLR(optimizer, 1, gamma=0.5))
    for factor in (1.0, float("inf"), 1.0):
        before = model.weight.detach().clone()
        rate = scheduler.get_last_lr()
        accelerator.backward(net(torch.ones(2, 4, device=accelerator.device)).sum() * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        overflowed = factor != 1.0
        assert accelerator.optimizer_step_was_skipped == overflowed
        assert torch.equal(model.weight, before) == overflowed
        assert (scheduler.get_last_lr() == rate) == overflowed


def test_unscaled_gradients_are_those_of_float32() -> None:
    gradients = []
    for precision in ("no", "fp16"):
        torch.manual_seed(0)
        accelerator = Accelerator(mixed_precision=precision)
        model = torch.nn.Linear(8, 8)
        net, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        accelerator.backward(net(torch.ones(2, 8, device=accelerator.device)).square().mean())
        accelerator.unscale_gradients()
        assert model.weight.grad is not None
        gradients.append(model.weight.grad.clone())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("pinned", [True, False])
def test_batches_come_whole_in_their_own_stream(pinned: bool) -> None:
    data = torch.arange(64.0).repeat_interleave(1 << 16).reshape(64, 1 << 16)  # 256 KiB each
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(data), batch_size=4, pin_memory=pinned))
    weight = torch.ones((), device=accelerator.device, requires_grad=True)
    sums = []
    for _ in range(3):
        for [x] in loader:
            accelerator.backward((x * weight).sum())
            sums.append(x.sum())
    expected = data.reshape(16, -1).sum(1).tolist() * 3
    assert torch.stack(sums).tolist() == pytest.approx(expected, rel=1e-4)
    accelerator.end_training()


def halve_while_another_rank_waits() -> Any:
    accelerator = Accelerator()
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: tried[-1] // 2)
    def training(batch_size: int) -> float:
        tried.append(batch_size)
        if accelerator.process_index == 1 and batch_size == 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return accelerator.reduce(torch.ones((), device=accelerator.device)).item()  # waits in NCCL, then for the GPU

    total = training()
    accelerator.end_training()
    return tried, total


@pytest.mark.skipif(gpus() < 2, reason="NOT TESTED: no two NVIDIA GPUs on this machine")
def test_a_rank_that_waits_in_nccl_takes_a_smaller_batch_too(sharing: ranks.Ranks) -> None:
    # NCCL's deadline of ten minutes is longer than the one of ``run``.
    assert sharing.run(halve_while_another_rank_waits) == [([8, 4], 2)] * 2


@pytest.fixture
def sharing() -> Iterator[ranks.Ranks]:
    with ranks.running(2) as running:
        yield running


def train_on_a_shared_gpu() -> Any:
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    net = accelerator.prepare(model)
    own = torch.full((3, 4), float(1 + accelerator.process_index), device=accelerator.device)
    accelerator.backward(net(own).sum())
    assert model.weight.grad is not None
    gathered = accelerator.gather(own[:1, 0])
    return str(accelerator.device), model.weight.grad[0].tolist(), gathered.tolist()


@pytest.mark.skipif(gpus() != 1, reason="NOT TESTED: there is a GPU for each rank")
def test_two_ranks_share_a_gpu(sharing: ranks.Ranks) -> None:
    assert sharing.run(train_on_a_shared_gpu, deadline_s=120) == [("cuda:0", [4.5] * 4, [1.0, 2.0])] * 2


def shapes_in_debug_mode() -> str:
    with environment.patched({environment.DEBUG[0]: "1"}):
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    try:
        accelerator.gather(torch.ones(1 + accelerator.process_index, device=accelerator.device))
    except Exception as error:  # noqa: BLE001  # the test looks at it
        return str(error)
    return ""


@pytest.mark.skipif(gpus() != 1, reason="NOT TESTED: there is a GPU for each rank")
def test_debug_mode_compares_shapes(sharing: ranks.Ranks) -> None:
    for message in sharing.run(shapes_in_debug_mode, deadline_s=120):
        assert "rank 0: gather float32 (1,)" in message
        assert "rank 1: gather float32 (2,)" in message


def test_the_benchmark_runs_on_the_gpu() -> None:
    command = [sys.executable, str(BENCHMARK), "--device", "cuda", "--blocks", "7"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    assert "fp16, full loop" in run.stdout


@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiled"])
def test_profile_of_memory_is_a_snapshot_of_the_allocator(launch: Callable[..., Job], compiles: bool) -> None:
    job = launch(profiled_programs.holds_memory, compiles, num_processes=1, use_cpu=False)
    processes.wait_until(lambda: (job.ranks[0].steps or 0) > 3, "it trains", 100.0)
    [rank] = job.profile(3, memory=True).ranks
    [again] = job.profile(2, memory=True).ranks  # nothing is left of the one before
    job.kill()
    assert (rank.why, rank.steps, again.steps) == ("", 3, 2)
    assert rank.snapshot is not None
    [trace] = [each for each in pickle.loads(rank.snapshot.read_bytes())["device_traces"] if each]
    for mark, size in (("inputs", 16 << 20), ("outputs", 32 << 20)):
        made = [entry for entry in trace if entry["action"] == "alloc" and entry["size"] == size]
        lines = [{f"{frame['filename']}, line {frame['line']}" for frame in entry["frames"]} for entry in made]
        assert len([of_entry for of_entry in lines if profiled_programs.line_of(mark) in of_entry]) == 3

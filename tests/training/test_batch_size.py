"""All ranks find the same batch size, even if one of them runs out of memory in the middle of a step."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from notebook_accel import Accelerator, find_executable_batch_size
from notebook_accel.errors import ConfigError, RankFailedError, TrainingError
from notebook_accel.launching.kernel.job import Job
from notebook_accel.training.backends import torch_group
from notebook_accel.training.handlers import InitProcessGroupKwargs
from tests.training import ranks
from tests.training.ranks import Ranks

# The group's timeout. No test waits for it: a rank that notices nothing is late for ``Ranks.run``.
OWN_DEADLINE = InitProcessGroupKwargs(timeout=datetime.timedelta(minutes=20))


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    """Yield three ranks that have no group yet."""
    with ranks.running(3) as running:
        yield running


def train(accelerator: Accelerator, net: torch.nn.Module, batch_size: int, limits: list[int], where: str) -> Any:
    """Take five steps; in the third, or at the end, ranks whose limit is below the batch size run out of memory."""
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.01))
    rank = accelerator.process_index
    for step in range(5):
        loss = net(torch.full((batch_size, 2), 1.0 + rank)).square().mean()
        is_short = step == 2 and batch_size > limits[rank] and where != "at the end"
        if is_short and where == "before backward":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if is_short and where == "in backward":
            loss.register_hook(out_of_memory)
        accelerator.backward(loss)
        if is_short:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        optimizer.step()
        optimizer.zero_grad()
        if where == "after backward":  # a collective in which the other ranks wait
            accelerator.gather(loss.detach())
    if where == "at the end" and batch_size > limits[rank]:  # the others may have returned
        time.sleep(0.5)
        raise MemoryError
    return [parameter.tolist() for parameter in accelerator.unwrap_model(net).parameters()]


def out_of_memory(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def layer() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Linear(64, 1))


def search(kind: str, limits: list[int], where: str) -> Any:
    """Search for a size with an Accelerator, and perhaps a model, from before."""
    outer = None if kind == "all inside" else Accelerator(cpu=True, kwargs_handlers=[OWN_DEADLINE])
    prepared = outer.prepare(layer()) if outer is not None and kind == "model outside" else None
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: tried[-1] // 2)
    def training(batch_size: int) -> Any:
        tried.append(batch_size)
        if not outer:
            assert not dist.is_initialized() or tried[1:]  # nobody has joined for the function
        accelerator = outer or Accelerator(cpu=True, kwargs_handlers=[OWN_DEADLINE])
        group = torch_group.made_here()
        assert group is not None and group.options == OWN_DEADLINE
        if outer is not None:
            accelerator.free_memory()
        return train(accelerator, prepared or accelerator.prepare(layer()), batch_size, limits, where)

    weights = training()
    accelerator = outer or Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor(1.0)).item()
    accelerator.end_training()
    return tried, training.batch_size, weights, total


@pytest.mark.parametrize(("kind", "where", "limits"), [
    pytest.param("accelerator outside", "before backward", [8, 3, 8], marks=pytest.mark.slow),
    pytest.param("model outside", "in backward", [8, 8, 5], marks=pytest.mark.slow),
    ("all inside", "after backward", [4, 8, 8]),
    ("model outside", "at the end", [3, 8, 8]),
])  # fmt: skip
def test_all_ranks_go_on_with_a_smaller_size(three: Ranks, kind: str, where: str, limits: list[int]) -> None:
    outcomes = three.run(search, kind, limits, where)
    sizes = [8, 4, 2] if min(limits) < 4 else [8, 4]
    for tried, found, weights, total in outcomes:
        assert (tried, found, total) == (sizes, sizes[-1], 3)
        assert weights == outcomes[0][2]


def halve_without_closing_connections() -> Any:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[OWN_DEADLINE])
    group = torch_group.made_here()
    assert group is not None
    rank = accelerator.process_index
    if rank == 1:  # as with NCCL, whose peers don't see that this rank has given up
        group._watchdog._end_waits = lambda: None  # type: ignore[method-assign,union-attr]
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: tried[-1] // 2)
    def training(batch_size: int) -> float:
        tried.append(batch_size)
        if rank == 1 and batch_size == 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return accelerator.reduce(torch.tensor(1.0)).item()

    total = training()
    accelerator.end_training()
    return tried, total


@pytest.mark.slow
def test_ranks_give_up_by_themselves_once_memory_has_run_out_elsewhere(two_ranks: Ranks) -> None:
    assert two_ranks.run(halve_without_closing_connections) == [([8, 4], 2)] * 2


def fail_beside() -> Any:
    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=4)
    def training(batch_size: int) -> None:
        if accelerator.process_index == 1:
            raise ValueError("not about memory")

    training()


def test_what_is_not_about_memory_ends_the_run(launch: Callable[..., Job]) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed.*ValueError: not about memory"):
        launch(fail_beside, num_processes=2).results(timeout_s=60)


def run_out_in_a_group_of_ones_own() -> str:
    dist.init_process_group("gloo")

    @find_executable_batch_size(starting_batch_size=4)
    def training(batch_size: int) -> None:
        raise MemoryError

    try:
        training()
    except TrainingError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return ""


def test_ranks_that_cannot_leave_their_group_together_say_so(launch: Callable[..., Job]) -> None:
    for said in launch(run_out_in_a_group_of_ones_own, num_processes=2).results(timeout_s=60):
        assert "Memory ran out in a process group that the program has made itself" in said


def test_the_size_falls_by_a_tenth_down_to_1() -> None:
    tried: list[int] = []

    def training(batch_size: int, most: int) -> str:
        tried.append(batch_size)
        if batch_size > most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return f"{batch_size} of {most}"

    assert find_executable_batch_size(training, 20)(17) == "16 of 17"
    with pytest.raises(TrainingError, match="every batch size down to 1"):
        find_executable_batch_size(training, 2)(0)
    assert tried == [20, 18, 16, 2, 1]


def test_the_effective_size_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=12, keep_effective_batch_size=True)
    def training(batch_size: int, steps: int, more: str) -> str:
        tried.append((batch_size, steps))
        if batch_size > 3:
            raise MemoryError
        return more

    assert training("done") == "done"
    assert tried == [(12, 1), (6, 2), (4, 3), (3, 4)]
    assert (training.batch_size, training.gradient_accumulation_steps) == (3, 4)
    said = "training runs with a batch size of 3, 4 of them a step; no memory for 12, 6, 4."
    assert said in capfd.readouterr().err
    with pytest.raises(TypeError, match="Leave that out"):
        training(3, "done")
    with pytest.raises(ConfigError, match="reduce_batch_size_fn"):
        find_executable_batch_size(training, reduce_batch_size_fn=lambda: 1, keep_effective_batch_size=True)

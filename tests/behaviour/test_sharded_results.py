"""Sharded models come back from their ranks whole, by --pull and as results, and the panel knows each rank's share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from notebook_accel.launching.kernel.job import Job
from notebook_accel.protocol import events
from tests import kernels
from tests.training import sharded_programs

Run = Callable[[str], kernels.Outcome]

_DEFINITIONS = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(30, 30) for _ in range(3))
        self.head = torch.nn.Linear(30, 5, bias=False)
        self.tied = self.head
        self.register_buffer("shift", torch.arange(30.0))
    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x + self.shift)
def whole(value):
    return type(value) in (torch.Tensor, torch.nn.Parameter)
net = Net()
before = net.head.weight.detach().clone()
"""

_TRAIN = """
from notebook_accel import Accelerator, FullyShardedDataParallelPlugin
import torch.distributed.tensor
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
net, optimizer = accelerator.prepare(net, optimizer)
assert isinstance(net.head.weight, torch.distributed.tensor.DTensor)
accelerator.backward(net(torch.ones(2, 30)).square().mean())
optimizer.step(); optimizer.zero_grad()
net(torch.ones(2, 30))  # leaves blocks gathered
"""


def ok(outcome: kernels.Outcome) -> kernels.Outcome:
    assert outcome.status == "ok", outcome.traceback
    return outcome


@pytest.fixture
def sharding(run: Run) -> Run:
    """Run cells in the shared notebook, which has a model."""
    ok(run(_DEFINITIONS))
    return run


def test_pulled_model_and_optimizer_are_whole_and_belong_together(sharding: Run) -> None:
    cell = f"%%distributed -n 2 --pull net,optimizer\n{_TRAIN}\naccelerator.get_state_dict(net)"
    ok(sharding(cell))
    state = """
parameters = [p for group in optimizer.param_groups for p in group["params"]]
(type(net) is Net and type(net.blocks[0]) is torch.nn.Linear, all(map(whole, net.state_dict().values())),
 [id(p) for p in parameters] == [id(p) for p in net.parameters()], net.tied is net.head,
 all(optimizer.state[p]["exp_avg"].shape == p.shape and whole(optimizer.state[p]["exp_avg"]) for p in parameters),
 bool((net.head.weight - before).abs().max() > 0))"""
    assert ok(sharding(state)).result == "(True, True, True, True, True, True)"
    # It computes and learns here, without anything of the ranks, and goes back to ranks for a second launch.
    learns = "net(torch.ones(1, 30)).sum().backward(); optimizer.step(); int(optimizer.state[net.head.weight]['step'])"
    assert ok(sharding(learns)).result == "2"
    again = f"%%distributed -n 2 --pull net\n{_TRAIN}\nnet.head.weight.shape == (5, 30)"
    assert ok(sharding(again)).result == "[True, True]"


def test_what_is_pulled_is_what_the_ranks_had(sharding: Run) -> None:
    """Beside it, every rank returns the model, and a sharded tensor that has no name in it."""
    cell = f"%%distributed -n 2 --pull net\n{_TRAIN}\n(accelerator.get_state_dict(net), net, net.blocks[1].weight * 2)"
    ok(sharding(cell))
    same = """
(state, own, doubled), (_, other, _) = _
[all(torch.equal(value, state[name]) for name, value in each.state_dict().items()) for each in (net, own, other)], \
list(state) == list(net.state_dict()), torch.equal(doubled, state["blocks.1.weight"] * 2), own is net"""
    assert ok(sharding(same)).result == "([True, True, True], True, True, True)"


_CUT = """
from notebook_accel import Accelerator, ParallelismConfig
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
accelerator = Accelerator(parallelism_config=ParallelismConfig(**SIZES))
plan = {"blocks.0": ColwiseParallel(), "blocks.1": RowwiseParallel()}
parallelize_module(net, accelerator.torch_device_mesh["tp"], plan)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
net, optimizer = accelerator.prepare(net, optimizer)
accelerator.backward(net(torch.ones(2, 30)).square().mean())
optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_shard_size": 2, "tp_size": 2}], ids=str)
def test_a_model_of_parts_is_pulled_whole(sharding: Run, sizes: dict[str, int]) -> None:
    cell = _CUT.replace("SIZES", str(sizes)) + "\nown = accelerator.get_state_dict(net)"
    ok(sharding(f"%%distributed -n {2 ** len(sizes)} --pull net,optimizer,own\n{cell}"))
    state = """
({type(block) for block in net.blocks} == {torch.nn.Linear}, all(map(whole, net.state_dict().values())),
 all(torch.equal(value, own[name]) for name, value in net.state_dict().items()),
 bool((net.head.weight - before).abs().max() > 0), net(torch.ones(1, 30)).shape == (1, 5),
 optimizer.state[net.blocks[0].weight]["exp_avg"].shape == (30, 30))"""
    assert ok(sharding(state)).result == "(True, True, True, True, True, True)"


def test_ranks_that_differ_are_named_and_nobody_waits(sharding: Run) -> None:
    outcome = sharding(f"%%distributed -n 2 --pull net,n\n{_TRAIN}\nn = 3\nif accelerator.process_index: del net")
    assert outcome.error_name == "ResultError"
    assert "rank 0 and rank 1 differ, rank 1 has nothing sharded there" in outcome.traceback
    assert "accelerator.save_model(model" in outcome.traceback
    assert ok(sharding("n, type(net)")).result == "(3, __main__.Net)"


def test_a_model_too_large_for_memory_is_refused_with_its_size(sharding: Run) -> None:
    """The tensor's shares are declared to be parts of 8 TiB."""
    outcome = sharding(f"""%%distributed -n 2 --pull large,net
{_TRAIN}
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
mesh = init_device_mesh('cpu', (2,))
shape = {{"shape": torch.Size([2**41]), "stride": (1,)}}
large = [DTensor.from_local(torch.zeros(4), mesh, [Shard(0)], run_check=False, **shape)]""")
    assert outcome.error_name == "ResultError", outcome.traceback
    assert 'name "large" is sharded over the ranks, and can\'t be sent whole' in outcome.traceback
    assert "it takes 8192 GiB on" in outcome.traceback and "is free" in outcome.traceback
    assert ok(sharding("type(net), net.head.weight.shape")).result == "(__main__.Net, torch.Size([5, 30]))"


def test_a_rank_that_fails_keeps_nobody_waiting(sharding: Run) -> None:
    outcome = sharding(
        f"%%distributed -n 2 --pull net,n\n{_TRAIN}\nn = 4\nif accelerator.process_index: raise ValueError('no more')"
    )
    assert outcome.error_name == "RankFailedError" and "no more" in outcome.traceback
    assert ok(sharding("type(net)")).result == "__main__.Net"


def test_a_model_whose_group_has_ended_is_refused(sharding: Run) -> None:
    outcome = sharding(f"%%distributed -n 2 --pull net\n{_TRAIN}\ntorch.distributed.destroy_process_group()")
    assert "all ranks have to take part, and their process group has ended" in outcome.traceback


def test_reported_memory_of_a_model_is_what_the_rank_holds(launch: Callable[..., Job]) -> None:
    cases = [sharded_programs.Case(calls=calls) for calls in ("together", "model first", "optimizer first")]
    job = launch(sharded_programs.held_bytes_of_each, cases)
    held = job.results(timeout_s=100)
    reported: dict[int | None, list[events.ModelMemory]] = {0: [], 1: []}
    for number, event in job.events():
        if isinstance(event, events.ModelMemory) and event.optimizer_bytes:  # after the one step of a case
            reported[number].append(event)
    for number, of_rank in enumerate(held):
        for case, memory, expected in zip(cases, reported[number], of_rank, strict=True):
            found = {
                "parameters": memory.parameter_bytes,
                "gradients": memory.gradient_bytes,
                "optimizer": memory.optimizer_bytes,
            }
            assert found == expected, case.calls
            assert memory.is_sharded and memory.peak_bytes == 0
        assert job.state.ranks[number].model_memory == reported[number][-1]
    shares = [rank.model_memory.held_parameters for rank in job.state.ranks if rank.model_memory]
    assert job.state.ranks[0].model_memory is not None
    assert sum(shares) == job.state.ranks[0].model_memory.parameters

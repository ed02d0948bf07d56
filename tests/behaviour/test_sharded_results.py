"""Sharded models come back from their ranks whole, by --pull and as results, and the panel knows each rank's share."""

from __future__ import annotations

import re
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


@pytest.fixture(autouse=True)
def model(request: pytest.FixtureRequest) -> None:
    """Define the model in the notebook of the tests that have one."""
    if "run" in request.fixturenames:
        request.getfixturevalue("done")(_DEFINITIONS)


def test_pulled_model_and_optimizer_are_whole_and_belong_together(run: Run, done: Run) -> None:
    """Beside it, every rank returns the model, and a sharded tensor that has no name in it."""
    own = "(accelerator.get_state_dict(net), net, net.blocks[1].weight * 2)"
    done(f"%%distributed -n 2 --pull net,optimizer --out got\n{_TRAIN}\n{own}")
    assert (
        run("""
(state, own, doubled), (_, other, _) = got
[all(torch.equal(value, state[name]) for name, value in each.state_dict().items()) for each in (net, own, other)], \
list(state) == list(net.state_dict()), torch.equal(doubled, state["blocks.1.weight"] * 2), own is net
""").result
        == "([True, True, True], True, True, True)"
    )
    assert (
        run("""
parameters = [p for group in optimizer.param_groups for p in group["params"]]
(type(net) is Net and type(net.blocks[0]) is torch.nn.Linear, all(map(whole, net.state_dict().values())),
 [id(p) for p in parameters] == [id(p) for p in net.parameters()], net.tied is net.head,
 all(optimizer.state[p]["exp_avg"].shape == p.shape and whole(optimizer.state[p]["exp_avg"]) for p in parameters),
 bool((net.head.weight - before).abs().max() > 0))""").result
        == "(True, True, True, True, True, True)"
    )
    # It computes and learns here, without anything of the ranks, and goes back to ranks for a second launch.
    learns = "net(torch.ones(1, 30)).sum().backward(); optimizer.step(); int(optimizer.state[net.head.weight]['step'])"
    assert run(learns).result == "2"
    assert run(f"%%distributed -n 2 --pull net\n{_TRAIN}\nnet.head.weight.shape == (5, 30)").result == "[True, True]"


# The tensor's shares are declared to be parts of 8 TiB.
_LARGE = """
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
mesh = init_device_mesh('cpu', (2,))
shape = {"shape": torch.Size([2**41]), "stride": (1,)}
n = [DTensor.from_local(torch.zeros(4), mesh, [Shard(0)], run_check=False, **shape)]"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "said", "pulled"),
    [
        (
            "n = 3\nif accelerator.process_index: del net",
            "rank 0 and rank 1 differ, rank 1 has nothing sharded there",
            "(3, torch.Size([5, 30]))",
        ),
        (
            _LARGE,
            'name "n" is sharded over the ranks, and can\'t be sent whole: .*it takes 8192 GiB on .*, and .* is free',
            "(0, torch.Size([5, 30]))",
        ),
        ("n = 4\nif accelerator.process_index: raise ValueError('no more')", "no more", "torch.Size([5, 30]))"),
        (
            "n = 3\ntorch.distributed.destroy_process_group()",
            "all ranks have to take part, and their process group has ended",
            "(3, torch.Size([5, 30]))",
        ),
    ],
    ids=["ranks that differ", "too large for memory", "a rank fails", "no group"],
)  # fmt: skip
def test_what_cannot_be_pulled_whole_is_said_and_nobody_waits(run: Run, last: str, said: str, pulled: str) -> None:
    run("n = 0")
    outcome = run(f"%%distributed -n 2 --pull n,net\n{_TRAIN}\n{last}")
    assert re.search(said, outcome.traceback), outcome.traceback
    assert run("n, net.head.weight.shape").result.endswith(pulled)


@pytest.mark.slow
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

"""A session whose ranks wait for each other in NCCL: they can be brought out of it, and training goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from notebook_accel.errors import RankFailedError
from notebook_accel.launching.kernel import local
from notebook_accel.sessions.kernel.session import Session
from tests.gpu.test_gpu import gpus
from tests.sessions.conftest import interrupted, runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(gpus() < 2, reason="NOT TESTED: no two NVIDIA GPUs on this machine"),
]
_PREPARE = """
import os, time, torch
from notebook_accel import Accelerator
rank = int(os.environ["RANK"])
accelerator = Accelerator()
net = torch.nn.Linear(64, 64)
model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
def step():
    accelerator.backward(model(torch.ones(8, 64, device=accelerator.device) * (rank + 1)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
_TOGETHER = """
for _ in range(3): step()
weights = accelerator.gather(net.weight.detach().sum().reshape(1))
bool((weights == weights[0]).all()), torch.distributed.get_backend()
"""


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(num_processes=2, view="none") as running:
        running.execute(_PREPARE)
        yield running
    local.engine().close()


@pytest.mark.parametrize(
    "source",
    [
        "accelerator.gather(torch.ones(1, device=accelerator.device)).sum().item()",  # the host waits for the GPU
        "step()\ntorch.cuda.synchronize()",
        "ones = torch.ones(1, device=accelerator.device)\ntorch.distributed.all_reduce(ones)\ntime.sleep(100)",
    ],
)
def test_interrupt_brings_ranks_out_of_nccl_and_the_model_goes_on(session: Session, source: str) -> None:
    alone = "\n".join(f"    {line}" for line in source.splitlines())
    with interrupted(session, runs):
        session.execute(f"kept = rank\nif rank == 0:\n{alone}\nelse:\n    time.sleep(100)")
    assert repr(session.execute("kept")) == "rank 0: 0\nrank 1: 1"
    together = session.execute(_TOGETHER)
    assert together[0] == together[1] and together[0].startswith("(True, ")


def test_number_that_never_comes_keeps_back_neither_the_failure_nor_the_next_cell(session: Session) -> None:
    with pytest.raises(RankFailedError, match="after the collective"):
        session.execute("""from notebook_accel import report
if rank == 0:
    loss = torch.ones(1, device=accelerator.device)
    torch.distributed.all_reduce(loss)
    report(loss=loss)
    time.sleep(1)  # in which it would be read
    raise LookupError("after the collective")
time.sleep(100)""")
    together = session.execute(_TOGETHER)
    assert together[0] == together[1] and together[0].startswith("(True, ")


def test_ranks_that_idle_for_longer_than_a_collective_may_take_go_on() -> None:
    with Session(num_processes=2, view="none") as idle:
        short = _PREPARE.replace("Accelerator()", "Accelerator(kwargs_handlers=[Short(timeout=timedelta(seconds=20))])")
        imports = "from datetime import timedelta\nfrom notebook_accel import InitProcessGroupKwargs as Short\n"
        idle.execute(imports + short)
        before = idle.execute(_TOGETHER)
        time.sleep(30)
        assert (
            repr(idle.execute("accelerator.gather_for_metrics([rank], use_gather_object=True)")) == "ranks 0-1: [0, 1]"
        )
        idle.execute(
            "again = accelerator.prepare(torch.nn.Linear(4, 4))\nagain(torch.ones(1, 4).cuda()).sum().backward()"
        )
        assert repr(idle.execute(_TOGETHER)) == repr(before)
    local.engine().close()

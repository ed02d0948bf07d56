"""A session whose ranks wait for each other in NCCL: an interrupt brings them out, and training goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from notebook_accel.launching import local
from notebook_accel.sessions.session import Session
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

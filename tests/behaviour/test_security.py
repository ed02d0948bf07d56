"""The sockets that listen during a run, and what a stranger on the same machine can do with them."""

from __future__ import annotations

import pathlib

from tests import hostile, kernels, processes

CELL = """%%distributed -n 2
import torch.distributed as dist
from notebook_accel import Accelerator
for _ in range(3):  # groups come and go under attack
    dist.init_process_group("gloo")
    for step in range(10):
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
    dist.destroy_process_group()
accelerator = Accelerator()
named = accelerator.gather_for_metrics([f"rank {accelerator.process_index}"], use_gather_object=True)
print("trained", flush=True)
while not os.path.exists(STOP):
    time.sleep(0.05)
accelerator.wait_for_everyone()
total.item(), named"""


def test_strangers_can_execute_nothing_and_hang_nothing(notebook: kernels.Kernel, tmp_path: pathlib.Path) -> None:
    kernel = notebook
    kernel.run(f"STOP = {str(tmp_path / 'stop')!r}")
    own = {listener for listener in hostile.listeners(kernel.pid) if listener.pid == kernel.pid}  # ipykernel's
    bomb = tmp_path / "exploded"
    attack = hostile.Attack(kernel.pid, bomb, spare=own)
    attack.start()
    try:
        running = kernel.start(CELL)
        running.wait_for_output("trained")
        processes.wait_until(lambda: len(attack.attacked) >= 3, "the store and both ranks were attacked")
        processes.wait_until(lambda: not attack.targets(), "nothing is left that could be attacked")
        (tmp_path / "stop").touch()
        outcome = running.finish()
    finally:
        attack.stop()
    assert outcome.result == "[(3.0, ['rank 0', 'rank 1']), (3.0, ['rank 0', 'rank 1'])]", outcome.traceback
    assert not bomb.exists()
    assert {listener.address for listener in attack.attacked} == {"127.0.0.1"}, attack.attacked
    assert kernel.run("%%distributed -n 2\n1 + 1").result == "[2, 2]"


def test_only_ranks_listen(notebook: kernels.Kernel) -> None:
    """Agent and template wait on inherited sockets, which have no address."""
    own = {listener for listener in hostile.listeners(notebook.pid) if listener.pid == notebook.pid}
    assert hostile.listeners(notebook.pid) == own

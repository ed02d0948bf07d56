"""torch_xla alone: two threads of one process, with a device each, sum a number each.

Run with PJRT_DEVICE=CPU and CPU_NUM_DEVICES=2. Both threads find that the sum isn't compiled yet, and each compiles it.
What they have compiled doesn't meet: PJRT waits ten seconds, and ends the process with SIGABRT.
"""

from __future__ import annotations

import threading

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla._internal import pjrt

begin = threading.Barrier(2)


def add_up() -> None:
    number = torch.ones(1).to(torch_xla.device())
    with torch.no_grad():
        for _ in range(50):
            number = number * 1.5 + 1  # so that it takes a while to compile
    xm.all_reduce(xm.REDUCE_SUM, [number])
    begin.wait()
    torch_xla.sync(wait=True)


pjrt._run_thread_per_device(0, 1, add_up, pjrt.initialize_multiprocess)

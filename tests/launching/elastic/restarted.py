"""Functions that the tests of restarts run in ranks."""

from __future__ import annotations

import os
import pathlib
import signal
import time

import torch
import torch.distributed as dist

from tests.launching.functions import rank


def attempt() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def fails_at_first(times: int, how: str = "raise") -> tuple[int, float, dict[str, str]]:
    """Rank 1 fails so often, in the middle of what all do together, when all have printed."""
    dist.init_process_group("gloo")
    total = torch.ones(1)
    print("attempt", attempt())
    dist.all_reduce(total)
    if rank() == 1 and attempt() < times:
        if how == "raise":
            raise ValueError(f"failure {attempt()}")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
    return attempt(), float(total), {name: os.environ[name] for name in os.environ if name.startswith(_ELASTIC)}


_ELASTIC = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_ADDR", "GLOO_SOCKET")


def runs_until_it_is_ended(folder: str) -> None:
    pathlib.Path(folder, f"{rank()} runs in attempt {attempt()}").touch()
    time.sleep(100)


def on_two_nodes(times: int = 0) -> tuple[int, int, float, str]:
    """Rank 3 fails so often, while all do something together."""
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {rank()} of node {os.environ['GROUP_RANK']}")
    if rank() == 3 and attempt() < times:
        raise ValueError(f"failure {attempt()}")
    dist.all_reduce(total)
    return rank(), attempt(), float(total), os.environ["GLOO_SOCKET_IFNAME"]


def goes_on_after_a_restart(folder: str) -> tuple[int, int]:
    """Waits for its end in the first attempt, and for nothing in the next."""
    if attempt() == 0:
        runs_until_it_is_ended(folder)
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    return attempt(), int(total)

"""What ranks on a cluster run in tests."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import torch
import torch.distributed


def place_and_sum(model: torch.nn.Module) -> dict[str, Any]:
    """Where this rank is, and what all ranks together come to."""
    torch.distributed.init_process_group()
    total = torch.tensor([1.0 + torch.distributed.get_rank()])
    torch.distributed.all_reduce(total)
    print(f"rank {os.environ['RANK']} has summed")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    return {
        **{name: os.environ.get(name) for name in names},
        "template": os.getppid(),
        "total": total.item(),
        "weights": sum(parameter.sum().item() for parameter in model.parameters()),
    }


def rank_1_raises() -> None:
    """Rank 1 fails while rank 0 waits for it."""
    torch.distributed.init_process_group()
    if torch.distributed.get_rank() == 1:
        print("about to fail")
        raise ValueError("of rank 1")
    torch.distributed.barrier()


def wait_to_be_ended(folder: str) -> None:
    """Says that it is there, and how it ends."""
    here = pathlib.Path(folder, os.environ["RANK"])
    here.with_suffix(".began").write_text(str(os.getpid()))
    try:
        time.sleep(120)
    finally:
        here.with_suffix(".ended").touch()


def fails_once(folder: str) -> int:
    """Rank 1 is killed in the first attempt."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if os.environ["RANK"] == "1" and attempt == 0:
        os._exit(3)
    torch.distributed.init_process_group()
    torch.distributed.barrier()
    return attempt


def visible_gpus() -> tuple[str | None, str | None]:
    """What this rank may use, and which of it is its own."""
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("LOCAL_RANK")

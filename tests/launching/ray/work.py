"""Functions that the tests' ranks run on a cluster."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import torch
import torch.distributed


def wait_to_be_ended(folder: str) -> None:
    """Leave one mark when the rank begins, and another when it ends."""
    here = pathlib.Path(folder, os.environ["RANK"])
    here.with_suffix(".began").write_text(str(os.getpid()))
    try:
        time.sleep(120)
    finally:
        here.with_suffix(".ended").touch()


def attempt() -> int:
    """Return the number of this attempt, once all ranks have met."""
    torch.distributed.init_process_group()
    torch.distributed.barrier()
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def waits_once(folder: str) -> int:
    """Return the number of this attempt; in the first one all ranks ``wait_to_be_ended``."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        wait_to_be_ended(folder)
    return attempt()


def fails_once() -> int:
    """Return the number of this attempt; in the first one rank 1 dies."""
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(3)
    return attempt()


def place(model: torch.Tensor) -> dict[str, Any]:
    """Return where this rank is, its template, and what it sees of the model after all ranks have written to it."""
    address = model.data_ptr()
    rows = pathlib.Path("/proc/self/maps").read_text().splitlines()
    [row] = [row for row in rows if int(row.split("-")[0], 16) <= address < int(row.split("-")[1].split()[0], 16)]
    torch.distributed.init_process_group()
    model += 1 + torch.distributed.get_rank()
    torch.distributed.barrier()
    print(f"rank {torch.distributed.get_rank()} has added")
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "COLOUR")
    return {name: os.environ.get(name) for name in names} | {
        "template": os.getppid(),
        "file": row.split()[4],
        "value": model[0].item(),
    }


def folder() -> list[str]:
    """Return the names in this rank's working directory."""
    return os.listdir()


def visible_gpus() -> tuple[str | None, str | None]:
    """Return the GPUs that this rank may use, and the number of its own."""
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("LOCAL_RANK")

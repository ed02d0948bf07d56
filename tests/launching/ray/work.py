"""Functions that the tests' ranks run on a cluster."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

import torch
import torch.distributed
from tqdm.auto import tqdm

from tests.launching.functions import wait_for


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


def is_ahead(here_s: float) -> bool:
    """Return whether the clock here is far ahead of one that has just shown this time."""
    return time.monotonic() > here_s + 3600


def fails_in_turn(folder: str, here_s: float, is_ahead_first: bool) -> None:
    """Fail on two nodes, first on the one whose clock is ahead, or on the other. Ignores a stop in between."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if is_ahead(here_s) == is_ahead_first:
        wait_for(folder, "the second waits")
        pathlib.Path(folder, "the first fails").touch()
        raise ValueError("first")
    pathlib.Path(folder, "the second waits").touch()
    wait_for(folder, "the first fails")
    time.sleep(0.5)  # the order of two failures that are closer than the answers of a node may not be known
    raise ValueError("second")


def stands_still(here_s: float) -> None:
    """Count steps on two nodes; then the one whose clock is ahead waits for the other."""
    torch.distributed.init_process_group()
    for _ in tqdm(range(5)):
        time.sleep(0.05)
    torch.distributed.barrier()
    if not is_ahead(here_s):
        time.sleep(120)
    torch.distributed.barrier()


def folder() -> list[str]:
    """Return the names in this rank's working directory."""
    return os.listdir()


def visible_gpus() -> tuple[str | None, str | None]:
    """Return the GPUs that this rank may use, and the number of its own."""
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("LOCAL_RANK")

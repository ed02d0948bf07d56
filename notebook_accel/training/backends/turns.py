"""Ranks of one machine that do something one after the other, because its memory isn't enough for all at once.

No collective: which ranks move a model is their own matter, and a rank that dies gives its turn back.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
from collections.abc import Iterator

from notebook_accel import host_memory

__all__ = ["is_memory_short", "one_at_a_time"]

# Of the memory that can be had, what all ranks together may take at the same time. The rest is for what else they do.
_SHARE = 0.5
# All ranks of the machine have this folder, and locking it makes nothing that somebody would have to delete.
_COMMON = pathlib.Path(__file__).parent


def is_memory_short(size_bytes: int, ranks: int) -> bool:
    """Return whether so many ranks of this machine had better not take so much each at the same time."""
    return ranks > 1 and ranks * size_bytes > _SHARE * host_memory.available_bytes()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Waits until no other process of this machine is in here. The system lets the next one in when a process dies."""
    fcntl = importlib.import_module("fcntl")  # not above: this can be imported where only Linux's calls are missing
    common = os.open(_COMMON, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A folder that is mounted from another machine may have no locks. Then there are no turns, as without this.
        with contextlib.suppress(OSError):
            fcntl.flock(common, fcntl.LOCK_EX)
        yield
    finally:
        os.close(common)

"""How a rank is asked for its stacks from outside: the file that they go to, and the signal that asks.

Python's fault handler needs neither the interpreter's lock nor its consent, so a rank that hangs answers too.
"""

from __future__ import annotations

import faulthandler
import os
import signal

from notebook_accel.payload import memory_files

__all__ = ["SIGNAL", "arm", "dump_file"]

# A real-time signal, which no library uses. Code of the user's may handle SIGUSR1 or SIGUSR2, as what runs under a
# cluster's scheduler does.
SIGNAL = getattr(signal, "SIGRTMIN", 34) + 7


def dump_file(rank: int) -> int:
    """A memory file that a rank's stacks are written to, each time at its end."""
    made = memory_files.memory_file(f"notebook-accel-stacks-{rank}")
    try:
        return os.open(f"/proc/self/fd/{made}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    finally:
        os.close(made)


def arm(dump: int) -> None:
    """In a rank: from now on the signal writes the stacks to ``dump``."""
    faulthandler.register(SIGNAL, file=dump, all_threads=True, chain=False)

"""NCCL's communicators of this process, given up so that what waits for other ranks in one of them ends.

Only where torch's watchdog leaves failed collectives alone: otherwise it would end the process for them. torch's
documentation of ``abort`` asks for that too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

__all__ = ["abort", "abort_soon", "can_abort", "let_ranks_survive"]

_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# What torch 2.13 does when a collective has passed its deadline, and when a communicator hangs.
_SURVIVAL = {
    _WATCHDOG: "0",  # the watchdog would end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # so would the watchdog's own monitor, eight minutes later
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # which a timeout calls, and which stays in the store for the next group
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # the watchdog sleeps four times this, and a group's end waits for it
}


def let_ranks_survive() -> None:
    """Set the variables with which a collective that fails or passes its deadline doesn't end the process.

    Called before a process group is made. What the user has set stays.
    """
    for name, value in _SURVIVAL.items():
        os.environ.setdefault(name, value)


def can_abort() -> bool:
    """Return whether there are communicators, and it is of use to abort them."""
    return os.environ.get(_WATCHDOG) == "0" and bool(_backends())


def abort() -> None:
    """Aborts them. Calls that wait for their collectives go on or raise; the groups can only be destroyed then."""
    first, *_ = backends = _backends()
    first._group_start()  # several at once wait for each other otherwise
    try:
        for backend in backends:
            with contextlib.suppress(RuntimeError):  # it has failed already
                backend.abort()
    finally:
        first._group_end()


def abort_soon(patience_s: float) -> None:
    """Abort them, if that is of use, in another thread, which is waited for this long: what a GPU waits for ends."""
    if can_abort():
        thread = threading.Thread(target=abort, name="notebook-accel-abort", daemon=True)
        thread.start()
        thread.join(patience_s)


def _backends() -> list[Any]:
    """Those of all process groups, the latest first."""
    torch: Any = sys.modules.get("torch")
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    found: list[Any] = []
    if torch is None or distributed is None:
        return found
    for group in reversed(list(distributed._world.pg_map)):
        with contextlib.suppress(RuntimeError):  # it has none for this device
            backend = group._get_backend(torch.device("cuda"))
            if backend.name() == "nccl":
                found.append(backend)
    return found

"""Aborts this process's NCCL communicators, to end its waits for other ranks.

A process always survives an abort if torch's watchdog ignores failed collectives, as torch's documentation of ``abort``
requires. Otherwise it survives unless a peer's abort reaches it over a network before its own (torch 2.13: ``abort``
first makes the watchdog stop looking for errors).
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

from notebook_accel import environment, torch_internals

_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# How torch 2.13 reacts when a collective has passed its deadline, and when a communicator hangs.
_SURVIVAL = {
    _WATCHDOG: "0",  # the watchdog would end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # so would the watchdog's own monitor, eight minutes later
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # started by a timeout; the request would stay in the store for the next group
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # the watchdog sleeps four times this, and a group's end waits for it
}


def let_ranks_survive() -> None:
    """Set variables so that a collective that fails or passes its deadline doesn't end the process.

    Call it before a process group is made. Variables that the user has set stay.
    """
    for name, value in _SURVIVAL.items() if environment.is_on(environment.NCCL_ABORT) else ():
        os.environ.setdefault(name, value)


def can_abort() -> bool:
    """Return whether there are communicators that can be aborted safely."""
    return os.environ.get(_WATCHDOG) == "0" and bool(_backends())


def abort() -> None:
    """Abort all communicators, if there are any.

    Calls that wait for their collectives return or raise. Afterwards the groups can only be destroyed.
    """
    backends = _backends()
    if not backends:
        return
    with torch_internals.one_nccl_call(backends[0]):
        for backend in backends:
            with contextlib.suppress(RuntimeError):  # the backend has failed already
                backend.abort()


def abort_soon(patience_s: float) -> None:
    """Abort all communicators in another thread, if that is safe, and wait for it up to ``patience_s``."""
    if can_abort():
        thread = threading.Thread(target=abort, name="notebook-accel-abort", daemon=True)
        thread.start()
        thread.join(patience_s)


def _backends() -> list[Any]:
    """Return the NCCL backends of all process groups, the latest first; none if aborts are switched off."""
    found: list[Any] = []
    for group in reversed(torch_internals.process_groups() if environment.is_on(environment.NCCL_ABORT) else []):
        with contextlib.suppress(RuntimeError):  # the group has no backend for this device
            backend = torch_internals.backend_for(group, "cuda")
            if backend.name() == "nccl":
                found.append(backend)
    return found

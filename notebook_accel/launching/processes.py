"""A few Linux calls that the standard library doesn't have, and how our processes are told where to import from."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["bootstrap", "die_with_parent", "kill_group"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Asks for a signal when the thread that started this process ends; ends now if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def kill_group(leader_pid: int) -> None:
    """Kills a process and its group, which it may not lead yet when it is very young.

    Call it before the leader is reaped: until then nobody else can have its number.
    """
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader_pid, signal.SIGKILL)


def bootstrap(module: str, *arguments: str, sys_path: Sequence[str] = ()) -> list[str]:
    """A command line that calls ``module.main(*arguments)`` in a new interpreter with this import path.

    Not ``-m``: that puts the working directory in front, and a ``random.py`` of the user's there would be ours.
    """
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        "import importlib; importlib.import_module(sys.argv[2]).main(*sys.argv[3:])"
    )
    return [sys.executable, "-c", code, json.dumps(list(sys_path or sys.path)), module, *arguments]

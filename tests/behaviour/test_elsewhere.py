"""Without the parts of Python that exist on Linux only, the package imports, a launch says what it needs, inline works.

A module that needs more of Linux than it should fails here; other systems may lack still more.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

_SETUP = """
import os, signal, sys
# What the standard library and other packages do there is not what is tried here: they come before.
import sysconfig, asyncio, ctypes, importlib.metadata, multiprocessing, platform, tempfile
import cloudpickle, msgspec, torch, torch.distributed, yaml
sysconfig.get_config_vars(), platform.uname()
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("fork", "killpg", "memfd_create", "pidfd_open", "pipe2", "register_at_fork", "sched_getaffinity", "setsid",
             "sysconf", "waitid", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "P_PID", "WNOWAIT"):
    delattr(os, name)
for name in ("SIGBUS", "SIGCONT", "SIGKILL", "SIGSTOP", "SIGUSR2", "pthread_sigmask"):
    delattr(signal, name)
sys.platform = "win32"
"""
_LAUNCH = """
import notebook_accel
def train():
    accelerator = notebook_accel.Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.backward(model(torch.ones(3, 2)).sum())
    return accelerator.num_processes
try:
    notebook_accel.notebook_launcher(train, num_processes=2)
except notebook_accel.PreflightError as error:
    print(error)
print(list(notebook_accel.notebook_launcher(train, num_processes=1, start_method="inline", view="none")))
"""


@pytest.mark.slow
def test_without_what_only_linux_has() -> None:
    command = [sys.executable, "-c", _SETUP + _LAUNCH]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "Launching needs Linux 5.3 or later; this is win32."
    assert lines[-1] == "[1]"

"""What a template imports, so that no rank has to: what every rank needs, what the user named, and what is slow.

What has initialised a device or left a thread can't be forked from, and an import can't be undone: the template that
has imported it is thrown away.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

from notebook_accel.launching import device_state

__all__ = ["LATER", "RefusedError", "files", "import_named", "import_needed", "import_welcome"]

# torch must be there; the others are imported where they are installed.
_NEEDED = ("torch", "torch.distributed", "torch.utils.data")
_WELCOME = ("numpy.random", "tqdm.auto", "torch.nn.parallel")

# torch._dynamo is what the first optimizer of a process imports, which takes longer than torch itself. In steps, its
# own dependencies first, so that a launch never waits for more than one of them.
LATER = (
    "notebook_accel.training.accelerator",
    "sympy",
    "torch.utils._sympy.functions",
    "torch.fx.experimental.symbolic_shapes",
    "torch._inductor.config",
    "torch._inductor.utils",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo.utils",
    "torch._dynamo",
)


class RefusedError(Exception):
    """A module that was to be preloaded can't be. The text says which and why."""


def import_needed() -> None:
    """Imports what every rank needs."""
    for name in _NEEDED:
        importlib.import_module(name)


def import_welcome() -> None:
    """Imports what nearly every rank uses and is quick to import."""
    for name in _WELCOME:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def import_named(names: Sequence[str]) -> None:
    """Imports what the user wants preloaded.

    Raises:
        RefusedError: One can't be imported, or this process can't be forked from any more.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise RefusedError(f"{name} can't be imported: {type(error).__name__}: {error}") from error
        reason = _why_not_forkable()
        if reason:
            raise RefusedError(f"importing {name} {reason}")


def _why_not_forkable() -> str:
    if sys.modules["torch"].cuda.is_initialized():
        return "initialises CUDA, which no fork can use then"
    if device_state.is_xla_initialized():
        return "initialises XLA, which no fork can use then"
    if device_state.forks_lose_cuda():
        return "wakes CUDA's driver, as torch.cuda.device_count() can, and no fork can use CUDA then"
    # The threads of OpenBLAS end at a fork and come back when they are needed. What is left after one is another's.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = len(os.listdir("/proc/self/task")) - 1
    return f"leaves {threads} thread{'s' if threads > 1 else ''} running, which no fork would have" if threads else ""


def files() -> dict[str, tuple[int, int]]:
    """Each imported package's own file, with its modification time in ns and its inode: other ones if reinstalled."""
    found: dict[str, tuple[int, int]] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if "." not in name and path and name not in sys.stdlib_module_names:
            with contextlib.suppress(OSError):
                status = os.stat(path)
                found[path] = (status.st_mtime_ns, status.st_ino)
    return found

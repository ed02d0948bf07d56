"""Prepares a template for fast forks: imports modules ahead of the ranks, and moves its memory into huge pages.

A process that has initialised a device or runs another thread must not fork ranks, and an import can't be undone. So a
template whose imports do this is thrown away.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Iterator, Sequence

from notebook_accel.launching import device_state

_HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # linux/mman.h
_AT_ONCE = 8  # huge pages in a block: some milliseconds of work
# pyarrow's allocator, jemalloc, returns unused memory in a thread of this name. In a fork, jemalloc itself disables the
# thread (``background_thread_postfork_child``) and returns the memory without it.
_SAFE_THREAD = "jemalloc_bg_thd"

# _NEEDED must be installed; _WELCOME is imported if it is installed.
_NEEDED = ("torch", "torch.distributed", "torch.utils.data")
_WELCOME = ("numpy.random", "tqdm.auto", "torch.nn.parallel")

# The first optimizer of a process imports torch._dynamo, which takes longer than importing torch. Its dependencies come
# first, one per step, so that a launch never waits for more than one of them.
LATER = (
    "notebook_accel.training.accelerator",
    "sympy",
    "torch.utils._sympy.functions",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._inductor.config",
    "torch._inductor.utils",
    "torch._dynamo.utils",
    "torch._dynamo",
    "tabulate",  # if it is installed, torch._dynamo imports it at the end of each process
)


class PreloadError(Exception):
    """A module can't be preloaded. The text names the module and the reason."""


def import_needed() -> None:
    """Import the modules that every rank needs."""
    for name in _NEEDED:
        importlib.import_module(name)


def import_welcome() -> None:
    """Import quick modules that nearly every rank uses."""
    for name in _WELCOME:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def import_named(names: Sequence[str]) -> None:
    """Import the modules that the user wants preloaded.

    Raises:
        PreloadError: A module can't be imported, or this process can't fork ranks after its import.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise PreloadError(f"{name} can't be imported: {type(error).__name__}: {error}") from error
        reason = _why_not_forkable()
        if reason:
            raise PreloadError(f"importing {name} {reason}")


def _why_not_forkable() -> str:
    if sys.modules["torch"].cuda.is_initialized():
        return "initialises CUDA, which no fork can use then"
    if device_state.is_xla_initialized():
        return "initialises XLA, which no fork can use then"
    if device_state.forks_lose_cuda():
        return "wakes CUDA's driver, as torch.cuda.device_count() can, and no fork can use CUDA then"
    threads = _threads_no_fork_has()
    return f"leaves {threads} thread{'s' if threads > 1 else ''} running, which no fork would have" if threads else ""


def _threads_no_fork_has() -> int:
    """Return the number of threads that forks of this process would miss."""
    # OpenBLAS ends its threads at a fork and restarts them when it needs them. So fork first, and count the others.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm", encoding="utf-8") as file:
            names.append(file.read().strip())
    return sum(name != _SAFE_THREAD for name in names) - 1


def files() -> dict[str, tuple[int, int]]:
    """Return each imported package's file with its modification time in ns and inode, which a reinstall changes."""
    found: dict[str, tuple[int, int]] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if "." not in name and path and name not in sys.stdlib_module_names:
            with contextlib.suppress(OSError):
                status = os.stat(path)
                found[path] = (status.st_mtime_ns, status.st_ino)
    return found


def memory_blocks() -> Iterator[tuple[int, int]]:
    """Yield address and length of this process's private memory, in blocks that are quick to collapse.

    Collapsing makes forks and their exits several times as fast. A fork copies an entry for each page that the process
    has written, and its exit frees each: with torch imported these are 55,000 pages, and most of a rank's start time.
    Linux 6.1 and later can collapse 512 pages to one huge page. A huge page that a fork writes to is split for that
    fork only.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if not permissions.startswith("rw-p") or inode != "0" or (name and name[0].startswith("[stack")):
            continue
        low, high = (int(address, 16) for address in addresses.split("-"))
        low, high = -(-low // _HUGE_BYTES) * _HUGE_BYTES, high // _HUGE_BYTES * _HUGE_BYTES
        step = _AT_ONCE * _HUGE_BYTES
        yield from ((start, min(step, high - start)) for start in range(low, high, step))


def collapse(address: int, length: int) -> None:
    """Move a block of memory into huge pages, as far as the system can. Its content stays the same."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start in range(address, address + length, _HUGE_BYTES):  # one call each: a failure must not stop the others
        libc.madvise(start, _HUGE_BYTES, _MADV_COLLAPSE)

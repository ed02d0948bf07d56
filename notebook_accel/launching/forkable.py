"""Whether this process can be forked and its forks compute: what start method ``fork`` is refused and warned for.

Nothing is imported to find out: what isn't imported can't be initialised.
"""

from __future__ import annotations

import sys
import threading

from notebook_accel.errors import Finding

__all__ = ["check"]

# Whose threads a fork does no harm: they hold no lock that a rank takes.
_HARMLESS = {"IPython", "ipykernel", "ipywidgets", "kernel_ext", "notebook_accel", "tornado", "tqdm", "zmq"}


def check() -> list[Finding | None]:
    """All that speaks against forking this process."""
    return [_cuda(), _xla(), _threads()]


def _cuda() -> Finding | None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return Finding(
        "CUDA is initialised in this kernel, and start_method='fork' was asked for.",
        "CUDA doesn't work in a fork of a process that has initialised it; allow_initialized_cuda can't change that.",
        "--start_method spawn; or restart the kernel and use the GPU only inside the cell or function",
    )


def _xla() -> Finding | None:
    return None if not is_xla_initialized() else Finding(
        "XLA is initialised in this kernel: something has used an XLA device or asked for one.",
        "A fork would share the TPU's connection with the kernel, which ends both.",
        "restart the kernel, and call torch_xla's functions only inside the cell or function",
    )  # fmt: skip


def is_xla_initialized() -> bool:
    """Whether this process has made XLA's runtime: torch_xla's, which says so itself, or jax's."""
    torch_xla = sys.modules.get("_XLAC") or sys.modules.get("torch_xla._XLAC")
    if torch_xla is not None and getattr(torch_xla, "_xla_runtime_is_initialized", lambda: False)():
        return True
    return bool(getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None))


def _threads() -> Finding | None:
    names = [thread.name for thread in threading.enumerate() if not _is_harmless(thread)]
    if not names:
        return None
    return Finding(
        f"Threads run in this kernel: {', '.join(names)}.",
        "Ranks that are forked from it have none of them. A lock that one holds at that moment stays locked in the "
        "ranks, and a rank that takes it waits for ever.",
        "end them before the launch, or --start_method spawn",
        refuses=False,
    )


def _is_harmless(thread: threading.Thread) -> bool:
    # A thread that was given a function has it as long as it runs, and else is of a class of its own.
    runs = getattr(thread, "_target", None) or type(thread)
    package = (getattr(runs, "__module__", None) or "").partition(".")[0]
    return thread is threading.main_thread() or package in _HARMLESS or isinstance(thread, threading._DummyThread)

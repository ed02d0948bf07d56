"""Whether this process can be forked and its forks compute: what start method ``fork`` is refused and warned for.

Nothing is imported to find out: what isn't imported can't be initialised.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from notebook_accel.errors import Finding
from notebook_accel.launching import device_state

__all__ = ["check"]

# Whose threads a fork does no harm: they hold no lock that a rank takes.
_HARMLESS = {"IPython", "ipykernel", "ipywidgets", "kernel_ext", "notebook_accel", "tornado", "tqdm", "zmq"}
# Libraries that begin to use a device, or threads of their own, when they are imported or first used.
_BREAK_FORKING = {
    "bitsandbytes": "it uses CUDA from when it is imported",
    "cupy": "it uses CUDA without torch's knowledge",
    "jax": "its threads hold locks",
    "tensorflow": "its threads hold locks",
}


def check(*, on_gpus: bool = False) -> list[Finding]:
    """All that speaks against forking this process.

    Args:
        on_gpus: Whether the forks are to compute on GPUs.
    """
    devices = [_cuda() or (_cuda_driver() if on_gpus else None), device_state.xla_in_use()]
    findings = [*devices, _threads(), _group_of_the_kernel(), _accelerator_of_the_kernel(), _libraries()]
    return [finding for finding in findings if finding is not None]


def _cuda() -> Finding | None:
    if not device_state.is_cuda_initialized():
        return None
    return Finding(
        "CUDA is initialised in this kernel, and start_method='fork' was asked for.",
        "CUDA doesn't work in a fork of a process that has initialised it; allow_initialized_cuda can't change that.",
        "--start_method spawn; or restart the kernel and use the GPU only inside the cell or function",
    )


def _cuda_driver() -> Finding | None:
    if not device_state.forks_lose_cuda():
        return None
    return Finding(
        "This kernel has woken CUDA's driver, as torch.cuda.is_available() does; start_method='fork' was asked for.",
        "CUDA doesn't work in a fork of such a process, although torch.cuda.is_initialized() is still False in it.",
        "--start_method spawn; or set PYTORCH_NVML_BASED_CUDA_CHECK=1 before the kernel starts, with which "
        "torch.cuda.is_available() leaves the driver asleep",
    )


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


def _group_of_the_kernel() -> Finding | None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Finding(
        "The kernel itself is in a process group of torch.distributed.",
        "Ranks that are forked from it would take it for theirs.",
        "torch.distributed.destroy_process_group(), or --start_method spawn",
    )


def _accelerator_of_the_kernel() -> Finding | None:
    state: Any = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    if not getattr(state, "_shared_state", None):
        return None
    return Finding(
        "There is an Accelerator of the accelerate library in this kernel.",
        "Ranks that are forked from it would share its state, in which they are one process alone.",
        "AcceleratorState._reset_state(True) (from accelerate.state), or --start_method spawn",
    )


def _libraries() -> Finding | None:
    found = {name: why for name, why in _BREAK_FORKING.items() if name in sys.modules}
    if not found:
        return None
    return Finding(
        f"This kernel has imported {', '.join(found)}.",
        "; ".join(f"{name}: {why}" for name, why in found.items()) + ". A fork may crash or wait for ever.",
        "import it only inside the cell or function, or --start_method spawn",
        refuses=False,
    )

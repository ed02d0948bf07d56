"""What this process has done to its devices before a launch. Nothing is imported to find out.

Where CUDA was initialised can't be found out afterwards. Whoever watches the cells, as the extension does, notes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from notebook_accel.errors import Finding

__all__ = ["against_forking", "captured_on_gpu", "cuda_in_use", "is_cuda_initialized", "note_cuda_origin"]

_MOST_LOOKED_AT = 1000
_DEEPEST = 3
# Libraries that begin to use a device, or threads of their own, when they are imported or first used.
_BREAK_FORKING = {
    "bitsandbytes": "it uses CUDA from when it is imported",
    "cupy": "it uses CUDA without torch's knowledge",
    "jax": "its threads hold locks",
    "tensorflow": "its threads hold locks",
}

_cuda_origin = ""


def note_cuda_origin(where: str) -> None:
    """Notes where CUDA was initialised, such as ``In[3], line 2``. The first note stays, if it says the line."""
    global _cuda_origin
    if "line" not in _cuda_origin:
        _cuda_origin = where


def is_cuda_initialized() -> bool:
    """Whether torch has, in this process."""
    torch: Any = sys.modules.get("torch")
    return bool(torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized())


def cuda_in_use(*, is_allowed: bool) -> Finding | None:
    """CUDA is initialised: where that was done, and what it holds."""
    if not is_cuda_initialized():
        return None
    torch: Any = sys.modules["torch"]
    held = {index: torch.cuda.memory_reserved(index) / 2**20 for index in range(torch.cuda.device_count())}
    shown = [f"{mib:,.0f} MiB on GPU {index}" for index, mib in held.items() if mib] or ["no tensors"]
    since = f" since {_cuda_origin}" if _cuda_origin else ""
    return Finding(
        f"CUDA is in use in this kernel{since}. It holds {', '.join(shown)}, and what the driver needs.",
        "What the kernel holds, the ranks can't have.",
        "restart the kernel, and make tensors on the GPU only inside the cell or function; "
        "or --allow_initialized_cuda (allow_initialized_cuda=True) to go on: ranks start clean",
        refuses=not is_allowed,
    )


def captured_on_gpu(captured: Mapping[str, Any]) -> Finding | None:
    """Something that the ranks are to have is on a GPU."""
    if not is_cuda_initialized():
        return None
    names = [label for label, value in captured.items() if _is_on_gpu(value)]
    if not names:
        return None
    return Finding(
        f"On the GPU, in this kernel's memory: {', '.join(names)}.",
        "The ranks are to have it, and one process's GPU memory can't be sent to another.",
        "move it first, with .cpu(), or make it inside the cell or function",
    )


def _is_on_gpu(value: Any, depth: int = 0) -> bool:
    if getattr(value, "is_cuda", False) is True:
        return True
    return depth < _DEEPEST and any(_is_on_gpu(part, depth + 1) for part in _parts(value))


def _parts(value: Any) -> Iterable[Any]:
    torch: Any = sys.modules["torch"]
    if isinstance(value, torch.nn.Module):
        return (*value.parameters(), *value.buffers())
    if isinstance(value, torch.optim.Optimizer):
        return (*value.param_groups, *value.state.values())
    if isinstance(value, dict):
        return list(value.values())[:_MOST_LOOKED_AT]
    return value[:_MOST_LOOKED_AT] if isinstance(value, (list, tuple)) else ()


def against_forking() -> list[Finding]:
    """What ranks that are forked from this process would inherit and trip over; clean ranks have none of it."""
    findings = [_group_of_the_kernel(), _accelerator_of_the_kernel(), _libraries()]
    return [finding for finding in findings if finding is not None]


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

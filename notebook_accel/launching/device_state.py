"""The state of CUDA and XLA in the kernel or a template, found without importing anything.

CUDA and XLA don't record where they were initialised, so the extension, which watches the cells, records it here.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from notebook_accel import torch_internals
from notebook_accel.errors import Finding

_MOST_LOOKED_AT = 1000
_DEEPEST = 3
_PROBE_DEADLINE_S = 5.0

_cuda_origin = ""
_xla_origin = ""


def note_cuda_origin(where: str) -> None:
    """Record where CUDA was initialised, such as ``In[3], line 2``. The first record with a line stays."""
    global _cuda_origin
    if "line" not in _cuda_origin:
        _cuda_origin = where


def is_cuda_initialized() -> bool:
    """Return whether torch has initialised CUDA in this process."""
    torch: Any = sys.modules.get("torch")
    return bool(torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized())


def forks_lose_cuda() -> bool:
    """Return whether there are GPUs that a fork of this process can't use, by forking and trying.

    Even ``torch.cuda.is_available()`` has this effect: it initialises the driver, while ``torch.cuda.is_initialized()``
    stays false. If torch isn't imported, or has no CUDA, nothing is forked.
    """
    torch: Any = sys.modules.get("torch")
    is_in_bad_fork = torch_internals.bad_fork_check()
    # A CUDA build of torch answers yes even on a machine without a GPU, where forks have nothing to lose. Counting GPUs
    # does no harm, since the driver is initialised already.
    return is_in_bad_fork is not None and _is_true_in_a_fork(is_in_bad_fork) and torch.cuda.device_count() > 0


def _is_true_in_a_fork(question: Callable[[], bool]) -> bool:
    """Return a fork's answer; ``False`` if there is none in time, for a reason that the launch itself reports."""
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as answer:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about threads: this fork takes no lock
                pid = os.fork()
        except OSError:  # too many processes
            os.close(write_end)
            return False
        if pid == 0:
            try:
                os.write(write_end, b"1" if question() else b"0")
            finally:
                os._exit(0)
        try:
            os.close(write_end)
            ready, _, _ = select.select([answer], [], [], _PROBE_DEADLINE_S)
            return bool(ready) and answer.read(1) == b"1"
        finally:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # reaped by other code
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def note_xla_origin(where: str) -> None:
    """Record where XLA was initialised, such as ``In[3]``."""
    global _xla_origin
    _xla_origin = where


def is_xla_initialized() -> bool:
    """Return whether this process has initialised the XLA runtime of torch_xla or jax."""
    torch_xla = sys.modules.get("_XLAC") or sys.modules.get("torch_xla._XLAC")
    if torch_xla is not None and getattr(torch_xla, "_xla_runtime_is_initialized", lambda: False)():
        return True
    return bool(getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None))


def xla_in_use() -> Finding | None:
    """Return a finding if XLA is initialised, with the place of the initialisation."""
    if not is_xla_initialized():
        return None
    since = f" since {_xla_origin}" if _xla_origin else ""
    return Finding(
        f"XLA is initialised in this kernel{since}: something has used an XLA device or asked for one.",
        "The kernel holds the TPU then. A fork would share and break the connection; other processes get none.",
        "restart the kernel, and call torch_xla's functions only inside the cell or function",
    )


def cuda_in_use(*, is_allowed: bool) -> Finding | None:
    """Return a finding if CUDA is initialised, with the place of the initialisation and the memory that CUDA holds."""
    if not is_cuda_initialized():
        return None
    torch: Any = sys.modules["torch"]
    held = {index: torch.cuda.memory_reserved(index) / 2**20 for index in range(torch.cuda.device_count())}
    shown = [f"{mib:,.0f} MiB on GPU {index}" for index, mib in held.items() if mib] or ["no tensors"]
    since = f" since {_cuda_origin}" if _cuda_origin else ""
    return Finding(
        f"CUDA is in use in this kernel{since}. It holds {', '.join(shown)}, and the driver's own memory.",
        "The ranks can't use memory that the kernel holds.",
        "restart the kernel, and make tensors on the GPU only inside the cell or function; "
        "or --allow_initialized_cuda (allow_initialized_cuda=True) to go on: ranks start clean",
        refuses=not is_allowed,
    )


def captured_on_gpu(captured: Mapping[str, Any]) -> Finding | None:
    """Return a finding if objects that the ranks need are on a GPU."""
    if not is_cuda_initialized():
        return None
    names = [label for label, value in captured.items() if _is_on_gpu(value)]
    if not names:
        return None
    return Finding(
        f"On the GPU, in this kernel's memory: {', '.join(names)}.",
        "The ranks need it, and GPU memory can't be sent from one process to another.",
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

"""Facts about models and memory. Names for models on several devices raise errors that point to Accelerate."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from notebook_accel import host_memory
from notebook_accel.errors import ConfigError
from notebook_accel.refusals import names_elsewhere
from notebook_accel.training.model_files import size_bytes
from notebook_accel.training.models import unwrap_model

__all__ = ["convert_file_size_to_int", "get_max_memory", "is_peft_model"]

if not TYPE_CHECKING:  # so that a type checker still finds unknown names
    __getattr__ = names_elsewhere(__name__)


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes: ``"5GB"`` counts in powers of ten, ``"5GiB"`` in powers of two.

    Raises:
        ConfigError: ``size`` isn't a size.
    """
    return size_bytes(size, "size")


def get_max_memory(max_memory: dict[int | str, int | str] | None = None) -> dict[int | str, int]:
    """Return the free bytes by device: GPUs by their number, then ``"cpu"``. It creates a context on each GPU.

    Args:
        max_memory: Sizes to return instead, GPUs first, as bytes or as text such as ``"10GiB"``. ``"disk"`` is allowed.

    Raises:
        ConfigError: A key is no device, or a value isn't a size.
    """
    if max_memory is None:
        free: dict[int | str, int] = {gpu: torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())}
        return {**free, "cpu": host_memory.available_bytes()}
    unknown = [key for key in max_memory if not isinstance(key, int) and key not in ("cpu", "disk")]
    if unknown:
        raise ConfigError(f"max_memory has the key {unknown[0]!r}.", fix='the number of a GPU, "cpu" or "disk"')
    ordered = sorted(max_memory, key=lambda key: (isinstance(key, str), key))
    return {key: convert_file_size_to_int(max_memory[key]) for key in ordered}


def is_peft_model(model: torch.nn.Module) -> bool:
    """Return whether a model, prepared or not, is a ``PeftModel`` of the package peft."""
    peft = sys.modules.get("peft")  # there is no such model unless peft is imported
    return peft is not None and isinstance(unwrap_model(model, keep_torch_compile=False), peft.PeftModel)

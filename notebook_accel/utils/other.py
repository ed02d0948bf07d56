"""Models, files, progress bars and a barrier, for code that has no ``Accelerator``."""

from __future__ import annotations

import os
from typing import Any

import torch

from notebook_accel.launching.kernel.configuring import write_basic_config
from notebook_accel.training import collectives, model_files, models, process_group
from notebook_accel.training.models import is_compiled_module
from notebook_accel.training.states import PartialState

__all__ = [
    "extract_model_from_parallel",
    "is_compiled_module",
    "load",
    "save",
    "tqdm",
    "wait_for_everyone",
    "write_basic_config",
]


def wait_for_everyone() -> None:
    """Block until every rank has called this function."""
    collectives.wait_for_everyone(process_group.current())


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a progress bar of the package tqdm, shown on the first rank of each machine only.

    Args:
        args: Arguments of ``tqdm.auto.tqdm``.
        main_process_only: ``False`` shows a bar for each rank.
        kwargs: Keyword arguments of ``tqdm.auto.tqdm``.
    """
    from tqdm.auto import tqdm as bar  # not a dependency

    if main_process_only and not PartialState().is_local_main_process:
        kwargs["disable"] = True
    return bar(*args, **kwargs)


def extract_model_from_parallel(
    model: torch.nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,  # noqa: ARG001  submodules are never wrapped here
) -> torch.nn.Module:
    """Return a model as it was before ``prepare``; see ``Accelerator.unwrap_model``."""
    return models.unwrap_model(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object by ``torch.save`` on rank 0, or as safetensors. The file appears when it is complete.

    Args:
        obj: The object; for safetensors a state dict.
        f: The file.
        save_on_each_node: Write it on the first rank of each machine.
        safe_serialization: Write safetensors rather than torch's own format.

    Raises:
        CheckpointError: A value isn't a tensor, and safetensors holds tensors only.
    """
    state = PartialState()
    if state.is_main_process or (save_on_each_node and state.is_local_main_process):
        model_files.save(obj, f, safe=safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Call ``torch.load``, which reads nothing that can run code unless ``weights_only=False``."""
    return torch.load(f, map_location=map_location, **kwargs)

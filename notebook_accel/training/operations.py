"""What an ``Accelerator`` does, as functions, for code that has none: they take the group that this process is in."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch

from notebook_accel.training import collectives, model_files, models, process_group, trees
from notebook_accel.training.process_control import PartialState

__all__ = [
    "broadcast",
    "broadcast_object_list",
    "extract_model_from_parallel",
    "gather",
    "gather_object",
    "is_compiled_module",
    "load",
    "pad_across_processes",
    "reduce",
    "release_memory",
    "save",
    "send_to_device",
    "tqdm",
    "wait_for_everyone",
]


def gather(tensor: Any) -> Any:
    """The ranks' tensors one after the other, on every rank: ``(n, ...)`` becomes ``(num_processes * n, ...)``.

    Raises:
        CollectiveError: Shapes or types differ between ranks.
    """
    return collectives.gather(process_group.current(), tensor)


def gather_object(object: Any) -> list[Any]:  # noqa: A002  the name that Accelerate documents
    """The ranks' lists put into one, in order of rank. Items can be anything that pickles.

    Raises:
        TrainingError: It isn't a list or a tuple.
    """
    return collectives.gather_object(process_group.current(), object)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """The ranks' tensors made one, element by element, in new tensors, times ``scale``.

    Args:
        tensor: Nested tensors.
        reduction: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``; ``"none"`` is another name for the sum.
        scale: What the result is multiplied by.
    """
    return collectives.reduce(process_group.current(), tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Fills the ranks' tensors with those of one rank, in place, and returns them."""
    return collectives.broadcast(process_group.current(), tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replaces the items of a list by those of one rank, in place, and returns it."""
    return collectives.broadcast_object_list(process_group.current(), object_list, from_process)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pads the ranks' tensors along ``dim`` to the length of the longest, so that they can be gathered."""
    return collectives.pad_across_processes(process_group.current(), tensor, dim, pad_index, pad_first)


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False) -> Any:
    """Nested tensors on a device."""
    return trees.send_to_device(tensor, device, non_blocking=non_blocking)


def wait_for_everyone() -> None:
    """Returns when every rank has called it."""
    collectives.wait_for_everyone(process_group.current())


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A bar of the package tqdm, on the first rank of each machine only.

    Args:
        args: Of ``tqdm.auto.tqdm``.
        main_process_only: ``False`` shows one a rank.
        kwargs: Of ``tqdm.auto.tqdm``.
    """
    from tqdm.auto import tqdm as bar  # not a dependency

    if main_process_only and not PartialState().is_local_main_process:
        kwargs["disable"] = True
    return bar(*args, **kwargs)


def extract_model_from_parallel(
    model: torch.nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,  # noqa: ARG001  what is inside of a model isn't wrapped here
) -> torch.nn.Module:
    """The model that was prepared, as it was; as ``Accelerator.unwrap_model``."""
    return models.unwrap_model(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile`` has made it."""
    return models.is_compiled(module)


def release_memory(*objects: Any) -> list[None]:
    """Gives unused device memory back.

    Returns:
        As many ``None`` as there are arguments, to overwrite the caller's names with: ``a, b = release_memory(a, b)``.
    """
    gc.collect()
    process_group.current().release_memory()
    return [None] * len(objects)


def save(
    obj: Any, f: str | os.PathLike[str], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """``torch.save`` on rank 0, or safetensors; the file is there whole or not at all.

    Args:
        obj: What to save; for safetensors a state dict.
        f: The file.
        save_on_each_node: The first rank of each machine writes it.
        safe_serialization: Safetensors rather than torch's own format.

    Raises:
        CheckpointError: Safetensors can't hold it.
    """
    state = PartialState()
    if state.is_main_process or (save_on_each_node and state.is_local_main_process):
        model_files.save(obj, f, safe=safe_serialization)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """``torch.load``, which reads nothing that can run code unless it is told ``weights_only=False``."""
    return torch.load(f, map_location=map_location, **kwargs)

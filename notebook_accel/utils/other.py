"""Models, files, a barrier and small helpers, for code that has no ``Accelerator``."""

from __future__ import annotations

import functools
import os
import socket
from typing import Any

import torch

from notebook_accel.launching.kernel.config_draft import write_basic_config
from notebook_accel.training import collectives, model_files, models, process_group
from notebook_accel.training.compiling import compile_regions, is_compiled_module
from notebook_accel.training.states import PartialState

__all__ = [
    "compile_regions",
    "convert_bytes",
    "extract_model_from_parallel",
    "get_free_port",
    "get_pretty_name",
    "is_compiled_module",
    "is_port_in_use",
    "load",
    "merge_dicts",
    "recursive_getattr",
    "save",
    "wait_for_everyone",
    "write_basic_config",
]


def wait_for_everyone() -> None:
    """Block until every rank has called this function."""
    collectives.wait_for_everyone(process_group.current())


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
        save_on_each_node: Write the object on the first rank of each machine.
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


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text, in units of 1024: ``"1.5 KB"``."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def get_pretty_name(obj: Any) -> str:
    """Return the name of a function or class; for another object, the name of its class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    name: str = getattr(named, "__qualname__", None) or named.__name__
    return name


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Copy the items of ``source`` into ``destination``, dictionaries item by item, and return ``destination``."""
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute of an attribute: ``recursive_getattr(model, "encoder.weight")``."""
    return functools.reduce(getattr, attr.split("."), obj)


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a program listens on a TCP port of this machine; by default on 29500."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", 29500 if port is None else port)) == 0


def get_free_port() -> int:
    """Return a TCP port that is free now. A launch doesn't need it: it finds its own port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port

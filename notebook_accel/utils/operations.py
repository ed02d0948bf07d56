"""Collectives and operations on nested tensors, for code that has no ``Accelerator``.

Collectives use the group that this process is in.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from notebook_accel.errors import CollectiveError as DistributedOperationException
from notebook_accel.errors import TrainingError
from notebook_accel.training import collectives, process_group, trees

__all__ = [
    "DistributedOperationException",
    "TensorInformation",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "get_data_structure",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "listify",
    "pad_across_processes",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
]


def gather(tensor: Any) -> Any:
    """Concatenate the ranks' tensors on every rank: ``(n, ...)`` becomes ``(num_processes * n, ...)``.

    Raises:
        CollectiveError: Shapes or types differ between ranks.
    """
    return collectives.gather(process_group.current(), tensor)


def gather_object(object: Any) -> list[Any]:  # noqa: A002  the name that Accelerate documents
    """Concatenate the ranks' lists on every rank, in order of rank. Items can be any objects that pickle.

    Raises:
        TrainingError: ``object`` isn't a list or a tuple.
    """
    return collectives.gather_object(process_group.current(), object)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Reduce the ranks' tensors element by element into new tensors, multiplied by ``scale``.

    Args:
        tensor: Nested tensors.
        reduction: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``; ``"none"`` is another name for the sum.
        scale: The factor of the result.
    """
    return collectives.reduce(process_group.current(), tensor, reduction, scale)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Fill the ranks' tensors with those of one rank, in place, and return them."""
    return collectives.broadcast(process_group.current(), tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of a list by those of one rank, in place, and return the list."""
    object_list[:] = collectives.broadcast_object(process_group.current(), object_list, from_process)
    return object_list


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad the ranks' tensors along ``dim`` to the length of the longest, so that they can be gathered."""
    return collectives.pad_across_processes(process_group.current(), tensor, dim, pad_index, pad_first)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return one rank's tensor on every rank.

    Args:
        tensor: The tensor on the rank that has it, ``None`` on the others.

    Raises:
        TrainingError: No rank has a tensor.
    """
    backend = process_group.current()
    described = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    by_rank = collectives.gather_object(backend, [described])
    owner = next((rank for rank, found in enumerate(by_rank) if found is not None), None)
    if owner is None:
        raise TrainingError("copy_tensor_to_devices was given a tensor on no rank.", fix="pass it on one rank")
    shape, dtype = by_rank[owner]
    own = torch.empty(shape, dtype=dtype) if tensor is None else tensor.detach().clone()
    copied: torch.Tensor = collectives.broadcast(backend, own.to(backend.device), owner)
    return copied


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False) -> Any:
    """Return nested tensors on a device."""
    return trees.send_to_device(tensor, device, non_blocking=non_blocking)


def is_torch_tensor(tensor: object) -> bool:
    """Return whether an object is a tensor."""
    return isinstance(tensor, torch.Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Replace leaves of nested lists, tuples and mappings by ``func(leaf, *args, **kwargs)``.

    Args:
        func: The function to apply.
        data: The container, or a leaf.
        args: Further arguments of ``func``.
        test_type: A predicate of the leaves to which ``func`` is applied.
        error_on_other_type: Refuse other leaves instead of leaving them as they are.
        kwargs: Keyword arguments of ``func``.

    Raises:
        TrainingError: There is another leaf, and ``error_on_other_type`` refuses it.
    """

    def applied(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TrainingError(
                f"recursively_apply can't take a {type(leaf).__name__}.",
                why=f"{getattr(test_type, '__name__', 'test_type')} returned False for it.",
                fix="error_on_other_type=False leaves it as it is",
            )
        return leaf

    return trees.map_leaves(applied, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate nested tensors: shapes ``(a, ...)`` and ``(b, ...)`` give ``(a + b, ...)``.

    A single structure is returned as it is, whatever its leaves are, so that a loop of one batch needs no special case.

    Args:
        data: The structures, each with the same keys and lengths.
        dim: The dimension along which tensors are concatenated.

    Raises:
        TrainingError: A leaf isn't a tensor, or ``data`` is empty.
    """
    first = data[0] if data else None
    if len(data) == 1:
        return first
    if isinstance(first, (list, tuple)):
        return honor_type(first, (concatenate([item[i] for item in data], dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return {key: concatenate([item[key] for item in data], dim) for key in first}
    if not isinstance(first, torch.Tensor):
        raise TrainingError(f"concatenate takes tensors; {type(first).__name__} isn't one.", fix="leave it out")
    return torch.cat(list(data), dim)


def slice_tensors(data: Any, tensor_slice: slice) -> Any:
    """Replace each tensor by ``tensor[tensor_slice]``."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def find_batch_size(data: Any) -> int:
    """Return the length of the first tensor that has a dimension.

    Raises:
        TrainingError: There is no such tensor.
    """
    length = ignorant_find_batch_size(data)
    if length is not None:
        return length
    raise TrainingError(
        f"There is no tensor with a length in this {type(data).__name__}.", fix="pass a batch that has one"
    )


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the length of the first tensor that has a dimension, ``None`` if there is no such tensor."""
    return next((len(leaf) for leaf in trees.leaves_of(data) if isinstance(leaf, torch.Tensor) and leaf.ndim), None)


@dataclasses.dataclass
class TensorInformation:
    """A tensor's shape and type, which can be sent before the tensor."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: object) -> bool:
    """Return whether an object is a ``TensorInformation``."""
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """Replace each tensor by its ``TensorInformation``."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Replace each ``TensorInformation`` by a tensor with that shape and type, whose values are undefined."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def is_namedtuple(data: object) -> bool:
    """Return whether an object is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_asdict")


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor, ``None`` if there is no tensor."""
    return next((leaf.device for leaf in trees.leaves_of(data) if isinstance(leaf, torch.Tensor)), None)


def listify(data: Any) -> Any:
    """Replace tensors by numbers or lists of numbers."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the items of ``generator`` as a list, tuple or named tuple, whichever ``obj`` is."""
    return type(obj)(*generator) if hasattr(obj, "_fields") else type(obj)(generator)


def convert_to_fp32(tensor: Any) -> Any:
    """Return nested tensors with those in half precision as float32."""
    return trees.to_float32(tensor)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it returns half precision tensors as float32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return trees.to_float32(model_forward(*args, **kwargs))

    return forward

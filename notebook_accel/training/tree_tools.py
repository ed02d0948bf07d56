"""What programs do to nested tensors without an ``Accelerator``, under the names that Accelerate documents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from notebook_accel.errors import TrainingError
from notebook_accel.training.trees import leaves_of, map_leaves, to_float32

__all__ = [
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "honor_type",
    "is_torch_tensor",
    "listify",
    "recursively_apply",
    "slice_tensors",
]


def is_torch_tensor(tensor: object) -> bool:
    """Return whether it is a tensor."""
    return isinstance(tensor, torch.Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """The same nested lists, tuples and mappings with ``func(leaf, *args, **kwargs)`` in the place of some leaves.

    Args:
        func: What to apply.
        data: The leaves' container, or a leaf.
        args: Of ``func``, after the leaf.
        test_type: Which leaves it is applied to.
        error_on_other_type: Refuse other leaves instead of leaving them as they are.
        kwargs: Of ``func``.

    Raises:
        TrainingError: There are others, and they are refused.
    """

    def applied(leaf: Any) -> Any:
        if test_type(leaf):
            return func(leaf, *args, **kwargs)
        if error_on_other_type:
            raise TrainingError(
                f"recursively_apply can't take a {type(leaf).__name__}.",
                why=f"{getattr(test_type, '__name__', 'test_type')} says no to it.",
                fix="error_on_other_type=False leaves it as it is",
            )
        return leaf

    return map_leaves(applied, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Several nested structures of tensors as one: of shapes ``(a, ...)`` and ``(b, ...)``, ``(a + b, ...)``.

    Args:
        data: The structures, each with the same keys and lengths.
        dim: The dimension along which tensors are put together.

    Raises:
        TrainingError: Something in there isn't a tensor, or there is nothing in there.
    """
    first = data[0] if data else None
    if isinstance(first, (list, tuple)):
        return honor_type(first, (concatenate([item[i] for item in data], dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return {key: concatenate([item[key] for item in data], dim) for key in first}
    if not isinstance(first, torch.Tensor):
        raise TrainingError(f"concatenate takes tensors; {type(first).__name__} isn't one.", fix="leave it out")
    return torch.cat(list(data), dim)


def slice_tensors(data: Any, tensor_slice: slice) -> Any:
    """The same structure with ``tensor[tensor_slice]`` in the place of each tensor."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def find_batch_size(data: Any) -> int:
    """The length of the first tensor in there that has one.

    Raises:
        TrainingError: There is none.
    """
    for leaf in leaves_of(data):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return len(leaf)
    raise TrainingError(f"There is no tensor with a length in this {type(data).__name__}.", fix="give it a batch")


def find_device(data: Any) -> torch.device | None:
    """Where the first tensor in there is, ``None`` if there is none."""
    return next((leaf.device for leaf in leaves_of(data) if isinstance(leaf, torch.Tensor)), None)


def listify(data: Any) -> Any:
    """The same structure with numbers, or lists of numbers, in the place of tensors."""
    return recursively_apply(lambda tensor: tensor.detach().cpu().tolist(), data)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """What ``generator`` yields as a list, tuple or named tuple, whichever ``obj`` is."""
    return type(obj)(*generator) if hasattr(obj, "_fields") else type(obj)(generator)


def convert_to_fp32(tensor: Any) -> Any:
    """The same structure with its half precision tensors in float32."""
    return to_float32(tensor)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns what ``model_forward`` does, with half precision tensors in float32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return to_float32(model_forward(*args, **kwargs))

    return forward

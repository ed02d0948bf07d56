"""Nested structures of tensors, such as a loader's batches, a model's outputs and the arguments of collectives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same structure with ``function`` applied to every leaf.

    Lists, tuples, named tuples and mappings are containers and keep their type; every other object is a leaf. So is a
    ``PackedSequence``: one of its fields has to stay on the CPU, and only its own ``to`` knows which.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple)) and not isinstance(tree, PackedSequence):
        items = [map_leaves(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        mapped = {key: map_leaves(function, value) for key, value in tree.items()}
        if type(tree) is dict:
            return mapped
        if isinstance(tree, MutableMapping):
            copied = copy.copy(tree)  # keeps attributes of the class, such as the factory of a defaultdict
            for key, value in mapped.items():
                copied[key] = value
            return copied
        return type(tree)(mapped)  # type: ignore[call-arg]  # an immutable mapping is made from a mapping
    return function(tree)


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of ``tree`` in order."""
    leaves: list[Any] = []
    map_leaves(leaves.append, tree)
    return leaves


def send_to_device(tree: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Return ``tree`` with its tensors on ``device``. Leaves without a method ``to`` stay as they are.

    Args:
        tree: Nested tensors.
        device: The destination.
        non_blocking: Don't wait for copies out of pinned memory.
    """

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return map_leaves(moved, tree)


def to_float32(tree: Any) -> Any:
    """Return ``tree`` with its half precision tensors in float32."""
    return map_leaves(_leaf_to_float32, tree)


def _leaf_to_float32(leaf: Any) -> Any:
    is_half = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16)
    return leaf.float() if is_half else leaf

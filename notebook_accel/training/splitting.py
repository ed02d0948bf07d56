"""Lists, tensors and mappings of them, cut into one part a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from notebook_accel.errors import TrainingError

__all__ = ["part_of"]


def part_of(inputs: Any, rank: int, world_size: int, *, apply_padding: bool = False) -> Any:
    """One rank's part of ``inputs``: consecutive items, of which the first ranks have one more where it doesn't divide.

    Args:
        inputs: A list, a tuple, a tensor ``(n, ...)``, something else with ``select`` such as a dataset of Hugging
            Face's, or a mapping of such, all of one length.
        rank: Whose part.
        world_size: How many parts.
        apply_padding: Repeat the last item so that all parts are as long.

    Raises:
        TrainingError: ``inputs`` is something else, or its items have different lengths.
    """
    if world_size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        _check_lengths(inputs)
        return {key: part_of(value, rank, world_size, apply_padding=apply_padding) for key, value in inputs.items()}
    if not isinstance(inputs, (list, tuple, torch.Tensor)) and not hasattr(inputs, "select"):
        raise TrainingError(
            f"split_between_processes can't cut {type(inputs).__name__} into parts.",
            fix="give it a list, a tuple, a tensor, or a dict of such",
        )
    each, extra = divmod(len(inputs), world_size)
    start = rank * each + min(rank, extra)
    end = start + each + (rank < extra)
    missing = each + bool(extra) - (end - start) if apply_padding and len(inputs) else 0
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):
        return inputs.select([*range(start, end), *[len(inputs) - 1] * missing])
    part, last = inputs[start:end], inputs[-1:]
    if isinstance(inputs, torch.Tensor):
        return torch.cat([part, *[last] * missing]) if missing else part
    return part + last * missing


def _check_lengths(inputs: Mapping[Any, Any]) -> None:
    lengths = {key: len(value) for key, value in inputs.items() if hasattr(value, "__len__")}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{key!r} has {length}" for key, length in lengths.items())
        raise TrainingError(
            f"split_between_processes was given values of different lengths: {shown}.",
            why="Each rank gets the same items of all of them.",
            fix="make them equally long",
        )

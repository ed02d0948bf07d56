"""The largest batch that fits into memory."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from notebook_accel.errors import TrainingError
from notebook_accel.training import collectives, process_group

__all__ = ["find_executable_batch_size"]

_REDUCTION = 0.9  # as Accelerate has it
_OUT_OF_MEMORY = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN says when it has no room for its workspace
)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorates a function of a batch size so that it is called again with a smaller one when memory runs out.

    What one rank has no memory for, no rank goes on with: all call the function again, with the same size. The size
    that was found is where the next call begins.

    Args:
        function: Its first parameter is the batch size; callers leave it out.
        starting_batch_size: The size to begin with.
        reduce_batch_size_fn: Gives the next size; by default nine tenths of the last one.

    Raises:
        TrainingError: Nothing fits, or another rank's function raised.
        TypeError: The function was called with a batch size.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    size = starting_batch_size

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _refuse_given_size(function, args)
        while size > 0:
            _free_memory()
            value, error = _attempt(functools.partial(function, size, *args, **kwargs))
            if not _runs_out_anywhere(error):
                return value
            error = None  # it holds the frames, and they hold the tensors
            size = int(size * _REDUCTION) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise TrainingError(
            f"{function.__name__} runs out of memory with every batch size down to 1.",
            fix="a smaller model, mixed_precision='bf16', or a device with more memory",
        )

    return search


def _refuse_given_size(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = inspect.signature(function).parameters.values()
    positional = [kind for kind in parameters if kind.kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)]
    if not any(kind.kind is kind.VAR_POSITIONAL for kind in parameters) and len(args) >= len(positional):
        raise TypeError(
            f"{function.__name__} was called with {len(args)} arguments and takes {len(positional)}, the first of "
            "which is the batch size that find_executable_batch_size passes. Leave it out."
        )


def _attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001  the other ranks are told first, whatever it is
        return None, error


def _runs_out_anywhere(error: Exception | None) -> bool:
    """Whether memory ran out on a rank.

    Raises:
        Exception: ``error``, if it is about something else.
        TrainingError: Another rank's was about something else.
    """
    runs_out = error is not None and _is_about_memory(error)
    failed = error is not None and not runs_out
    runtime = process_group.current()
    ends: list[tuple[bool, str]] = [(runs_out, f"{type(error).__name__}: {error}" if failed else "")]
    if runtime.place.world_size > 1:
        ends = collectives.gather_object(runtime, ends)
    if error is not None and failed:
        raise error
    for rank, (_, text) in enumerate(ends):
        if text:
            raise TrainingError(f"Rank {rank} failed while a batch size was being tried: {text}")
    return any(ran_out for ran_out, _ in ends)


def _is_about_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )


def _free_memory() -> None:
    gc.collect()
    process_group.current().release_memory()

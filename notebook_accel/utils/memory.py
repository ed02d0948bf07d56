"""Device memory: the largest batch size that fits, and the release of unused memory."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.training import process_group
from notebook_accel.training.backends import group_recovery, torch_group
from notebook_accel.training.backends.backend import Backend

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]

_REDUCTION = 0.9  # as in Accelerate
_OUT_OF_MEMORY = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN has no room for its workspace
)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    keep_effective_batch_size: bool = False,
) -> Any:
    """Decorate a function of a batch size, to call it again with a smaller one when memory runs out.

    When memory runs out on one rank, all ranks give up the attempt, even in the middle of a step, and call the function
    again with the same smaller size, in a new process group. Models that were prepared outside of the function join the
    new group. The next call begins with the size that was found. It is the attribute ``batch_size`` of the decorated
    function, and rank 0 prints it if it isn't the first one.

    Ranks can only do so once there is an ``Accelerator``, which makes their process group.

    Args:
        function: The function to decorate. Its first parameter is the batch size, which callers leave out.
        starting_batch_size: The first size.
        reduce_batch_size_fn: A function that returns the next size, by default nine tenths of the last one.
        keep_effective_batch_size: Try the divisors of ``starting_batch_size`` from the largest down, and give the
            function a second argument, the number of micro-batches to accumulate. The product of both stays the same.
            The number is the attribute ``gradient_accumulation_steps`` of the decorated function.

    Raises:
        ConfigError: ``keep_effective_batch_size`` was given together with ``reduce_batch_size_fn``.
        TrainingError: No size fits, or the program has made the process group itself.
        TypeError: The function was called with a batch size.
    """
    if keep_effective_batch_size and reduce_batch_size_fn is not None:
        raise ConfigError(
            "find_executable_batch_size has both reduce_batch_size_fn and keep_effective_batch_size=True.",
            why="keep_effective_batch_size tries the divisors of the first size, and no others.",
            fix="leave out one of them",
        )
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            keep_effective_batch_size=keep_effective_batch_size,
        )
    size = starting_batch_size

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _refuse_given_size(function, args, own=1 + keep_effective_batch_size)
        tried: list[int] = []
        while size > 0:
            steps = starting_batch_size // size
            sizes = (size, steps) if keep_effective_batch_size else (size,)
            runs_out, value = _attempt_on_all(functools.partial(function, *sizes, *args, **kwargs))
            if not runs_out:
                search.batch_size, search.gradient_accumulation_steps = size, steps  # type: ignore[attr-defined]
                if tried and process_group.rank_place().rank == 0:
                    _print_found(function.__name__, sizes, tried)
                return value
            tried.append(size)
            if keep_effective_batch_size:
                size = next((part for part in range(size - 1, 0, -1) if starting_batch_size % part == 0), 0)
            else:
                size = int(size * _REDUCTION) if reduce_batch_size_fn is None else reduce_batch_size_fn()
        raise TrainingError(
            f"{function.__name__} runs out of memory with every batch size down to 1.",
            fix="a smaller model, mixed_precision='bf16', or a device with more memory",
        )

    return search


def _print_found(name: str, sizes: Sequence[int], tried: Sequence[int]) -> None:
    """Print the batch size with which a function runs, and the number of micro-batches if there is one."""
    times = f", {sizes[1]} of them a step" if len(sizes) > 1 else ""
    without = ", ".join(map(str, tried))
    sys.stderr.write(f"{name} runs with a batch size of {sizes[0]}{times}; no memory for {without}.\n")


def release_memory(*objects: Any) -> list[None]:
    """Release unused device memory.

    Returns:
        One ``None`` per argument, to overwrite the caller's variables: ``a, b = release_memory(a, b)``.
    """
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release unused device memory.

    Args:
        garbage_collection: Collect Python's garbage first, which may hold tensors.
    """
    if garbage_collection:
        gc.collect()
    process_group.current().release_memory()


def _refuse_given_size(function: Callable[..., Any], args: tuple[Any, ...], own: int) -> None:
    """Raise ``TypeError`` if ``args`` are too many for the function after its first ``own`` arguments."""
    try:
        inspect.signature(function).bind_partial(*range(own), *args)
    except TypeError as error:
        passed = "the batch size" if own == 1 else "the batch size and the steps of accumulation"
        raise TypeError(
            f"{function.__name__} can't be called with {len(args)} more arguments after {passed}, which "
            f"find_executable_batch_size passes itself ({error}). Leave that out, and let the function take it."
        ) from None


def _attempt_on_all(function: Callable[[], Any]) -> tuple[bool, Any]:
    """Call a function on all ranks; return whether memory ran out on any of them, and the value if it didn't.

    If memory ran out, all ranks are in a new group now.

    Raises:
        Exception: The function's own exception, if it isn't about memory.
        TrainingError: Memory ran out in a group that the user's code has made.
    """
    _free_memory()
    # A group that exists already is joined, so that it is renewed if it breaks, even if nothing else uses it.
    member = _member()
    try:
        value = function()
        if (others := _member()) is not None:
            others.barrier()  # fails if memory runs out on a rank that is still in the function
        if not _has_run_out_elsewhere():
            return False, value
    except Exception as error:
        if not (should_reduce_batch_size(error) or _has_run_out_elsewhere()):
            raise
    # Here the exception is gone. It references frames, which reference tensors.
    value = others = None
    group = torch_group.made_here()
    if group is not None:
        group.give_up()
        gc.collect()  # so that objects of the failed attempt aren't reconnected
        group_recovery.renew_group(None, rejoins=member is not None, namespace={})
    elif dist.is_initialized() and dist.get_world_size() > 1:
        raise TrainingError(
            "Memory ran out in a process group that the program has made itself, in which the other ranks wait.",
            why="All ranks have to leave the group together, before they try a smaller batch.",
            fix="make an Accelerator() before, instead of calling torch.distributed.init_process_group()",
        )
    return True, None


def _member() -> Backend | None:
    """Return this rank's backend if this package has made the process group, else ``None``."""
    if torch_group.made_here() is None:
        return None
    return process_group.current(cpu="nccl" not in dist.get_backend_config())


def _has_run_out_elsewhere() -> bool:
    group = torch_group.made_here()
    return group is not None and group.has_memory_run_out()


def should_reduce_batch_size(exception: Exception) -> bool:
    """Return whether an exception says that memory has run out."""
    return isinstance(exception, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(exception, RuntimeError) and any(text in str(exception) for text in _OUT_OF_MEMORY)
    )


def _free_memory() -> None:
    gc.collect()
    backend = process_group.joined()  # don't join a group: the function decides on its options
    if backend is not None:
        backend.release_memory()
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()

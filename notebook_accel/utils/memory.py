"""Device memory: the largest batch size that fits, and the release of unused memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented, not listed in __all__

from notebook_accel import torch_internals
from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.training import process_group
from notebook_accel.training.backends import group_recovery, torch_group

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]

_REDUCTION = 0.9  # as in Accelerate
_OUT_OF_MEMORY = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN has no room for its workspace
)
_DEADLINE_S = 1800.0  # one rank may evaluate or save for a long time after the others have returned
_POLL_S = 0.05
_WATCH_PERIOD_S = 0.5


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

    Ranks can only agree once there is an ``Accelerator``. In a process group that the user's code has made without one,
    a rank that waits for another waits until the group's timeout.

    Args:
        function: The function to decorate. Its first parameter is the batch size, which callers leave out.
        starting_batch_size: The first size.
        reduce_batch_size_fn: A function that returns the next size, by default nine tenths of the last one.
        keep_effective_batch_size: Try the divisors of ``starting_batch_size`` from the largest down, and give the
            function a second argument, the number of micro-batches to accumulate. The product of both stays the same.
            The number is the attribute ``gradient_accumulation_steps`` of the decorated function.

    Raises:
        ConfigError: ``keep_effective_batch_size`` was given together with ``reduce_batch_size_fn``.
        TrainingError: No size fits, or another rank's function raised.
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
        TrainingError: Another rank raised an exception that isn't about memory.
    """
    _free_memory()
    member = None
    if torch_group.made_here() is not None:
        # A group that exists already is joined, so that it is renewed if it breaks, even if nothing else uses it.
        member = process_group.current(cpu="nccl" not in dist.get_backend_config())
    value, runs_out, error = None, False, None
    with _giving_up_with_others():
        try:
            value = function()
        except Exception as raised:  # noqa: BLE001  any error is reported to the other ranks first
            runs_out = should_reduce_batch_size(raised)
            error = None if runs_out else raised  # an exception references frames, which reference tensors
    place = process_group.rank_place()
    if place.world_size == 1 or not dist.is_initialized():
        if error is not None:
            raise error
        return runs_out, value
    group = torch_group.made_here()
    exchange = _Exchange(place.rank, place.world_size)
    if runs_out:
        exchange.announce_out_of_memory()
    is_over = runs_out or (error is not None and exchange.has_memory_run_out())
    if is_over and group is not None:
        group.give_up()  # frees the waiting ranks, which then read the announcement
    if error is not None and not is_over:
        exchange.report(f"{type(error).__name__}: {error}", rejoins=False)
        raise error
    error = None  # caused by a peer that ran out of memory and gave up its group
    gc.collect()  # so that objects of the failed attempt aren't reconnected
    runs_out, rejoins = exchange.agree(rejoins=group is not None and bool(group.members))
    del exchange
    if runs_out and group is not None:
        group_recovery.renew_group(None, rejoins=rejoins, namespace={})
    del member
    return runs_out, None if runs_out else value


@contextlib.contextmanager
def _giving_up_with_others() -> Iterator[None]:
    """Give up the group during the body once memory has run out on another rank.

    gloo's waits end without this, because that rank closes its connections. NCCL's only end if this rank aborts them.
    """
    is_over = threading.Event()

    def watch() -> None:
        announced = None
        while not is_over.wait(_WATCH_PERIOD_S):
            group = torch_group.made_here()
            if group is None:  # the function may create it
                continue
            with contextlib.suppress(RuntimeError):  # the store ends with rank 0
                announced = announced or _Exchange.next_announcement(process_group.rank_place().rank)
                if announced():
                    group.give_up()
                    return

    thread = threading.Thread(target=watch, name="notebook-accel-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class _Exchange:
    """An exchange between all ranks at the end of an attempt. It uses their store, since their group may be broken."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        store = self._connect()
        self._store = PrefixStore(f"round {store.add(f'rounds of {rank}', 1)}", store)

    @staticmethod
    def _connect() -> PrefixStore:
        # A connection of its own, since another thread may wait on the process group's.
        return PrefixStore("batch size", torch_internals.default_store().clone())

    @classmethod
    def next_announcement(cls, rank: int) -> Callable[[], bool]:
        """Return a function that returns whether memory has run out in the exchange that this rank will enter next."""
        store = cls._connect()
        round_store = PrefixStore(f"round {store.add(f'rounds of {rank}', 0) + 1}", store)
        return lambda: bool(round_store.check(["memory"]))

    def announce_out_of_memory(self) -> None:
        """Announce that memory ran out. Call it before giving up the group on which other ranks wait."""
        self._store.set("memory", "")

    def has_memory_run_out(self) -> bool:
        """Return whether any rank has announced that memory ran out."""
        return bool(self._store.check(["memory"]))

    def report(self, text: str, *, rejoins: bool) -> None:
        """Report this rank's exception, if it isn't about memory, and whether the rank has an Accelerator."""
        self._store.set(f"end of {self._rank}", json.dumps([text, rejoins]))

    def agree(self, *, rejoins: bool) -> tuple[bool, bool]:
        """Report no exception; return whether memory has run out, and whether all ranks have an Accelerator.

        Raises:
            TrainingError: Another rank has reported an exception. This doesn't wait for the other ranks.
        """
        self.report("", rejoins=rejoins)
        keys = [f"end of {rank}" for rank in range(self._world_size)]
        ends: dict[str, tuple[str, bool]] = {}

        def is_known() -> bool:
            ends.update({key: json.loads(self._store.get(key)) for key in keys if self._store.check([key])})
            return len(ends) == len(keys) or any(text for text, _ in ends.values())

        self._wait(is_known, keys)
        for rank, key in enumerate(keys):
            text, _ = ends.get(key, ("", False))
            if text:
                raise TrainingError(f"Rank {rank} failed while a batch size was being tried: {text}")
        has_run_out = self.has_memory_run_out()
        # Rank 0 may host the store, so it leaves last.
        self._store.set(f"heard by {self._rank}", "")
        if self._rank == 0:
            keys = [f"heard by {rank}" for rank in range(self._world_size)]
            self._wait(lambda: self._store.check(keys), keys)
        return has_run_out, all(rejoins for _, rejoins in ends.values())

    def _wait(self, is_enough: Callable[[], bool], keys: list[str]) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not is_enough():
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self._store.check([key])]
                raise TrainingError(
                    f"Rank {self._rank} waited {_DEADLINE_S:.0f} s for the other ranks to return from the function "
                    f"whose batch size is sought; missing: {', '.join(missing)}.",
                    fix="make every rank call it, and take as many steps as the others",
                )
            time.sleep(_POLL_S)


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

"""The largest batch that fits into memory."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # documented, not listed in __all__

from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.training import process_group
from notebook_accel.training.backends import group_recovery, torch_group
from notebook_accel.training.backends.backend import Backend

__all__ = ["find_executable_batch_size"]

_REDUCTION = 0.9  # as Accelerate has it
_OUT_OF_MEMORY = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN says when it has no room for its workspace
)
_DEADLINE_S = 1800.0  # a rank may evaluate or save for long after the others have returned
_POLL_S = 0.05


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    keep_effective_batch_size: bool = False,
) -> Any:
    """Decorates a function of a batch size so that it is called again with a smaller one when memory runs out.

    What one rank has no memory for, no rank goes on with: those that wait for it in the middle of a step are brought
    out of it, and all call the function again with the same size, in a new process group. Models that were prepared
    outside of the function go on in that. The size that was found is where the next call begins; it is the attribute
    ``batch_size`` of the decorated function, and rank 0 prints it if it isn't the first one.

    Ranks agree once the function, or what was before it, has made the ``Accelerator``. A group that the user's code
    has made itself, without one, is left as it is: there a rank that waits for another does so until its deadline. So
    does one whose GPU waits in NCCL, which only its own deadline ends.

    Args:
        function: Its first parameter is the batch size; callers leave it out.
        starting_batch_size: The size to begin with.
        reduce_batch_size_fn: Gives the next size; by default nine tenths of the last one.
        keep_effective_batch_size: Try the divisors of ``starting_batch_size`` from the largest down, and give the
            function a second argument, the number of micro-batches to accumulate: the product of both stays the same.
            That number is the attribute ``gradient_accumulation_steps`` of the decorated function.

    Raises:
        ConfigError: ``keep_effective_batch_size`` was given together with ``reduce_batch_size_fn``.
        TrainingError: Nothing fits, or another rank's function raised.
        TypeError: The function was called with a batch size.
    """
    if keep_effective_batch_size and reduce_batch_size_fn is not None:
        raise ConfigError(
            "find_executable_batch_size has both reduce_batch_size_fn and keep_effective_batch_size=True.",
            why="The second one decides on the sizes: they divide the first one.",
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

    def reduced() -> int:
        if keep_effective_batch_size:
            return next((part for part in range(size - 1, 0, -1) if starting_batch_size % part == 0), 0)
        return int(size * _REDUCTION) if reduce_batch_size_fn is None else reduce_batch_size_fn()

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _refuse_given_size(function, args, own=1 + keep_effective_batch_size)
        tried: list[int] = []
        while size > 0:
            _free_memory()
            steps = starting_batch_size // size
            sizes = (size, steps) if keep_effective_batch_size else (size,)
            member = _member()
            value, error = _attempt(functools.partial(function, *sizes, *args, **kwargs))
            outcome, error = _Outcome(error), None  # it holds the frames, and they hold the tensors
            runs_out = _runs_out_anywhere(outcome)
            del member
            if not runs_out:
                search.batch_size, search.gradient_accumulation_steps = size, steps  # type: ignore[attr-defined]
                if tried and process_group.rank_place().rank == 0:
                    times = f", {steps} of them a step" if keep_effective_batch_size else ""
                    without = ", ".join(map(str, tried))
                    sys.stderr.write(
                        f"{function.__name__} runs with a batch size of {size}{times}; no memory for {without}.\n"
                    )
                return value
            value = None
            tried.append(size)
            size = reduced()
        raise TrainingError(
            f"{function.__name__} runs out of memory with every batch size down to 1.",
            fix="a smaller model, mixed_precision='bf16', or a device with more memory",
        )

    return search


def _refuse_given_size(function: Callable[..., Any], args: tuple[Any, ...], own: int) -> None:
    parameters = inspect.signature(function).parameters.values()
    positional = [kind for kind in parameters if kind.kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)]
    if not any(kind.kind is kind.VAR_POSITIONAL for kind in parameters) and len(args) + own > len(positional):
        raise TypeError(
            f"{function.__name__} was called with {len(args)} arguments and takes {len(positional)}, the first of "
            "which is the batch size that find_executable_batch_size passes. Leave it out."
        )


def _attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001  the other ranks are told first, whatever it is
        return None, error


def _member() -> Backend | None:
    """A use of the group that there is already, so that it is made anew if it breaks, although nobody else uses it."""
    if torch_group.made_here() is None:
        return None
    return process_group.current(cpu="nccl" not in dist.get_backend_config())


class _Outcome:
    """How a rank's attempt has ended.

    Args:
        error: What it raised.

    Attributes:
        runs_out: Whether memory ran out.
        error: What it raised, if it is about something else.
        text: The same in words.
    """

    def __init__(self, error: Exception | None) -> None:
        self.runs_out = error is not None and _is_about_memory(error)
        self.error = None if self.runs_out else error
        self.text = "" if self.error is None else f"{type(self.error).__name__}: {self.error}"


def _runs_out_anywhere(outcome: _Outcome) -> bool:
    """Return whether memory ran out on a rank. If so, all ranks are in a new group.

    Raises:
        Exception: The outcome's own, if it is about something else.
        TrainingError: Another rank's was about something else.
    """
    place = process_group.rank_place()
    if place.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        if outcome.error is not None:
            raise outcome.error
        return outcome.runs_out
    group = torch_group.made_here()
    round_ = _Round(place.rank, place.world_size)
    if outcome.runs_out:
        round_.say_memory_ran_out()
    is_over = outcome.runs_out or (outcome.error is not None and round_.has_memory_run_out())
    if is_over and group is not None:
        group.give_up()  # ranks that wait for this one go on, and find what was said
    if outcome.error is not None and not is_over:
        round_.say(outcome.text, rejoins=False)
        raise outcome.error
    outcome.error = None  # if there is one: this rank was brought out of waiting for one without memory
    gc.collect()  # what only the failed attempt has held isn't reconnected
    texts, rejoins = round_.say_and_hear("", rejoins=group is not None and bool(group.members))
    for rank, text in enumerate(texts):
        if text:
            raise TrainingError(f"Rank {rank} failed while a batch size was being tried: {text}")
    ran_out = round_.has_memory_run_out()
    round_.part()
    del round_
    if ran_out and group is not None:
        group_recovery.renew_group(None, rejoins=rejoins, namespace={})
    return ran_out


class _Round:
    """What the ranks say to each other at the end of an attempt, through their store: their group may be broken.

    Args:
        rank: This one.
        world_size: Number of ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        # A connection of its own: another thread may wait on the other one.
        own: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        store = PrefixStore("batch size", own)
        self._store = PrefixStore(f"round {store.add(f'rounds of {rank}', 1)}", store)

    def say_memory_ran_out(self) -> None:
        """To be said before other ranks are brought out of waiting."""
        self._store.set("memory", "")

    def has_memory_run_out(self) -> bool:
        """Return whether a rank has said so."""
        return bool(self._store.check(["memory"]))

    def say(self, text: str, *, rejoins: bool) -> None:
        """Says what this rank's attempt has raised, if that isn't about memory, and whether it has an Accelerator."""
        self._store.set(f"end of {self._rank}", json.dumps([text, rejoins]))

    def say_and_hear(self, text: str, *, rejoins: bool) -> tuple[list[str], bool]:
        """Says the same, and returns what each rank has raised, and whether all have an Accelerator.

        Returns as soon as one has raised something.
        """
        self.say(text, rejoins=rejoins)
        keys = [f"end of {rank}" for rank in range(self._world_size)]
        ends: dict[str, tuple[str, bool]] = {}

        def is_known() -> bool:
            ends.update({key: json.loads(self._store.get(key)) for key in keys if self._store.check([key])})
            return len(ends) == len(keys) or any(text for text, _ in ends.values())

        self._wait(is_known, keys)
        return [ends.get(key, ("", False))[0] for key in keys], all(rejoins for _, rejoins in ends.values())

    def part(self) -> None:
        """Says that this rank has heard all. Rank 0, which may have the store, waits for the others to say so."""
        self._store.set(f"heard by {self._rank}", "")
        if self._rank == 0:
            keys = [f"heard by {rank}" for rank in range(self._world_size)]
            self._wait(lambda: self._store.check(keys), keys)

    def _wait(self, is_enough: Callable[[], bool], keys: list[str]) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not is_enough():
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self._store.check([key])]
                raise TrainingError(
                    f"Rank {self._rank} waited {_DEADLINE_S:.0f} s for the other ranks to return from the function "
                    f"whose batch size is sought; missing: {', '.join(missing)}.",
                    fix="see that every rank calls it, and that all take as many steps",
                )
            time.sleep(_POLL_S)


def _is_about_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
    )


def _free_memory() -> None:
    gc.collect()
    backend = process_group.joined()  # joins no group: with which options is for the function to say
    if backend is not None:
        backend.release_memory()
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()

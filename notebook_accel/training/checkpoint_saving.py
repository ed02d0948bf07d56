"""Saves a checkpoint on all ranks together, optionally in the background.

A failure on one rank raises on all ranks, and the group can still be used. The folder appears when all ranks have
written their parts.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import io
import pathlib
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from notebook_accel import code_places
from notebook_accel.errors import CheckpointError
from notebook_accel.formatting import ranks_in_words
from notebook_accel.payload.sharded_tensors import is_sharded_tensor
from notebook_accel.reporting import reporter
from notebook_accel.training import checkpoint_folders as folders
from notebook_accel.training import fsdp, model_files, random_state, sharded_files
from notebook_accel.training.accumulation import GradientState
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.backends.single_process import SingleProcess
from notebook_accel.training.checkpoint import (
    SHARDED_MODEL,
    CheckpointState,
    absence_error,
    agreed,
    fingerprint_of,
    gradients_of,
    on_all_ranks,
    on_rank_0,
    state_of,
)
from notebook_accel.training.compiling import uncompiled
from notebook_accel.training.trees import map_leaves

_Hooks = Sequence[Callable[[list[Any], list[Any], str], None]]
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


class Saving:
    """A checkpoint that is being saved or was saved in ``folder``."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._writing: concurrent.futures.Future[None] | None = None

    def run(self, write: Callable[[], None]) -> None:
        """Call ``write`` in a thread. A rank of a launch waits for it before it reports its result.

        Any other process waits at its exit, where Python prints an error and can't raise it.
        """
        executor = concurrent.futures.ThreadPoolExecutor(1, "notebook-accel-checkpoint")
        self._writing = executor.submit(write)
        executor.shutdown(wait=False)  # the thread ends when ``write`` has returned
        if reporter().is_connected:
            reporter().before_result.append(self.wait)
        else:
            atexit.register(self.wait)

    def wait(self) -> None:
        """Block until the checkpoint is complete. Later calls return at once.

        Raises:
            CheckpointError: A rank couldn't write its part.
        """
        if self._writing is None:
            return
        cause = self._writing.exception()  # after an interrupt here, the next call waits again
        self._writing = None
        atexit.unregister(self.wait)
        with contextlib.suppress(ValueError):  # another reporter than at the call of ``run``
            reporter().before_result.remove(self.wait)
        if cause is not None:
            raise CheckpointError(
                f"The checkpoint {self.folder}, which was saved while training went on, failed: {cause}",
                why="The last complete one is as it was.",
            ) from cause


def is_possible(gradients: GradientState, models: Sequence[torch.nn.Module]) -> bool:
    """Return whether a checkpoint can be saved now: not where gradients of a sharded model are in torch's buffers."""
    is_in_window = not (gradients.sync_gradients or gradients.plugin.sync_each_batch)
    return not any(map(fsdp.was_fully_sharded if is_in_window else fsdp.has_local_gradients, models))


def savers(backend: Backend, models: Sequence[torch.nn.Module]) -> Backend | None:
    """Return the backend of the ranks that save: all, or rank 0 alone if others don't call ``save_state`` with it.

    The result is ``None`` on a rank that has nothing to write, since rank 0 saves alone.

    Raises:
        CheckpointError: Some ranks don't call ``save_state``, although one is rank 0 or a model is sharded.
    """
    absent = backend.absent_ranks()
    if not absent:
        return backend
    if 0 in absent or any(map(fsdp.is_sharded, models)):
        why = "Each rank writes its share of a sharded model." if 0 not in absent else "Rank 0 writes what all share."
        raise absence_error("save_state", absent, why)
    if backend.place.rank:
        return None
    _warn_of_absence(ranks_in_words(absent))
    return SingleProcess(dataclasses.replace(backend.place, world_size=1), backend.device)


@functools.cache  # once in a process
def _warn_of_absence(ranks: str) -> None:
    code_places.warn(
        f"save_state wasn't called on {ranks}: rank 0 saves alone, without the random numbers of the others, and waits "
        "each time until they have gone on. Fix: call it on all ranks, not under `if accelerator.is_main_process:`"
    )


def save(
    backend: Backend,
    state: CheckpointState,
    hooks: _Hooks,
    choose: Callable[[], pathlib.Path],
    *,
    safe: bool = True,
    in_background: bool = False,
    completed: Callable[[pathlib.Path], None] = lambda _: None,
) -> Saving:
    """Write a checkpoint. Its folder appears when it is complete on all ranks.

    Only rank 0 calls ``choose``, which returns the folder, and ``completed`` with the complete folder. Hooks get the
    draft's folder; weights that a hook removes aren't saved. With ``in_background``, return once everything is copied
    to host memory, and write it in a thread.

    Raises:
        CheckpointError: A rank couldn't write its part. An earlier checkpoint of that name is kept.
    """
    rank = backend.place.rank
    folder: pathlib.Path = on_rank_0(backend, "begin a checkpoint", lambda: folders.start_draft(choose()))
    draft = folders.draft_of(folder)
    with _abandoned_on_failure(folder, rank):
        parts = _collect_on_all_ranks(backend, state, hooks, draft, copies=in_background)
    counts = {kind: len(items) for kind, items in state.states.items()}
    manifest = {
        "world_size": backend.place.world_size,
        "counts": counts,
        "models": parts.fingerprints,
        "optimizers": state.parameters_of_optimizers(),
    }

    def complete() -> None:
        if rank == 0:
            folders.publish(folder, manifest)
            completed(folder)
            reporter().report_checkpoint(str(folder))

    def write(on_all: Callable[[str, Callable[[], Any]], list[Any]], group: Any = None) -> None:
        """Write this rank's part, and on rank 0 complete the checkpoint. ``on_all`` runs an action on all ranks."""
        with _abandoned_on_failure(folder, rank):
            on_all("write its part of a checkpoint", lambda: parts.write(draft, rank, safe=safe, group=group))
            on_all("complete a checkpoint", complete)

    saving = Saving(folder)
    if in_background:
        group = backend.background_group()
        gather = functools.partial(_gather_in, group) if group is not None else list
        saving.run(lambda: write(functools.partial(agreed, gather=gather), group))
    else:
        write(functools.partial(on_all_ranks, backend))
    return saving


@contextlib.contextmanager
def _abandoned_on_failure(folder: pathlib.Path, rank: int) -> Iterator[None]:
    """Delete the checkpoint's draft if the body raises."""
    try:
        yield
    except BaseException:
        if rank == 0:
            folders.abandon(folder)
        raise


def _collect_on_all_ranks(
    backend: Backend, state: CheckpointState, hooks: _Hooks, draft: pathlib.Path, *, copies: bool
) -> _Parts:
    """Collect this rank's part of a checkpoint, with ``copies`` in host memory, and compare it with the others'."""
    parts: list[_Parts] = []  # not the action's value, which would be sent to the other ranks

    def collect() -> tuple[dict[str, float], set[int]]:
        own = _collect(backend, state, hooks, draft)
        parts.append(own.copied(backend.place.rank) if copies else own)
        return _norms_of_copies(state.models), own.sharded_models

    by_rank = on_all_ranks(backend, "write its part of a checkpoint", collect)
    if any(sharded_models != by_rank[0][1] for _, sharded_models in by_rank):
        raise CheckpointError(
            "A hook has removed the weights of a sharded model on some ranks only.",
            why="Each rank has a share of them, and writes it.",
            fix="remove them on all ranks, not under `if accelerator.is_main_process:`",
        )
    if backend.place.rank == 0:
        _warn_of_differences([norms for norms, _ in by_rank])
    return parts[0]


def _norms_of_copies(models: Sequence[torch.nn.Module]) -> dict[str, float]:
    """Return by name the norm of each parameter that should be equal on all ranks."""
    copied: list[Any] = [model for model in map(uncompiled, models) if isinstance(model, DistributedDataParallel)]
    return {
        f"{type(model.module).__name__}.{name}": _norm(parameter.detach())
        for model in copied
        for name, parameter in model.module.named_parameters()
        if parameter.is_floating_point() and name not in model.parameters_to_ignore
    }


def _norm(tensor: torch.Tensor) -> float:
    """Return the sum of the absolute values, with at least the precision of float32 and without a copy."""
    dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    return float(torch.linalg.vector_norm(tensor, 1, dtype=dtype))


def _warn_of_differences(norms: Sequence[dict[str, float]]) -> None:
    """Warn if the ranks' copies of a model differ by more than the rounding of different processors."""
    first = norms[0]
    apart = [name for name in first if any(abs(of[name] - first[name]) > 1e-4 * abs(first[name]) for of in norms)]
    if apart:
        shown = f"{', '.join(apart[:3])}{', ...' if len(apart) > 3 else ''}"
        warnings.warn(
            f"Each rank has trained a model of its own: {shown} differ between the ranks, and rank 0's are saved. "
            "Fix: prepare the optimizer, call what prepare returned, average weights that you train in no_sync, and "
            "change no weight under `if accelerator.is_main_process:`",
            stacklevel=5,
        )


def _gather_in(group: Any, values: list[Any]) -> list[Any]:
    by_rank: list[list[Any]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(by_rank, values, group=group)
    return [value for of_rank in by_rank for value in of_rank]


@dataclasses.dataclass
class _Parts:
    """The contents of the files that a rank writes."""

    weights: list[dict[str, Any]]
    states: dict[str, list[Any]]
    own: dict[str, Any]
    shares: sharded_files.Shares
    sharded_models: set[int]
    fingerprints: list[str]

    def copied(self, rank: int) -> _Parts:
        """Return a copy on the host of what this rank writes, so that training can go on."""
        written = (self.weights, self.states) if rank == 0 else ([], {})
        weights, states, own = map_leaves(_copied, (*written, self.own))
        return dataclasses.replace(self, weights=weights, states=states, own=own, shares=self.shares.copied())

    def write(self, draft: pathlib.Path, rank: int, *, safe: bool, group: Any) -> None:
        """Write the files. Sharded tensors are written by all ranks of ``group``, or of the default group."""
        # First: until the shards are written, the other ranks wait for this one, even if another file can't be.
        sharded_files.write(self.shares, draft, group)
        model_files.write_object(self.own, draft / f"rank_{rank}.bin")
        if rank == 0:
            for number, of_model in enumerate(self.weights):
                if number in self.sharded_models:
                    model_files.write_object(of_model, draft / model_files.numbered(SHARDED_MODEL, number))
                else:
                    model_files.write_weights(of_model, draft / model_files.weights_file(number, safe), safe=safe)
            for name, of_one_kind in self.states.items():
                for number, of_object in enumerate(of_one_kind):
                    model_files.write_object(of_object, draft / model_files.numbered(name, number))


def _copied(leaf: Any) -> Any:
    """Return a copy of a value on the host, or raise the error that writing the value would raise."""
    if isinstance(leaf, torch.Tensor):
        return fsdp.on_host(leaf)
    if type(leaf) in _IMMUTABLE:
        return leaf
    if not getattr(getattr(leaf, "dtype", None), "hasobject", True):  # a NumPy array, which pickling copies slowly
        return copy.deepcopy(leaf)
    # Some objects can be pickled and not copied by ``deepcopy``, such as one that holds a tensor with a graph.
    pickled = io.BytesIO()
    torch.save(leaf, pickled, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    pickled.seek(0)
    return torch.load(pickled, map_location="cpu", weights_only=False)


def _collect(backend: Backend, state: CheckpointState, hooks: _Hooks, draft: pathlib.Path) -> _Parts:
    """Collect this rank's part of a checkpoint."""
    own = _own_state(backend, state)
    weights = [backend.to_host(state_of(model)) for model in state.models]
    states = {name: [backend.to_host(item.state_dict()) for item in items] for name, items in state.states.items()}
    if state.writes_whole:
        weights = [fsdp.whole_state(of_model, backend) for of_model in weights]
        states = fsdp.whole_tree(states, backend)
    for hook in hooks:
        hook(state.models[:], weights, str(draft))
    shares = sharded_files.Shares()
    return _Parts(
        [shares.taken_out_of(of_model, f"model_{number}") for number, of_model in enumerate(weights)],
        shares.taken_out_of(states, "states"),
        shares.taken_out_of(own, "own"),
        shares,
        {number for number, of_one in enumerate(weights) if any(map(is_sharded_tensor, of_one.values()))},
        [fingerprint_of(of_model) for of_model in weights],
    )


def _own_state(backend: Backend, state: CheckpointState) -> dict[str, Any]:
    """Return the state that differs between ranks."""
    if not is_possible(state.gradients, state.models):
        raise CheckpointError(
            "A checkpoint can't be saved within an accumulation window of a sharded model.",
            why="The gradients so far are in torch's own buffers.",
            fix="save after the window's last backward pass, which averages them, or "
            "gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=..., sync_each_batch=True)",
        )
    is_unused = state.gradients.is_unused and any(state.states["optimizer"])
    has_gradients = is_unused or not state.gradients.sync_gradients
    return {
        "loaders": [loader.state_dict() for loader in state.loaders],
        "window": state.gradients.state_dict(),
        **{
            name: [backend.to_host(gradients_of(item)) for item in items if has_gradients]
            for name, items in state.trained.items()
        },
        "random": random_state.capture(backend),
    }

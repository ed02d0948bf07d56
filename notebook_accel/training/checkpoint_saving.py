"""Saves a checkpoint on all ranks together, optionally in the background.

A failure on one rank raises on all ranks, and the group can still be used. The folder appears when all ranks have
written their parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from notebook_accel.errors import CheckpointError
from notebook_accel.payload.sharded_tensors import is_sharded_tensor
from notebook_accel.training import checkpoint_folders as folders
from notebook_accel.training import fsdp, model_files, random_state, sharded_files
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.checkpoint import (
    SHARDED_MODEL,
    CheckpointState,
    agreed,
    fingerprint_of,
    gradients_of,
    model_file,
    numbered,
    on_all_ranks,
    state_of,
)
from notebook_accel.training.trees import map_leaves

_BeforeSave = Sequence[Callable[[list[Any], list[Any], str], None]]


class Saving:
    """A checkpoint that is being saved or was saved.

    Attributes:
        folder: The checkpoint's folder.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def run(self, write: Callable[[], None]) -> None:
        """Call ``write`` in a thread, which a rank waits for before it exits."""

        def work() -> None:
            try:
                write()
            except BaseException as error:  # noqa: BLE001  ``wait`` raises it
                self._error = error

        self._thread = threading.Thread(target=work, name="notebook-accel-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Block until the checkpoint is complete.

        Raises:
            CheckpointError: A rank couldn't write its part.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(
                f"The checkpoint {self.folder}, which was saved while training went on, failed: {error}",
                why="The last complete one is as it was.",
            ) from error


def save(
    backend: Backend,
    state: CheckpointState,
    hooks: _BeforeSave,
    choose: Callable[[], pathlib.Path],
    *,
    safe: bool = True,
    in_background: bool = False,
    completed: Callable[[pathlib.Path], None] = lambda _: None,
) -> Saving:
    """Write a checkpoint. Its folder appears when it is complete on all ranks.

    Args:
        backend: The backend of this rank.
        state: The objects to save.
        hooks: Called with the models, their weights and the draft's folder; weights that a hook removes aren't saved.
        choose: A function that returns the folder; only rank 0 calls it.
        safe: Write weights as safetensors rather than in torch's own format.
        in_background: Return once everything is copied to host memory, and write it in a thread.
        completed: Called on rank 0 with the complete folder.

    Raises:
        CheckpointError: A rank couldn't write its part. An earlier checkpoint of that name is kept.
    """
    is_main = backend.place.rank == 0

    def begin() -> pathlib.Path | None:
        if not is_main:
            return None
        folder = choose()
        folders.start_draft(folder)
        return folder

    folder: pathlib.Path = on_all_ranks(backend, "begin a checkpoint", begin)[0]
    counts = {name: len(items) for name, items in state.states.items()}
    job = _Job(folder, backend.place.rank, {"world_size": backend.place.world_size, "counts": counts}, safe, completed)
    found: list[_Parts] = []

    def collect() -> dict[str, float]:
        parts = _collect(backend, state, hooks, folders.draft_of(folder))
        found.append(parts.copied(backend.place.rank) if in_background else parts)
        return _norms_of_copies(state.models)

    with job.abandoned_on_failure():
        norms = on_all_ranks(backend, "write its part of a checkpoint", collect)
    if is_main:
        _warn_of_differences(norms)
    saving = Saving(folder)
    if in_background:
        group = backend.background_group()
        gather = functools.partial(_gather_in, group) if group is not None else list
        saving.run(lambda: job.write(found[0], functools.partial(agreed, gather=gather), group))
    else:
        job.write(found[0], functools.partial(on_all_ranks, backend))
    return saving


def _norms_of_copies(models: Sequence[torch.nn.Module]) -> dict[str, float]:
    """Return by name the norm of each parameter that should be equal on all ranks."""
    copied: list[Any] = [model for model in map(fsdp.uncompiled, models) if isinstance(model, DistributedDataParallel)]
    return {
        f"{type(model.module).__name__}.{name}": _norm(parameter.detach())
        for model in copied
        if model.require_backward_grad_sync  # not in local SGD
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
            "Fix: prepare the optimizer, call what prepare returned, and "
            "change no weight under `if accelerator.is_main_process:`",
            stacklevel=4,
        )


def _gather_in(group: Any, values: list[Any]) -> list[Any]:
    by_rank: list[list[Any]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(by_rank, values, group=group)
    return [value for of_rank in by_rank for value in of_rank]


@dataclasses.dataclass
class _Job:
    """One rank's work of writing a checkpoint."""

    folder: pathlib.Path
    rank: int
    manifest: dict[str, Any]
    safe: bool
    completed: Callable[[pathlib.Path], None]

    def write(self, parts: _Parts, on_all: Callable[[str, Callable[[], Any]], list[Any]], group: Any = None) -> None:
        """Write this rank's part, and on rank 0 complete the checkpoint. ``on_all`` runs an action on all ranks."""

        def complete() -> None:
            if self.rank == 0:
                folders.publish(self.folder, {**self.manifest, "models": fingerprints})
                self.completed(self.folder)

        draft = folders.draft_of(self.folder)
        with self.abandoned_on_failure():
            fingerprints: list[str] = on_all(
                "write its part of a checkpoint", lambda: parts.write(draft, self.rank, safe=self.safe, group=group)
            )[0]
            on_all("complete a checkpoint", complete)

    @contextlib.contextmanager
    def abandoned_on_failure(self) -> Iterator[None]:
        """Delete the draft if the body raises."""
        try:
            yield
        except BaseException:
            if self.rank == 0:
                folders.abandon(self.folder)
            raise


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
        weights, states, own = map_leaves(fsdp.on_host, (self.weights, self.states, self.own))
        if rank != 0:
            weights, states = [], {}
        return dataclasses.replace(self, weights=weights, states=states, own=own, shares=self.shares.copied())

    def write(self, draft: pathlib.Path, rank: int, *, safe: bool, group: Any = None) -> list[str]:
        """Write the files, and return a fingerprint of each model. ``group`` is used to write sharded tensors."""
        model_files.write_object(self.own, draft / f"rank_{rank}.bin")
        if rank == 0:
            for number, of_model in enumerate(self.weights):
                if number in self.sharded_models:
                    model_files.write_object(of_model, draft / numbered(SHARDED_MODEL, number))
                else:
                    model_files.write_weights(of_model, draft / model_file(number, safe), safe=safe)
            for name, of_one_kind in self.states.items():
                for number, of_object in enumerate(of_one_kind):
                    model_files.write_object(of_object, draft / numbered(name, number))
        sharded_files.write(self.shares, draft, group)
        return self.fingerprints


def _collect(backend: Backend, state: CheckpointState, hooks: _BeforeSave, draft: pathlib.Path) -> _Parts:
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
    models = [] if state.gradients.sync_gradients else state.models
    if not state.gradients.averages_each_batch and any(map(fsdp.was_fully_sharded, models)):
        raise CheckpointError(
            "A checkpoint can't be saved within an accumulation window of a sharded model.",
            why="The gradients so far are in torch's own buffers.",
            fix="save where accelerator.sync_gradients is true, or "
            "gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=..., sync_each_batch=True)",
        )
    return {
        "loaders": [loader.state_dict() for loader in state.loaders],
        "window": state.gradients.state_dict(),
        "gradients": [backend.to_host(gradients_of(model)) for model in models],
        "random": random_state.capture(backend),
    }

"""Saving and loading all that training depends on, by all ranks together.

A checkpoint is a folder: the weights of each model in safetensors, the state of each optimizer, scheduler and
registered object, and one file a rank for what differs between them: random numbers, the place in each loader,
gradients of a window that has begun. What goes wrong on one rank is an error on all; the group can still be used.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from notebook_accel.errors import CheckpointError, NotebookAccelError
from notebook_accel.training import checkpoint_folders as folders
from notebook_accel.training import collectives, model_files, random_state
from notebook_accel.training.accumulation import GradientState
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.collectives import verify_collective
from notebook_accel.training.models import unwrap_model

__all__ = ["CUSTOM", "Contents", "Hooks", "load", "save", "state_of"]

# What users register, by the name that Accelerate's files have.
CUSTOM = "custom_checkpoint"

_SHOWN_TENSORS = 5


@dataclasses.dataclass
class Contents:
    """What a checkpoint is of.

    Attributes:
        models: Prepared models.
        states: What has a state that is equal on all ranks, by kind, with the name of its files.
        loaders: Prepared loaders, which know where they stand.
        gradients: The accumulation window.
    """

    models: list[torch.nn.Module]
    states: dict[str, list[Any]]
    loaders: list[Any]
    gradients: GradientState


@dataclasses.dataclass
class Hooks:
    """What users have registered.

    Attributes:
        before_save: Called with models, their weights and the folder that is being written. What they take out of the
            list of weights isn't saved.
        before_load: Called with models and the folder. What they take out of the list of models isn't loaded.
    """

    before_save: list[Callable[[list[Any], list[Any], str], None]]
    before_load: list[Callable[[list[Any], str], None]]


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """The state dict of the model that was prepared."""
    state: dict[str, Any] = unwrap_model(model, keep_torch_compile=False).state_dict()
    return state


def save(
    backend: Backend, contents: Contents, hooks: Hooks, choose: Callable[[], pathlib.Path], *, safe: bool = True
) -> pathlib.Path:
    """Writes a checkpoint and returns its folder. The folder appears when it is complete, and then on all ranks.

    Args:
        backend: The way to the other ranks.
        contents: What to save.
        hooks: What to call before.
        choose: Gives the folder; only rank 0's is used.
        safe: Weights in safetensors rather than in torch's own format.

    Raises:
        CheckpointError: A rank couldn't write its part. What was there before is still there.
    """
    is_main = backend.place.rank == 0

    def begin() -> pathlib.Path | None:
        if not is_main:
            return None
        folder = choose()
        folders.start_draft(folder)
        return folder

    folder: pathlib.Path = _together(backend, "begin a checkpoint", begin)[0]
    draft = folders.draft_of(folder)
    try:
        fingerprints = _together(
            backend, "write its part of a checkpoint", lambda: _write(backend, contents, hooks, draft, safe)
        )
        publish = functools.partial(_publish, backend, contents, folder, fingerprints[0])
        _together(backend, "complete a checkpoint", publish if is_main else lambda: None)
    except BaseException:
        if is_main:
            folders.abandon(folder)
        raise
    return folder


def _write(backend: Backend, contents: Contents, hooks: Hooks, draft: pathlib.Path, safe: bool) -> list[str]:
    """Writes a rank's part, and returns a fingerprint of each model that is saved."""
    weights = [backend.to_host(state_of(model)) for model in contents.models]
    for hook in hooks.before_save:
        hook(contents.models[:], weights, str(draft))
    rank = backend.place.rank
    states = {name: [backend.to_host(item.state_dict()) for item in items] for name, items in contents.states.items()}
    model_files.write_object(_own_state(backend, contents), draft / f"rank_{rank}.bin")
    if rank == 0:
        for number, state in enumerate(weights):
            model_files.write_weights(state, draft / _model_file(number, safe), safe=safe)
        for name, of_one_kind in states.items():
            for number, state in enumerate(of_one_kind):
                model_files.write_object(state, draft / _numbered(name, number))
    return [_fingerprint(state) for state in weights]


def _publish(backend: Backend, contents: Contents, folder: pathlib.Path, fingerprints: list[str]) -> None:
    manifest = {
        "world_size": backend.place.world_size,
        "models": fingerprints,
        "counts": {name: len(items) for name, items in contents.states.items()},
    }
    folders.publish(folder, manifest)


def _own_state(backend: Backend, contents: Contents) -> dict[str, Any]:
    models = [] if contents.gradients.sync_gradients else contents.models
    return {
        "loaders": [loader.state_dict() for loader in contents.loaders],
        "window": contents.gradients.state_dict(),
        "gradients": [backend.to_host(_gradients_of(model)) for model in models],
        "random": random_state.capture(backend),
    }


def _gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = unwrap_model(model, keep_torch_compile=False).named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def load(
    backend: Backend,
    contents: Contents,
    hooks: Hooks,
    choose: Callable[[], pathlib.Path],
    *,
    strict: bool = True,
    weights_only: bool = True,
) -> pathlib.Path:
    """Puts training back to where a checkpoint was saved, and returns its folder.

    Everything is read and checked on every rank before anything changes.

    Args:
        backend: The way to the other ranks.
        contents: What to load into.
        hooks: What to call before.
        choose: Gives the folder; only rank 0's is used.
        strict: The models have to have exactly the tensors that were saved.
        weights_only: Read nothing that can run code. Registered objects may need ``False``.

    Raises:
        CheckpointError: There is no such checkpoint, it isn't whole, or it is of something else.
    """

    def begin() -> pathlib.Path | None:
        if backend.place.rank != 0:
            return None
        folder = choose()
        folders.settle(folder)
        return folder

    folder: pathlib.Path = _together(backend, "find a checkpoint", begin)[0]
    own: list[_Read] = []
    read = functools.partial(_read, backend, contents, hooks, folder, strict=strict, weights_only=weights_only)
    _together(backend, "read a checkpoint", lambda: own.append(read()))
    _together(backend, "load a checkpoint", lambda: _apply(backend, contents, own[0], strict=strict))
    return folder


@dataclasses.dataclass
class _Read:
    """A rank's part of a checkpoint in memory."""

    models: list[tuple[torch.nn.Module, dict[str, torch.Tensor]]]
    states: list[tuple[Any, Any]]
    own: dict[str, Any]


def _read(
    backend: Backend, contents: Contents, hooks: Hooks, folder: pathlib.Path, *, strict: bool, weights_only: bool
) -> _Read:
    manifest = folders.read_manifest(folder)
    _check_world_size(manifest, backend, folder)
    if not (contents.models or contents.loaders or any(contents.states.values())):
        raise CheckpointError(
            f"There is nothing to load the checkpoint {folder} into: nothing has been prepared.",
            fix="accelerator.prepare(model, optimizer, ...) first, then load_state",
        )
    models = contents.models[:]
    for hook in hooks.before_load:
        hook(models, str(folder))
    _check_counts(manifest, models, contents, folder)
    weights = []
    for number, (model, fingerprint) in enumerate(zip(models, manifest["models"], strict=False)):
        safe = _model_file(number, safe=True) in manifest["files"]
        state = model_files.read_weights(folder / _model_file(number, safe), safe=safe)
        own = state_of(model)
        if strict and _fingerprint(own) != fingerprint:
            raise _of_another_model(own, state, folder)
        weights.append((model, state))
    states = [
        (item, _read_object(folder / _numbered(name, number), weights_only=weights_only))
        for name, items in contents.states.items()
        for number, item in enumerate(items)
    ]
    return _Read(weights, states, _read_object(folder / f"rank_{backend.place.rank}.bin"))


def _apply(backend: Backend, contents: Contents, read: _Read, *, strict: bool) -> None:
    for model, state in read.models:
        unwrap_model(model, keep_torch_compile=False).load_state_dict(state, strict=strict)
    for item, state in read.states:
        item.load_state_dict(state)
    for loader, state in zip(contents.loaders, read.own["loaders"], strict=False):  # evaluation's may come later
        loader.load_state_dict(state)
    contents.gradients.load_state_dict(read.own["window"])
    for model, gradients in zip(contents.models, read.own["gradients"], strict=False):
        for name, parameter in unwrap_model(model, keep_torch_compile=False).named_parameters():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
    random_state.restore(read.own["random"], backend)


def _together(backend: Backend, what: str, action: Callable[[], Any]) -> list[Any]:
    """Runs a part of the work on every rank, and returns what it gave, by rank.

    Raises:
        CheckpointError: It failed on a rank. The others get the first such rank's message.
    """
    value, error = None, None
    verify_collective(backend, what)  # no rank saves what another one loads
    try:
        value = action()
    except Exception as raised:  # noqa: BLE001  the other ranks wait to hear of it, whatever it is
        error = raised
    text = None if error is None else str(error) if isinstance(error, NotebookAccelError) else _in_words(error)
    ends = collectives.gather_object(backend, [(value if error is None else None, text)])
    if isinstance(error, NotebookAccelError):
        raise error
    for rank, (_, reported) in enumerate(ends):
        if reported is not None:
            raise CheckpointError(f"Rank {rank} could not {what}: {reported}") from error
    return [value for value, _ in ends]


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _check_world_size(manifest: Mapping[str, Any], backend: Backend, folder: pathlib.Path) -> None:
    saved, now = manifest["world_size"], backend.place.world_size
    if saved != now:
        raise CheckpointError(
            f"The checkpoint {folder} was saved by {saved} ranks, and now there are {now}.",
            why="Where each rank stands in its data and its random numbers can't be dealt out anew.",
            fix=f"num_processes={saved}; or take the weights alone: "
            f'safetensors.torch.load_model(model, "{folder / "model.safetensors"}")',
        )


def _check_counts(manifest: Mapping[str, Any], models: Iterable[Any], contents: Contents, folder: pathlib.Path) -> None:
    saved = {"model": len(manifest["models"]), **manifest["counts"]}
    prepared = {"model": len(list(models)), **{name: len(items) for name, items in contents.states.items()}}
    for name, count in prepared.items():
        # Fewer is fine, such as a model alone to evaluate it.
        is_wrong = count != saved.get(name) if name == CUSTOM else count > saved.get(name, 0)
        if is_wrong:
            raise CheckpointError(
                f"The checkpoint {folder} has {saved.get(name, 0)} of the kind {name!r}, and here there are {count}.",
                fix="prepare and register the same objects in the same order as when it was saved",
            )


def _of_another_model(own: Mapping[str, Any], saved: Mapping[str, Any], folder: pathlib.Path) -> CheckpointError:
    differing = [
        f"  {name}: {_shape(saved, name)} in the checkpoint, {_shape(own, name)} in the model"
        for name in sorted({*own, *saved})
        if _shape(own, name) != _shape(saved, name)
    ]
    more = [f"  and {len(differing) - _SHOWN_TENSORS} more"] if len(differing) > _SHOWN_TENSORS else []
    return CheckpointError(
        "\n".join([f"The checkpoint {folder} is of another model:", *differing[:_SHOWN_TENSORS], *more]),
        fix="make the model as it was when it was saved; load_state(..., strict=False) loads what has the same name",
    )


def _shape(state: Mapping[str, Any], name: str) -> str:
    value = state.get(name)
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "missing" if value is None else "an object"


def _read_object(path: pathlib.Path, *, weights_only: bool = True) -> Any:
    try:
        with torch.serialization.safe_globals(_numpys_own()):
            return torch.load(path, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values: {error}",
            why="Reading it could run code, so that needs your word.",
            fix="load_state(..., load_kwargs={'weights_only': False}), for a checkpoint that you trust",
        ) from error
    except (OSError, EOFError, RuntimeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", fix="use another checkpoint") from error


def _numpys_own() -> list[Any]:
    """What a pickled NumPy scalar or array refers to, by the names of NumPy 1 and 2: a learning rate may be one.

    To make one runs no code of anyone else's.
    """
    try:
        import numpy
    except ImportError:
        return []
    kinds = {type(numpy.dtype(code)) for code in numpy.typecodes["All"] if code != "O"}
    makers = {"scalar": numpy.float64(0).__reduce__()[0], "_reconstruct": numpy.zeros(0).__reduce__()[0]}
    modules = ("numpy.core.multiarray", "numpy._core.multiarray")
    named = [(maker, f"{module}.{name}") for module in modules for name, maker in makers.items()]
    return [numpy.ndarray, numpy.dtype, *kinds, *named]


def _fingerprint(state: Mapping[str, Any]) -> str:
    """What two models have in common if one's weights fit the other."""
    lines = "\n".join(f"{name} {_shape(state, name)}" for name in sorted(state))
    return hashlib.sha256(lines.encode()).hexdigest()


def _model_file(number: int, safe: bool) -> str:
    return _numbered("model" if safe else "pytorch_model", number, "safetensors" if safe else "bin")


def _numbered(name: str, number: int, suffix: str = "bin") -> str:
    """``optimizer.bin``, ``optimizer_1.bin`` and so on, as Accelerate numbers them."""
    return f"{name}.{suffix}" if number == 0 else f"{name}_{number}.{suffix}"

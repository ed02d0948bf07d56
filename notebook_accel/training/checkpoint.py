"""Checkpoints: their contents, and how all ranks load one. ``checkpoint_saving`` saves them.

A checkpoint is a folder with the weights of each model in safetensors, the state of each optimizer, scheduler and
registered object, and for each rank a file with its random states, the position of each loader, and the gradients of an
unfinished window. Any number of ranks can load it. A failure on one rank raises on all ranks, and the group can still
be used.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from notebook_accel.errors import CheckpointError, NotebookAccelError
from notebook_accel.training import (
    accelerate_checkpoint,
    collectives,
    fsdp,
    model_files,
    random_state,
    sharded_files,
)
from notebook_accel.training import checkpoint_folders as folders
from notebook_accel.training.accumulation import GradientState
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.collectives import verify_collective
from notebook_accel.training.models import unwrap_model
from notebook_accel.training.optimizers import parameters_of

CUSTOM = "custom_checkpoint"  # the kind of objects that users register, named as in Accelerate's files
SHARDED_MODEL = "sharded_model"

_SHOWN_TENSORS = 5

_BeforeLoad = Sequence[Callable[[list[Any], str], None]]


@dataclasses.dataclass
class CheckpointState:
    """The prepared and registered objects whose state goes into a checkpoint."""

    models: list[torch.nn.Module]
    states: dict[str, list[Any]]  # objects whose state is equal on all ranks, by kind; the kind names their files
    loaders: list[Any]
    gradients: GradientState
    writes_whole: bool = False  # gather sharded models on rank 0


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict of a model as it was before ``prepare``, which may be sharded."""
    if fsdp.is_sharded(model):
        return fsdp.state_of(model)
    state: dict[str, Any] = unwrap_model(model, keep_torch_compile=False).state_dict()
    return state


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's gradients by the names of their parameters."""
    named = unwrap_model(model, keep_torch_compile=False).named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def load(
    backend: Backend,
    state: CheckpointState,
    hooks: _BeforeLoad,
    choose: Callable[[], pathlib.Path],
    *,
    strict: bool = True,
    weights_only: bool = True,
) -> pathlib.Path:
    """Restore training from a checkpoint, and return its folder.

    Every rank reads and checks everything before any rank changes anything. The exception is the weights of sharded
    models, which are read in place, since a rank may lack the memory for two copies.

    Args:
        backend: The backend of this rank.
        state: The objects to load into.
        hooks: Called with the models and the folder. Models that a hook removes from the list aren't loaded.
        choose: A function that returns the folder; only rank 0 calls it.
        strict: Require that the models have exactly the tensors that were saved.
        weights_only: Read nothing that can run code. Registered objects may need ``False``.

    Raises:
        CheckpointError: There is no such checkpoint, it isn't whole, or it was saved from other objects.
    """

    def begin() -> pathlib.Path | None:
        if backend.place.rank != 0:
            return None
        folder = choose()
        folders.recover(folder)
        return folder

    folder: pathlib.Path = on_all_ranks(backend, "find a checkpoint", begin)[0]
    parts: list[_RankPart] = []  # not the action's value, which would be sent to the other ranks
    read = functools.partial(_read, backend, state, hooks, folder, strict=strict, weights_only=weights_only)
    on_all_ranks(backend, "read a checkpoint", lambda: parts.append(read()))
    on_all_ranks(backend, "load a checkpoint", lambda: _apply(backend, state, parts[0], strict=strict))
    _tell_new_ranks(parts[0].saved_ranks, backend, folder)
    return folder


@dataclasses.dataclass
class _RankPart:
    """A rank's part of a checkpoint in memory: pairs of an object and its saved state, and the rank's own state."""

    models: list[tuple[torch.nn.Module, dict[str, torch.Tensor]]]
    states: list[tuple[Any, Any]]
    own: dict[str, Any]
    saved_ranks: int
    read_in_place: Callable[[], None] = lambda: None


def _read(
    backend: Backend,
    state: CheckpointState,
    hooks: _BeforeLoad,
    folder: pathlib.Path,
    *,
    strict: bool,
    weights_only: bool,
) -> _RankPart:
    is_of_accelerate = folders.is_of_accelerate(folder)
    manifest = {} if is_of_accelerate else folders.read_manifest(folder)
    if not (state.models or state.loaders or any(state.states.values())):
        raise CheckpointError(
            f"The checkpoint {folder} can't be loaded: nothing has been prepared.",
            fix="accelerator.prepare(model, optimizer, ...) first, then load_state",
        )
    models = state.models[:]
    for hook in hooks:
        hook(models, str(folder))
    if is_of_accelerate:
        return _read_accelerates(backend, state, models, folder, strict=strict, weights_only=weights_only)
    _check_counts(manifest, models, state, folder)
    files = sharded_files.ShardedFiles(folder)
    to_read: dict[str, torch.Tensor] = {}
    in_place: dict[str, torch.Tensor] = {}
    weights = []
    for number, (model, fingerprint) in enumerate(zip(models, manifest["models"], strict=False)):
        own = state_of(model)
        saved = _read_weights(folder, number, manifest["files"])
        saved = files.fitted(saved, _by_name(own), in_place, in_place=True)
        if strict and fingerprint_of(own) != fingerprint:
            raise _other_model_error(own, saved, folder)
        weights.append((model, saved))
    states = []
    for name, items in state.states.items():
        for number, item in enumerate(items):
            saved = _read_object(folder / numbered(name, number), weights_only=weights_only)
            states.append((item, files.fitted(saved, _counterpart_in(item), to_read)))
    saved_ranks = manifest["world_size"]
    own_state = _read_own_state(folder, saved_ranks, backend, has_shards=any(map(fsdp.is_sharded, models)))
    parameters = [dict(unwrap_model(model, keep_torch_compile=False).named_parameters()) for model in models]
    own_state["gradients"] = [
        files.fitted(of_model, _by_name(named), to_read)
        for of_model, named in zip(own_state["gradients"], parameters, strict=False)
    ]
    files.read(to_read)
    return _RankPart(weights, states, own_state, saved_ranks, lambda: files.read(in_place))


def _read_weights(folder: pathlib.Path, number: int, files: Mapping[str, int]) -> dict[str, Any]:
    """Return a saved model's weights, with references to those that are sharded."""
    if numbered(SHARDED_MODEL, number) in files:
        weights: dict[str, Any] = _read_object(folder / numbered(SHARDED_MODEL, number))
        return weights
    safe = model_file(number, safe=True) in files
    return model_files.read_weights(folder / model_file(number, safe), safe=safe)


def _by_name(tensors: Mapping[str, Any]) -> Callable[[tuple[Any, ...]], Any]:
    return lambda path: tensors.get(path[0])


def _counterpart_in(item: Any) -> Callable[[tuple[Any, ...]], Any]:
    """Return a function that maps the keys of a tensor in an object's state to a tensor with the wanted sharding.

    For an optimizer that tensor is the parameter, since before the first step there is no state yet.
    """
    if isinstance(item, torch.optim.Optimizer):
        parameters = dict(enumerate(parameters_of([item])))
        return lambda path: parameters.get(path[1]) if path[0] == "state" and len(path) > 1 else None
    state = item.state_dict()

    def at(path: tuple[Any, ...]) -> Any:
        found = state
        for key in path:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                return None
        return found

    return at


def _read_accelerates(
    backend: Backend,
    state: CheckpointState,
    models: list[torch.nn.Module],
    folder: pathlib.Path,
    *,
    strict: bool,
    weights_only: bool,
) -> _RankPart:
    """Return this rank's part of a checkpoint that Accelerate has saved."""
    saved = accelerate_checkpoint.AccelerateCheckpoint(folder, _read_object)
    _check_counts(saved.manifest(state.states), models, state, folder)
    files = sharded_files.ShardedFiles(folder)  # without sharded files: whole tensors are read, then sharded
    weights = []
    for number, model in enumerate(models):
        own = state_of(model)
        of_model = saved.weights(number, own)
        if strict and fingerprint_of(own) != fingerprint_of(of_model):
            raise _other_model_error(own, of_model, folder)
        weights.append((model, files.fitted(of_model, _by_name(own), {})))
    states = [
        (item, files.fitted(saved.state(name, number, weights_only=weights_only), _counterpart_in(item), {}))
        for name, items in state.states.items()
        for number, item in enumerate(items)
    ]
    own_state = saved.own_state(backend, state.loaders, state.gradients.num_steps)
    return _RankPart(weights, states, own_state, saved.ranks)


def _read_own_state(folder: pathlib.Path, saved_ranks: int, backend: Backend, *, has_shards: bool) -> dict[str, Any]:
    """Return this rank's part of the state that differs between ranks, even if the number of ranks has changed.

    An additional rank gets the data position of rank 0, and the entry ``"afresh"`` instead of ``"random"``.
    """
    rank, ranks = backend.place.rank, backend.place.world_size
    own: dict[str, Any] = _read_object(folder / f"rank_{rank if rank < saved_ranks else 0}.bin")
    if rank >= saved_ranks:
        own["afresh"] = own.pop("random")
    values = [gradient for gradients in own["gradients"] for gradient in gradients.values()]
    if (ranks != saved_ranks or has_shards) and all(isinstance(value, torch.Tensor) for value in values):
        # Training continues from the mean over the saved ranks, however many ranks there are now.
        parts = (_read_object(folder / f"rank_{other}.bin")["gradients"] for other in range(saved_ranks))
        own["gradients"] = functools.reduce(_added, parts)
        for gradients in own["gradients"]:
            for gradient in gradients.values():
                gradient.div_(saved_ranks)
    return own


def _added(sums: list[dict[str, torch.Tensor]], gradients: list[dict[str, torch.Tensor]]) -> list[Any]:
    """Add another rank's gradients to each model's sums, by name. A rank has none for unused parameters."""
    for total, further in zip(sums, gradients, strict=True):
        for name, gradient in further.items():
            total[name] = total[name] + gradient if name in total else gradient
    return sums


def _apply(backend: Backend, state: CheckpointState, read: _RankPart, *, strict: bool) -> None:
    read.read_in_place()
    for model, saved in read.models:
        unwrap_model(model, keep_torch_compile=False).load_state_dict(saved, strict=strict)
    for item, saved in read.states:
        item.load_state_dict(saved)
    for loader, position in zip(state.loaders, read.own["loaders"], strict=False):  # some may be prepared later
        loader.load_state_dict(position)
    state.gradients.load_state_dict(read.own["window"])
    for model, gradients in zip(state.models, read.own["gradients"], strict=False):
        for name, parameter in unwrap_model(model, keep_torch_compile=False).named_parameters():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
    if "afresh" in read.own:
        random_state.draw_afresh(read.own["afresh"], backend.place.rank, backend)
    else:
        random_state.restore(read.own["random"], backend)


def on_all_ranks(backend: Backend, what: str, action: Callable[[], Any]) -> list[Any]:
    """Run an action on every rank, and return the values by rank.

    Raises:
        CheckpointError: The action failed on a rank. The other ranks get the first failure's message.
    """
    verify_collective(backend, what)  # no rank saves while another one loads
    return agreed(what, action, functools.partial(collectives.gather_object, backend))


def agreed(what: str, action: Callable[[], Any], gather: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Run an action on every rank, and return the values by rank, which ``gather`` collects.

    Raises:
        CheckpointError: The action failed on a rank. The other ranks get the first failure's message.
    """
    value, error, text = None, None, None
    try:
        value = action()
    except Exception as raised:  # noqa: BLE001  the other ranks wait for the outcome, whatever it is
        error = raised
        text = str(error) if isinstance(error, NotebookAccelError) else f"{type(error).__name__}: {error}"
    outcomes = gather([(value, text)])
    if isinstance(error, NotebookAccelError):
        raise error
    for rank, (_, reported) in enumerate(outcomes):
        if reported is not None:
            raise CheckpointError(f"Rank {rank} could not {what}: {reported}") from error
    return [value for value, _ in outcomes]


def _tell_new_ranks(saved: int, backend: Backend, folder: pathlib.Path) -> None:
    now = backend.place.world_size
    if now > saved and backend.place.rank == 0:
        ranks = f"rank {saved} draws its" if now == saved + 1 else f"ranks {saved} to {now - 1} draw their"
        warnings.warn(
            f"The checkpoint {folder} was saved by {saved} of this run's {now} ranks: {ranks} random numbers afresh.",
            stacklevel=3,
        )


def _check_counts(
    manifest: Mapping[str, Any], models: Iterable[Any], state: CheckpointState, folder: pathlib.Path
) -> None:
    saved = {"model": len(manifest["models"]), **manifest["counts"]}
    prepared = {"model": len(list(models)), **{name: len(items) for name, items in state.states.items()}}
    for name, count in prepared.items():
        # A run may prepare fewer objects, such as only the model, to evaluate it.
        is_wrong = count != saved.get(name) if name == CUSTOM else count > saved.get(name, 0)
        if is_wrong:
            raise CheckpointError(
                f"The checkpoint {folder} has {saved.get(name, 0)} objects of kind {name!r}, this run has {count}.",
                fix="prepare and register the same objects in the same order as when it was saved",
            )


def _other_model_error(own: Mapping[str, Any], saved: Mapping[str, Any], folder: pathlib.Path) -> CheckpointError:
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
        with torch.serialization.safe_globals(_numpy_globals()):
            return torch.load(path, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain values: {error}",
            why="Reading it could run code.",
            fix="load_state(..., load_kwargs={'weights_only': False}), if you trust the checkpoint",
        ) from error
    except (OSError, EOFError, RuntimeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", fix="use another checkpoint") from error


def _numpy_globals() -> list[Any]:
    """Return the names that a pickled NumPy scalar or array refers to, in NumPy 1 and 2.

    A learning rate may be such a scalar. Unpickling one runs no foreign code.
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


def fingerprint_of(state: Mapping[str, Any]) -> str:
    """Return a hash of names and shapes. It is equal for two models if the weights of one fit the other."""
    lines = "\n".join(f"{name} {_shape(state, name)}" for name in sorted(state))
    return hashlib.sha256(lines.encode()).hexdigest()


def model_file(number: int, safe: bool) -> str:
    """Return the name of the file of a whole model's weights."""
    return numbered("model" if safe else "pytorch_model", number, "safetensors" if safe else "bin")


def numbered(name: str, number: int, suffix: str = "bin") -> str:
    """Return ``optimizer.bin``, ``optimizer_1.bin`` and so on, as Accelerate numbers them."""
    return f"{name}.{suffix}" if number == 0 else f"{name}_{number}.{suffix}"

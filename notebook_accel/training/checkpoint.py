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

_Hooks = Sequence[Callable[[list[Any], str], None]]


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
    state: dict[str, Any] = _inner(model).state_dict()
    return state


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    return unwrap_model(model, keep_torch_compile=False)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's gradients by the names of their parameters."""
    named = _inner(model).named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def load(
    backend: Backend,
    state: CheckpointState,
    hooks: _Hooks,
    choose: Callable[[], pathlib.Path],
    *,
    strict: bool = True,
    weights_only: bool = True,
) -> tuple[pathlib.Path, dict[str, int]]:
    """Restore training from a checkpoint.

    Every rank reads and checks everything before any rank changes anything. The exception is the weights of sharded
    models, which are read in place, since a rank may lack the memory for two copies. Only rank 0 calls ``choose``,
    which returns the folder. Models that a hook removes from its list aren't loaded. Registered objects may need
    ``weights_only=False``, which can run code.

    Returns:
        The folder, and the number of saved objects of each kind that this run hasn't prepared.

    Raises:
        CheckpointError: There is no such checkpoint, it isn't whole, or it was saved from other objects.
    """
    folder: pathlib.Path = on_rank_0(backend, "find a checkpoint", lambda: folders.recover(choose()))
    parts: list[_RankPart] = []  # not the action's value, which would be sent to the other ranks
    read = functools.partial(_read, backend, state, hooks, folder, strict=strict, weights_only=weights_only)
    on_all_ranks(backend, "read a checkpoint", lambda: parts.append(read()))
    on_all_ranks(backend, "load a checkpoint", lambda: _apply(backend, state, parts[0], strict=strict))
    _tell_new_ranks(parts[0].saved_ranks, backend, folder)
    return folder, parts[0].left


@dataclasses.dataclass
class _RankPart:
    """A rank's part of a checkpoint in memory: pairs of an object and its saved state, and the rank's own state."""

    models: list[tuple[torch.nn.Module, dict[str, torch.Tensor]]]
    states: list[tuple[Any, Any]]
    own: dict[str, Any]
    left: dict[str, int]  # the number of saved objects of each kind that aren't prepared
    saved_ranks: int
    read_in_place: Callable[[], None]


def _read(
    backend: Backend,
    state: CheckpointState,
    hooks: _Hooks,
    folder: pathlib.Path,
    *,
    strict: bool,
    weights_only: bool,
) -> _RankPart:
    saved: _Checkpoint | accelerate_checkpoint.AccelerateCheckpoint = (
        accelerate_checkpoint.AccelerateCheckpoint(folder) if folders.is_of_accelerate(folder) else _Checkpoint(folder)
    )
    if not (state.models or state.loaders or any(state.states.values())):
        raise CheckpointError(
            f"The checkpoint {folder} can't be loaded: nothing has been prepared.",
            fix="accelerator.prepare(model, optimizer, ...) first, then load_state",
        )
    models = state.models[:]
    for hook in hooks:
        hook(models, str(folder))
    counts = saved.counts(state.states)
    _check_counts(counts, models, state, folder)
    files = sharded_files.ShardedFiles(folder)
    to_read: dict[str, torch.Tensor] = {}
    in_place: dict[str, torch.Tensor] = {}
    weights = []
    for number, model in enumerate(models):
        own = state_of(model)
        of_model = files.fitted(saved.weights(number, own), _by_name(own), in_place, in_place=True)
        if strict and fingerprint_of(own) != fingerprint_of(of_model):
            raise _other_model_error(own, of_model, folder)
        weights.append((model, of_model))
    states = []
    for kind, items in state.states.items():
        for number, item in enumerate(items):
            of_item = saved.state(kind, number, weights_only=weights_only)
            states.append((item, files.fitted(of_item, _counterpart_in(item), to_read)))
    own_state = saved.own_state(backend, state)
    own_state["gradients"] = [
        files.fitted(gradients, _by_name(dict(_inner(model).named_parameters())), to_read)
        for model, gradients in zip(state.models, own_state["gradients"], strict=False)
    ]
    files.read(to_read)
    prepared = {"model": state.models, **state.states}
    left = {kind: counts.get(kind, 0) - len(items) for kind, items in prepared.items()}
    positions = own_state["loaders"][len(state.loaders) :]
    left["loader"] = sum(position["batches"] not in (0, position["length"]) for position in positions)
    return _RankPart(weights, states, own_state, left, saved.ranks, lambda: files.read(in_place))


class _Checkpoint:
    """A checkpoint that ``checkpoint_saving`` has written. ``AccelerateCheckpoint`` has the same attributes.

    Raises:
        CheckpointError: There is no such checkpoint, or it isn't whole.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._manifest = folders.read_manifest(folder)
        self.ranks: int = self._manifest["world_size"]

    def counts(self, _: Iterable[str]) -> dict[str, int]:
        """Return the number of saved objects of each kind."""
        return {"model": len(self._manifest["models"]), **self._manifest["counts"]}

    def weights(self, number: int, _: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved model's weights, with references to those that are sharded."""
        files = self._manifest["files"]
        sharded = model_files.numbered(SHARDED_MODEL, number)
        if sharded in files:
            weights: dict[str, Any] = model_files.read_object(self._folder / sharded)
            return weights
        safe = model_files.weights_file(number, safe=True) in files
        return model_files.read_weights(self._folder / model_files.weights_file(number, safe))

    def state(self, kind: str, number: int, *, weights_only: bool) -> Any:
        """Return the state of an object, with references to tensors that are sharded."""
        return model_files.read_object(self._folder / model_files.numbered(kind, number), weights_only=weights_only)

    def own_state(self, backend: Backend, state: CheckpointState) -> dict[str, Any]:
        """Return this rank's part of the state that differs between ranks, even if the number of ranks has changed.

        An additional rank gets the data position of rank 0, and the entry ``"afresh"`` instead of ``"random"``.
        """
        rank = backend.place.rank
        own = self._own_state_of(rank if rank < self.ranks else 0)
        if rank >= self.ranks:
            own["afresh"] = own.pop("random")
        values = [gradient for gradients in own["gradients"] for gradient in gradients.values()]
        is_spread = backend.place.world_size != self.ranks or any(map(fsdp.is_sharded, state.models))
        if is_spread and all(isinstance(value, torch.Tensor) for value in values):
            # Training continues from the mean over the saved ranks, however many ranks there are now.
            parts = (self._own_state_of(other)["gradients"] for other in range(self.ranks))
            own["gradients"] = functools.reduce(_added, parts)
            for gradients in own["gradients"]:
                for gradient in gradients.values():
                    gradient.div_(self.ranks)
        return own

    def _own_state_of(self, rank: int) -> dict[str, Any]:
        own: dict[str, Any] = model_files.read_object(self._folder / f"rank_{rank}.bin")
        return own


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


def _added(sums: list[dict[str, torch.Tensor]], gradients: list[dict[str, torch.Tensor]]) -> list[Any]:
    """Add another rank's gradients to each model's sums, by name. A rank has none for unused parameters."""
    for total, further in zip(sums, gradients, strict=True):
        for name, gradient in further.items():
            total[name] = total[name] + gradient if name in total else gradient
    return sums


def _apply(backend: Backend, state: CheckpointState, read: _RankPart, *, strict: bool) -> None:
    read.read_in_place()
    for model, saved in read.models:
        _inner(model).load_state_dict(saved, strict=strict)
    for item, saved in read.states:
        item.load_state_dict(saved)
    for loader, position in zip(state.loaders, read.own["loaders"], strict=False):  # some may be prepared later
        loader.load_state_dict(position)
    state.gradients.load_state_dict(read.own["window"])
    for model, gradients in zip(state.models, read.own["gradients"], strict=False):
        for name, parameter in _inner(model).named_parameters():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
    if "afresh" in read.own:
        random_state.draw_afresh(read.own["afresh"], backend.place.rank, backend)
    else:
        random_state.restore(read.own["random"], backend)


def on_rank_0(backend: Backend, what: str, action: Callable[[], Any]) -> Any:
    """Run an action on rank 0, and return its value on all ranks, which call this together."""
    return on_all_ranks(backend, what, lambda: action() if backend.place.rank == 0 else None)[0]


def on_all_ranks(backend: Backend, what: str, action: Callable[[], Any]) -> list[Any]:
    """Run an action on every rank through the default group; see ``agreed``."""
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
    saved: Mapping[str, int], models: Sequence[Any], state: CheckpointState, folder: pathlib.Path
) -> None:
    prepared = {"model": len(models), **{kind: len(items) for kind, items in state.states.items()}}
    for kind, count in prepared.items():
        # A run may prepare fewer objects, such as only the model, to evaluate it.
        is_wrong = count != saved.get(kind) if kind == CUSTOM else count > saved.get(kind, 0)
        if is_wrong:
            raise CheckpointError(
                f"The checkpoint {folder} has {saved.get(kind, 0)} objects of kind {kind!r}, this run has {count}.",
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


def fingerprint_of(state: Mapping[str, Any]) -> str:
    """Return a hash of names and shapes. It is equal for two models if the weights of one fit the other."""
    lines = "\n".join(f"{name} {_shape(state, name)}" for name in sorted(state))
    return hashlib.sha256(lines.encode()).hexdigest()

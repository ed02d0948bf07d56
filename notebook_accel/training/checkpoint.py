"""Checkpoints: their contents, and how all ranks load one. ``checkpoint_saving`` saves them.

A checkpoint is a folder with the weights of each model in safetensors, the state of each optimizer, scheduler and
registered object, and for each rank a file with its random states, the position of each loader, and the gradients of an
unfinished window. Any number of ranks can load it. A failure on one rank raises on all ranks, and the group can still
be used.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import itertools
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import UninitializedParameter

from notebook_accel import code_places
from notebook_accel.errors import CheckpointError, NotebookAccelError
from notebook_accel.formatting import ranks_in_words
from notebook_accel.training import checkpoint_folders as folders
from notebook_accel.training import collectives, fsdp, model_files, random_state, sharded_files
from notebook_accel.training.accumulation import GradientState
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.collectives import verify_collective
from notebook_accel.training.models import unwrap_model
from notebook_accel.training.optimizers import parameters_of

CUSTOM = "custom_checkpoint"  # the kind of objects that users register, named as in Accelerate's files
TENSOR = "tensor"  # the kind of prepared bare tensors
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
    tensors: list[torch.Tensor]  # bare ones that were prepared in place of models
    writes_whole: bool = False  # gather sharded models on rank 0

    def __post_init__(self) -> None:
        self.states = {**self.states, TENSOR: [TensorState(tensor) for tensor in self.tensors]}

    @property
    def trained(self) -> dict[str, Sequence[Any]]:
        """Models and bare tensors, by the name of their gradients in a rank's own state."""
        return {"gradients": self.models, "tensor_gradients": self.tensors}

    def parameters_of_optimizers(self) -> list[list[Any]]:
        """Return the names, where they are known, and the shapes of each optimizer's parameters in their order."""
        names = {
            id(parameter): f"model_{number}.{name}" if number else name
            for number, model in enumerate(self.models)
            for name, parameter in _parameters_of(model).items()
        }
        return [
            [[names.get(id(parameter), ""), list(parameter.shape)] for parameter in parameters_of([optimizer])]
            for optimizer in self.states["optimizer"]
        ]


class TensorState:
    """The state of a bare tensor that was prepared in place of a model."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return a copy of the values."""
        return {"value": self._tensor.detach().clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load values in place."""
        saved = state["value"]
        if saved.shape != self._tensor.shape:
            shapes = f"{tuple(saved.shape)} in the checkpoint, {tuple(self._tensor.shape)} here"
            raise CheckpointError(f"A prepared tensor has another shape: {shapes}.", fix="make it as it was then")
        with torch.no_grad():
            self._tensor.copy_(saved)


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict of a model as it was before ``prepare``, which may be sharded."""
    if fsdp.is_sharded(model):
        return fsdp.state_of(model)
    state: dict[str, Any] = _inner(model).state_dict()
    return state


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    return unwrap_model(model, keep_torch_compile=False)


def gradients_of(item: torch.nn.Module | torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a model or a bare tensor by the names of their parameters."""
    named = _parameters_of(item).items()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def _parameters_of(item: torch.nn.Module | torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the parameters of a model by name, or a bare tensor under an empty name."""
    return {"": item} if isinstance(item, torch.Tensor) else dict(_inner(item).named_parameters())


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
    models, which are read in place, since a rank may lack the memory for two copies. Optimizers and other objects check
    their states themselves: if one refuses its own, all get back those from before. Only rank 0 calls ``choose``,
    which returns the folder. Models that a hook removes from its list aren't loaded. Registered objects may need
    ``weights_only=False``, which can run code. Of a checkpoint of Accelerate, only the weights are read, and rank 0
    warns.

    Returns:
        The folder, and the number of saved objects of each kind that this run hasn't prepared.

    Raises:
        CheckpointError: There is no such checkpoint, it isn't whole, or it was saved from other objects.
    """
    if absent := backend.absent_ranks():
        raise absence_error("load_state", absent, "Otherwise the ranks would train different models.")
    folder: pathlib.Path = on_rank_0(backend, "find a checkpoint", lambda: folders.recover(choose()))
    parts: list[_RankPart] = []  # not the action's value, which would be sent to the other ranks
    read = functools.partial(_read, backend, state, hooks, folder, strict=strict, weights_only=weights_only)
    on_all_ranks(backend, "read a checkpoint", lambda: parts.append(read()))
    _load_states(backend, parts[0].states)
    on_all_ranks(backend, "load a checkpoint", lambda: _apply(backend, state, parts[0], strict=strict))
    _tell_what_is_new(parts[0], backend, folder)
    return folder, parts[0].left


@dataclasses.dataclass
class _RankPart:
    """A rank's part of a checkpoint in memory: pairs of an object and its saved state, and the rank's own state."""

    models: list[tuple[torch.nn.Module, dict[str, torch.Tensor]]]
    states: list[tuple[Any, Any]]
    own: dict[str, Any]  # empty if only weights are read
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
    saved = _AccelerateCheckpoint(folder) if folders.is_of_accelerate(folder) else _Checkpoint(folder)
    counts = saved.counts
    if saved.has_only_weights:
        state = dataclasses.replace(state, states={}, loaders=[], tensors=[])
    elif TENSOR not in counts:  # saved by an earlier version, which leaves them out
        if state.tensors and backend.place.rank == 0:
            warnings.warn(f"{folder} has no prepared tensors: those of this run stay as they are.", stacklevel=3)
        state = dataclasses.replace(state, tensors=[])
    if not (state.models or state.loaders or any(state.states.values())):
        missing = "no model" if saved.has_only_weights else "nothing"
        raise CheckpointError(
            f"The checkpoint {folder} can't be loaded: {missing} has been prepared.",
            fix="accelerator.prepare(model, optimizer, ...) first, then load_state",
        )
    models = state.models[:]
    for hook in hooks:
        hook(models, str(folder))
    if saved.has_only_weights and models and not counts["model"]:
        raise CheckpointError(
            f"The checkpoint {folder} was saved by Accelerate without the whole weights of a model.",
            why="Each file of FSDP or DeepSpeed has a part of a model.",
            fix=f"merge them into {folder} by `accelerate merge-weights`, or load_state in the program that saved it, "
            "then save_model, and load these weights into the model",
        )
    _check_counts(counts, models, state, folder)
    files = sharded_files.ShardedFiles(folder)
    to_read: dict[str, torch.Tensor] = {}
    in_place: dict[str, torch.Tensor] = {}
    weights = []
    for number, model in enumerate(models):
        own = state_of(model)
        of_model = files.fitted(saved.weights(number, own), _by_name(own), in_place, in_place=True)
        _check_model(model, own, of_model, folder, strict=strict)
        weights.append((model, of_model))
    if saved.has_only_weights:
        left = {"model": counts["model"] - len(state.models)}
        return _RankPart(weights, [], {}, left, backend.place.world_size, lambda: files.read(in_place))
    _check_optimizers(saved.optimizers, state.parameters_of_optimizers(), folder)
    states = []
    for kind, items in state.states.items():
        for number, item in enumerate(items):
            of_item = saved.state(kind, number, weights_only=weights_only)
            states.append((item, files.fitted(of_item, _counterpart_in(item), to_read)))
    own_state = saved.own_state(backend, state)
    for name, trained in state.trained.items():
        own_state[name] = [
            files.fitted(gradients, _by_name(_parameters_of(item)), to_read)
            for item, gradients in zip(trained, own_state.get(name, ()), strict=False)
        ]
    files.read(to_read)
    prepared = {"model": state.models, **state.states}
    left = {kind: counts.get(kind, 0) - len(items) for kind, items in prepared.items()}
    positions = own_state["loaders"][len(state.loaders) :]
    left["loader"] = sum(position["batches"] not in (0, position["length"]) for position in positions)
    return _RankPart(weights, states, own_state, left, saved.ranks, lambda: files.read(in_place))


class _Checkpoint:
    """A checkpoint that ``checkpoint_saving`` has written.

    Raises:
        CheckpointError: There is no such checkpoint, or it isn't whole.
    """

    has_only_weights = False

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._manifest = folders.read_manifest(folder)
        self.ranks: int = self._manifest["world_size"]
        self.optimizers: list[list[Any]] = self._manifest.get("optimizers", [])

    @property
    def counts(self) -> dict[str, int]:
        """The number of saved objects of each kind."""
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
        if backend.place.world_size != self.ranks:  # rank 0 may have saved alone: its next batch isn't the others'
            own["loaders"] = [{**position, "ahead": []} for position in own["loaders"]]
        is_spread = backend.place.world_size != self.ranks or any(map(fsdp.is_sharded, state.models))
        for name in state.trained if is_spread else ():
            values = [gradient for gradients in own.get(name, ()) for gradient in gradients.values()]
            if own.get(name) and all(isinstance(value, torch.Tensor) for value in values):
                # Training continues from the mean over the saved ranks, however many ranks there are now.
                parts = (self._own_state_of(other).get(name, []) for other in range(self.ranks))
                own[name] = functools.reduce(_added, parts)
                for gradients in own[name]:
                    for gradient in gradients.values():
                        gradient.div_(self.ranks)
        return own

    def _own_state_of(self, rank: int) -> dict[str, Any]:
        own: dict[str, Any] = model_files.read_object(self._folder / f"rank_{rank}.bin")
        return own


class _AccelerateCheckpoint(_Checkpoint):
    """The whole weights in a checkpoint of Accelerate, 0.20 to 1.15, which has no manifest."""

    has_only_weights = True

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        files = {path.name for path in folder.iterdir()}
        names = ({model_files.weights_file(number, safe) for safe in (True, False)} for number in itertools.count())
        models = [*itertools.takewhile(files.intersection, names)]
        self._manifest = {"models": models, "counts": {}, "files": files}

    def weights(self, number: int, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved model's weights, under the names of its ``own`` state dict."""
        return model_files.renamed(super().weights(number, own), own)


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


def _load_states(backend: Backend, states: Sequence[tuple[Any, Any]]) -> None:
    """Load objects' states on all ranks, or if that fails on a rank, give all objects back those from before.

    States from before aren't copied where objects replace them when they load. Modules overwrite them.
    """
    before: list[tuple[Any, Any]] = []

    def load_all() -> None:
        for item, saved in states:
            state = item.state_dict()
            before.append((item, copy.deepcopy(state) if isinstance(item, torch.nn.Module) else state))
            item.load_state_dict(saved)

    try:
        on_all_ranks(backend, "load a checkpoint", load_all)
    except Exception:
        for item, its_state in before:
            with contextlib.suppress(Exception):  # the one that has failed may refuse any state
                item.load_state_dict(its_state)
        raise


def _apply(backend: Backend, state: CheckpointState, read: _RankPart, *, strict: bool) -> None:
    read.read_in_place()
    for model, saved in read.models:
        _inner(model).load_state_dict(saved, strict=strict)
    if not read.own:
        return
    for loader, position in zip(state.loaders, read.own["loaders"], strict=False):  # some may be prepared later
        loader.load_state_dict(position)
    state.gradients.load_state_dict(read.own["window"])
    for kind, items in state.trained.items():
        # Others than those of an unfinished window are cleared: they belong to the training before.
        for item, gradients in zip(items, itertools.chain(read.own[kind], itertools.repeat({})), strict=False):
            parameters = _parameters_of(item)
            fsdp.drop_local_gradients(parameters.values())
            for name, parameter in parameters.items():
                gradient = gradients.get(name)
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
    if "afresh" in read.own:
        random_state.draw_afresh(read.own["afresh"], backend.place.rank, backend)
    else:
        random_state.restore(read.own["random"], backend)


def absence_error(call: str, absent: Sequence[int], why: str) -> CheckpointError:
    """Return the error for a call that some ranks don't make."""
    return CheckpointError(
        f"{call} wasn't called on {ranks_in_words(absent)}.",
        why=why,
        fix="call it on all ranks, not under `if accelerator.is_main_process:`",
    )


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


def _tell_what_is_new(read: _RankPart, backend: Backend, folder: pathlib.Path) -> None:
    saved, now = read.saved_ranks, backend.place.world_size
    if not read.own and backend.place.rank == 0:
        code_places.warn(
            f"{folder} was saved by Accelerate: the weights of models are loaded, and nothing else. Optimizers, "
            "schedulers, the loss scaler, registered objects, random numbers and positions of loaders stay as they "
            "are. Fix: train on from these weights, and load what save_state writes here from now on, which has all "
            "of it; or finish this training with Accelerate"
        )
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


def _check_model(
    model: torch.nn.Module, own: Mapping[str, Any], saved: Mapping[str, Any], folder: pathlib.Path, *, strict: bool
) -> None:
    """Raise ``CheckpointError`` if the saved weights don't fit a model, whose state is ``own``."""
    # Without ``strict``, buffers and lazy parameters may differ: they may take over the shapes of saved ones.
    parameters = {
        name for name, each in _inner(model).named_parameters() if not isinstance(each, UninitializedParameter)
    }
    names = {*own, *saved} if strict else parameters & own.keys() & saved.keys()
    differing = sorted(name for name in names if _shape(own, name) != _shape(saved, name))
    if differing:
        raise _other_model_error(own, saved, differing, folder, strict=strict)


def _check_optimizers(saved: Sequence[Any], own: Sequence[Any], folder: pathlib.Path) -> None:
    """Raise ``CheckpointError`` if parameters would get the state of others, which torch doesn't notice."""
    for theirs, ours in zip(saved, own, strict=False):
        is_in_another_order = sorted(name for name, _ in theirs) == sorted(name for name, _ in ours)
        for (there, saved_shape), (here, shape) in zip(theirs, ours, strict=False):
            if saved_shape != shape or (is_in_another_order and there != here):
                raise CheckpointError(
                    f"An optimizer of the checkpoint {folder} has other parameters: {there} of shape "
                    f"{tuple(saved_shape)} is where this run has {here} of shape {tuple(shape)}.",
                    fix="give the optimizer the same parameters in the same order as when it was saved",
                )


def _other_model_error(
    own: Mapping[str, Any], saved: Mapping[str, Any], differing: Sequence[str], folder: pathlib.Path, *, strict: bool
) -> CheckpointError:
    shown = [
        f"  {name}: {_shape(saved, name)} in the checkpoint, {_shape(own, name)} in the model"
        for name in differing[:_SHOWN_TENSORS]
    ]
    more = [f"  and {len(differing) - _SHOWN_TENSORS} more"] if len(differing) > _SHOWN_TENSORS else []
    return CheckpointError(
        "\n".join([f"The checkpoint {folder} is of another model:", *shown, *more]),
        fix="make the model as it was when it was saved"
        + ("; load_state(..., strict=False) loads what has the same name" if strict else ""),
    )


def _shape(state: Mapping[str, Any], name: str) -> str:
    value = state.get(name)
    return str(tuple(value.shape)) if isinstance(value, torch.Tensor) else "missing" if value is None else "an object"


def fingerprint_of(state: Mapping[str, Any]) -> str:
    """Return a hash of names and shapes. It is equal for two models if the weights of one fit the other."""
    lines = "\n".join(f"{name} {_shape(state, name)}" for name in sorted(state))
    return hashlib.sha256(lines.encode()).hexdigest()

"""Reads the checkpoints that Accelerate's ``save_state`` writes.

Such a folder has no manifest: the files themselves show what was saved. Each rank has written a file of random states,
so these files show the number of ranks. The format is that of Accelerate 0.20 to 1.15, without sharded weights.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from notebook_accel import environment
from notebook_accel.errors import CheckpointError
from notebook_accel.training import model_files, random_state
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.loader_position import ResumePoint
from notebook_accel.training.loaders import DataLoaderDispatcher

_RANDOM = "random_states_{}.pkl"
_SHARDED = ("pytorch_model_fsdp*", "pytorch_model/*_states.pt", "latest")  # of FSDP, and two of DeepSpeed's


class AccelerateCheckpoint:
    """A checkpoint of Accelerate, which ``ranks`` ranks have saved.

    Raises:
        CheckpointError: The weights are sharded.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self.ranks = self._count(_RANDOM.format)
        self.optimizers: list[Any] = []  # Accelerate doesn't save what their parameters are
        sharded = [path.name for pattern in _SHARDED for path in folder.glob(pattern)]
        if sharded and not self._has_weights(0):
            raise CheckpointError(
                f"The checkpoint {folder} was saved by Accelerate with sharded weights ({sharded[0]}).",
                why="Each file has a part of the model, as FSDP or DeepSpeed has distributed it.",
                fix="load_state in the program that saved it, then save_model; or merge the weights by "
                "`accelerate merge-weights`, and load these into the model",
            )

    def counts(self, kinds: Iterable[str]) -> dict[str, int]:
        """Return the number of saved objects of each kind, and of models."""
        models = next(number for number in itertools.count() if not self._has_weights(number))
        counts = {kind: self._count(functools.partial(_file_of, kind)) for kind in kinds}
        return {"model": models, **counts}

    def weights(self, number: int, own: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the weights of the model of this number, under the names of its ``own`` state dict.

        Accelerate leaves out all but one name of a tied tensor, and adds the wrappers' names to those of compiled
        models and of some wrapped ones.
        """
        safe = (self._folder / model_files.weights_file(number, safe=True)).is_file()
        read = model_files.read_weights(self._folder / model_files.weights_file(number, safe))
        saved = {_plain_name(key, own): value for key, value in read.items()}
        kept = {model_files.place_of(own[key]): key for key in saved if key in own}
        places = {key: model_files.place_of(value) for key, value in own.items()}
        tied = {key: saved[kept[place]] for key, place in places.items() if place in kept}
        return {**tied, **saved}

    def state(self, kind: str, number: int, *, weights_only: bool) -> Any:
        """Return the state of an optimizer, a scheduler, the loss scaler or a registered object."""
        return model_files.read_object(self._folder / _file_of(kind, number), weights_only=weights_only)

    def own_state(self, backend: Backend, state: Any) -> dict[str, Any]:
        """Return the state that differs between ranks, in the form of a checkpoint of this package.

        Accelerate saves no gradients, so a window starts; and without ``use_stateful_dataloader`` no position inside an
        epoch, so loaders start an epoch.
        """
        rank = backend.place.rank
        random = self._random_of(rank if rank < self.ranks else 0, backend.device)
        points = [ResumePoint(self._epoch_of(number, item)) for number, item in enumerate(state.loaders)]
        for number, loader in enumerate(state.loaders):
            batches = self._batches_of(number)
            is_dispatched = self.ranks > 1 and isinstance(loader, DataLoaderDispatcher)  # it counts in another way
            if batches and (
                is_dispatched or backend.place.world_size != self.ranks or environment.follows_accelerate()
            ):
                if rank == 0:
                    warnings.warn(
                        f"The checkpoint {self._folder} was saved after {batches} batches of an epoch on {self.ranks} "
                        "ranks: the epoch begins anew. Fix: as many ranks, or "
                        f"accelerator.skip_first_batches(loader, {batches})",
                        stacklevel=3,
                    )
            elif batches:
                length = loader.state_dict()["length"]
                points[number] = ResumePoint(points[number].epoch, batches, length, begun=random)
        return {
            "loaders": [vars(point) for point in points],
            "window": {"sync_gradients": True, "divisor": state.gradients.num_steps, "micro_batches": 0},
            "gradients": [],
            "random" if rank < self.ranks else "afresh": random,
        }

    def _random_of(self, rank: int, device: torch.device) -> dict[str, Any]:
        saved = model_files.read_object(self._folder / _RANDOM.format(rank))
        state = {"torch": saved["torch_manual_seed"], "python": saved["random_state"]}
        if "numpy_random_seed" in saved:
            state["numpy"] = saved["numpy_random_seed"]
        gpus = saved.get("torch_cuda_manual_seed", ())
        if device.type == "cuda" and (device.index or 0) < len(gpus):
            state["cuda"] = gpus[device.index or 0]
        if device.type == "xla" and "xm_seed" in saved:
            state["xla"] = saved["xm_seed"]
        return random_state.to_loadable(state)

    def _epoch_of(self, number: int, loader: Any) -> int:
        """Return the next epoch of a loader's saved sampler, or the loader's own if none was saved."""
        path = self._folder / _file_of("sampler", number)
        epoch = getattr(_read_inert(path), "epoch", None) if path.is_file() else None
        following: int = loader.position.epochs.following
        return epoch if isinstance(epoch, int) else following

    def _batches_of(self, number: int) -> int:
        """Return the number of batches that a rank has had of an unfinished epoch, as torchdata's loader counts them.

        The state has one form with worker processes, and another one without.
        """
        path = self._folder / _file_of("dl_state_dict", number)
        # The dataset's own state may hold any object, which isn't needed here.
        state: dict[str, Any] = _read_inert(path) if path.is_file() else {"_iterator_finished": True}
        counted = state.get("_snapshot", {}).get("_snapshot_step", state.get("_num_yielded", 0))
        batches: int = counted + state.get("_steps_since_snapshot", 0)
        return 0 if state["_iterator_finished"] else batches

    def _has_weights(self, number: int) -> bool:
        return any((self._folder / model_files.weights_file(number, safe)).is_file() for safe in (True, False))

    def _count(self, name_of: Callable[[int], str]) -> int:
        return next(number for number in itertools.count() if not (self._folder / name_of(number)).is_file())


def _file_of(kind: str, number: int) -> str:
    if kind == "custom_checkpoint":
        return f"{kind}_{number}.pkl"
    return model_files.numbered(kind, number, "pt" if kind == "scaler" else "bin")


def _plain_name(name: str, own: Mapping[str, Any]) -> str:
    """Return a saved tensor's name without the names of wrappers, if the model has it under that name."""
    bare = name.replace("_orig_mod.", "").removeprefix("module.")
    return bare if name not in own and bare in own else name


class _Inert:
    """A stand-in for every object in a pickle, with its attributes. No pickled class is imported or run."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def append(self, _: Any) -> None:
        """Ignore an item of a list."""

    def extend(self, _: Any) -> None:
        """Ignore items of a list."""

    def __setitem__(self, _: Any, __: Any) -> None:
        pass


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, _: str, __: str) -> Any:
        return _Inert

    def persistent_load(self, _: Any) -> Any:
        return None


def _read_inert(path: pathlib.Path) -> Any:
    """Return a pickled object without running code, such as a sampler, which holds its dataset.

    Raises:
        CheckpointError: The file can't be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            with archive.open(name) as file:
                return _InertUnpickler(file).load()
    except (OSError, ValueError, TypeError, AttributeError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", fix="use another checkpoint") from error

"""Files of a model's weights, with the names and the layout that the Hugging Face libraries read."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import re
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from notebook_accel.errors import CheckpointError, ConfigError
from notebook_accel.training.checkpoint_folders import atomic_write

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_FORMAT = {"format": "pt"}  # without it Transformers refuses the file
_SHARD = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def weights_file(number: int, safe: bool) -> str:
    """Return the name of the file of a whole model's weights."""
    return numbered("model" if safe else "pytorch_model", number, "safetensors" if safe else "bin")


def numbered(name: str, number: int, suffix: str = "bin") -> str:
    """Return ``optimizer.bin``, ``optimizer_1.bin`` and so on, as Accelerate numbers them."""
    return f"{name}.{suffix}" if number == 0 else f"{name}_{number}.{suffix}"


def write_weights(state: Mapping[str, Any], path: pathlib.Path, *, safe: bool) -> None:
    """Write a state dict to one file: safetensors, or torch's own format.

    A tensor with several names is written once, as by safetensors' own ``save_model``.

    Raises:
        CheckpointError: A value isn't a tensor, and safetensors holds tensors only.
    """
    if not safe:
        write_object(dict(state), path)
        return
    distinct, aliases = _deduplicated(state)
    with atomic_write(path) as draft:
        save_file(distinct, draft, {**_FORMAT, **aliases})


def write_object(value: Any, path: pathlib.Path) -> None:
    """Write an object by ``torch.save`` to a file that appears when it is complete."""
    with atomic_write(path) as draft:
        torch.save(value, draft)


def read_object(path: pathlib.Path, *, weights_only: bool = True) -> Any:
    """Return an object that ``write_object`` has written, on the CPU.

    Raises:
        CheckpointError: The file can't be read, or with ``weights_only`` reading it could run code.
    """
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


def save(value: Any, path: str | os.PathLike[str], *, safe: bool) -> None:
    """Write a state dict as safetensors, or any object by ``torch.save``. The file appears when it is complete.

    Raises:
        CheckpointError: A value isn't a tensor, and safetensors holds tensors only.
    """
    target = pathlib.Path(path).expanduser()
    write_weights(value, target, safe=True) if safe else write_object(value, target)


def read_weights(path: pathlib.Path) -> dict[str, torch.Tensor]:
    """Return the state dict that ``write_weights`` has written, on the CPU.

    Raises:
        CheckpointError: The file can't be read.
    """
    if path.suffix != ".safetensors":
        state: dict[str, torch.Tensor] = read_object(path)
        return state
    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it isn't a mapping
            aliases = {name: kept for name, kept in (file.metadata() or {}).items() if kept in state}
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", fix="use another checkpoint") from error
    return {**state, **{name: state[kept] for name, kept in aliases.items()}}


def renamed(saved: Mapping[str, torch.Tensor], own: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights that Accelerate has ``saved``, under the names of the model's ``own`` state dict.

    Accelerate leaves out all but one name of a tied tensor, and adds the wrapper's name to those of compiled models.
    """
    named = {name if name in own else name.replace("_orig_mod.", ""): value for name, value in saved.items()}
    kept = {_place_of(own[name]): name for name in named if name in own}
    places = {name: _place_of(value) for name, value in own.items()}
    tied = {name: named[kept[place]] for name, place in places.items() if place in kept}
    return {**tied, **named}


def save_model(
    state: Mapping[str, Any], folder: pathlib.Path, max_shard_size: int | str = "10GB", safe_serialization: bool = True
) -> None:
    """Write weights to ``model.safetensors``, or to numbered shards and an index of them.

    Each file appears when it is complete, the index last, and the shards of an earlier model are deleted.

    Raises:
        CheckpointError: A value isn't a tensor, and safetensors holds tensors only.
        ConfigError: ``max_shard_size`` isn't a size, or ``folder`` is a file.
    """
    limit_bytes = size_bytes(max_shard_size, "max_shard_size")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"A model is saved to a folder; {folder} is a file.", fix="give it another name")
    folder.mkdir(parents=True, exist_ok=True)
    stem, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    distinct, aliases = _deduplicated(state) if safe_serialization else (dict(state), {})
    shards = _sharded(distinct, limit_bytes)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}.{suffix}" if len(shards) == 1 else f"{stem}-{number:05}-of-{len(shards):05}.{suffix}"
        places.update(dict.fromkeys(shard, name))
        own = {again: first for again, first in aliases.items() if first in shard}
        with atomic_write(folder / name) as draft:
            save_file(shard, draft, {**_FORMAT, **own}) if safe_serialization else torch.save(shard, draft)
    names = {*places.values()}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_bytes_of, distinct.values()))}, "weight_map": places}
        names.add(f"{stem}.{suffix}.index.json")
        with atomic_write(folder / f"{stem}.{suffix}.index.json") as draft:
            draft.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name in os.listdir(folder):
        if _SHARD.fullmatch(name) and name not in names:
            (folder / name).unlink()


def _deduplicated(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return each tensor under its first name, without shared memory, and the first name of each further name."""
    first: dict[Any, str] = {}
    storages: set[Any] = set()
    distinct: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{name} of the model's state is {type(tensor).__name__}, and safetensors holds tensors only.",
                fix="safe_serialization=False",
            )
        kept = first.setdefault(_place_of(tensor), name)
        if kept != name:
            aliases[name] = kept
            continue
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        distinct[name] = tensor.detach().clone() if storage in storages else tensor.detach().contiguous()
        storages.add(storage)
    return distinct, aliases


def _place_of(value: Any) -> Any:
    """Return a key that is equal for two values only if they are one tensor under two names."""
    if not isinstance(value, torch.Tensor) or not value.numel() or value.is_meta:
        return id(value)
    return value.device, value.data_ptr(), value.shape, value.stride(), value.dtype


def _sharded(state: Mapping[str, Any], limit_bytes: int) -> list[dict[str, Any]]:
    shards: list[dict[str, Any]] = [{}]
    size_bytes = 0
    for name, tensor in state.items():
        if shards[-1] and size_bytes + _bytes_of(tensor) > limit_bytes:
            shards.append({})
            size_bytes = 0
        shards[-1][name] = tensor
        size_bytes += _bytes_of(tensor)
    return shards


def _bytes_of(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def size_bytes(size: int | str, name: str) -> int:
    """Return a size in bytes: ``"5GB"`` counts in powers of ten, as at Hugging Face, ``"5GiB"`` in powers of two.

    Raises:
        ConfigError: ``size``, the value of the option ``name``, isn't a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", str(size).strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f"{name} is {size!r}.", fix='a size such as "500MB" or "10GB", or a number of bytes')
    return int(float(match[1]) * _UNITS[match[2].upper()])

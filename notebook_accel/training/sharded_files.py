"""A checkpoint's files of sharded tensors, to which every rank writes its shards by ``torch.distributed.checkpoint``.

They have the sharded tensors of models, optimizers and registered objects, each under a key. The checkpoint's other
files have a reference in place of each. Any number of ranks can read them, each only what it needs.
"""

from __future__ import annotations

import dataclasses
import pathlib
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from notebook_accel.errors import CheckpointError
from notebook_accel.payload.sharded_tensors import is_sharded_tensor
from notebook_accel.training import fsdp

FOLDER = "sharded"
_REFERENCE = "sharded tensor"  # the only key of the dictionary that replaces a tensor
# Classes in the index that torch writes, which is pickled. Reading others could run code.
_INDEX_CLASSES = {
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}  # fmt: skip

_Path = tuple[Any, ...]


def _map_paths(function: Callable[[Any, _Path], Any], tree: Any, path: _Path = ()) -> Any:
    """Replace each node of a tree by ``function(node, path)``, unless the function returns ``None``.

    Containers without a replaced node are returned as they are.
    """
    found = function(tree, path)
    if found is not None:
        return found
    if isinstance(tree, Mapping):
        mapped = {key: _map_paths(function, value, (*path, key)) for key, value in tree.items()}
        return tree if all(mapped[key] is value for key, value in tree.items()) else mapped
    if type(tree) in (list, tuple):
        items = [_map_paths(function, value, (*path, number)) for number, value in enumerate(tree)]
        return tree if all(new is old for new, old in zip(items, tree, strict=True)) else type(tree)(items)
    return tree


@dataclasses.dataclass
class Shares:
    """The sharded tensors that go into a checkpoint, by key."""

    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def copied(self) -> Shares:
        """Return a copy of the shards in host memory."""
        return Shares({key: fsdp.on_host(tensor) for key, tensor in self.tensors.items()})

    def taken_out_of(self, tree: Any, name: str) -> Any:
        """Move a tree's sharded tensors here, each once, and return the tree with references in their place."""
        keys: dict[int, str] = {}

        def taken(node: Any, path: _Path) -> Any:
            if not is_sharded_tensor(node):
                return None
            key = keys.setdefault(id(node), ".".join(map(str, (name, *path))))
            self.tensors[key] = node
            return {_REFERENCE: key}

        return _map_paths(taken, tree)


def write(shares: Shares, draft: pathlib.Path, group: Any = None) -> None:
    """Write this rank's shards below a checkpoint's draft. All ranks of ``group``, by default all, call this at once.

    Raises:
        CheckpointError: A rank couldn't write its part.
    """
    if not shares.tensors:
        return
    from torch.distributed.checkpoint import api, filesystem, state_dict_saver  # a slow import

    writer = filesystem.FileSystemWriter(draft / FOLDER)
    try:
        state_dict_saver.save(dict(shares.tensors), storage_writer=writer, process_group=group)
    except (Exception, api.CheckpointException) as error:  # CheckpointException isn't an Exception
        raise _failure(error) from error


def _failure(error: BaseException) -> CheckpointError:
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    by_rank = "; ".join(f"rank {rank}: {failed[0]}" for rank, failed in sorted(failures.items()))
    return CheckpointError(f"The sharded part of a checkpoint failed: {by_rank or error}")


class ShardedFiles:
    """The sharded tensors of a checkpoint, for reading; there may be none.

    Raises:
        CheckpointError: The index can't be read.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder / FOLDER
        self._index: Mapping[str, Any] = {}
        if self._folder.is_dir():
            try:
                self._index = self._metadata().state_dict_metadata
            except (OSError, EOFError, AttributeError, pickle.UnpicklingError) as error:
                raise CheckpointError(f"{self._folder} can't be read: {error}", fix="use another one") from error

    def fitted(
        self, tree: Any, like: Callable[[_Path], Any], to_read: dict[str, torch.Tensor], *, in_place: bool = False
    ) -> Any:
        """Return a tree of this checkpoint with tensors in place of references, sharded as in this run.

        Args:
            tree: The tree.
            like: A function that maps the keys of a tensor to a tensor with the wanted sharding; ``None`` or a whole
                tensor for a result that is whole.
            to_read: The tensors that are still to be read, by key. This method adds to it.
            in_place: Use the tensors of ``like`` themselves if they are sharded and have the saved shape.
        """

        def fit(node: Any, path: _Path) -> Any:
            if isinstance(node, torch.Tensor):
                return fsdp.sharded_like(node, like(path))
            if not (type(node) is dict and node.keys() == {_REFERENCE}):
                return None
            key = node[_REFERENCE]
            saved, own = self._index[key], like(path)
            if key not in to_read:
                is_own = in_place and is_sharded_tensor(own) and own.shape == saved.size
                to_read[key] = own if is_own else fsdp.empty_like(own, saved.size, saved.properties.dtype)
            return to_read[key]

        return _map_paths(fit, tree)

    def read(self, tensors: dict[str, torch.Tensor]) -> None:
        """Fill tensors, whole or sharded over any ranks, with those that were saved. Ranks don't wait for each other.

        Raises:
            CheckpointError: A file can't be read.
        """
        if not tensors:
            return
        from torch.distributed.checkpoint import api, filesystem, state_dict_loader  # a slow import

        reader: Any = filesystem.FileSystemReader(self._folder)
        reader.read_metadata = self._metadata  # torch's own could run code
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about no_dist
                state_dict_loader.load(dict(tensors), storage_reader=reader, no_dist=True)
        except (Exception, api.CheckpointException) as error:  # CheckpointException isn't an Exception
            raise _failure(error) from error

    def _metadata(self, *_: Any, **__: Any) -> Any:
        with open(self._folder / ".metadata", "rb") as file:
            return _IndexUnpickler(file).load()


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, and reading that could run code")

"""Collectives over nested lists, tuples, named tuples and mappings: gather, reduce, broadcast, pad.

With one process tensors are returned unchanged. In a group whose backend compares calls, all ranks get a
``CollectiveError`` if their calls differ, such as in shapes or types, and the group can still be used. Collectives of
tensors raise a ``TrainingError`` for a leaf that isn't a tensor.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch

from notebook_accel import code_places
from notebook_accel.errors import CollectiveError, ConfigError, TrainingError
from notebook_accel.training.backends.backend import Backend, all_ranks
from notebook_accel.training.sharding import Tail
from notebook_accel.training.trees import leaves_of, map_leaves

_T = TypeVar("_T")
_has_warned = False  # about repeated rows, once per process

# Sums of these types would overflow, or some backend can't compute them.
_SUMMED_AS_INT64 = (torch.bool, torch.uint8, torch.int8, torch.int16)
_SHOWN_DIFFERENCES = 3


def gather(backend: Backend, tree: Any, tail: Tail | None = None) -> Any:
    """Concatenate the ranks' tensors: ``(n, ...)`` becomes ``(world_size * n, ...)``, 0-d becomes 1-d.

    Warn once about repeated rows if ``tail`` is set: the current round is a last round that differs from the others.
    """
    if backend.place.world_size == 1:
        return tree
    tensors = _tensors_of(tree, "gather")
    verify_collective(backend, "gather", tensors)
    if tail is not None and backend.place.rank == 0:
        _warn_of_repeats(backend, tensors, tail)
    return map_leaves(lambda tensor: backend.all_gather(_at_least_1d(tensor)), tree)


def _warn_of_repeats(backend: Backend, tensors: list[torch.Tensor], tail: Tail) -> None:
    global _has_warned
    rows = [max((len(tensor) for tensor in tensors if tensor.ndim), default=0)] * backend.place.world_size
    repeated = sum(rows) - sum(tail.rows_kept(rows))
    if repeated and not _has_warned:
        _has_warned = True
        warnings.warn(
            f"gather in the last batch of an epoch: {repeated} of {sum(rows)} rows are repeated from the "
            "beginning of the epoch, so that all ranks have as many. Fix: gather_for_metrics leaves them out",
            stacklevel=2,
        )


def gather_for_metrics(backend: Backend, tree: Any, tail: Tail | None, *, use_gather_object: bool = False) -> Any:
    """Gather without the samples that were repeated to fill the last round of an epoch.

    Lists of other objects than tensors, and with ``use_gather_object`` any list, are concatenated as objects. ``tail``
    is the current round if it is a last round that differs from the others.

    Raises:
        TrainingError: Some ranks have no batch in this round.
    """
    if backend.place.world_size == 1:
        return tree
    if tail is not None and tail.missing:
        fix = "even_batches=True: gather_for_metrics leaves out what is repeated"
        raise tail.missing_error("don't take part in gather_for_metrics", fix)
    are_tensors = all(isinstance(leaf, torch.Tensor) for leaf in leaves_of(tree))
    # An empty list counts as a list of objects, since other ranks may have some.
    if use_gather_object or not are_tensors or (isinstance(tree, list) and not tree):
        parts = _gather_lists(backend, tree)
        return [value for part in (parts if tail is None else _kept(parts, tail)) for value in part]
    if tail is None:
        return gather(backend, tree)
    if tail.may_differ_in_rows:
        return map_leaves(lambda tensor: torch.cat(_kept(_gather_rows(backend, tensor), tail)), tree)
    ranks = len(tail.sizes)
    return map_leaves(lambda rows: torch.cat(_kept(rows.tensor_split(ranks), tail)), gather(backend, tree))


def _kept(parts: Sequence[Any], tail: Tail) -> list[Any]:
    """Return the part of each rank without its repeated samples."""
    return [part[:rows] for part, rows in zip(parts, tail.rows_kept([*map(len, parts)]), strict=True)]


def _gather_rows(backend: Backend, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the ranks' tensors, in order of rank, which may differ in their first dimension."""
    tensor = _at_least_1d(tensor)
    verify_collective(backend, "gather tensors of different lengths")
    lengths = backend.all_gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
    padded = torch.cat([tensor, tensor.new_zeros(max(lengths) - len(tensor), *tensor.shape[1:])])
    parts = torch.tensor_split(gather(backend, padded), len(lengths))
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def reduce(backend: Backend, tree: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return the ranks' sum, mean, maximum or minimum, element by element, times ``scale``, in new tensors.

    The mean of integers is floating point. Sums of bools and of integers below 32 bits are int64. ``"none"`` is
    Accelerate's name for a sum.

    Raises:
        ConfigError: ``reduction`` is none of ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` and ``"none"``.
    """
    if reduction not in ("sum", "mean", "max", "min", "none"):
        raise ConfigError(f"reduction is {reduction!r}.", fix='one of "sum", "mean", "max", "min" and "none"')
    world_size = backend.place.world_size

    def scaled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if scale == 1.0 else tensor * scale

    if world_size == 1:
        return map_leaves(lambda leaf: scaled(leaf.detach().clone()) if isinstance(leaf, torch.Tensor) else leaf, tree)
    verify_collective(backend, f"reduce {reduction}", _tensors_of(tree, "reduce"))

    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        if reduction in ("max", "min"):
            by_rank = backend.all_gather(tensor.detach().unsqueeze(0))
            return scaled(by_rank.amax(0) if reduction == "max" else by_rank.amin(0))
        dtype = torch.int64 if tensor.dtype in _SUMMED_AS_INT64 else tensor.dtype
        total = tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        backend.all_reduce(total)
        return scaled(total / world_size if reduction == "mean" else total)

    return map_leaves(reduced, tree)


@torch.no_grad()
def broadcast(backend: Backend, tree: Any, from_process: int = 0) -> Any:
    """Fill the ranks' tensors with those of one rank, in place, and return them."""
    if backend.place.world_size == 1:
        return tree
    verify_collective(backend, f"broadcast from rank {from_process}", _tensors_of(tree, "broadcast"))

    def filled(tensor: torch.Tensor) -> torch.Tensor:
        backend.broadcast(tensor, from_process)
        return tensor

    return map_leaves(filled, tree)


def pad_across_processes(
    backend: Backend, tree: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Any:
    """Pad the ranks' tensors along one dimension to the length of the longest, so that they can be gathered.

    Pad with ``pad_index``, at the end or with ``pad_first`` at the beginning. Tensors without that dimension are left
    as they are.

    Raises:
        CollectiveError: Ranks have different numbers of tensors, or tensors that differ in another dimension.
    """
    if backend.place.world_size == 1:
        return tree
    own_shapes = [tuple(tensor.shape) for tensor in _tensors_of(tree, "pad_across_processes")]
    call = f"pad_across_processes along dimension {dim}"
    verify_collective(backend, call)
    by_rank: list[list[tuple[int, ...]]] = backend.all_gather_object(own_shapes)
    if len({tuple(_masked(shape, dim) for shape in shapes) for shapes in by_rank}) > 1:
        raise mismatch_error([f"{call} {shapes}" for shapes in by_rank])
    shapes_by_tensor = zip(*by_rank, strict=True)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        shapes = next(shapes_by_tensor)
        if not _has_dim(tensor.shape, dim):
            return tensor
        missing = list(tensor.shape)
        missing[dim] = max(shape[dim] for shape in shapes) - tensor.shape[dim]
        if missing[dim] == 0:
            return tensor
        padding = tensor.new_full(missing, pad_index)
        return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim)

    return map_leaves(padded, tree)


def _masked(shape: tuple[int, ...], dim: int) -> tuple[int | None, ...]:
    """Return the shape with its size along ``dim`` replaced by ``None``."""
    return tuple(None if _has_dim(shape, dim) and axis == dim % len(shape) else size for axis, size in enumerate(shape))


def _has_dim(shape: Sequence[int], dim: int) -> bool:
    return -len(shape) <= dim < len(shape)


def gather_object(backend: Backend, values: Any) -> list[Any]:
    """Concatenate the ranks' lists, in order of rank. Items can be any objects that pickle.

    Raises:
        TrainingError: ``values`` isn't a list or a tuple.
    """
    return [value for part in _gather_lists(backend, values) for value in part]


def _gather_lists(backend: Backend, values: Any) -> list[Any]:
    if not isinstance(values, (list, tuple)):
        raise TrainingError(
            f"Objects are gathered from a list on each rank; {type(values).__name__} isn't one.",
            fix="put it into a list: [value]",
        )
    verify_collective(backend, "gather objects")
    lists: list[Any] = backend.all_gather_object(values)
    return lists


def broadcast_object(backend: Backend, value: _T, from_process: int = 0) -> _T:
    """Return one rank's object on all ranks."""
    verify_collective(backend, f"broadcast an object from rank {from_process}")
    received: _T = backend.broadcast_object(value, from_process)
    return received


def scatter_object(backend: Backend, values: Sequence[Any] | None) -> Any:
    """Return rank 0's value for this rank. Only rank 0 gives ``values``, one for each rank."""
    verify_collective(backend, "take a batch that rank 0 has read")
    return backend.scatter_object(values)


def wait_for_everyone(backend: Backend) -> None:
    """Block until every rank has called this function."""
    if backend.compares_calls:
        verify_collective(backend, "wait for everyone")  # the comparison is a barrier itself
    else:
        backend.barrier()


@contextlib.contextmanager
def first(backend: Backend, *, is_first: bool) -> Iterator[None]:
    """Run the body on some ranks before the others, which are released even if the body raises on a first rank."""
    if not is_first:
        wait_for_everyone(backend)
    try:
        yield
    finally:
        if is_first:
            wait_for_everyone(backend)


def _tensors_of(tree: Any, operation: str) -> list[torch.Tensor]:
    leaves = leaves_of(tree)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise TrainingError(
                f"{operation} takes tensors; {type(leaf).__name__} isn't one.",
                fix="torch.tensor(number); gather_for_metrics([...], use_gather_object=True) gathers lists of objects",
            )
        if hasattr(leaf, "full_tensor"):
            raise TrainingError(
                f"{operation} takes tensors that each rank has whole, and this one is sharded over the ranks.",
                fix="tensor.full_tensor() gathers it; get_state_dict(model) gathers a model on rank 0",
            )
        if leaf.layout is not torch.strided or leaf.is_nested:
            raise TrainingError(
                f"{operation} takes dense tensors, and this one is {'nested' if leaf.is_nested else leaf.layout}.",
                fix="list(tensor.unbind()), with gather_for_metrics(..., use_gather_object=True)"
                if leaf.is_nested
                else "tensor.to_dense()",
            )
    return leaves


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def verify_collective(backend: Backend, operation: str, tensors: Sequence[torch.Tensor] = ()) -> None:
    """Raise ``CollectiveError`` on all ranks if their calls or tensors differ and the backend compares calls."""
    if backend.compares_calls:
        _compare(all_ranks(backend), operation + "".join(f" {_kind_of(tensor)}" for tensor in tensors))


def verify_model(backend: Backend, model: torch.nn.Module) -> None:
    """Raise ``CollectiveError`` on all ranks if they prepare models with different parameters, or make other calls."""
    if backend.place.world_size == 1:
        return
    parameters = [f"{name} {_kind_of(parameter)}" for name, parameter in model.named_parameters()]
    operation = f"prepare a {type(model).__name__} of {len(parameters)} parameters"
    if backend.compares_calls:
        _compare(backend, operation, parameters)
    else:
        _refuse_differences(backend, operation, parameters)


def mismatch_error(calls: Sequence[str]) -> CollectiveError:
    """Return the error that shows each rank's call, in order of rank."""
    by_rank = "\n".join(f"  rank {rank}: {call}" for rank, call in enumerate(calls))
    return CollectiveError(
        f"The ranks disagree about a collective:\n{by_rank}",
        why="All ranks have to call the same ones in the same order, with tensors of the same shapes and types.",
        fix="pad_across_processes for different lengths; keep collectives out of `if accelerator.is_main_process:`",
    )


def _compare(backend: Backend, call: str, details: Sequence[str] = ()) -> None:
    digest = zlib.crc32("\n".join([call, *details]).encode())
    digests = backend.all_gather(torch.tensor([digest]))
    if bool((digests != digests[0]).any()):
        _refuse_differences(backend, call, details)


def _refuse_differences(backend: Backend, call: str, details: Sequence[str]) -> None:
    where = code_places.describe(sys._getframe(1)).rpartition(" at ")[2]
    by_rank: list[tuple[str, Sequence[str], str]] = backend.all_gather_object((call, details, where))
    common = set.intersection(*(set(details) for _, details, _ in by_rank))
    calls = [f"{call}{_only(details, common)}" for call, details, _ in by_rank]
    if len(set(calls)) > 1:
        raise mismatch_error([f"{call} at {where}" for call, (_, _, where) in zip(calls, by_rank, strict=True)])


def _only(details: Sequence[str], common: set[str]) -> str:
    """Describe the first few details that not every rank has."""
    own = [detail for detail in details if detail not in common]
    shown = ", ".join(own[:_SHOWN_DIFFERENCES])
    more = f" and {len(own) - _SHOWN_DIFFERENCES} more" if len(own) > _SHOWN_DIFFERENCES else ""
    return f", with {shown}{more}" if own else ""


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"

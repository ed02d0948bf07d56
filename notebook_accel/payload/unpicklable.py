"""Pickling errors that name the object and the path to it from a name that the user knows."""

from __future__ import annotations

import contextlib
import functools
import pickle
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from notebook_accel.errors import PayloadError
from notebook_accel.formatting import format_size

_MOST_LISTED = 8
_MOST_STEPS = 8  # of a path

_TryPickle = Callable[[Any], "Exception | None"]


class OnDeviceError(pickle.PicklingError):
    """A tensor lives on a device, in memory that belongs to this process."""


class StaysError(pickle.PicklingError):
    """An object can't leave its process. ``why`` completes the sentence that names the object."""

    def __init__(self, obj: object, why: str) -> None:
        super().__init__(why)
        self.obj = obj


# Classes whose objects can be pickled within their process only, each with a function that raises ``StaysError``.
# Picklers for other processes have them in their ``dispatch_table``, which costs nothing for all other objects.
STAYING: dict[type, Callable[[Any], NoReturn]] = {}


def explain(roots: Mapping[str, Any], error: Exception, pickle_it: Callable[[Any], Any], advice: str) -> PayloadError:
    """Return the error that names the unpicklable object and the path to it.

    ``roots`` are the objects by the labels of messages, ``error`` that of pickling all of them together. ``pickle_it``
    pickles one object.
    """

    def try_pickle(obj: Any) -> Exception | None:
        try:
            pickle_it(obj)
        except Exception as error:  # noqa: BLE001 - whatever a user's __reduce__ raises is the reason
            return error
        return None

    visited: set[int] = set()
    for label, obj in roots.items():
        reason = try_pickle(obj)
        if reason is not None:
            path, culprit, reason = _descend(obj, [label], try_pickle, reason, visited)
            return _payload_error(path, culprit, reason, advice)
    # Each object alone can be pickled, so pickle's own message is the best explanation.
    return PayloadError(f"The objects can be pickled one by one, but not together: {error}", path=", ".join(roots))


def too_large(sizes_bytes: Mapping[str, int], available_bytes: int, *, is_all: bool = True) -> PayloadError:
    """Return the error that lists objects too large for memory. Unless ``is_all``, the last is measured in part."""
    ordered = sorted(sizes_bytes.items(), key=lambda entry: -entry[1])
    rest = sum(size_bytes for _, size_bytes in ordered[_MOST_LISTED:])
    listed = [f"  {label}: {format_size(size_bytes)}" for label, size_bytes in ordered[:_MOST_LISTED]]
    listed += [f"  others: {format_size(rest)}"] if rest else []
    total = format_size(sum(sizes_bytes.values()))
    return PayloadError(
        f"The objects to send don't fit into memory: they take {'' if is_all else 'at least '}{total}, "
        f"and {format_size(available_bytes)} is free.",
        path=ordered[0][0] if ordered else "",
        why="\n".join(["They would be copied once, for all receivers:", *listed]),
        fix="load it inside the cell or the function instead, from a file that all of them map: "
        'numpy.load(path, mmap_mode="r"), torch.load(path, mmap=True); or del what is no longer needed',
    )


def too_large_for_disk(sizes_bytes: Mapping[str, int], available_bytes: int) -> PayloadError:
    """Return the error for a detached run whose disk has no room for the objects. It names the largest."""
    largest = max(sizes_bytes, key=lambda label: sizes_bytes[label], default="")
    total = format_size(sum(sizes_bytes.values()))
    return PayloadError(
        f"The disk has no room for the objects: they take {total}, and {format_size(available_bytes)} is free.",
        path=largest,
        why="A detached run keeps on disk what is sent to the ranks, and what they return.",
        fix="make room on the disk, or set XDG_STATE_HOME to a folder on another local one",
    )


def too_large_for_limit(sizes_bytes: Mapping[str, int]) -> PayloadError:
    """Return the error for objects that are larger than this process may make a file. It names the largest."""
    return PayloadError(
        f"The objects take {format_size(sum(sizes_bytes.values()))}, and the limit on files is less (ulimit -f).",
        path=max(sizes_bytes, key=lambda label: sizes_bytes[label], default=""),
        why="Objects are sent in files, mostly in memory, which the limit counts too.",
        fix="ulimit -f unlimited, where Jupyter or the shell's command is started",
    )


def _payload_error(path: list[str], culprit: Any, reason: Exception, advice: str) -> PayloadError:
    if len(path) > _MOST_STEPS:
        half = _MOST_STEPS // 2
        path = [*path[:half], f"... {len(path) - _MOST_STEPS} more ...", *path[-half:]]
    way = " -> ".join(path)
    kind = type(culprit)
    named = _KINDS.get(kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    if isinstance(reason, OnDeviceError):
        return PayloadError(
            f"{way} is {reason}, which can't be sent to another process.",
            path=way,
            why="Its memory belongs to this process's device context.",
            fix="move it first with .cpu(), or make it inside the cell or the function",
        )
    if isinstance(reason, StaysError):
        return PayloadError(f"{way} can't be sent to another process: {reason}.", path=way, fix=advice)
    if _is_recursion(reason):
        return PayloadError(
            f"{way} can't be sent to another process: it is nested too deeply for pickle.",
            path=way,
            why="It has more objects inside each other than Python's recursion limit allows, or a method of it that "
            "pickle calls recurses without end.",
            fix="send it flat, such as a list of its nodes with the number of each one's parent, and link them later",
        )
    return PayloadError(
        f"{way} can't be sent to another process: it is {named}.",
        path=way,
        why=f"It can't be pickled ({type(reason).__name__}: {reason}).",
        fix=advice,
    )


_KINDS = {
    "socket": "an open socket",
    "generator": "a generator, which holds a running frame",
    "lock": "a lock",
    "RLock": "a lock",
    "TextIOWrapper": "an open file",
    "BufferedReader": "an open file",
    "BufferedWriter": "an open file",
    "FileIO": "an open file",
}


def _descend(
    obj: Any, path: list[str], try_pickle: _TryPickle, reason: Exception, visited: set[int]
) -> tuple[list[str], Any, Exception]:
    """Descend into unpicklable parts until all parts of one can be pickled. Return its path, itself and its error."""
    while True:
        visited.add(id(obj))
        if isinstance(reason, StaysError) and reason.obj is obj:
            return path, obj, reason
        if _is_recursion(reason) and len(path) > _MOST_STEPS:  # the next steps would be the same again
            return [*path[: _MOST_STEPS // 2], "..."], obj, reason
        for label, part in _parts(obj):
            part_reason = None if id(part) in visited else try_pickle(part)
            if part_reason is not None:
                obj, path, reason = part, [*path, label], part_reason
                break
        else:
            return path, obj, reason


def _is_recursion(reason: Exception) -> bool:
    """Return whether pickling has reached Python's recursion limit. cloudpickle wraps Python's error in its own."""
    return isinstance(reason, RecursionError) or isinstance(reason.__cause__, RecursionError)


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    for kinds, parts in _PARTS:
        if isinstance(obj, kinds):
            yield from parts(obj)
            break
    if not isinstance(obj, (type, types.ModuleType, types.FunctionType)):
        yield from ((f'attribute "{name}"', value) for name, value in getattr(obj, "__dict__", {}).items())
        yield from _slots(obj)


def _slots(obj: Any) -> Iterator[tuple[str, Any]]:
    for cls in type(obj).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(obj, name):
                yield f'attribute "{name}"', getattr(obj, name)


def _dict_parts(obj: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in list(obj.items()):
        yield f"key {key!r}", key
        yield f"item {key!r}", value


def _sequence_parts(obj: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"item {index}", value) for index, value in enumerate(list(obj)))


def _function_parts(obj: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f'closure variable "{name}"', cell.cell_contents
    for name in global_names(obj.__code__):
        if name in obj.__globals__:
            yield f'global "{name}"', obj.__globals__[name]
    yield from _sequence_parts(obj.__defaults__ or ())
    yield from _dict_parts(obj.__kwdefaults__ or {})
    yield from ((f'attribute "{name}"', value) for name, value in obj.__dict__.items())


def global_names(code: types.CodeType) -> list[str]:
    """Return the names that a function's code, nested code included, looks up as globals or attributes."""
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in global_names(const)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def class_members(kind: type) -> Iterator[Any]:
    """Yield the members of a class. Methods and properties come as the functions behind them."""
    for member in vars(kind).values():
        parts = [member.fget, member.fset, member.fdel] if isinstance(member, property) else [member]
        yield from (getattr(part, "__func__", part) for part in parts)


def _class_parts(obj: type) -> Iterator[tuple[str, Any]]:
    for base in obj.__bases__:
        yield f"base class {base.__qualname__}", base
    for name, value in list(vars(obj).items()):
        plain = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if name not in ("__dict__", "__weakref__"):
            yield f'attribute "{name}"', plain


def _method_parts(obj: types.MethodType) -> Iterator[tuple[str, Any]]:
    yield "its object", obj.__self__
    yield "its function", obj.__func__


def _partial_parts(obj: functools.partial[Any]) -> Iterator[tuple[str, Any]]:
    yield "its function", obj.func
    yield from _sequence_parts(obj.args)
    yield from _dict_parts(obj.keywords)


_PARTS: list[tuple[Any, Callable[[Any], Iterator[tuple[str, Any]]]]] = [
    (dict, _dict_parts),
    ((list, tuple, set, frozenset), _sequence_parts),
    (types.FunctionType, _function_parts),
    (types.MethodType, _method_parts),
    (functools.partial, _partial_parts),
    (type, _class_parts),
]

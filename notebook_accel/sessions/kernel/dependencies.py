"""Finds the notebook variables that an object depends on: those that its functions look up when they are called."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from notebook_accel.payload.unpicklable import global_names


def with_dependencies(names: Iterable[str], namespace: Mapping[str, Any]) -> list[str]:
    """Return these names and, transitively, those that the functions and classes among their values use."""
    found: dict[str, None] = {}
    waiting = [name for name in names if name in namespace]
    while waiting:
        name = waiting.pop(0)
        if name not in found:
            found[name] = None
            waiting += [
                used for used in _names_in(namespace[name], namespace) if used in namespace and used not in found
            ]
    return list(found)


def dependencies_of(value: Any, namespace: Mapping[str, Any]) -> list[str]:
    """Return the names that a value uses, transitively."""
    return with_dependencies(_names_in(value, namespace), namespace)


def _names_in(value: Any, namespace: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(value, types.FunctionType):
        if value.__globals__ is namespace:
            yield from global_names(value.__code__)
        for cell in value.__closure__ or ():
            contents = _contents(cell)
            if isinstance(contents, types.FunctionType) and contents is not value:
                yield from _names_in(contents, namespace)
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            yield from _names_in(wrapped, namespace)
    elif isinstance(value, type):
        for base in value.__mro__:
            if base.__module__ == "__main__":
                for part in vars(base).values():
                    for function in _functions_of(part):
                        yield from _names_in(function, namespace)
    elif type(value).__module__ == "__main__":
        yield from _names_in(type(value), namespace)


def _functions_of(part: Any) -> list[types.FunctionType]:
    parts = [part.fget, part.fset, part.fdel] if isinstance(part, property) else [getattr(part, "__func__", part)]
    return [part for part in parts if isinstance(part, types.FunctionType)]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None

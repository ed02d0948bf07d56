"""What a rank's names are and have, for completion and ``?``. Looks, and computes nothing. Runs in a rank."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["completions", "description"]

_DOTTED = re.compile(r"(?:[^\W\d]\w*\.)*(?:[^\W\d]\w*)?$")
_MOST_CHARACTERS = 4000
_NOT_THERE = object()
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def completions(namespace: Mapping[str, Any], text: str) -> list[str]:
    """What could stand for the dotted name at the end of ``text``, as a whole: ``model.weight`` for ``model.w``."""
    found = _DOTTED.search(text)
    path = found[0] if found is not None else ""
    owner, dot, begun = path.rpartition(".")
    if not dot:
        return sorted(name for name in namespace if name.startswith(begun) and (begun or not name.startswith("_")))
    obj = _resolve(namespace, owner)
    if obj is _NOT_THERE:
        return []
    names = [name for name in _dir(obj) if name.startswith(begun) and (begun or not name.startswith("_"))]
    return [f"{owner}.{name}" for name in sorted(names)]


def description(namespace: Mapping[str, Any], path: str) -> list[str]:
    """Lines about what a dotted name stands for; none if there is no such name."""
    obj = _resolve(namespace, path)
    if obj is _NOT_THERE:
        return []
    lines = []
    try:
        if callable(obj):
            lines.append(f"Signature: {path.rpartition('.')[2]}{inspect.signature(obj)}")
    except (TypeError, ValueError):  # some built-in ones have none
        pass
    lines.append(f"Type: {type(obj).__name__}")
    shape = getattr(obj, "shape", None)
    if isinstance(shape, tuple):
        lines.append(f"Shape: {tuple(shape)}, {getattr(obj, 'dtype', '')}")
    elif isinstance(obj, (*_PLAIN, list, tuple, dict, set)):
        lines += [f"Value: {_clipped(repr(obj))}"] if isinstance(obj, _PLAIN) else [f"Length: {len(obj)}"]
    documentation = inspect.getdoc(obj) if callable(obj) or inspect.ismodule(obj) else inspect.getdoc(type(obj))
    if documentation:
        lines += ["Docstring:", _clipped(documentation)]
    return lines


def _clipped(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " …"


def _resolve(namespace: Mapping[str, Any], path: str) -> Any:
    name, *attributes = path.split(".")
    obj = namespace.get(name, _NOT_THERE)
    for attribute in attributes:
        if obj is not _NOT_THERE:
            obj = _attribute(obj, attribute)
    return obj


def _attribute(obj: Any, name: str) -> Any:
    """An attribute that is there already. A property could compute anything, even something that all ranks do."""
    if not name.isidentifier() or keyword.iskeyword(name):
        return _NOT_THERE
    found = inspect.getattr_static(obj, name, _NOT_THERE)
    if found is _NOT_THERE:  # a part of a torch module is in one of three dictionaries
        parts = (
            vars(obj).get(kind, {}) for kind in ("_modules", "_parameters", "_buffers") if hasattr(obj, "__dict__")
        )
        return next((part[name] for part in parts if name in part), _NOT_THERE)
    if isinstance(found, property) or (hasattr(type(found), "__get__") and not callable(found)):
        return _NOT_THERE
    return (
        getattr(obj, name, _NOT_THERE) if callable(found) or isinstance(found, (staticmethod, classmethod)) else found
    )


def _dir(obj: Any) -> list[str]:
    names: list[object] = list(dir(obj))  # a __dir__ of the user's may give anything
    return [name for name in names if isinstance(name, str)]

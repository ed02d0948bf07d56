"""What a notebook can define, besides functions and classes, and cloudpickle doesn't send by value.

Each is taken apart into what its constructor takes. What can be imported is left to pickle, which sends its name.
"""

from __future__ import annotations

import functools
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["can_be_imported", "reduce"]


def reduce(obj: Any) -> Any:
    """What pickle's ``reducer_override`` returns for such an object, ``NotImplemented`` for any other."""
    reducer = _REDUCERS.get(type(obj))
    return NotImplemented if reducer is None or can_be_imported(obj) else reducer(obj)


def can_be_imported(obj: Any) -> bool:
    """Return whether a module has it under the name that it calls itself, so that its name is enough."""
    module = getattr(obj, "__module__", None)
    if module in (None, "__main__"):
        return False
    found: Any = sys.modules.get(module)
    for part in str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", "")).split("."):
        found = getattr(found, part, None)
    return found is obj


def _lru_cache(obj: Any) -> Any:
    """Its entries stay behind: they are a cache."""
    return functools.lru_cache(**obj.cache_parameters()), (obj.__wrapped__,)


def _cached_property(obj: Any) -> Any:
    return _make_cached_property, (obj.func, obj.attrname)


def _make_cached_property(func: Callable[[Any], Any], attrname: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(func)
    made.attrname = attrname  # classes set it when they are defined
    return made


def _new_type(obj: Any) -> Any:
    return typing.NewType, (obj.__name__, obj.__supertype__)


def _by_name(obj: Any) -> Any:
    return type(obj), (obj.__name__,)


def _function(obj: Any) -> Any:
    """A generic function of ``functools.singledispatch``; any other function is cloudpickle's."""
    if obj.__code__ is not _DISPATCHING:
        return NotImplemented
    return _make_generic, (dict(obj.registry),)


def _make_generic(registry: Mapping[type, Callable[..., Any]]) -> Any:
    generic: Any = functools.singledispatch(registry[object])
    for kind, function in registry.items():
        generic.register(kind, function)
    return generic


def _dispatching_method(obj: Any) -> Any:
    """Leave its methods bound so far behind, which Python 3.13 and later keep by weak references."""
    return _make_dispatching_method, (obj.func, obj.dispatcher)


def _make_dispatching_method(func: Callable[..., Any], dispatcher: Any) -> functools.singledispatchmethod[Any]:
    made = functools.singledispatchmethod(func)
    made.dispatcher = dispatcher
    return made


_generic: Any = functools.singledispatch(_function)
_DISPATCHING = _generic.__code__  # that of every generic function
_LruCache = type(functools.lru_cache(_function))
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    type(_function): _function,
    _LruCache: _lru_cache,
    functools.cached_property: _cached_property,
    functools.singledispatchmethod: _dispatching_method,
    typing.NewType: _new_type,
    typing.ParamSpec: _by_name,
}

if sys.version_info >= (3, 11):
    _REDUCERS[typing.TypeVarTuple] = _by_name
if sys.version_info >= (3, 12):

    def _alias(obj: Any) -> Any:
        return _make_alias, (obj.__name__, obj.__value__, obj.__type_params__)

    def _make_alias(name: str, value: Any, type_params: tuple[Any, ...]) -> Any:
        return typing.TypeAliasType(name, value, type_params=type_params)

    _REDUCERS[typing.TypeAliasType] = _alias

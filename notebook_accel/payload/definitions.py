"""Reductions of definitions, and of objects that go by name, where pickle and cloudpickle have none or a wrong one.

What every process has of its own goes by its import name: modules, the standard streams, and the instances that the
standard library, NumPy and torch keep as globals, such as ``os.environ`` and the random generator behind
``random.shuffle``. So do instances without state of any package, since they are only compared by identity.

Functions and classes of the notebook go by value, with all that their definitions have made of them.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import enum
import functools
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import cloudpickle

from notebook_accel.payload import unpicklable

_HOOK = "__init_subclass__"
_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
# Their global objects are each process's own.
_SHARED_PACKAGES = frozenset({*sys.stdlib_module_names, "numpy", "torch"})


def can_be_imported(obj: Any) -> bool:
    """Return whether a module has the object under the object's own name, so that pickling the name is enough."""
    module = getattr(obj, "__module__", None)
    if module in (None, "__main__"):
        return False
    found: Any = sys.modules.get(module)
    for part in str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", "")).split("."):
        found = getattr(found, part, None)
    return found is obj


def reduce_code(code: types.CodeType) -> Any:
    """Reduce code with its file name, which cloudpickle 3.1.3 leaves out: sources are found by it."""
    make, args = cloudpickle.cloudpickle._code_reduce(code)
    own = "".join(code.co_filename)  # a new string, so that equal code makes equal pickles
    return make, tuple(own if isinstance(arg, str) and arg == "<dynamic-code>" else arg for arg in args)


def completed(obj: Any, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return cloudpickle's reduction of a function or class of the notebook, with what cloudpickle leaves out."""
    if isinstance(obj, enum.EnumMeta):
        return _with_members(obj, reduced)
    if reduced[0] is cloudpickle.cloudpickle._make_skeleton_class:
        return _make_class, *reduced[1:]
    if reduced[0] is cloudpickle.cloudpickle._make_function:
        _complete(obj, reduced[2][1])
    return reduced


class ByName(dict[type, "Callable[[Any], Any] | None"]):
    """For each type, the function that reduces those of its objects that travel by name; ``None`` for most types.

    The function returns ``None`` for an object that travels by value.
    """

    def __missing__(self, kind: type) -> Callable[[Any], Any] | None:
        self[kind] = function = self._function(kind)
        return function

    def _function(self, kind: type) -> Callable[[Any], Any] | None:
        if issubclass(kind, types.ModuleType):  # such as torch.backends.cudnn; cloudpickle knows plain modules
            return None if kind is types.ModuleType else lambda module: _by_path(module, module.__name__)
        if kind is types.MethodType:
            return self._method
        if kind.__module__ == "torch._ops":  # operators, such as torch.ops.aten.add
            return lambda operator: _by_path(operator, f"torch.ops.{operator}")
        named = _named_instances(kind)
        return (lambda obj: named.get(id(obj))) if named else None

    def _method(self, method: types.MethodType) -> Any:
        reduce_by_name = self[type(method.__self__)]
        if reduce_by_name is None or reduce_by_name(method.__self__) is None:
            return None
        return getattr, (method.__self__, method.__func__.__name__)  # the receiver's object may have another class


def _named_instances(kind: type) -> dict[int, Any]:
    """Return how the instances of a type that travel by name are reduced, by their ids."""
    names = [("sys", name) for name in _STREAMS] + _globals_of_type(kind)
    found = [(module, name, vars(sys.modules[module]).get(name)) for module, name in names]
    return {id(obj): (_named, (module, name)) for module, name, obj in found if type(obj) is kind}


@functools.lru_cache(maxsize=1024)
def _globals_of_type(kind: type) -> list[tuple[str, str]]:
    """Return the globals of the type's module that are instances of it and travel by name: module and name of each."""
    home = str(getattr(kind, "__module__", ""))
    if home in ("__main__", "builtins") or not isinstance(sys.modules.get(home), types.ModuleType):
        return []
    is_shared = home.partition(".")[0] in _SHARED_PACKAGES
    contents = vars(sys.modules[home]).copy()
    return [(home, name) for name, obj in contents.items() if type(obj) is kind and (is_shared or _is_bare(obj))]


def _is_bare(obj: Any) -> bool:
    """Return whether an object has no state, by what pickle would keep of it."""
    try:
        make, arguments, *state = obj.__reduce_ex__(4)
    except Exception:  # noqa: BLE001 - whatever a class's own method raises
        return False
    return make is vars(copyreg)["__newobj__"] and len(arguments) == 1 and not any(part is not None for part in state)


def _by_path(obj: Any, path: str) -> Any:
    """Reduce an object to its dotted path below a module; ``None`` if it isn't found there."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        module, rest = ".".join(parts[:length]), ".".join(parts[length:])
        with contextlib.suppress(AttributeError):
            if module in sys.modules and _named(module, rest) is obj:
                return _named, (module, rest)
    return None


def _named(module: str, path: str) -> Any:
    """Return what a module has under a dotted path; the module itself for an empty one."""
    return functools.reduce(getattr, path.split(".") if path else (), importlib.import_module(module))


def submodules(names: set[str], values: Iterable[Any]) -> tuple[str, ...]:
    """Return modules that code with these names reaches as attributes of packages: ``import a.b`` binds only ``a``.

    ``values`` are the objects that the code reads by name; those that are modules count.
    """
    found: dict[str, None] = {}
    waiting = [value.__name__ for value in values if isinstance(value, types.ModuleType)]
    while waiting:
        package = waiting.pop()
        below = [full for full in (f"{package}.{name}" for name in sorted(names)) if full in sys.modules]
        waiting += [full for full in below if full not in found]
        found |= dict.fromkeys(below)
    return tuple(found)


def _complete(function: types.FunctionType, state: dict[str, Any]) -> None:
    """Add to cloudpickle's state of a function what its nested code uses.

    cloudpickle looks for submodules in the outer code only, and not for globals that a class in the function reads.
    """
    nested = [const for const in function.__code__.co_consts if isinstance(const, types.CodeType)]
    if not nested:
        return
    names = {name for code in nested for name in _names_in_classes(code) if not name.startswith("__")}
    state["__globals__"].update({name: function.__globals__[name] for name in names if name in function.__globals__})
    values = list(state["__globals__"].values())
    for cell in state["__closure__"] or ():
        with contextlib.suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    found = submodules(set(unpicklable.global_names(function.__code__)), values)
    state["_cloudpickle_submodules"] = [sys.modules[name] for name in found]


_CLASS_READS = ("LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


def _names_in_classes(code: types.CodeType) -> Iterator[str]:
    """Yield the names that bodies of classes in some code read: locals of the class, or globals."""
    if not code.co_flags & inspect.CO_OPTIMIZED:  # the body of a class
        yield from (item.argval for item in dis.get_instructions(code) if item.opname in _CLASS_READS)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names_in_classes(const)


def _make_class(kind: Any, name: str, bases: tuple[Any, ...], *others: Any) -> Any:
    """Make a class, to be filled, without the notebook's hooks: they ran when it was defined, and it is empty yet."""
    library = next(each for each in kind.__mro__ if each.__module__ != "__main__")
    make = kind if library is kind else functools.partial(library.__new__, kind)
    parents = {
        parent for base in types.resolve_bases(bases) for parent in base.__mro__ if parent.__module__ == "__main__"
    }
    hooks = {parent: vars(parent)[_HOOK] for parent in parents if _HOOK in vars(parent)}
    for parent in hooks:
        type.__delattr__(parent, _HOOK)
    try:
        return cloudpickle.cloudpickle._make_skeleton_class(make, name, bases, *others)
    finally:
        for parent, hook in hooks.items():
            type.__setattr__(parent, _HOOK, hook)


def _with_members(cls: enum.EnumMeta, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a reduced enum whose members have all that the class's own definition has made of them.

    cloudpickle makes the members from their values alone, without the methods and mixins that take part in it.
    """
    make, (bases, name, qualname, _, *others), state, *_ = reduced
    members: Mapping[str, Any] = cls.__members__
    if "_generate_next_value_" in vars(cls):  # for classes that extend one without members
        state[0]["_generate_next_value_"] = vars(cls)["_generate_next_value_"]
    base: Any = vars(cls)["_member_type_"]
    # The second: of a type whose instances can't be made again from what they are.
    if not members or (base.__new__ is not object.__new__ and not hasattr(base, "__getnewargs__")):
        return reduced
    made: dict[str, Any] = {"__new__": _make_member, "__init__": _leave_as_made}
    for member_name, member in members.items():
        # A list, since an enum takes a tuple apart.
        made[member_name] = [member.value, base.__getnewargs__(member) if hasattr(base, "__getnewargs__") else ()]
        state[0].pop(member_name, None)  # an alias
    own = [(member_name, {key: value for key, value in vars(member).items() if key not in _OF_ENUM})
           for member_name, member in members.items()]  # fmt: skip
    return make, (bases, name, qualname, made, *others), (state, own), None, None, _set_enum_state


_OF_ENUM = ("__objclass__", "_name_", "_sort_order_", "_value_")


def _make_member(cls: Any, made: Any) -> Any:
    value, arguments = made[0] if isinstance(made, tuple) else made  # an enum of tuples puts it into one
    member = cls._member_type_.__new__(cls, *arguments)
    member._value_ = value
    return member


def _leave_as_made(member: Any, *_: Any) -> None:
    """Stand in for an enum's ``__init__``, since the members' attributes come with the state."""


def _set_enum_state(cls: Any, state: tuple[Any, list[tuple[str, dict[str, Any]]]]) -> None:
    of_class, of_members = state
    if vars(cls).get("__init__") is _leave_as_made:
        del cls.__init__
    cloudpickle.cloudpickle._class_setstate(cls, of_class)
    for name, attributes in of_members:
        vars(cls.__members__[name]).update(attributes)


def _make_cached_property(func: Callable[[Any], Any], attrname: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(func)
    made.attrname = attrname  # classes set it when they are defined
    return made


def _function(obj: Any) -> Any:
    """Reduce a generic function of ``functools.singledispatch``. cloudpickle reduces all other functions."""
    if obj.__code__ is not _DISPATCHING:
        return NotImplemented
    return _make_generic, (dict(obj.registry),)


def _make_generic(registry: Mapping[type, Callable[..., Any]]) -> Any:
    generic: Any = functools.singledispatch(registry[object])
    for kind, function in registry.items():
        generic.register(kind, function)
    return generic


def _make_dispatching_method(func: Callable[..., Any], dispatcher: Any) -> functools.singledispatchmethod[Any]:
    made = functools.singledispatchmethod(func)
    made.dispatcher = dispatcher
    return made


_generic: Any = functools.singledispatch(_function)
_DISPATCHING = _generic.__code__  # all generic functions have this code
_LruCache = type(functools.lru_cache(_function))
# How definitions that cloudpickle can't reduce, or reduces wrongly, travel by value.
REDUCERS: dict[type, Callable[[Any], Any]] = {
    type(_function): _function,
    _LruCache: lambda obj: (functools.lru_cache(**obj.cache_parameters()), (obj.__wrapped__,)),  # without its entries
    functools.cached_property: lambda obj: (_make_cached_property, (obj.func, obj.attrname)),
    # Without the methods bound so far, which Python 3.13 and later keep by weak references.
    functools.singledispatchmethod: lambda obj: (_make_dispatching_method, (obj.func, obj.dispatcher)),
    typing.NewType: lambda obj: (typing.NewType, (obj.__name__, obj.__supertype__)),
    typing.ParamSpec: lambda obj: (typing.ParamSpec, (obj.__name__,)),
}

if sys.version_info >= (3, 11):
    REDUCERS[typing.TypeVarTuple] = lambda obj: (typing.TypeVarTuple, (obj.__name__,))
if sys.version_info >= (3, 12):

    def _make_alias(name: str, value: Any, type_params: tuple[Any, ...]) -> Any:
        return typing.TypeAliasType(name, value, type_params=type_params)

    REDUCERS[typing.TypeAliasType] = lambda obj: (_make_alias, (obj.__name__, obj.__value__, obj.__type_params__))

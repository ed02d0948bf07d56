"""Definitions other than functions and classes travel to the ranks, and come back as the notebook's own objects."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import cloudpickle
import pytest

from notebook_accel.payload import memory_files, serialization

NOTEBOOK = """
import functools, typing

@functools.lru_cache(maxsize=7)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

UserId = typing.NewType("UserId", int)
Spec = typing.ParamSpec("Spec")

class Squares:
    @functools.cached_property
    def all(self):
        return [n * n for n in range(fib(6))]

    @functools.singledispatchmethod
    def show(self, value): return "something"

    @show.register
    def _(self, value: int): return f"int {value}"

Squares().show(1)  # from here on it knows a method that it has bound

@functools.singledispatch
def name(value): return "object"

@name.register
def _(value: Squares): return "squares " + name(1)

@name.register(int)
def name_of_int(value): return "int"
"""

USES = """
def use():
    squares = Squares()
    return (fib(10), fib.cache_parameters()["maxsize"], UserId(3), UserId.__name__, squares.all, squares.show(4),
            squares.show("x"), name(squares), name(2), name(None), Spec.__name__)
"""

EXPECTED = (55, 7, 3, "UserId", [0, 1, 4, 9, 16, 25, 36, 49], "int 4", "something", "squares int", "int", "object",
            "Spec")  # fmt: skip


def notebook(source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(source, namespace)
    return namespace


def test_in_a_process_that_has_never_seen_the_notebook() -> None:
    namespace = notebook(NOTEBOOK + USES)
    descriptor = memory_files.memory_file("test")
    try:
        pickled = serialization.pickle_by_value(namespace["use"], roots={"use": namespace["use"]}, namespace=namespace)
        serialization.dump(descriptor, pickled)
        code = f"from notebook_accel.payload import serialization as s; print(s.load({descriptor}).value())"
        command = [sys.executable, "-c", code]
        run = subprocess.run(
            command, pass_fds=[descriptor], capture_output=True, text=True, timeout=60, check=False, cwd=os.getcwd()
        )
    finally:
        os.close(descriptor)
    assert run.stdout.strip() == repr(EXPECTED), run.stderr


@pytest.mark.parametrize("defined", ["fib", "UserId", "name"])
def test_they_come_back_as_the_notebooks_own(defined: str) -> None:
    namespace = notebook(NOTEBOOK)
    there: dict[str, Any] = {}
    out = serialization.pickle_by_value(namespace[defined], roots={}, namespace=namespace)
    opened = _through(out, namespace=there)
    by_value = [obj for _, obj in opened.by_value]
    back = serialization.pickle_by_value(opened.value, roots={}, origins=by_value)
    assert _through(back, origins=out.by_value).value is namespace[defined]


SLOTTED = """
import abc, collections, dataclasses, typing
T = typing.TypeVar("T")

@dataclasses.dataclass(slots=True)
class Point:
    x: int = 4

@dataclasses.dataclass(slots=True, frozen=True)
class Fixed:
    x: int = 4

class Plain: pass
class Tuple:
    __slots__ = ("x", "__y")
    def __init__(self): self.x, self.__y = 4, 5
    def both(self): return self.x, self.__y
class Inherits(Tuple): __slots__ = ("z",)
class OfPlain(Plain): __slots__ = ("x",)
class Both(Plain, Tuple): __slots__ = ()
class Unslotted(Tuple): pass
class Text: __slots__ = "x"
class PrivateText:
    __slots__ = "__x"
    def __init__(self): self.__x = 4
class Dict: __slots__ = {"x": "its documentation"}
class Open: __slots__ = ("x", "__dict__", "__weakref__")
class OnlyWeak: __slots__ = "__weakref__"
class Abstract(abc.ABC, typing.Generic[T]): __slots__ = ("x",)
class Empty: __slots__ = ()
class Pair(collections.namedtuple("Pair", "x y", defaults=(4, 5))): __slots__ = ()
class Named(typing.NamedTuple): x: int = 4
class Refers:
    __slots__ = ("x",)
Refers.one = Refers()
Refers.one.x = 4
"""


@pytest.mark.parametrize("name", [
    "Point", "Fixed", "Plain", "Tuple", "Inherits", "OfPlain", "Both", "Unslotted", "Text", "PrivateText", "Dict",
    "Open", "OnlyWeak", "Abstract", "Empty", "Pair", "Named", "Refers",
])  # fmt: skip
def test_slots_are_the_same_in_the_ranks_and_instances_travel_both_ways(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = notebook(SLOTTED)
    own = namespace[name]
    declared = own.__dict__.get("__slots__")
    here = own()
    for attribute in _takes(own, ("x", "z")):
        setattr(here, attribute, 4)
    out = serialization.pickle_by_value(here, roots={}, namespace=namespace)
    # Like another process, which doesn't know the class.
    monkeypatch.setattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", weakref.WeakValueDictionary())
    opened = _through(out, namespace={"__name__": "__main__"})
    there = opened.value
    assert type(there) is not own and own.__dict__.get("__slots__") is declared
    assert _takes(type(there), ATTRIBUTES) == _takes(own, ATTRIBUTES)
    assert _state(there) == _state(here)
    back = serialization.pickle_by_value(there, roots={}, origins=[obj for _, obj in opened.by_value])
    again = _through(back, origins=out.by_value).value
    assert type(again) is own and _state(again) == _state(here)


ATTRIBUTES = ("x", "z", "_Tuple__y", "_PrivateText__x", "typo", "__weakref__")


def _takes(cls: Any, attributes: Sequence[str]) -> list[str]:
    """Return the attributes that an instance may have, and ``__weakref__`` if it can have weak references."""
    found = []
    for name in attributes:
        with contextlib.suppress(AttributeError, TypeError):
            weakref.ref(cls()) if name == "__weakref__" else setattr(cls(), name, 1)
            found.append(name)
    return found


def _state(instance: Any) -> dict[str, Any]:
    names = ("x", "z", "_Tuple__y", "_PrivateText__x", "__dict__")
    return {name: getattr(instance, name) for name in names if hasattr(instance, name)}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="syntax of Python 3.12")
def test_type_parameters_and_aliases() -> None:
    namespace = notebook(
        "type Pair[T] = tuple[T, T]\n"
        "class Box[T]:\n"
        "    def first(self, pair: Pair[T]) -> T: return pair[0]\n"
        "def use[T, *Ts, **P](x: T) -> str:\n"
        "    return str([Pair.__value__, Pair[int], T, Ts, P.__name__, Box[int]().first((x, x))])"
    )
    pickled = serialization.pickle_by_value(namespace["use"], roots={}, namespace=namespace)
    there = _through(pickled, namespace={"__name__": "__main__"}).value
    assert there(3) == namespace["use"](3) == "[tuple[T, T], Pair[int], T, Ts, 'P', 3]"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has none")
def test_type_variable_tuple() -> None:
    namespace = notebook("import typing; Ts = typing.TypeVarTuple('Ts')")
    pickled = serialization.pickle_by_value(namespace["Ts"], roots={}, namespace=namespace)
    assert _through(pickled, namespace={}).value.__name__ == "Ts"


def _through(pickled: serialization.Pickled, **how: Any) -> serialization.Opened:
    descriptor = memory_files.memory_file("test")
    try:
        serialization.dump(descriptor, pickled)
        return serialization.load(descriptor, **how)
    finally:
        os.close(descriptor)


@functools.lru_cache
def of_this_module() -> int:
    return 1


def test_what_can_be_imported_goes_by_name() -> None:
    pickled = serialization.pickle_by_value(of_this_module, roots={})
    assert pickled.by_value == ()
    assert _through(pickled).value is of_this_module

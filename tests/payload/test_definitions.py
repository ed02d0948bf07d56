"""Definitions other than functions and classes travel to the ranks, and come back as the notebook's own objects."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any

import cloudpickle
import pytest
import torch

from notebook_accel.payload import memory_files, serialization

pytestmark = pytest.mark.front_end  # that lane has the oldest cloudpickle

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
    exec(compile(source, "notebook", "exec", dont_inherit=True), namespace)  # without this file's __future__
    return namespace


def elsewhere(value: Any, namespace: dict[str, Any]) -> str:
    """What a process that has never seen the notebook prints of the call of a function."""
    descriptor = memory_files.memory_file("test")
    try:
        pickled = serialization.pickle_by_value(value, roots={"value": value}, namespace=namespace)
        serialization.dump(descriptor, pickled)
        code = f"from notebook_accel.payload import serialization as s; print(s.load({descriptor}).value())"
        command = [sys.executable, "-c", code]
        run = subprocess.run(
            command, pass_fds=[descriptor], capture_output=True, text=True, timeout=60, check=False, cwd=os.getcwd()
        )
    finally:
        os.close(descriptor)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_in_a_process_that_has_never_seen_the_notebook() -> None:
    namespace = notebook(NOTEBOOK + USES)
    assert elsewhere(namespace["use"], namespace) == repr(EXPECTED)


ENUMS = """
import dataclasses, enum

class Planet(enum.Enum):
    MERCURY = (3.3, 2.4)
    EARTH = (5.9, 6.3)
    TERRA = (5.9, 6.3)
    def __init__(self, mass, radius): self.mass, self.radius = mass, radius
    @property
    def density(self): return self.mass / self.radius
    def home(self): return Planet.EARTH

class Axis(bytes, enum.Enum):
    def __new__(cls, value, label):
        member = bytes.__new__(cls, [value])
        member._value_, member.label = value, label
        return member
    X = (0, "x axis")
    Y = (1, "y axis")

@dataclasses.dataclass
class Size:
    size: str
    legs: int

class Animal(Size, enum.Enum):
    BEETLE = "small", 6
    DOG = "medium", 4

class Numbered(enum.Enum):
    def __new__(cls, *_):
        member = object.__new__(cls)
        member._value_ = len(cls.__members__) + 1
        return member
    FIRST = ()
    SECOND = ()

class Named(enum.Enum):
    def _generate_next_value_(name, start, count, last): return name.lower()

class Colour(Named):
    RED = enum.auto()

class Letter(str, enum.Enum):
    A = "a"
    def __init__(self, text): self.upper_case = text.upper()

class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2
    BOTH = 3

class Pair(tuple, enum.Enum):
    ONE = (1, 2)

class Unhashable(enum.Enum):
    LIST = [1]

class Loose(enum.Enum):
    KNOWN = 1
    @classmethod
    def _missing_(cls, value): return cls.KNOWN

ALL = [Planet, Axis, Animal, Numbered, Colour, Letter, Rights, Pair, Unhashable, Loose]

def use():
    members = [(kind.__name__, name, member.name, str(member.value), type(member) is kind, kind[name] is member,
                kind(member.value) is member, sorted(str(item) for item in vars(member).items() if item[1] is not kind))
               for kind in ALL for name, member in kind.__members__.items()]
    class Shade(Named):
        DARK = enum.auto()
    return members, [
        Planet.EARTH.density, Planet.MERCURY.home() is Planet.EARTH, Planet["TERRA"] is Planet.EARTH,
        Axis.Y == bytes([1]), Axis.X.label, Animal.DOG.legs, Numbered.SECOND.value, Letter.A.upper_case, Letter.A + "b",
        int(Rights.READ | 2),
        (Rights.READ | Rights.WRITE) is Rights.BOTH, Pair.ONE[1], Loose(7), Shade.DARK.value]
"""


def test_enums_keep_what_their_definitions_make_of_the_members() -> None:
    namespace = notebook(ENUMS)
    assert elsewhere(namespace["use"], namespace) == str(namespace["use"]())


def test_enum_that_is_sent_again_stays_one_class() -> None:
    namespace = notebook(ENUMS)
    sent = [serialization.pickle_by_value(namespace["Planet"], roots={}, namespace=namespace) for _ in range(2)]
    first, second = (through(pickled, namespace={}).value for pickled in sent)
    assert first is second
    assert second.EARTH.density == namespace["Planet"].EARTH.density


BY_NAME = """
import argparse, dataclasses, random, sys, xml
import numpy, torch, xml.dom.minidom, xml.etree.ElementTree
import torch.backends.cudnn as cudnn
from dataclasses import KW_ONLY, MISSING
from logging import lastResort
from numpy import _NoValue
from numpy.random import rand
from os import environ
from random import Random, shuffle
from secrets import choice
from torch import default_generator

def seed_everything(seed):
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True

class Net(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ops, self.classes, self.config, self.rnn, self.special = [1], ["a", "b"], config, 2, 3
    def forward(self): return torch.tensor(len(self.classes) + len(self.ops) + self.rnn).item()

arguments, own, add, write = argparse.Namespace(deterministic=True), Random(3), torch.ops.aten.add, sys.stdout.write

def defaults(of=MISSING, file=sys.stdout, errors=sys.stderr):
    return of is dataclasses.MISSING, file is sys.stdout, errors is sys.stderr

@dataclasses.dataclass
class Settings:
    rate: float = 1.0
    _: KW_ONLY
    names: list = dataclasses.field(default_factory=list)

def nested():
    def inner(): return xml.dom.minidom.parseString("<a/>").documentElement.tagName
    return inner(), (lambda: [xml.etree.ElementTree.fromstring("<b/>").tag for _ in range(1)])()

def use():
    seed_everything(5)
    drawn = list(range(9))
    shuffle(drawn)
    cudnn.benchmark = True
    return [
        drawn, rand(), own.random(), choice([4]), Net({})(), arguments.deterministic,
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark,
        add(torch.ones(1), 1).item(), write(""),
        environ is sys.modules["os"].environ, default_generator is torch.default_generator, defaults(), nested(),
        [field.default is MISSING for field in dataclasses.fields(Settings)], _NoValue is numpy._NoValue,
        lastResort is sys.modules["logging"].lastResort]
"""

COMPILED = """
import sys, torch, torch._dynamo.config as dynamo_config
compiled = torch.compile(lambda x: torch.sin(x) * 0, backend="eager")
def use(): return compiled(torch.ones(1)).item(), dynamo_config is sys.modules["torch._dynamo.config"]
"""


# Takes over 3 s: another process imports all that the notebook has imported.
def test_what_every_process_has_of_its_own_goes_by_name() -> None:
    namespace = notebook(BY_NAME)
    there = elsewhere(namespace["use"], namespace)
    is_deterministic = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    try:
        assert there == str(namespace["use"]())
    finally:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = is_deterministic


@pytest.mark.slow
def test_compiled_function_and_the_settings_of_its_compiler() -> None:
    namespace = notebook(COMPILED)
    assert elsewhere(namespace["use"], namespace) == str(namespace["use"]()) == "(0.0, True)"


def test_other_instances_go_by_value_since_the_notebook_may_have_changed_them() -> None:
    settings = cloudpickle.cloudpickle.__dict__.setdefault("_settings_of_a_test", types.SimpleNamespace(rate=1.0))
    settings.rate = 3.0
    there = through(serialization.pickle_by_value(settings, roots={})).value
    assert there is not settings and there.rate == 3.0


REGISTRIES = """
import abc
NAMES, KINDS = [], {}

class Base:
    registry = {}
    def __init_subclass__(cls, key, **others):
        super().__init_subclass__(**others)
        Base.registry[key] = cls
        NAMES.append(cls.title)

class Square(Base, key="square"):
    title = "a square"
    def area(self): return 4

class Meta(abc.ABCMeta):
    def __new__(mcs, name, bases, contents):
        if "area" not in contents: raise TypeError(f"{name} has no area")
        return super().__new__(mcs, name, bases, contents)
    def __init__(cls, name, bases, contents):
        super().__init__(name, bases, contents)
        KINDS[name] = cls

class Circle(metaclass=Meta):
    @abc.abstractmethod
    def area(self): ...

class Disc(Circle):
    def area(self): return 3

def use():
    class Late(Base, key="late"):
        title = "late"
    return [Square().area(), Base.registry["square"] is Square, Base.registry["late"] is Late, NAMES,
            KINDS["Disc"] is Disc, Disc().area(), isinstance(Disc, Meta), sorted(KINDS), Circle.__abstractmethods__]
"""


def test_hooks_of_a_definition_ran_once_and_run_for_new_classes() -> None:
    namespace = notebook(REGISTRIES)
    assert elsewhere(namespace["use"], namespace) == str(namespace["use"]())


def test_code_keeps_the_file_name_by_which_its_source_is_found() -> None:
    exec(
        compile("def outer():\n    def inner(): raise KeyError\n    inner()", "cell 7", "exec"),
        namespace := notebook(""),
    )
    there = through(
        serialization.pickle_by_value(namespace["outer"], roots={}, namespace=namespace), namespace={}
    ).value
    with pytest.raises(KeyError) as raised:
        there()
    assert [entry.frame.code.raw.co_filename for entry in raised.traceback[1:]] == ["cell 7", "cell 7"]


@pytest.mark.parametrize("defined", ["fib", "UserId", "name"])
def test_they_come_back_as_the_notebooks_own(defined: str) -> None:
    namespace = notebook(NOTEBOOK)
    there: dict[str, Any] = {}
    out = serialization.pickle_by_value(namespace[defined], roots={}, namespace=namespace)
    opened = through(out, namespace=there)
    by_value = [obj for _, obj in opened.by_value]
    back = serialization.pickle_by_value(opened.value, roots={}, origins=by_value)
    assert through(back, origins=out.by_value).value is namespace[defined]


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
    opened = through(out, namespace={"__name__": "__main__"})
    there = opened.value
    assert type(there) is not own and own.__dict__.get("__slots__") is declared
    assert _takes(type(there), ATTRIBUTES) == _takes(own, ATTRIBUTES)
    assert _state(there) == _state(here)
    back = serialization.pickle_by_value(there, roots={}, origins=[obj for _, obj in opened.by_value])
    again = through(back, origins=out.by_value).value
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
    there = through(pickled, namespace={"__name__": "__main__"}).value
    assert there(3) == namespace["use"](3) == "[tuple[T, T], Pair[int], T, Ts, 'P', 3]"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has none")
def test_type_variable_tuple() -> None:
    namespace = notebook("import typing; Ts = typing.TypeVarTuple('Ts')")
    pickled = serialization.pickle_by_value(namespace["Ts"], roots={}, namespace=namespace)
    assert through(pickled, namespace={}).value.__name__ == "Ts"


def through(pickled: serialization.Pickled, **how: Any) -> serialization.Opened:
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
    assert through(pickled).value is of_this_module

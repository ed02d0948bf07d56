"""A rank's ``__main__``, in the rank: separates the rank's own variables from the notebook's; completion and ``?``.

A variable that a session's cell has assigned is the rank's own: the notebook's value doesn't replace it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import keyword
import os
import re
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from notebook_accel.errors import PayloadError
from notebook_accel.formatting import clipped
from notebook_accel.launching.ranks import worker
from notebook_accel.launching.spec import JobSpec
from notebook_accel.payload import memory_files, serialization, sharded_tensors
from notebook_accel.protocol.session_messages import Delivery
from notebook_accel.sessions import shared_parts

_MISSING = object()
_DOTTED = re.compile(r"(?:[^\W\d]\w*\.)*(?:[^\W\d]\w*)?$")
_MOST_CHARACTERS = 4000
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class SealedDelivery(NamedTuple):
    """The contents of a sealed file."""

    names: dict[str, Any]  # variables
    shared: list[Any]  # objects that get numbers
    # Tensors to write to, with their new values (``None``: the rank's own) and with ``requires_grad``.
    written: Sequence[tuple[Any, Any, bool]]
    # Optimizers to write to, with their defaults, parameter groups and state (``None``: the rank's own), and whether
    # all settings of the groups replace the rank's, or only those that the notebook has changed.
    settings: Sequence[tuple[Any, dict[str, Any], list[dict[str, Any]], Any, bool]]
    submodules: tuple[str, ...]  # modules to import
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None  # a function with its arguments


class NamespaceTracker:
    """Distinguishes a rank's own variables from those that came from the notebook."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._given = set(namespace)  # names that every rank has from its start
        # Values from the notebook, held weakly; ``_MISSING`` once the rank has deleted the name.
        self._taken: dict[str, Callable[[], Any]] = {}
        self.objects: dict[int, Any] = {}  # from the notebook, by the numbers by which later deliveries refer to them
        self._tensor_numbers: dict[int, dict[str, int]] = {}  # of each model, by its number and their names
        # The notebook's settings of each of its optimizers, without what schedules here have made of them.
        self._settings: weakref.WeakKeyDictionary[Any, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
        # To the objects that are held weakly while code runs; empty once ``objects`` has changed.
        self._references: dict[int, weakref.ref[Any]] = {}

    @property
    def definitions(self) -> Mapping[int, Any]:
        """The notebook's functions and classes, which return to the notebook as references."""
        kinds = (type, types.FunctionType)
        return {number: obj for number, obj in self.objects.items() if isinstance(obj, kinds)}

    def take(self, delivery: Delivery, descriptor: int) -> Any:
        """Open a delivery and bind its names. Return its function call, ``None`` if it has none."""
        before = dict(self._namespace)
        self._follow_models()
        try:
            opened = serialization.load(descriptor, namespace=self._namespace, origins=self.objects)
            contents: SealedDelivery = opened.value
            for tensor, values, requires_grad in contents.written:
                shared_parts.write(tensor, values, requires_grad=requires_grad)
            for optimizer, defaults, groups, state, is_pushed in contents.settings:
                known = [] if is_pushed else self._settings[optimizer]
                shared_parts.set_up(optimizer, defaults, groups, state, known)
                self._settings[optimizer] = shared_parts.settings(groups)
        except BaseException:  # otherwise names that have arrived would count as the rank's own, and not be sent again
            for name in self._namespace.keys() - before.keys():
                del self._namespace[name]
            self._namespace.update(before)
            raise
        # Functions bring the globals that they use. These must not replace variables that the rank has.
        self._namespace.update(before)
        arrived = {name: obj for name, obj in opened.by_value if name is not None and name not in before}
        arrived.update(
            (name, obj) for name, obj in contents.names.items() if name in delivery.pushed or not self.is_own(name)
        )
        self._namespace.update(arrived)
        for name in self._namespace.keys() - before.keys() | arrived.keys():
            self._taken[name] = _reference(self._namespace[name])
        self._references = {}
        for number in delivery.forgotten:
            self.objects.pop(number, None)
            self._tensor_numbers.pop(number, None)
        self._number(zip(delivery.shared, contents.shared, strict=True))
        definitions = zip(delivery.by_value, (obj for _, obj in opened.by_value), strict=True)
        self._number((number, obj) for number, obj in definitions if number >= 0)
        for name in contents.submodules:
            with contextlib.suppress(ImportError):  # code that needs the module raises by itself
                importlib.import_module(name)
        return contents.call

    def count_as_pulled(self, numbers: Mapping[str, Sequence[int]]) -> list[str]:
        """Give the parts of variables, by the variables' names, the numbers of the notebook's copies of them.

        Return the names of the variables that the rank has, with as many parts.
        """
        done = []
        for name in numbers.keys() & self._namespace.keys():
            parts = shared_parts.parts(self._namespace[name]) if numbers[name] else []
            if len(parts) == len(numbers[name]):
                self._number(list(zip(numbers[name], parts, strict=True)))
                done.append(name)
        return done

    def _number(self, numbered: Iterable[tuple[int, Any]]) -> None:
        """Let later deliveries refer to objects by these numbers."""
        new = dict(numbered)
        self._references = {}
        self.objects.update(new)
        numbers = {id(obj): number for number, obj in new.items()}
        for number, obj in new.items():
            if shared_parts.is_optimizer(obj) and obj not in self._settings:
                self._settings[obj] = shared_parts.settings(obj.param_groups)
            if shared_parts.is_model(obj):
                known = [each for each in shared_parts.tensors(obj).items() if id(each[1]) in numbers]
                self._tensor_numbers[number] = {name: numbers[id(tensor)] for name, tensor in known}

    def _follow_models(self) -> None:
        """Let numbers refer to the tensors that models hold by now: moving a model to a device replaces its buffers."""
        for number in self._tensor_numbers:
            for module in self.objects[number].modules():
                if sharded_tensors.is_sharded_module(module):
                    module.reshard()  # a block that a forward pass has gathered has whole parameters for a while
        self._number_tensors_of_models()

    def _number_tensors_of_models(self) -> None:
        self._references = {}
        for number, numbers in self._tensor_numbers.items():
            tensors = shared_parts.tensors(self.objects[number])
            self.objects.update((numbers[name], tensor) for name, tensor in tensors.items() if name in numbers)

    def is_own(self, name: str) -> bool:
        """Return whether the rank itself has bound this name, to another value than the notebook's."""
        value = self._namespace.get(name, _MISSING)
        return value is not _MISSING and name not in self._given and self._taken.get(name, _missing)() is not value

    def let_go(self) -> None:
        """Hold the notebook's objects weakly from now on, so that the rank's code can free them."""
        if not self._references:
            for number, obj in self.objects.items():
                if not isinstance(obj, shared_parts.BY_NAME):
                    with contextlib.suppress(TypeError):  # a dict, for example, has no weak references
                        self._references[number] = weakref.ref(obj)
        for number in self._references:
            self.objects.pop(number, None)

    def hold(self) -> list[int]:
        """Hold the notebook's objects again, since a delivery may refer to them. Return the numbers of lost ones."""
        references = self._references
        found = {number: obj for number, refer in references.items() if (obj := refer()) is not None}
        self.objects.update(found)
        if len(found) == len(references):
            return []
        lost = references.keys() - found.keys()
        for number in lost:
            self._tensor_numbers.pop(number, None)
        self._number_tensors_of_models()  # some may be buffers that models have replaced
        return sorted(lost - self.objects.keys())

    def hand_over(self) -> tuple[list[str], list[str]]:
        """Forget a kernel's numbers of objects, since the next kernel uses others.

        Return the rank's own names, and the names of the notebook's values other than modules.
        """
        self.objects.clear()
        self._references.clear()
        self._tensor_numbers.clear()
        sent = [
            name
            for name, refer in self._taken.items()
            if name in self._namespace and not self.is_own(name) and not isinstance(refer(), types.ModuleType)
        ]
        return self.own(), sorted(sent)

    def own(self) -> list[str]:
        """Return the names that the rank itself has bound."""
        return sorted(name for name in list(self._namespace) if self.is_own(name))  # threads may bind others

    def deleted(self) -> list[str]:
        """Return the names that came from the notebook and that the rank no longer has. Release their values."""
        names = [name for name in self._taken if name not in self._namespace]
        self._taken.update(dict.fromkeys(names, _missing))
        return sorted(names)


def _missing() -> Any:
    return _MISSING


def _reference(obj: Any) -> Callable[[], Any]:
    """Return a weak reference, a strong one to an object of a kind that has none. It gives ``_MISSING`` in the end."""
    try:
        refer = weakref.ref(obj)
    except TypeError:
        return lambda: obj
    return lambda: _MISSING if (found := refer()) is None else found


def share_with_workers(namespace: dict[str, Any], spec: JobSpec) -> None:
    """Give processes that multiprocessing starts by spawn or forkserver the definitions of this rank's ``__main__``.

    They fill their ``__main__`` from the run's payload, and a session's has nothing of what came later. So whenever a
    process starts, a new file with the present definitions takes the payload's descriptor.
    """
    payload = int(os.environ[worker.NAMESPACE_VARIABLE].rpartition("/")[2])
    spawn: Any = importlib.import_module("multiprocessing.spawn")
    prepare = spawn.get_preparation_data  # multiprocessing calls it for each process, before the start

    def prepare_with_definitions(name: str) -> Any:
        descriptor = memory_files.memory_file("notebook-accel-definitions")
        try:
            serialization.dump(descriptor, _pickled_definitions(namespace), spec.encode())
            os.dup2(descriptor, payload, inheritable=False)
        finally:
            os.close(descriptor)
        return prepare(name)

    spawn.get_preparation_data = prepare_with_definitions


def _pickled_definitions(namespace: dict[str, Any]) -> serialization.Pickled:
    """Pickle the functions and classes of ``__main__`` and the variables that they use, if these can be pickled."""

    def pickled(names: dict[str, Any]) -> serialization.Pickled:
        return serialization.pickle_by_value(worker.Target(names), roots={}, namespace=namespace)

    def can_be_pickled(name: str) -> bool:
        with contextlib.suppress(PayloadError):
            return bool(pickled({name: found[name]}))
        return False

    kinds = (type, types.FunctionType)
    found = {k: v for k, v in list(namespace.items()) if isinstance(v, kinds) and v.__module__ == "__main__"}
    try:
        return pickled(found)
    except PayloadError:
        return pickled({name: definition for name, definition in found.items() if can_be_pickled(name)})


def completions(namespace: Mapping[str, Any], text: str) -> list[str]:
    """Complete the dotted name at the end of ``text``. Return whole names: ``model.weight`` for ``model.w``."""
    owner, dot, begun = _DOTTED.findall(text)[0].rpartition(".")
    if not dot:
        return sorted(name for name in namespace if name.startswith(begun) and (begun or not name.startswith("_")))
    obj = _resolve(namespace, owner)
    if obj is _MISSING:
        return []
    found_there: list[object] = list(dir(obj))  # the user's __dir__ may return anything
    names = [name for name in found_there if isinstance(name, str) and name.startswith(begun)]
    return [f"{owner}.{name}" for name in sorted(names) if begun or not name.startswith("_")]


def description(namespace: Mapping[str, Any], path: str) -> list[str]:
    """Return lines that describe a dotted name; none if there is no such name."""
    obj = _resolve(namespace, path)
    if obj is _MISSING:
        return []
    lines = []
    try:
        if callable(obj):
            lines.append(f"Signature: {path.rpartition('.')[2]}{inspect.signature(obj)}")
    except (TypeError, ValueError):  # some built-in functions have no signature
        pass
    lines.append(f"Type: {type(obj).__name__}")
    shape = getattr(obj, "shape", None)
    if isinstance(shape, tuple):
        lines.append(f"Shape: {tuple(shape)}, {getattr(obj, 'dtype', '')}")
    elif isinstance(obj, _PLAIN):
        lines.append(f"Value: {clipped(repr(obj), _MOST_CHARACTERS)}")
    elif isinstance(obj, (list, tuple, dict, set)):
        lines.append(f"Length: {len(obj)}")
    documentation = inspect.getdoc(obj) if callable(obj) or inspect.ismodule(obj) else inspect.getdoc(type(obj))
    if documentation:
        lines += ["Docstring:", clipped(documentation, _MOST_CHARACTERS)]
    return lines


def _resolve(namespace: Mapping[str, Any], path: str) -> Any:
    name, *attributes = path.split(".")
    obj = namespace.get(name, _MISSING)
    for attribute in attributes:
        if obj is not _MISSING:
            obj = _attribute(obj, attribute)
    return obj


def _attribute(obj: Any, name: str) -> Any:
    """Return an attribute without running code: a property might run anything, even a collective."""
    if not name.isidentifier() or keyword.iskeyword(name):
        return _MISSING
    found = inspect.getattr_static(obj, name, _MISSING)
    if found is _MISSING:  # torch keeps a module's submodules, parameters and buffers in dictionaries
        kinds = ("_modules", "_parameters", "_buffers") if hasattr(obj, "__dict__") else ()
        parts = (vars(obj).get(kind, {}) for kind in kinds)
        return next((part[name] for part in parts if name in part), _MISSING)
    if isinstance(found, property) or (hasattr(type(found), "__get__") and not callable(found)):
        return _MISSING
    return getattr(obj, name, _MISSING) if callable(found) else found

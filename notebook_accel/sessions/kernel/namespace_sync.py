"""Namespace sync: the kernel tracks each rank's notebook variables, to send a value once, and again after a change.

An object that the ranks already have is sent as a reference: an optimizer that is sent after its model updates the
parameters of the model that the ranks have, not of a copy.

A variable has changed if its name is bound to another object, if a small object pickles differently than before, or if
a tensor or a model's parameter was written to, which torch counts. Writes into a large array go unnoticed.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from notebook_accel.errors import PayloadError
from notebook_accel.launching.kernel import run_payload
from notebook_accel.payload import memory_files, serialization
from notebook_accel.payload.unpicklable import global_names
from notebook_accel.protocol.session_messages import Delivery
from notebook_accel.sessions.kernel.interrupts import held
from notebook_accel.sessions.ranks.namespace import SealedDelivery

_SMALL_BYTES = 1 << 14
_BY_NAME = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Notebook variables and objects that a request needs.

    Attributes:
        names: Notebook variables that the code uses.
        by_force: Names whose values replace the ranks' own.
        optional_names: Names that are left out if they can't be sent.
        submodules: Modules to import.
        call: A function with its arguments.
    """

    names: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    by_force: Sequence[str] = ()
    optional_names: Sequence[str] = ()
    submodules: tuple[str, ...] = ()
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None


class Fingerprint:
    """A value's state when it was sent. Refers to large values weakly, so that it doesn't keep them in memory."""

    def __init__(self, value: Any, pickled_bytes: int) -> None:
        self._refer = _reference(value)
        self._digest = _digest(value) if pickled_bytes <= _SMALL_BYTES and not isinstance(value, _BY_NAME) else None
        self._versions = _versions(value)

    def matches(self, value: Any) -> bool:
        if self._refer() is not value or self._versions != _versions(value):
            return False
        return self._digest is None or self._digest == _digest(value)


@dataclasses.dataclass(frozen=True)
class Parcel:
    """A sealed file for some ranks, which have earlier values of the variables in ``again``."""

    ranks: tuple[int, ...]
    delivery: Delivery
    descriptor: int
    fingerprints: Mapping[str, Fingerprint]
    again: tuple[str, ...]


@dataclasses.dataclass
class _SentVariables:
    """The variables of a rank: its own names, the fingerprints of values sent to it, and the numbers of its objects.

    A fingerprint is ``None`` for a value that an earlier notebook has sent and this one doesn't have.
    """

    own: set[str] = dataclasses.field(default_factory=set)
    fingerprints: dict[str, Fingerprint | None] = dataclasses.field(default_factory=dict)
    numbers: set[int] = dataclasses.field(default_factory=set)


class NamespaceSync:
    """Tracks the variables of a session's ranks. Used by the thread that runs cells."""

    def __init__(self, world_size: int) -> None:
        self._ranks = [_SentVariables() for _ in range(world_size)]
        self._objects: dict[int, Callable[[], Any]] = {}
        self._numbers: dict[int, int] = {}
        self._next = 0

    # State of the ranks ---------------------------------------------------------------------------------------------

    def note(self, rank: int, bound: Iterable[str], unbound: Iterable[str]) -> None:
        """Record the names that a rank has bound itself, and the names that it no longer has."""
        own = self._ranks[rank].own
        own.update(bound)
        own.difference_update(unbound)

    def take_over(self, names: Mapping[int, tuple[Sequence[str], Sequence[str]]]) -> None:
        """Take over ranks that have variables from an earlier notebook.

        The ranks' variables win over this notebook's present values; later changes here are sent. Functions and classes
        of this notebook win.

        Args:
            names: Each rank's own names, and the names of values that the earlier notebook has sent.
        """
        here = sys.modules["__main__"].__dict__
        known = {name: _as_sent(here, name) for _, sent in names.values() for name in sent}
        for rank, (own, sent) in names.items():
            self._ranks[rank] = _SentVariables(set(own), {name: known[name] for name in sent})

    def forget(self, rank: int) -> None:
        """Forget the variables of a rank whose process was replaced by a fresh one."""
        self._ranks[rank] = _SentVariables()

    @property
    def origins(self) -> Mapping[int, Any]:
        """The notebook's objects by the numbers by which values from ranks refer to them."""
        return {number: refer() for number, refer in self._objects.items()}

    # Sending ---------------------------------------------------------------------------------------------------------

    def pack(self, inputs: Inputs, ranks: Sequence[int]) -> list[Parcel]:
        """Seal the inputs that these ranks don't have yet. Ranks that lack the same inputs share a file.

        The caller closes the files.

        Raises:
            PayloadError: A value can't be sent.
        """
        made: list[Parcel] = []
        try:
            for names, of_ranks in self._needs(inputs, ranks):
                if names or inputs.call is not None:
                    made.append(self._parcel(inputs, names, of_ranks))
        except BaseException:
            for parcel in made:
                os.close(parcel.descriptor)
            raise
        return made

    def sent(self, parcel: Parcel, *, lacking: Collection[int]) -> None:
        """Record that a parcel's ranks have its contents, except ``lacking`` ranks, which failed to open all of it."""
        for rank in parcel.ranks:
            state = self._ranks[rank]
            if rank in lacking:
                for name in parcel.fingerprints:
                    state.fingerprints.pop(name, None)
                state.numbers.difference_update(parcel.delivery.numbers)
                continue
            state.fingerprints.update(parcel.fingerprints)
            state.own.difference_update(parcel.delivery.by_force)
            state.numbers.difference_update(parcel.delivery.forgotten)
            state.numbers.update(number for number in parcel.delivery.numbers if number >= 0)

    def _needs(self, inputs: Inputs, ranks: Sequence[int]) -> list[tuple[dict[str, Any], tuple[int, ...]]]:
        by_names: dict[tuple[str, ...], list[int]] = {}
        for rank in ranks:
            by_names.setdefault(self._needed_by(rank, inputs), []).append(rank)
        return [({name: inputs.names[name] for name in names}, tuple(of)) for names, of in by_names.items()]

    def _needed_by(self, rank: int, inputs: Inputs) -> tuple[str, ...]:
        fingerprints = self._ranks[rank].fingerprints
        return tuple(
            name
            for name, value in inputs.names.items()
            if name in inputs.by_force
            or (not self._is_own_somewhere(name) and not _match(fingerprints.get(name), value))
        )

    def _is_own_somewhere(self, name: str) -> bool:
        """Return whether any rank has bound this name itself.

        Such a name isn't sent unasked: otherwise some ranks would silently have their own value, others the notebook's.
        """
        return any(name in state.own for state in self._ranks)

    def _parcel(self, inputs: Inputs, names: dict[str, Any], ranks: tuple[int, ...]) -> Parcel:
        had = {name for name in names if any(name in self._ranks[rank].fingerprints for rank in ranks)}
        # A value whose older state the ranks have, or that must replace theirs, can't be sent as a reference.
        afresh = [names[name] for name in names if name in had or name in inputs.by_force]
        stale = {id(part) for value in afresh for part in _shareable(value)}
        known = set.intersection(*(self._ranks[rank].numbers for rank in ranks))
        origins = {
            number: obj for number in known if (obj := self._object(number)) is not None and id(obj) not in stale
        }
        pickled, names = _pickled(names, inputs, origins)
        sizes = pickled.sizes_bytes
        fingerprints = {
            name: Fingerprint(value, sizes.get(run_payload.variable_label(name), 0)) for name, value in names.items()
        }
        descriptor = memory_files.memory_file("notebook-accel-names")
        try:
            serialization.dump(descriptor, pickled)
            memory_files.make_unwritable(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        is_kept = inputs.call is None  # of a call, ranks keep only the classes, whose instances may outlive the call
        delivery = Delivery(
            shared=[self._number(part) for value in names.values() for part in _shareable(value)],
            by_value=[self._number(obj) if is_kept or isinstance(obj, type) else -1 for obj in pickled.by_value],
            by_force=[name for name in inputs.by_force if name in names],
            forgotten=sorted(number for number in known if self._object(number) is None),
            sources={
                name: (source.label, source.text)
                for name, source in run_payload.notebook_sources(pickled.by_value).items()
            },
        )
        return Parcel(ranks, delivery, descriptor, fingerprints, tuple(sorted(had.difference(inputs.by_force))))

    def _object(self, number: int) -> Any:
        refer = self._objects.get(number)
        return None if refer is None else refer()

    def _number(self, obj: Any) -> int:
        number = self._numbers.get(id(obj))
        if number is not None and self._objects[number]() is obj:
            return number
        number, self._next = self._next, self._next + 1
        key = id(obj)

        def gone(_: object) -> None:
            self._objects.pop(number, None)
            if self._numbers.get(key) == number:
                del self._numbers[key]

        # Functions and classes are held strongly: a returned instance must belong to this very class.
        is_definition = isinstance(obj, (type, types.FunctionType))
        self._objects[number] = (lambda: obj) if is_definition else weakref.ref(obj, gone)
        self._numbers[key] = number
        return number


def _pickled(
    names: dict[str, Any], inputs: Inputs, origins: Mapping[int, Any]
) -> tuple[serialization.Pickled, dict[str, Any]]:
    """Return the pickle, and the variables in it: without the optional ones that can't be pickled."""
    try:
        done = _pickle(names, inputs, origins)
    except PayloadError:
        optional = [name for name in inputs.optional_names if name in names]
        staying = [name for name in optional if _pickled_alone(names[name], origins) is None]
        if not staying:
            raise
        names = {name: value for name, value in names.items() if name not in staying}
        done = _pickle(names, inputs, origins)
    run_payload.report_large(done.sizes_bytes)
    run_payload.report_lost_graphs({run_payload.variable_label(name): value for name, value in names.items()})
    return done, names


def _pickle(names: dict[str, Any], inputs: Inputs, origins: Mapping[int, Any]) -> serialization.Pickled:
    roots = {run_payload.variable_label(name): value for name, value in names.items()}
    if inputs.call is not None:
        roots |= run_payload.call_roots(*inputs.call)
    shared = [part for value in names.values() for part in _shareable(value)]
    contents: SealedDelivery = names, shared, inputs.submodules, inputs.call
    return _by_value(contents, roots, origins)


def _match(fingerprint: Fingerprint | None, value: Any) -> bool:
    return fingerprint is not None and fingerprint.matches(value)


def _as_sent(namespace: Mapping[str, Any], name: str) -> Fingerprint | None:
    """Return a fingerprint that marks a variable's present value as sent; ``None`` if it must be sent."""
    value = namespace.get(name)
    if name not in namespace or isinstance(value, (type, types.FunctionType)):
        return None
    pickled = _pickled_alone(value, {})
    return Fingerprint(value, 0 if pickled is None else sum(pickled.sizes_bytes.values()))


def _pickled_alone(value: Any, origins: Mapping[int, Any]) -> serialization.Pickled | None:
    """Return a value's pickle, ``None`` if the value can't be pickled."""
    try:
        return _by_value(value, {"it": value}, origins)
    except PayloadError:
        return None


def _by_value(value: Any, roots: Mapping[str, Any], origins: Mapping[int, Any]) -> serialization.Pickled:
    with held() as interrupts, interrupts.allowed():  # pickling runs methods of the user's objects
        namespace = sys.modules["__main__"].__dict__
        return serialization.pickle_by_value(value, roots=roots, namespace=namespace, origins=origins)


def _shareable(value: Any) -> list[Any]:
    """Return the parts of a value that other values often refer to: the value itself and a model's parameters."""
    if isinstance(value, _BY_NAME):
        return []
    parts = [*_parameters(value)]
    try:
        weakref.ref(value)
    except TypeError:
        return parts
    return [value, *parts]


def _parameters(value: Any) -> list[Any]:
    torch = _torch()
    if torch is None:
        return []
    if isinstance(value, torch.nn.Module):
        return [*value.parameters()]
    if isinstance(value, torch.optim.Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    return []


def _torch() -> Any:
    """Return torch if this kernel has imported it. Otherwise the kernel has no tensors and models."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "optim") else None  # without ``optim``, another thread is still importing torch


def _versions(value: Any) -> int:
    """Return the number of writes to the tensors in a value."""
    torch = _torch()
    if torch is None:
        return 0
    tensors = [value] if isinstance(value, torch.Tensor) else _parameters(value)
    if isinstance(value, torch.nn.Module):
        tensors += value.buffers()
    return sum(tensor._version for tensor in tensors if not tensor.is_inference())


def _digest(value: Any) -> int | None:
    pickled = _pickled_alone(value, {})  # without a pickle, the ranks keep the value that they have
    return None if pickled is None else zlib.crc32(pickled.data)


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def with_dependencies(names: Iterable[str], namespace: Mapping[str, Any]) -> list[str]:
    """Return these names and, transitively, the names that the functions and classes among their values use."""
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
    except ValueError:  # an empty cell
        return None

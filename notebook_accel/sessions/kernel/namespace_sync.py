"""Namespace sync: the kernel tracks each rank's notebook variables, to send a value once, and again after a change.

An object that the ranks already have, and that hasn't changed since, is sent as a reference: an optimizer that is sent
after its model updates the parameters of the model that the ranks have, not of a copy. A model that has changed arrives
as a new object, with references to the ranks' tensors. Tensors and optimizers that have changed are written into those
of the ranks.

A variable has changed if its name is bound to another object, if a small object pickles differently than before, or if
a tensor or a model's parameter was written to, which torch counts. Writes into a large array go unnoticed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from notebook_accel.errors import PayloadError
from notebook_accel.launching.kernel import run_payload
from notebook_accel.payload import memory_files, serialization
from notebook_accel.payload.unpicklable import class_members, global_names
from notebook_accel.protocol.session_messages import Delivery
from notebook_accel.sessions import shared_parts
from notebook_accel.sessions.kernel.fingerprints import Fingerprint, fingerprint, pickle_by_value, pickled_alone
from notebook_accel.sessions.ranks.namespace import SealedDelivery


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Notebook variables and objects that a request needs."""

    names: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # variables that the code uses
    pushed: Sequence[str] = ()  # names whose values replace the ranks' own
    optional_names: Sequence[str] = ()  # names that are left out if they can't be sent
    submodules: tuple[str, ...] = ()  # modules to import
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None  # a function with its arguments


@dataclasses.dataclass(frozen=True)
class Parcel:
    """A sealed file for some ranks."""

    ranks: tuple[int, ...]
    delivery: Delivery
    descriptor: int
    fingerprints: Mapping[str, Fingerprint]  # of the variables
    objects: Mapping[int, Fingerprint | None]  # of the objects that the delivery numbers
    resent: tuple[str, ...]  # the variables of which the ranks have earlier values


@dataclasses.dataclass
class _SentVariables:
    """The variables of a rank."""

    own: set[str] = dataclasses.field(default_factory=set)  # names that the rank has bound itself
    # Of the variables that were sent to it; ``None`` for a value that an earlier notebook has sent and this one lacks.
    fingerprints: dict[str, Fingerprint | None] = dataclasses.field(default_factory=dict)
    # Of the notebook's copies of these variables, which count as the rank's values too.
    pulled: dict[str, Fingerprint] = dataclasses.field(default_factory=dict)
    # Of its objects by their numbers; ``None`` for functions and classes.
    objects: dict[int, Fingerprint | None] = dataclasses.field(default_factory=dict)

    def forget(self, name: str) -> None:
        """Forget the values that the rank had under this name."""
        self.fingerprints.pop(name, None)
        self.pulled.pop(name, None)

    def fingerprints_of(self, name: str) -> list[Fingerprint]:
        """Return the fingerprints of the values that the rank has under this name."""
        return [each for each in (self.fingerprints.get(name), self.pulled.get(name)) if each is not None]


class NamespaceSync:
    """Tracks the variables of a session's ranks. Used by the thread that runs cells."""

    def __init__(self, world_size: int) -> None:
        self._ranks = [_SentVariables() for _ in range(world_size)]
        self._objects: dict[int, Callable[[], Any]] = {}
        self._numbers: dict[int, int] = {}
        self._gone: collections.deque[_Numbered] = collections.deque()  # references to objects that are gone
        self._next = 0

    # State of the ranks ---------------------------------------------------------------------------------------------

    def record(self, rank: int, own: Iterable[str], deleted: Iterable[str], released: Iterable[int]) -> None:
        """Record the names that a rank has bound itself, and the sent names and objects that it no longer has."""
        state = self._ranks[rank]
        state.own = set(own)
        for name in deleted:
            state.forget(name)
        for number in released:
            state.objects.pop(number, None)

    def take_over(self, names: Mapping[int, tuple[Sequence[str], Sequence[str]]]) -> None:
        """Take over ranks that have variables from an earlier notebook.

        The ranks' variables win over this notebook's present values; later changes here are sent. Functions and classes
        of this notebook win. ``names`` has each rank's own names, and those that the earlier notebook has sent.
        """
        here = sys.modules["__main__"].__dict__
        was_sent = {name for _, sent in names.values() for name in sent if name in here}
        was_sent = {name for name in was_sent if not isinstance(here[name], (type, types.FunctionType))}
        present = {name: fingerprint(here[name]) for name in was_sent}
        for rank, (own, sent) in names.items():
            self._ranks[rank] = _SentVariables(set(own), {name: present.get(name) for name in sent})

    def forget(self, rank: int) -> None:
        """Forget the variables of a rank whose process was replaced by a fresh one."""
        self._ranks[rank] = _SentVariables()

    @property
    def origins(self) -> Mapping[int, Any]:
        """The notebook's objects by the numbers by which values from ranks refer to them."""
        return {number: obj for number, refer in self._objects.items() if (obj := refer()) is not None}

    # Pulled values ---------------------------------------------------------------------------------------------------

    def number_pulled(self, values: Mapping[str, Any]) -> dict[str, list[int]]:
        """Return numbers for the parts of pulled values, by the values' names. Values without tensors get none."""
        return {
            name: [self._number(part) for part in shared_parts.parts(value)] if shared_parts.tensors(value) else []
            for name, value in values.items()
        }

    def record_pulled(self, values: Mapping[str, Any], names: Mapping[int, Collection[str]]) -> None:
        """Record that pulled values count as the ranks' own values of these names.

        ``names`` has the names whose values, or whose parts, each rank has numbered as ``number_pulled`` says.
        """
        for name, value in values.items():
            has_tensors = bool(shared_parts.tensors(value))
            states = [self._ranks[rank] for rank, numbered in names.items() if name in numbered]
            states = [state for state in states if has_tensors or name in state.fingerprints]
            if not states:
                continue
            of_copy = fingerprint(value)
            for state in states:
                if name in state.fingerprints:
                    state.pulled[name] = of_copy
                if has_tensors:
                    state.objects.update(self._part_fingerprints(value, of_copy))

    # Sending ---------------------------------------------------------------------------------------------------------

    def pack(self, inputs: Inputs, ranks: Sequence[int]) -> list[Parcel]:
        """Seal the inputs that these ranks don't have yet. Ranks that lack the same inputs share a file.

        The caller closes the files. Raises a ``PayloadError`` for a value that can't be sent.
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

    def record_sent(self, parcel: Parcel, *, lacking: Collection[int]) -> None:
        """Record that a parcel's ranks have its contents, except ``lacking`` ranks, which failed to open all of it."""
        for rank in parcel.ranks:
            state = self._ranks[rank]
            for name in parcel.fingerprints:
                state.forget(name)
            if rank in lacking:
                continue
            state.fingerprints.update(parcel.fingerprints)
            for number in parcel.delivery.forgotten:
                state.objects.pop(number, None)
            state.objects.update(parcel.objects)

    def _needs(self, inputs: Inputs, ranks: Sequence[int]) -> list[tuple[dict[str, Any], tuple[int, ...]]]:
        """Return the names that must be sent, each time with the ranks that need exactly these."""
        # A name that any rank has bound itself isn't sent unasked: otherwise some ranks would silently have their own
        # value, others the notebook's.
        own = {name for state in self._ranks for name in state.own}
        # Ranks that got a value together share its fingerprint. Comparing it pickles the value.
        is_same = functools.cache(lambda sent, name: sent.matches(inputs.names[name]))
        alike: dict[tuple[tuple[str, ...], frozenset[int]], list[int]] = {}
        for rank in ranks:
            state = self._ranks[rank]
            needed = tuple(
                name
                for name in inputs.names
                if name in inputs.pushed
                or (name not in own and not any(is_same(sent, name) for sent in state.fingerprints_of(name)))
            )
            # A rank that has a model gets a reference to it. A restarted one beside it gets the model itself.
            trained = self._models_in(state) if needed or inputs.call is not None else frozenset()
            alike.setdefault((needed, trained), []).append(rank)
        return [({name: inputs.names[name] for name in names}, tuple(of)) for (names, _), of in alike.items()]

    def _models_in(self, state: _SentVariables) -> frozenset[int]:
        """Return the numbers of the models and optimizers that a rank has. This looks at every object."""
        objects = {number: self._object(number) for number in state.objects}
        return frozenset(
            number for number, obj in objects.items() if shared_parts.is_model(obj) or shared_parts.is_optimizer(obj)
        )

    def _parcel(self, inputs: Inputs, names: dict[str, Any], ranks: tuple[int, ...]) -> Parcel:
        states = [self._ranks[rank] for rank in ranks]
        resent = {name for name in names if any(name in state.fingerprints for state in states)}
        common = set.intersection(*(set(state.objects) for state in states))
        found = {number: obj for number in common if (obj := self._object(number)) is not None}
        changes = _Changes(inputs, names, found, states)
        pickled, names = _pickled(names, changes, inputs)
        fingerprints: dict[str, Fingerprint] = {}
        objects: dict[int, Fingerprint | None] = {}
        for name, value in names.items():
            sent = changes.unchanged(value)
            label = run_payload.variable_label(name)
            size_bytes = pickled.sizes_bytes.get(label, 0) if sent is None else sent.pickled_bytes
            fingerprints[name] = Fingerprint(value, size_bytes)
            objects |= self._part_fingerprints(value, fingerprints[name])
        is_kept = inputs.call is None  # of a call, ranks keep only the classes, whose instances may outlive the call
        by_value = [self._number(obj) if is_kept or isinstance(obj, type) else -1 for obj in pickled.by_value]
        objects |= {number: None for number in by_value if number >= 0}
        sources = run_payload.notebook_sources(pickled.by_value)
        delivery = Delivery(
            shared=[self._number(part) for value in names.values() for part in shared_parts.parts(value)],
            by_value=by_value,
            pushed=[name for name in inputs.pushed if name in names],
            forgotten=sorted(common - found.keys()),
            sources={name: (source.label, source.text) for name, source in sources.items()},
        )
        resent.difference_update(inputs.pushed)
        return Parcel(ranks, delivery, _sealed(pickled), fingerprints, objects, tuple(sorted(resent)))

    def _part_fingerprints(self, value: Any, of_value: Fingerprint) -> dict[int, Fingerprint | None]:
        """Return the fingerprints of a value's parts by their numbers. ``of_value`` is that of the value."""
        tensors = {id(part) for part in shared_parts.tensors(value).values()}
        return {
            self._number(part): Fingerprint(part, 0) if id(part) in tensors else of_value
            for part in shared_parts.parts(value)
        }

    def _object(self, number: int) -> Any:
        return self._objects.get(number, lambda: None)()

    def _number(self, obj: Any) -> int:
        number = self._numbers.get(id(obj))
        if number is not None and self._objects[number]() is obj:
            return number
        while self._gone:
            gone = self._gone.popleft()
            self._objects.pop(gone.number, None)
            if self._numbers.get(gone.key) == gone.number:
                del self._numbers[gone.key]
        number, self._next = self._next, self._next + 1
        # Functions and classes are held strongly: a returned instance must belong to this very class.
        is_definition = isinstance(obj, (type, types.FunctionType))
        if is_definition:
            self._objects[number] = lambda: obj
        else:
            self._objects[number] = reference = _Numbered(obj, self._gone.append)
            reference.key, reference.number = id(obj), number
        self._numbers[id(obj)] = number
        return number


class _Numbered(weakref.ref[Any]):
    """A weak reference to an object with a number, which joins a queue when the object is gone.

    No Python code runs then: an interrupt that comes in a callback of a weak reference is lost.
    """

    __slots__ = ("key", "number")
    key: int
    number: int


class _Changes:
    """The parts of variables that have changed since they were sent, or that were pushed and replace the ranks' own.

    Such a part is sent itself; other parts that the ranks have are sent as references. The ranks keep their tensors
    and optimizers: those in ``written`` get new values, and those in ``settings`` new settings. ``objects`` are what
    all these ranks have, and ``origins`` what is referred to.
    """

    def __init__(
        self, inputs: Inputs, names: dict[str, Any], objects: dict[int, Any], states: Sequence[_SentVariables]
    ) -> None:
        self._states = states
        self._numbers = {id(obj): number for number, obj in objects.items()}
        self._pushed = {id(part) for name in inputs.pushed if name in names for part in _replaced_parts(names[name])}
        parts = {id(part): part for value in names.values() for part in shared_parts.parts(value)}
        tensors = {id(part): part for value in names.values() for part in shared_parts.tensors(value).values()}
        self._stale = self._pushed | {
            key
            for key, part in parts.items()
            if key in self._numbers and not self._is_same(part, Fingerprint.differs_at_most_in_tensors)
        }
        to_write = [part for key, part in (parts | tensors).items() if key in self._numbers and key in self._stale]
        optimizers = [part for part in to_write if shared_parts.is_optimizer(part)]
        self.written = [
            (part, self._unless_same(part, part.data, Fingerprint.has_values_of), part.requires_grad)
            for part in to_write
            if id(part) in tensors
        ]
        self.settings = [
            (
                each,
                each.defaults,
                each.param_groups,
                self._unless_same(each, each.state, Fingerprint.has_statistics_of),
                id(each) in self._pushed,
            )
            for each in optimizers
        ]
        kept = tensors.keys() | {id(each) for each in optimizers}
        self.origins = {number: obj for number, obj in objects.items() if id(obj) in kept or id(obj) not in self._stale}

    def unchanged(self, value: Any) -> Fingerprint | None:
        """Return the fingerprint of a value that is sent as a reference."""
        number = self._numbers.get(id(value))
        return None if number is None or id(value) in self._stale else self._states[0].objects[number]

    def _unless_same(self, part: Any, value: Any, check: Callable[[Fingerprint, Any], bool]) -> Any:
        return None if self._is_same(part, check) else value

    def _is_same(self, part: Any, check: Callable[[Fingerprint, Any], bool]) -> bool:
        sent = [state.objects[self._numbers[id(part)]] for state in self._states]
        return id(part) not in self._pushed and all(each is None or check(each, part) for each in sent)


def _sealed(pickled: serialization.Pickled) -> int:
    """Return the descriptor of a memory file with the pickle."""
    descriptor = memory_files.memory_file("notebook-accel-names")
    try:
        serialization.dump(descriptor, pickled)
        memory_files.make_unwritable(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _pickled(names: dict[str, Any], changes: _Changes, inputs: Inputs) -> tuple[serialization.Pickled, dict[str, Any]]:
    """Return the pickle, and the variables in it: without the optional ones that can't be pickled."""
    try:
        done = _pickle(names, changes, inputs)
    except PayloadError:
        optional = [name for name in inputs.optional_names if name in names]
        staying = [name for name in optional if pickled_alone(names[name], changes.origins) is None]
        if not staying:
            raise
        names = {name: value for name, value in names.items() if name not in staying}
        done = _pickle(names, changes, inputs)
    run_payload.report_large(done.sizes_bytes)
    run_payload.report_lost_graphs({run_payload.variable_label(name): value for name, value in names.items()})
    return done, names


def _pickle(names: dict[str, Any], changes: _Changes, inputs: Inputs) -> serialization.Pickled:
    roots = {run_payload.variable_label(name): value for name, value in names.items()}
    roots["changed weights"] = [values for _, values, _ in changes.written]
    roots["changed optimizers"] = [settings for _, *settings in changes.settings]
    if inputs.call is not None:
        roots |= run_payload.call_roots(*inputs.call)
    shared = [part for value in names.values() for part in shared_parts.parts(value)]
    contents = SealedDelivery(names, shared, changes.written, changes.settings, inputs.submodules, inputs.call)
    return pickle_by_value(contents, roots, changes.origins)


def _replaced_parts(value: Any) -> list[Any]:
    """Return what a pushed value replaces: also a model's tensors, but not those that an optimizer only refers to."""
    return [value] if shared_parts.is_optimizer(value) else [value, *shared_parts.tensors(value).values()]


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
            with contextlib.suppress(ValueError):  # an empty cell
                if isinstance(cell.cell_contents, types.FunctionType) and cell.cell_contents is not value:
                    yield from _names_in(cell.cell_contents, namespace)
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            yield from _names_in(wrapped, namespace)
    elif isinstance(value, type):
        for base in value.__mro__:
            if base.__module__ == "__main__":
                for member in class_members(base):
                    if isinstance(member, types.FunctionType):
                        yield from _names_in(member, namespace)
    elif type(value).__module__ == "__main__":
        yield from _names_in(type(value), namespace)

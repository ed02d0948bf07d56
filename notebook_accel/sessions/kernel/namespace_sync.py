"""What the ranks of a session have of the notebook's, so that it is sent once, and again when it has changed.

An object that the ranks have, and that another one refers to, is sent as a reference: an optimizer that is sent later
than its model moves the parameters of the model that the ranks have, not of a copy.

What counts as a change: the name is bound to something else; a small object is pickled differently than before; a
tensor, or a parameter of a model, was written to, which torch counts. What is written into a large array isn't seen.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from notebook_accel.errors import PayloadError
from notebook_accel.launching.kernel import run_payload
from notebook_accel.payload import memory_files, serialization
from notebook_accel.protocol.session_messages import Delivery
from notebook_accel.sessions.kernel.interrupts import held
from notebook_accel.sessions.ranks.names import Contents

__all__ = ["Ledger", "Parcel", "Request", "Stamp"]

_SMALL_BYTES = 1 << 14
_BY_NAME = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType)


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be sent.

    Attributes:
        names: Names and values of the notebook that code uses.
        by_force: Names that the ranks get whatever they have under them.
        optional_names: Names that are sent if they can be, and stay behind if not.
        submodules: Modules to import.
        call: A function with its arguments.
    """

    names: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    by_force: Sequence[str] = ()
    optional_names: Sequence[str] = ()
    submodules: tuple[str, ...] = ()
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None


class Stamp:
    """How a value was when it was sent. Holds large values weakly, so as not to keep them in the notebook's memory."""

    def __init__(self, value: Any, pickled_bytes: int) -> None:
        self._refer = _reference(value)
        self._digest = _digest(value) if pickled_bytes <= _SMALL_BYTES and not isinstance(value, _BY_NAME) else None
        self._versions = _versions(value)

    def fits(self, value: Any) -> bool:
        """Return whether the value is as it was."""
        if self._refer() is not value or self._versions != _versions(value):
            return False
        return self._digest is None or self._digest == _digest(value)


@dataclasses.dataclass(frozen=True)
class Parcel:
    """A sealed file for some ranks.

    Attributes:
        ranks: Which.
        delivery: What the message says of it.
        descriptor: The file's.
        stamps: How the values of its names were.
        again: Those of its names that ranks had as they were before.
    """

    ranks: tuple[int, ...]
    delivery: Delivery
    descriptor: int
    stamps: Mapping[str, Stamp]
    again: tuple[str, ...]


@dataclasses.dataclass
class _Rank:
    """What one rank has: its own names, names as they came from the notebook, and numbered objects."""

    own: set[str] = dataclasses.field(default_factory=set)
    stamps: dict[str, Stamp] = dataclasses.field(default_factory=dict)
    numbers: set[int] = dataclasses.field(default_factory=set)


class Ledger:
    """The account of all ranks of a session. Used by the thread that runs cells."""

    def __init__(self, world_size: int) -> None:
        self._ranks = [_Rank() for _ in range(world_size)]
        self._objects: dict[int, Callable[[], Any]] = {}
        self._numbers: dict[int, int] = {}
        self._next = 0

    # What ranks have ------------------------------------------------------------------------------------------------

    def note(self, rank: int, bound: Iterable[str], unbound: Iterable[str]) -> None:
        """A rank has names of its own now, and some no longer."""
        own = self._ranks[rank].own
        own.update(bound)
        own.difference_update(unbound)

    def forget(self, rank: int) -> None:
        """A rank has come in place of one that is gone, and has nothing."""
        self._ranks[rank] = _Rank()

    @property
    def origins(self) -> Mapping[int, Any]:
        """The notebook's objects by number, for what ranks send back."""
        return {number: refer() for number, refer in self._objects.items()}

    # What is sent ---------------------------------------------------------------------------------------------------

    def pack(self, request: Request, ranks: Sequence[int]) -> list[Parcel]:
        """Seals what these ranks don't have yet; ranks that need the same share a file, which is the caller's to close.

        Raises:
            PayloadError: Something can't be sent.
        """
        made: list[Parcel] = []
        try:
            for names, of_ranks in self._needs(request, ranks):
                if names or request.call is not None:
                    made.append(self._parcel(request, names, of_ranks))
        except BaseException:
            for parcel in made:
                os.close(parcel.descriptor)
            raise
        return made

    def sent(self, parcel: Parcel, *, lacking: Collection[int]) -> None:
        """Its ranks have it, but for those that have come to an end before they could open it, or all of it."""
        for rank in parcel.ranks:
            state = self._ranks[rank]
            if rank in lacking:
                for name in parcel.stamps:
                    state.stamps.pop(name, None)
                state.numbers.difference_update(parcel.delivery.numbers)
                continue
            state.stamps.update(parcel.stamps)
            state.own.difference_update(parcel.delivery.by_force)
            state.numbers.difference_update(parcel.delivery.forgotten)
            state.numbers.update(number for number in parcel.delivery.numbers if number >= 0)

    def _needs(self, request: Request, ranks: Sequence[int]) -> list[tuple[dict[str, Any], tuple[int, ...]]]:
        by_names: dict[tuple[str, ...], list[int]] = {}
        changed = {rank: self._needed_by(rank, request) for rank in ranks}
        for rank in ranks:
            by_names.setdefault(changed[rank], []).append(rank)
        return [({name: request.names[name] for name in names}, tuple(of)) for names, of in by_names.items()]

    def _needed_by(self, rank: int, request: Request) -> tuple[str, ...]:
        stamps = self._ranks[rank].stamps
        return tuple(
            name
            for name, value in request.names.items()
            if name in request.by_force
            or (not self._is_anywhere_own(name) and not (name in stamps and stamps[name].fits(value)))
        )

    def _is_anywhere_own(self, name: str) -> bool:
        """Then it isn't sent by itself: one rank would have its own, and another the notebook's, and nobody knew."""
        return any(name in state.own for state in self._ranks)

    def _parcel(self, request: Request, names: dict[str, Any], ranks: tuple[int, ...]) -> Parcel:
        had = {name for name in names if any(name in self._ranks[rank].stamps for rank in ranks)}
        # What ranks have otherwise than it is now, or are to have as it is now, is no longer what they are referred to.
        afresh = [names[name] for name in names if name in had or name in request.by_force]
        stale = {id(part) for value in afresh for part in _shareable(value)}
        known = set.intersection(*(self._ranks[rank].numbers for rank in ranks))
        origins = {
            number: obj for number in known if (obj := self._object(number)) is not None and id(obj) not in stale
        }
        pickled, names = _pickled(names, request, origins)
        sizes = pickled.sizes_bytes
        stamps = {name: Stamp(value, sizes.get(run_payload.variable_label(name), 0)) for name, value in names.items()}
        descriptor = memory_files.memory_file("notebook-accel-names")
        try:
            serialization.dump(descriptor, pickled)
            memory_files.make_unwritable(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        is_kept = request.call is None  # of what is called once only the classes: their instances may stay
        delivery = Delivery(
            shared=[self._number(part) for value in names.values() for part in _shareable(value)],
            by_value=[self._number(obj) if is_kept or isinstance(obj, type) else -1 for obj in pickled.by_value],
            by_force=[name for name in request.by_force if name in names],
            forgotten=sorted(number for number in known if self._object(number) is None),
            sources={
                name: (source.label, source.text)
                for name, source in run_payload.notebook_sources(pickled.by_value).items()
            },
        )
        return Parcel(ranks, delivery, descriptor, stamps, tuple(sorted(had.difference(request.by_force))))

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

        # Functions and classes are kept: an instance may come back, and is to be one of this very class.
        is_definition = isinstance(obj, (type, types.FunctionType))
        self._objects[number] = (lambda: obj) if is_definition else weakref.ref(obj, gone)
        self._numbers[key] = number
        return number


def _pickled(
    names: dict[str, Any], request: Request, origins: Mapping[int, Any]
) -> tuple[serialization.Pickled, dict[str, Any]]:
    """The pickle, and which of the names are in it."""
    try:
        done = _pickle(names, request, origins)
    except PayloadError:
        staying = [name for name in request.optional_names if name in names and _cannot_be_sent(names[name], origins)]
        if not staying:
            raise
        names = {name: value for name, value in names.items() if name not in staying}
        done = _pickle(names, request, origins)
    run_payload.report_large(done.sizes_bytes)
    run_payload.report_lost_graphs({run_payload.variable_label(name): value for name, value in names.items()})
    return done, names


def _pickle(names: dict[str, Any], request: Request, origins: Mapping[int, Any]) -> serialization.Pickled:
    roots = {run_payload.variable_label(name): value for name, value in names.items()}
    if request.call is not None:
        function, args, kwargs = request.call
        roots |= {f'function "{getattr(function, "__name__", type(function).__name__)}"': function}
        roots |= {f"argument {index}": value for index, value in enumerate(args)}
        roots |= {f'argument "{key}"': value for key, value in kwargs.items()}
    shared = [part for value in names.values() for part in _shareable(value)]
    contents: Contents = names, shared, request.submodules, request.call
    return _by_value(contents, roots, origins)


def _cannot_be_sent(value: Any, origins: Mapping[int, Any]) -> bool:
    try:
        _by_value(value, {"it": value}, origins)
    except PayloadError:
        return True
    return False


def _by_value(value: Any, roots: Mapping[str, Any], origins: Mapping[int, Any]) -> serialization.Pickled:
    with held() as interrupts, interrupts.opened():  # how the user's objects are pickled is the user's code
        return serialization.pickle_by_value(value, roots=roots, namespace=_namespace(), origins=origins)


def _namespace() -> dict[str, Any]:
    return sys.modules["__main__"].__dict__


def _shareable(value: Any) -> list[Any]:
    """A value, if others can refer to it, and what of it others usually refer to: a model's parameters."""
    if isinstance(value, _BY_NAME):
        return []
    parts = [*_parameters(value)]
    try:
        weakref.ref(value)
    except TypeError:
        return parts
    return [value, *parts]


def _parameters(value: Any) -> list[Any]:
    """Those of a model or of an optimizer. A kernel that hasn't imported torch has neither."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "optim"):  # half imported, in another thread
        return []
    if isinstance(value, torch.nn.Module):
        return [*value.parameters()]
    if isinstance(value, torch.optim.Optimizer):
        return [parameter for group in value.param_groups for parameter in group["params"]]
    return []


def _versions(value: Any) -> int:
    """How often the tensors in there were written to."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "optim"):
        return 0
    tensors = [value] if isinstance(value, torch.Tensor) else _parameters(value)
    if isinstance(value, torch.nn.Module):
        tensors += value.buffers()
    return sum(tensor._version for tensor in tensors if not tensor.is_inference())


def _digest(value: Any) -> int | None:
    try:
        pickled = _by_value(value, {"it": value}, {})
    except PayloadError:  # no longer to be sent: then ranks keep what they have
        return None
    return zlib.crc32(pickled.data)


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value

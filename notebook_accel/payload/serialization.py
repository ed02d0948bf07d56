"""Pickling of objects that travel between the notebook and the ranks. Both sides use it.

The notebook's functions and classes travel by value, through cloudpickle. Large buffers, one for each tensor storage
and array, travel beside the pickle in an anonymous memory file. Every receiver maps it privately: nothing is copied
until a process writes, and then only the pages that it writes to.

Functions and classes of the notebook return as references, never as copies: cloudpickle unpickles a class that it has
seen before *into* that class, and would so replace the notebook's methods by copies with their own globals.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import errno
import io
import operator
import os
import pickle
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import cloudpickle

from notebook_accel import host_memory
from notebook_accel.payload import definitions, memory_files, sharded_tensors, unpicklable
from notebook_accel.payload.tensor_memory import Block, Blocks, Whole

Origins: TypeAlias = Sequence[Any] | Mapping[int, Any]

# The attribute of an error with the label of the root that couldn't be rebuilt, such as ``global "model"``.
ROOT_ATTRIBUTE = "_notebook_accel_root"
# Smaller buffers stay in the pickle: a page and a table entry for each would cost more than the copy.
_OUT_OF_BAND_BYTES = 4096
# Objects larger than this are compared with the available memory before they are copied.
_LARGE_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Pickled:
    """A pickle and its out-of-band buffers, in order."""

    data: memoryview
    buffers: tuple[Block | Whole, ...]
    # The functions and classes that the pickle holds by value. What the receiver sends back refers to them by index.
    by_value: tuple[Any, ...]
    sizes_bytes: Mapping[str, int]  # of the roots, by label; objects that two roots share count for the first
    # The objects in the pickle except numbers, strings and tuples, if ``SharedPickling`` asks for them, in the order in
    # which pickle met them: the best order to enter cycles in.
    memoized: tuple[Any, ...] = ()


class SharedPickling:
    """The state that several pickles for one receiver share, so that common objects are sent once."""

    def __init__(self, *, device_tensors_to_cpu: bool, keeps_memo: bool = False) -> None:
        self.blocks = Blocks(device_tensors_to_cpu=device_tensors_to_cpu)
        self.namespaces: dict[int, Any] = {}  # cloudpickle's stand-ins for the namespaces of functions
        # References to objects in other pickles, by the objects' ids. ``loads_linked`` resolves them.
        self.links: Mapping[int, Any] = {}
        self.keeps_memo = keeps_memo  # whether to record the objects in each pickle


@dataclasses.dataclass(frozen=True)
class Opened:
    """An unpickled object, and the definitions sent by value, each with its name in the sender's namespace, if any."""

    value: Any
    by_value: Sequence[tuple[str | None, Any]]


def pickle_by_value(
    value: Any,
    *,
    roots: Mapping[str, Any],
    namespace: Mapping[str, Any] | None = None,
    origins: Origins = (),
    device_tensors_to_cpu: bool = False,
    shared: SharedPickling | None = None,
    wholes: Mapping[int, Any] | None = None,
    advice: str = "make it inside the cell or the function instead, or keep it out of what the ranks use",
) -> Pickled:
    """Pickle an object.

    Args:
        value: The object.
        roots: The value's parts, by the labels that error messages use for them, such as ``global "model"``.
        namespace: The sender's module namespace. Functions with these globals get the receiver's namespace instead of a
            dict of their own.
        origins: Objects that the receiver has, by the receiver's numbers: for functions and classes that it sent, their
            index in its ``Pickled.by_value``. They travel as references.
        device_tensors_to_cpu: Whether tensors on a device travel as CPU copies; otherwise they are refused.
        shared: The state that this pickle shares with others.
        wholes: Gathered copies of tensors that are sharded over ranks, by the tensors' ids. Other sharded tensors are
            refused.
        advice: What an error advises to do instead.

    Raises:
        PayloadError: An object can't be pickled. The message has the path to the object.
    """
    options = _Options(namespace, _numbers(origins), device_tensors_to_cpu, wholes or {})
    pickler = _LinkingPickler(options, shared) if shared and shared.links else _Pickler(options, shared)
    try:
        pickler.dump_with(value, roots)
    except _TooLargeError:
        raise unpicklable.too_large(pickler.output.sizes_bytes, host_memory.available_bytes(), is_all=False) from None
    except Exception as error:  # noqa: BLE001 - whatever it is, the error names the object

        def pickle_alone(obj: Any) -> None:
            _Pickler(options).dump_with(None, {"": obj})  # as deep in the pickle as a root

        raise unpicklable.explain(roots, error, pickle_alone, advice) from None
    by_value = tuple(obj for _, obj in pickler.by_value)
    output = pickler.output
    memoized = pickler.memoized() if shared is not None and shared.keeps_memo else ()
    return Pickled(output.data, tuple(output.buffers), by_value, output.sizes_bytes, memoized)


def find_sharded(value: Any, *, origins: Origins) -> list[Any]:
    """Return an object's tensors that are sharded over ranks, in the order in which pickle meets them.

    Reshards gathered blocks of ``fully_shard``. Returns nothing for an object that can't be pickled.
    """
    finder = _Finder(_Options(None, _numbers(origins), device_tensors_to_cpu=True, wholes={}))
    try:
        finder.dump_with(value, {})
    except Exception:  # noqa: BLE001 - pickling in earnest reports it
        return []
    return list(finder.found.values())


def dump(descriptor: int, pickled: Pickled, head: bytes = b"") -> int:
    """Write a head and a pickle into an empty file, and return its length. Raise a ``PayloadError`` if it has no room.

    The file is in memory or, for a detached run, on a disk.
    """
    needed = len(pickled.data) + sum(buffer.used_bytes for buffer in pickled.buffers)
    if needed > _LARGE_BYTES and needed > host_memory.available_bytes():
        raise unpicklable.too_large(pickled.sizes_bytes, host_memory.available_bytes())
    try:
        return memory_files.write(descriptor, head, pickled.data, pickled.buffers)
    except MemoryError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EFBIG:
            raise unpicklable.too_large_for_limit(pickled.sizes_bytes) from None
        if os.fstat(descriptor).st_nlink:  # not a memory file, which has no name
            disk = os.fstatvfs(descriptor)
            raise unpicklable.too_large_for_disk(pickled.sizes_bytes, disk.f_bavail * disk.f_frsize) from None
        raise unpicklable.too_large(pickled.sizes_bytes, host_memory.available_bytes()) from None


def load(descriptor: int, *, namespace: dict[str, Any] | None = None, origins: Origins = ()) -> Opened:
    """Return the objects in a file, their buffers mapped privately. The descriptor may be closed afterwards.

    ``namespace`` replaces the sender's; without one, functions get a dict of their own. ``origins`` are the objects
    that the sender may refer to: those that this side sent by value or has numbered.
    """
    contents = memory_files.read(descriptor)
    with _receiving({} if namespace is None else namespace, origins):
        _, value, by_value = pickle.loads(contents.pickle, buffers=contents.buffers)
    return Opened(value, by_value)


def loads(data: bytes, *, origins: Origins = ()) -> Any:
    """Return the object in a ``Pickled.data`` without buffers."""
    with _receiving({}, origins):
        _, value, _ = pickle.loads(data)
    return value


def loads_linked(
    data: memoryview, buffers: Iterable[memoryview], resolve: Callable[[Any], Any], *, origins: Origins = ()
) -> Any:
    """Return the object in one of several pickles of a ``SharedPickling``.

    ``resolve`` takes a link and returns the object in another pickle; ``origins`` are as for ``load``.
    """
    with _receiving({}, origins):
        _, value, _ = _LinkingUnpickler(io.BytesIO(data), buffers, resolve).load()
    return value


@dataclasses.dataclass(frozen=True)
class _Options:
    namespace: Mapping[str, Any] | None
    origins: Mapping[int, int]
    device_tensors_to_cpu: bool
    wholes: Mapping[int, Any]


class _TooLargeError(pickle.PicklingError):
    """The pickle itself outgrows the available memory."""


class _Stream(io.BytesIO):
    """A buffer for a pickle. ``write`` raises ``_TooLargeError`` before the memory can't hold a copy of the pickle."""

    _checked_bytes = _LARGE_BYTES

    def write(self, data: Any) -> int:
        written = super().write(data)
        if self.tell() > self._checked_bytes:
            self._checked_bytes += _LARGE_BYTES
            if self.tell() > host_memory.available_bytes():
                raise _TooLargeError
        return written


class _Mark:
    """A marker before a root in the stream, to measure the root's size, and to name the root if it can't be rebuilt."""

    def __init__(self, label: str) -> None:
        self.label = label


class _PickleOutput:
    """The pickle so far, its out-of-band buffers, and each root's share of both.

    If the pickler's buffer callback were its own method, the reference cycle would keep all pickled memory alive.
    """

    def __init__(self, blocks: Blocks) -> None:
        self.stream = _Stream()
        self.buffers: list[Block | Whole] = []
        self._blocks = blocks
        self._root = ""
        self._root_start = 0
        self._in_band_bytes: dict[str, int] = {}
        self._buffers_of: dict[str, list[Block | Whole]] = {}

    @property
    def data(self) -> memoryview:
        # Not getbuffer(): some Pythons, 3.12.1 for one, crash when its view is collected as part of a cycle.
        # getvalue() doesn't copy either.
        return memoryview(self.stream.getvalue())

    @property
    def sizes_bytes(self) -> dict[str, int]:
        """Each root's size so far."""
        self.begin(self._root)
        return {
            label: size_bytes + sum(buffer.used_bytes for buffer in self._buffers_of.get(label, ()))
            for label, size_bytes in self._in_band_bytes.items()
            if label
        }

    def begin(self, root: str) -> None:
        """Count the bytes from here on for the root with this label."""
        taken = self.stream.tell() - self._root_start
        self._in_band_bytes[self._root] = self._in_band_bytes.get(self._root, 0) + taken
        self._root, self._root_start = root, self.stream.tell()

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a large buffer out of band. As pickle's ``buffer_callback``, return whether the buffer stays in band."""
        if buffer.raw().nbytes < _OUT_OF_BAND_BYTES:
            return True
        memory = self._blocks.of(buffer)
        self.buffers.append(memory)
        self._buffers_of.setdefault(self._root, []).append(memory)
        return False


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle with memory out of band, one namespace, and references to the receiver's own objects."""

    def __init__(self, options: _Options, shared: SharedPickling | None = None) -> None:
        self._options = options
        shared = shared or SharedPickling(device_tensors_to_cpu=options.device_tensors_to_cpu)
        self._blocks = shared.blocks
        self._torch_types = sharded_tensors.types()
        self._by_name = definitions.ByName()
        self.output = _PickleOutput(self._blocks)
        self.by_value: list[tuple[str | None, Any]] = []
        super().__init__(self.output.stream, protocol=5, buffer_callback=self.output.take)
        self.globals_ref = shared.namespaces
        if options.namespace is not None:
            # cloudpickle keeps one stand-in for each globals dict of functions. Set the one for the sender's namespace.
            self.globals_ref[id(options.namespace)] = _Namespace()

    def dump_with(self, value: Any, roots: Mapping[str, Any]) -> None:
        # The roots come first, one by one, to measure each; the value then refers to them. ``by_value`` comes last,
        # since it fills while the objects before it are pickled.
        marked = [(_Mark(label), root) for label, root in roots.items()]
        self.dump(([*marked, _Mark("")], value, self.by_value))

    def memoized(self) -> tuple[Any, ...]:
        """Return pickle's memo in order, without strings, bytes and tuples, of which there may be millions."""
        found = [entry for entry in self.memo.copy().values() if type(entry[1]) not in (str, bytes, tuple)]
        return tuple(obj for _, obj in sorted(found, key=operator.itemgetter(0)))

    # Few maps, since every object is looked up in each. The last is copyreg's, which libraries still add to.
    dispatch_table: ClassVar[Any] = collections.ChainMap(
        unpicklable.STAYING,
        {
            **cloudpickle.Pickler.dispatch_table.maps[0],
            types.CodeType: definitions.reduce_code,
            random.SystemRandom: lambda _: (random.SystemRandom, ()),
        },
        *cloudpickle.Pickler.dispatch_table.maps[1:],
    )

    def reducer_override(self, obj: Any) -> Any:
        origin = self._options.origins.get(id(obj))
        if origin is not None:
            return _resolve_origin, (origin,)
        if type(obj) is _Mark:
            self.output.begin(obj.label)
            return _begin_root, (obj.label,)
        reduce_by_name = self._by_name[type(obj)]
        if reduce_by_name is not None and (by_name := reduce_by_name(obj)) is not None:
            return by_name
        reduced = self._blocks.reduce(obj)
        if reduced is NotImplemented and isinstance(obj, self._torch_types):
            reduced = sharded_tensors.reduce(obj, self._options.wholes)
        if reduced is not NotImplemented:
            return reduced
        reducer = definitions.REDUCERS.get(type(obj))
        reduced = NotImplemented if reducer is None or definitions.can_be_imported(obj) else reducer(obj)
        is_definition = reduced is not NotImplemented
        if not is_definition:
            is_slotted = issubclass(type(obj), type) and "__slots__" in vars(obj)
            reduced = self._reduce_slotted(obj) if is_slotted else super().reducer_override(obj)
            is_definition = reduced is not NotImplemented and isinstance(obj, (type, types.FunctionType))
        if is_definition:
            self.by_value.append((self._name_in_namespace(obj), obj))
            reduced = definitions.completed(obj, reduced)
        return reduced

    def _reduce_slotted(self, cls: type) -> Any:
        """Reduce a class with ``__slots__``. cloudpickle sets them only once the class is made, which is too late."""
        declared = vars(cls)["__slots__"]
        slots = (declared,) if isinstance(declared, str) else declared
        if slots is not declared:  # cloudpickle fails for the string "__weakref__" and for private names
            type.__setattr__(cls, "__slots__", slots)
        try:
            reduced = super().reducer_override(cls)
        finally:
            if slots is not declared:
                type.__setattr__(cls, "__slots__", declared)
        if reduced is NotImplemented or reduced[0] is not cloudpickle.cloudpickle._make_skeleton_class:
            return reduced
        make, (kind, name, bases, attributes, *others), *state = reduced
        if any(getattr(base, "__name__", "") == "NamedTuple" for base in bases):  # which makes the slots itself
            return reduced
        return make, (kind, name, bases, attributes | {"__slots__": slots}, *others), *state

    def _name_in_namespace(self, obj: Any) -> str | None:
        name: str | None = getattr(obj, "__name__", None)
        namespace = self._options.namespace or {}
        return name if name is not None and namespace.get(name) is obj else None


class _Finder(_Pickler):
    """A pickler that collects sharded tensors and leaves out all other tensors."""

    def __init__(self, options: _Options) -> None:
        super().__init__(options)
        self.found: dict[int, Any] = {}  # the sharded tensors, in order, by their ids

    def reducer_override(self, obj: Any) -> Any:
        if sharded_tensors.is_sharded_tensor(obj):
            self.found[id(obj)] = obj
            return tuple, ()
        if self._blocks.is_of_tensors(obj):
            return tuple, ()
        if sharded_tensors.is_sharded_module(obj):
            obj.reshard()  # a block that a forward pass has gathered has whole parameters until the backward pass
        return super().reducer_override(obj)


class _LinkingPickler(_Pickler):
    """A pickler that refers to objects of other pickles. It is slower, since it checks every object."""

    def __init__(self, options: _Options, shared: SharedPickling) -> None:
        self._links = shared.links
        super().__init__(options, shared)

    def persistent_id(self, obj: Any) -> Any:
        return self._links.get(id(obj))


class _LinkingUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, buffers: Iterable[memoryview], resolve: Callable[[Any], Any]) -> None:
        super().__init__(stream, buffers=buffers)
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)


class _Namespace:
    """A stand-in for the sender's namespace; unpickles as the receiver's."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _receiver_namespace, ()


@dataclasses.dataclass
class _Receiving:
    namespace: dict[str, Any]
    origins: Origins
    root: str = ""  # the label of the root that is being rebuilt


_now_receiving: contextvars.ContextVar[_Receiving] = contextvars.ContextVar("now_receiving")


@contextlib.contextmanager
def _receiving(namespace: dict[str, Any], origins: Origins) -> Iterator[None]:
    receiving = _Receiving(namespace, origins)
    token = _now_receiving.set(receiving)
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # the user's class may refuse attributes
            setattr(error, ROOT_ATTRIBUTE, receiving.root)
        raise
    finally:
        _now_receiving.reset(token)  # unpickling one object may have unpickled another


def _begin_root(label: str) -> None:
    _now_receiving.get().root = label


def _receiver_namespace() -> dict[str, Any]:
    return _now_receiving.get().namespace


def _numbers(origins: Origins) -> dict[int, int]:
    """Return the receiver's numbers of the origins, by the origins' ids."""
    # Not by a question for Mapping, which takes 0.2 ms in a fork.
    numbered: Iterable[tuple[int, Any]] = getattr(origins, "items", lambda: enumerate(origins))()
    return {id(origin): number for number, origin in numbered}


def _resolve_origin(index: int) -> Any:
    return _now_receiving.get().origins[index]

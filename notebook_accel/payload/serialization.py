"""Pickling of objects that travel between the notebook and the ranks. Both sides use it.

The notebook's functions and classes travel by value, through cloudpickle. Large buffers, one for each tensor storage
and array, travel beside the pickle in an anonymous memory file. Every receiver maps it privately: nothing is copied
until a process writes, and then only the pages that it writes to.

Functions and classes of the notebook return as references, never as copies: cloudpickle unpickles a class that it has
seen before *into* that class, and would so replace the notebook's methods by copies with their own globals.

What every process has of its own travels by its import name: modules, the standard streams, and the instances that the
standard library, NumPy and torch keep as globals, such as ``os.environ`` and the random generator behind
``random.shuffle``. So do instances without state of any package, since they are only compared by identity.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copyreg
import dataclasses
import dis
import enum
import errno
import functools
import importlib
import inspect
import io
import operator
import os
import pickle
import random
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import cloudpickle

from notebook_accel import host_memory
from notebook_accel.payload import memory_files, sharded_tensors, unpicklable
from notebook_accel.payload.tensor_memory import Block, Blocks, Whole

Origins: TypeAlias = Sequence[Any] | Mapping[int, Any]

# The attribute of an error with the label of the root that couldn't be rebuilt, such as ``global "model"``.
ROOT_ATTRIBUTE = "_notebook_accel_root"
_HOOK = "__init_subclass__"
_STREAMS = ("stdin", "stdout", "stderr", "__stdin__", "__stdout__", "__stderr__")
# Their global objects are each process's own.
_SHARED_PACKAGES = frozenset({*sys.stdlib_module_names, "numpy", "torch"})
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
        self._by_name = _ByName()
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

    @staticmethod
    def _reduce_code(code: types.CodeType) -> Any:
        """Reduce code with its file name, which cloudpickle 3.1.3 leaves out: sources are found by it."""
        make, args = cloudpickle.cloudpickle._code_reduce(code)
        own = "".join(code.co_filename)  # a new string, so that equal code makes equal pickles
        return make, tuple(own if isinstance(arg, str) and arg == "<dynamic-code>" else arg for arg in args)

    # Few maps, since every object is looked up in each. The last is copyreg's, which libraries still add to.
    dispatch_table: ClassVar[Any] = collections.ChainMap(
        unpicklable.STAYING,
        {
            **cloudpickle.Pickler.dispatch_table.maps[0],
            types.CodeType: _reduce_code,
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
        if reduced is NotImplemented and (
            isinstance(obj, self._torch_types) or type(obj).__module__ == sharded_tensors.PARAMETRIZE
        ):
            reduced = sharded_tensors.reduce(obj, self._options.wholes)
        if reduced is not NotImplemented:
            return reduced
        reducer = _REDUCERS.get(type(obj))
        reduced = NotImplemented if reducer is None or can_be_imported(obj) else reducer(obj)
        is_definition = reduced is not NotImplemented
        if not is_definition:
            is_slotted = issubclass(type(obj), type) and "__slots__" in vars(obj)
            reduced = self._reduce_slotted(obj) if is_slotted else super().reducer_override(obj)
            is_definition = reduced is not NotImplemented and isinstance(obj, (type, types.FunctionType))
        if is_definition:
            self.by_value.append((self._name_in_namespace(obj), obj))
            if isinstance(obj, types.FunctionType) and reduced[0] is cloudpickle.cloudpickle._make_function:
                _complete(obj, reduced[2][1])
            elif isinstance(obj, enum.EnumMeta):
                reduced = _with_members(obj, reduced)
            elif reduced[0] is cloudpickle.cloudpickle._make_skeleton_class:
                reduced = _make_class, *reduced[1:]
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
    numbered = origins.items() if isinstance(origins, Mapping) else enumerate(origins)
    return {id(origin): number for number, origin in numbered}


def _resolve_origin(index: int) -> Any:
    return _now_receiving.get().origins[index]


def can_be_imported(obj: Any) -> bool:
    """Return whether a module has the object under the object's own name, so that pickling the name is enough."""
    module = getattr(obj, "__module__", None)
    if module in (None, "__main__"):
        return False
    found: Any = sys.modules.get(module)
    for part in str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", "")).split("."):
        found = getattr(found, part, None)
    return found is obj


class _ByName(dict[type, "Callable[[Any], Any] | None"]):
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
    make, (bases, name, qualname, _, *others), state, *_, set_state = reduced
    members: Mapping[str, Any] = cls.__members__
    if "_generate_next_value_" in vars(cls):  # for classes that extend one without members
        state[0]["_generate_next_value_"] = vars(cls)["_generate_next_value_"]
    if not members:
        return make, (bases, name, qualname, {}, *others), state, None, None, set_state
    base: Any = vars(cls)["_member_type_"]
    if base.__new__ is not object.__new__ and not hasattr(base, "__getnewargs__"):
        return reduced  # of a type whose instances can't be made again from what they are
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
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    type(_function): _function,
    _LruCache: lambda obj: (functools.lru_cache(**obj.cache_parameters()), (obj.__wrapped__,)),  # without its entries
    functools.cached_property: lambda obj: (_make_cached_property, (obj.func, obj.attrname)),
    # Without the methods bound so far, which Python 3.13 and later keep by weak references.
    functools.singledispatchmethod: lambda obj: (_make_dispatching_method, (obj.func, obj.dispatcher)),
    typing.NewType: lambda obj: (typing.NewType, (obj.__name__, obj.__supertype__)),
    typing.ParamSpec: lambda obj: (typing.ParamSpec, (obj.__name__,)),
}

if sys.version_info >= (3, 11):
    _REDUCERS[typing.TypeVarTuple] = lambda obj: (typing.TypeVarTuple, (obj.__name__,))
if sys.version_info >= (3, 12):

    def _make_alias(name: str, value: Any, type_params: tuple[Any, ...]) -> Any:
        return typing.TypeAliasType(name, value, type_params=type_params)

    _REDUCERS[typing.TypeAliasType] = lambda obj: (_make_alias, (obj.__name__, obj.__value__, obj.__type_params__))

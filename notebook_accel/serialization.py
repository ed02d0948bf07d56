"""Objects on their way between the notebook and the ranks.

What the notebook defined travels by value, through cloudpickle. Large buffers, one for each tensor storage and array,
travel beside the pickle in an anonymous memory file, which every receiver maps privately: nobody copies them, and
whoever writes, writes to pages of its own.

What came from the notebook goes back as a reference to the notebook's own object, never as a copy: cloudpickle
unpickles a class that it has seen before *into* that class, and so would replace the notebook's methods by copies with
globals of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import io
import mmap
import os
import pickle
import struct
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from notebook_accel import unpicklable

__all__ = [
    "Opened",
    "Pickled",
    "loads",
    "make_unwritable",
    "memory_file",
    "open_sealed",
    "pickle_by_value",
    "read_head",
    "seal",
]

# Smaller buffers stay in the pickle: a page and a table entry each would cost more than the copy.
_OUT_OF_BAND_BYTES = 4096
_PREFIX = struct.Struct("!QQQ")  # bytes of the head, bytes of the pickle, number of buffers
_SPAN = struct.Struct("!QQ")  # a buffer's offset in the file and its length
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclasses.dataclass(frozen=True)
class Pickled:
    """A pickle and what belongs to it.

    Attributes:
        data: The pickle.
        buffers: Its out-of-band buffers, in order.
        shipped: The functions and classes that are in it by value. Their place in here is how the receiver refers to
            them when it sends something back.
    """

    data: bytes
    buffers: tuple[pickle.PickleBuffer, ...]
    shipped: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Opened:
    """What ``open_sealed`` found.

    Attributes:
        value: The object.
        shipped: The functions and classes that travelled by value, each with the name under which the sender's
            namespace has it, or ``None``.
    """

    value: Any
    shipped: Sequence[tuple[str | None, Any]]


def pickle_by_value(
    value: Any,
    *,
    roots: Mapping[str, Any],
    namespace: Mapping[str, Any] | None = None,
    origins: Iterable[Any] = (),
    device_tensors_to_cpu: bool = False,
    advice: str = "make it inside the cell or the function instead, or keep it out of what the ranks use",
) -> Pickled:
    """Pickles an object.

    Args:
        value: The object.
        roots: What the user knows in it, by the words that a message uses for it, such as ``global "model"``.
        namespace: The sender's module namespace. Functions that have it as their globals get the receiver's namespace
            instead of a dict of their own.
        origins: Functions and classes that came from the receiver, in the order of its ``Pickled.shipped``.
        device_tensors_to_cpu: Whether tensors on a device travel as CPU copies; otherwise they are refused.
        advice: What an error says to do instead of sending the object.

    Raises:
        PayloadError: Something can't be pickled; the message leads to it.
    """
    options = _Options(namespace, {id(origin): index for index, origin in enumerate(origins)}, device_tensors_to_cpu)
    pickler = _Pickler(options)
    try:
        data = pickler.pickled(value)
    except Exception as error:  # noqa: BLE001 - whatever it is, the user is told where it comes from
        raise unpicklable.explain(roots, error, lambda obj: _failure(obj, options), advice) from None
    return Pickled(data, tuple(pickler.buffers), tuple(obj for _, obj in pickler.shipped))


def seal(descriptor: int, pickled: Pickled, head: bytes = b"") -> int:
    """Writes a head and a pickle into an empty memory file; returns the bytes written. Buffers start on pages."""
    views = [buffer.raw() for buffer in pickled.buffers]
    position = _PREFIX.size + _SPAN.size * len(views) + len(head) + len(pickled.data)
    spans = []
    for view in views:
        position = -(-position // mmap.PAGESIZE) * mmap.PAGESIZE
        spans.append((position, view.nbytes))
        position += view.nbytes
    table = b"".join(_SPAN.pack(*span) for span in spans)
    os.ftruncate(descriptor, position)
    _write(descriptor, _PREFIX.pack(len(head), len(pickled.data), len(views)) + table + head + pickled.data, 0)
    for view, (offset, _) in zip(views, spans, strict=True):
        _write(descriptor, view, offset)
    return position


def make_unwritable(descriptor: int) -> None:
    """Nobody, not even through this descriptor, can change the memory file any more; private mappings still work."""
    fcntl = importlib.import_module(
        "fcntl"
    )  # not at the top: this can be imported where only Linux's calls are missing
    fcntl.fcntl(
        descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    )


def memory_file(name: str) -> int:
    """A new anonymous memory file's descriptor. It goes when the last descriptor and mapping go."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def read_head(descriptor: int) -> bytes:
    """The head of a sealed file."""
    length, _, count = _PREFIX.unpack(os.pread(descriptor, _PREFIX.size, 0))
    return os.pread(descriptor, length, _PREFIX.size + count * _SPAN.size)


def open_sealed(descriptor: int, *, namespace: dict[str, Any] | None = None, origins: Sequence[Any] = ()) -> Opened:
    """The objects in a sealed file, their buffers mapped privately. The descriptor may be closed afterwards.

    Args:
        descriptor: The memory file.
        namespace: The namespace that the sender's own stands for here; without one, functions get a dict of their own.
        origins: What this side had shipped before, so that references to it are resolved.
    """
    head_bytes, data_bytes, count = _PREFIX.unpack(os.pread(descriptor, _PREFIX.size, 0))
    table = os.pread(descriptor, count * _SPAN.size, _PREFIX.size)
    spans = [_SPAN.unpack_from(table, index * _SPAN.size) for index in range(count)]
    data = _read(descriptor, data_bytes, _PREFIX.size + len(table) + head_bytes)
    mapped = _map_privately(descriptor) if spans else memoryview(b"")
    buffers = [mapped[offset : offset + length] for offset, length in spans]
    with _receiving({} if namespace is None else namespace, origins):
        value, shipped = pickle.loads(data, buffers=buffers)
    return Opened(value, shipped)


def _map_privately(descriptor: int) -> memoryview:
    """The file's bytes, in pages that become this process's own when they are written.

    Not ``mmap.mmap``: before Python 3.13 that keeps a duplicate of the descriptor for as long as anything refers to the
    mapping, and a notebook that keeps many results would run out of descriptors.
    """
    length = os.fstat(descriptor).st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mapping a memory file failed")
    block = (ctypes.c_ubyte * length).from_address(address)
    # Nothing may touch the pages at the interpreter's end, when tensors in them may be freed in any order.
    weakref.finalize(block, libc.munmap, address, length).atexit = False
    return memoryview(block).cast("B")


def loads(data: bytes, *, origins: Sequence[Any] = ()) -> Any:
    """The object that a ``Pickled.data`` without buffers holds."""
    with _receiving({}, origins):
        value, _ = pickle.loads(data)
    return value


def _read(descriptor: int, length: int, offset: int) -> bytes:
    parts: list[bytes] = []
    while length:
        parts.append(os.pread(descriptor, length, offset))  # at most 2 GiB at once
        length, offset = length - len(parts[-1]), offset + len(parts[-1])
    return b"".join(parts)


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[written:], offset + written


@dataclasses.dataclass(frozen=True)
class _Options:
    namespace: Mapping[str, Any] | None
    origins: Mapping[int, int]
    device_tensors_to_cpu: bool


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle with tensor storages out of band, one namespace, and references to the receiver's own objects."""

    def __init__(self, options: _Options) -> None:
        self._file = io.BytesIO()
        self.buffers: list[pickle.PickleBuffer] = []
        self.shipped: list[tuple[str | None, Any]] = []
        self._options = options
        self._storages: dict[int, _Storage] = {}
        super().__init__(self._file, protocol=5, buffer_callback=self._take_buffer)
        if options.namespace is not None:
            # cloudpickle keeps one stand-in for each globals dict that functions have: this is the one for ours.
            self.globals_ref[id(options.namespace)] = _Namespace()
        torch = sys.modules.get("torch")  # never import it: a kernel without torch has no tensors
        self._storage_types = (torch.storage.TypedStorage, torch.UntypedStorage) if torch is not None else ()

    def pickled(self, value: Any) -> bytes:
        # The list is pickled last and filled while the value before it is being pickled.
        self.dump((value, self.shipped))
        return self._file.getvalue()

    def _take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < _OUT_OF_BAND_BYTES:
            return True
        self.buffers.append(buffer)
        return False

    def reducer_override(self, obj: Any) -> Any:
        origin = self._options.origins.get(id(obj))
        if origin is not None:
            return _resolve_origin, (origin,)
        if isinstance(obj, self._storage_types):
            return self._reduce_storage(obj)
        reduced = super().reducer_override(obj)
        if reduced is not NotImplemented and isinstance(obj, (type, types.FunctionType)):
            self.shipped.append((self._name_in_namespace(obj), obj))
        return reduced

    def _name_in_namespace(self, obj: Any) -> str | None:
        name: str = obj.__name__
        namespace = self._options.namespace or {}
        return name if namespace.get(name) is obj else None

    def _reduce_storage(self, obj: Any) -> Any:
        untyped = getattr(obj, "_untyped_storage", obj)
        holder = self._storages.get(untyped._cdata)
        if holder is None:
            if untyped.device.type != "cpu" and not self._options.device_tensors_to_cpu:
                raise unpicklable.OnDeviceError(f"a tensor on {untyped.device}")
            holder = self._storages[untyped._cdata] = _Storage(untyped)
        # torch asks for an untyped one for its newer types, and is content with one of bytes.
        dtype = sys.modules["torch"].uint8 if obj is untyped else obj.dtype
        return _typed_storage, (holder, dtype)


class _Namespace:
    """Stands for the sender's namespace; unpickles as the receiver's."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _receiver_namespace, ()


class _Storage:
    """Stands for one tensor storage, so that pickle's own memory of objects keeps views and ties together."""

    def __init__(self, untyped: Any) -> None:
        self.original = untyped  # kept: its address must not be given to another storage meanwhile
        self.on_cpu = untyped.cpu() if untyped.device.type != "cpu" else untyped

    def __reduce__(self) -> tuple[Any, ...]:
        if self.on_cpu.nbytes() == 0:
            return _storage_from_buffer, (b"",)
        block = (ctypes.c_ubyte * self.on_cpu.nbytes()).from_address(self.on_cpu.data_ptr())
        block.storage = self.on_cpu  # the bytes stay where they are for as long as somebody has the buffer
        return _storage_from_buffer, (pickle.PickleBuffer(block),)


def _storage_from_buffer(buffer: Any) -> Any:
    torch = importlib.import_module("torch")  # only where there is a tensor: a kernel need not have torch
    if len(buffer) == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    torch = importlib.import_module("torch")
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


class _Receiving(threading.local):
    namespace: dict[str, Any]
    origins: Sequence[Any]


_now_receiving = _Receiving()


@contextlib.contextmanager
def _receiving(namespace: dict[str, Any], origins: Sequence[Any]) -> Iterator[None]:
    _now_receiving.namespace, _now_receiving.origins = namespace, origins
    try:
        yield
    finally:
        del _now_receiving.namespace, _now_receiving.origins


def _receiver_namespace() -> dict[str, Any]:
    return _now_receiving.namespace


def _resolve_origin(index: int) -> Any:
    return _now_receiving.origins[index]


def _failure(obj: Any, options: _Options) -> Exception | None:
    """What pickling the object alone raises."""
    try:
        _Pickler(options).pickled(obj)
    except Exception as error:  # noqa: BLE001 - whatever a user's __reduce__ raises is the reason we look for
        return error
    return None

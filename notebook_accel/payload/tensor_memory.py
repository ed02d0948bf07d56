"""The memory of tensors and arrays, pickled out of band.

Tensors and arrays are pickled as views of a block of memory. Each block is pickled once, so that shared memory stays
shared, also between torch and numpy. Only the parts of a block that views use are sent. The receiver of an array that
is a memory-mapped file maps the file itself.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any

from notebook_accel.payload.unpicklable import OnDeviceError

_PLAIN_KINDS = frozenset("biufcmMSUV")  # kinds of numpy's types whose memory holds no pointers


class Whole:
    """A buffer of an object that is no tensor or array. All of it is sent."""

    def __init__(self, buffer: pickle.PickleBuffer) -> None:
        self._bytes = buffer.raw()
        self.size_bytes = self.used_bytes = self._bytes.nbytes

    def pieces(self) -> Sequence[tuple[int, memoryview]]:
        return [(0, self._bytes)] if self.size_bytes else []


class Block:
    """A range of memory, the owner that keeps it alive, and the parts that views use. Pickled as its bytes."""

    def __init__(self, address: int, size_bytes: int, owner: Any) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._used: list[tuple[int, int]] = []
        self._memory = _memory(address, size_bytes)
        self._memory.owner = owner  # keeps the memory alive as long as the buffer
        self.buffer = pickle.PickleBuffer(self._memory)

    def use(self, start: int, end: int) -> None:
        """Record that a view uses these bytes, counted from the block's beginning."""
        if start == end:
            return
        if self._used and self._used[-1][0] <= start <= self._used[-1][1]:  # such as consecutive rows
            self._used[-1] = (self._used[-1][0], max(end, self._used[-1][1]))
        else:
            self._used.append((start, end))

    @property
    def used_bytes(self) -> int:
        """Number of bytes that views use."""
        self._merge()
        return sum(end - start for start, end in self._used)

    def pieces(self) -> Sequence[tuple[int, memoryview]]:
        self._merge()
        whole = memoryview(self._memory).cast("B")
        return [(start, whole[start:end]) for start, end in self._used]

    def _merge(self) -> None:
        spans, self._used = sorted(self._used), []
        for start, end in spans:
            self.use(start, end)

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self.buffer,)


class Blocks:
    """The blocks of one pickle. With ``device_tensors_to_cpu``, device tensors become CPU copies; else they raise."""

    def __init__(self, *, device_tensors_to_cpu: bool) -> None:
        self._device_tensors_to_cpu = device_tensors_to_cpu
        self._blocks: dict[tuple[int, int], Block] = {}
        self._by_buffer: dict[int, Block] = {}
        self._storages: dict[tuple[str, int, int], _Storage] = {}
        self._files: dict[int, _MappedFile] = {}
        # Don't import these: a kernel without torch has no tensors. Another thread may be in the middle of an import.
        self._torch: Any = sys.modules.get("torch")
        self._tensor_type = getattr(self._torch, "Tensor", None)
        self._storage_types = _storage_types()
        numpy: Any = sys.modules.get("numpy")
        self._array_types = tuple(getattr(numpy, name) for name in ("ndarray", "memmap") if hasattr(numpy, name))

    @staticmethod
    def is_storage(obj: Any) -> bool:
        """Return whether the object is a torch storage. torch makes a new object for each access to a storage."""
        return isinstance(obj, _storage_types())

    def is_of_tensors(self, obj: Any) -> bool:
        """Return whether the object is a torch tensor of any class, or a torch storage."""
        return self._tensor_type is not None and isinstance(obj, (self._tensor_type, *self._storage_types))

    def reduce(self, obj: Any) -> Any:
        """Reduce a tensor, a storage or an array; ``NotImplemented`` for other objects. For ``reducer_override``."""
        kind = type(obj)
        if kind is self._tensor_type:
            return self._reduce_tensor(obj)
        if kind in self._array_types:
            return self._reduce_array(obj)
        if isinstance(obj, self._storage_types):
            return self._reduce_storage(obj)
        return NotImplemented

    def of(self, buffer: pickle.PickleBuffer) -> Block | Whole:
        """Return the memory to write for a buffer of the pickle."""
        return self._by_buffer.get(id(buffer)) or Whole(buffer)

    # Tensors --------------------------------------------------------------------------------------------------------

    def _reduce_tensor(self, tensor: Any) -> Any:
        """Reduce a tensor as torch does, without its autograd graph, and record the bytes that it uses."""
        alone = tensor if tensor.grad_fn is None else tensor.detach()
        if alone.device.type not in ("cpu", "meta") and not _has_address(alone):
            self._refuse_if_it_must_stay(alone.device)
            alone = alone.detach().cpu().requires_grad_(alone.requires_grad)
        if alone.layout is self._torch.strided and alone.device.type != "meta" and not alone.is_nested:
            item_bytes = alone.element_size()
            start = alone.storage_offset() * item_bytes
            used_bytes = _reach(alone.shape, alone.stride(), item_bytes, item_bytes)[1]  # torch has no negative strides
            self._storage(alone.untyped_storage()).expect(start, start + used_bytes)
        return NotImplemented if alone is tensor else alone.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    def _reduce_storage(self, obj: Any) -> Any:
        untyped = getattr(obj, "_untyped_storage", obj)
        storage = self._storage(untyped)
        storage.reached()
        # torch expects an untyped storage for its newer types, and accepts one of type uint8.
        return _typed_storage, (storage, self._torch.uint8 if obj is untyped else obj.dtype)

    def _storage(self, untyped: Any) -> _Storage:
        key = (str(untyped.device), untyped.data_ptr(), untyped.nbytes())
        if key not in self._storages:
            if untyped.device.type != "cpu":
                self._refuse_if_it_must_stay(untyped.device)
            on_cpu = untyped.cpu() if untyped.device.type != "cpu" else untyped
            self._storages[key] = _Storage(self._block(on_cpu.data_ptr(), on_cpu.nbytes(), on_cpu), untyped)
        return self._storages[key]

    def _refuse_if_it_must_stay(self, device: Any) -> None:
        if not self._device_tensors_to_cpu:
            raise OnDeviceError(f"a tensor on {device}")

    # Arrays ---------------------------------------------------------------------------------------------------------

    def _reduce_array(self, array: Any) -> Any:
        if array.dtype.hasobject or array.dtype.kind not in _PLAIN_KINDS or array.size == 0:
            return NotImplemented
        root = array
        while isinstance(root.base, self._array_types):
            root = root.base
        address = _address(array)
        view = (array.dtype, array.shape, array.strides, array.flags.writeable)
        if _can_be_opened(root):
            file = self._files.setdefault(id(root), _MappedFile(root))
            return _array_in_file, (file, address - _address(root), *view, type(array) is type(root))
        block = self._block_of(root)
        start = address - block.address
        low, high = _reach(array.shape, array.strides, array.itemsize)
        block.use(start + low, start + high)
        return _array, (block, start, *view)

    def _block_of(self, root: Any) -> Block:
        """Return the memory of an array that is no view of another."""
        if type(root.base) is self._tensor_type:  # the array comes from tensor.numpy()
            return self._storage(root.base.untyped_storage()).block
        low, high = _reach(root.shape, root.strides, root.itemsize)
        return self._block(_address(root) + low, high - low, root)

    def _block(self, address: int, size_bytes: int, owner: Any) -> Block:
        key = (address, size_bytes)
        if key not in self._blocks:
            block = self._blocks[key] = Block(address, size_bytes, owner)
            self._by_buffer[id(block.buffer)] = block
        return self._blocks[key]


def _storage_types() -> tuple[type, ...]:
    modules = ((sys.modules.get("torch"), "UntypedStorage"), (sys.modules.get("torch.storage"), "TypedStorage"))
    return tuple(getattr(module, name) for module, name in modules if hasattr(module, name))


def _has_address(tensor: Any) -> bool:
    """Return whether a tensor's storage has an address. Tensors of a compiler, such as XLA's, have none."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


class _Storage:
    """A stand-in for one tensor storage, by which pickle's memo recognises views and tied tensors."""

    def __init__(self, block: Block, original: Any) -> None:
        self.block = block
        self._original = original  # kept alive, so that no other storage gets its address
        self._expected = 0

    def expect(self, start: int, end: int) -> None:
        """Record the bytes that a tensor uses. Its storage is pickled next."""
        self.block.use(start, end)
        self._expected += 1

    def reached(self) -> None:
        """Record that the storage is pickled. If no ``expect`` came before, the whole storage counts as used."""
        if self._expected:
            self._expected -= 1
        else:
            self.block.use(0, self.block.size_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_storage, (self.block,)) if self.block.size_bytes else (_storage, (b"",))


class _MappedFile:
    """A stand-in for an array that is a memory-mapped file."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def __reduce__(self) -> tuple[Any, ...]:
        mode = "r+" if self._root.mode == "w+" else self._root.mode
        return _file_bytes, (self._root.filename, mode, self._root.offset, self._root.nbytes)


def _can_be_opened(root: Any) -> bool:
    """Return whether an array is a mapped file that still exists and has all of the array's bytes."""
    if not isinstance(root.base, mmap.mmap) or getattr(root, "filename", None) is None or root.mode == "c":
        return False
    try:
        return os.stat(root.filename).st_size >= int(root.offset + root.nbytes)
    except OSError:
        return False


def _reach(shape: Sequence[int], steps: Sequence[int], item_bytes: int, step_bytes: int = 1) -> tuple[int, int]:
    """Return start and end of a view's bytes, counted from its first element. ``steps``: strides in ``step_bytes``."""
    low = high = 0
    for size, step in zip(shape, steps, strict=True):
        if size == 0:
            return 0, 0
        if step < 0:
            low += (size - 1) * step
        else:
            high += (size - 1) * step
    return low * step_bytes, high * step_bytes + item_bytes


def _memory(address: int, size_bytes: int) -> Any:
    return (ctypes.c_ubyte * size_bytes).from_address(address)


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


# Functions that unpickling calls. They import torch and numpy only if the pickle has objects of these libraries.


def _same(buffer: Any) -> Any:
    return buffer


def _storage(buffer: Any) -> Any:
    torch = importlib.import_module("torch")
    if len(buffer) == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    torch = importlib.import_module("torch")
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


def _array(buffer: Any, offset: int, dtype: Any, shape: Any, strides: Any, writeable: bool) -> Any:
    array = importlib.import_module("numpy").ndarray(shape, dtype, buffer, offset, strides)
    array.flags.writeable = writeable
    return array


def _file_bytes(filename: str, mode: str, offset: int, size_bytes: int) -> Any:
    numpy = importlib.import_module("numpy")
    return numpy.memmap(filename, numpy.uint8, mode, offset, (size_bytes,))


def _array_in_file(whole: Any, offset: int, dtype: Any, shape: Any, strides: Any, writeable: bool, mapped: bool) -> Any:
    array = _array(whole, offset, dtype, shape, strides, writeable)
    return array.view(type(whole)) if mapped else array

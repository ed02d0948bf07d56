"""Anonymous memory files: a pickle and its buffers, written once and mapped by every reader.

A file has a prefix with the lengths, a table of the buffers, a head, a pickle, and then each buffer on pages of its
own. Parts of a buffer that no view uses are not written. They are holes, which take no memory and read as zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import mmap
import os
import struct
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from notebook_accel.payload.tensor_memory import Block, Whole

_PREFIX = struct.Struct("!QQQ")  # bytes of the head, bytes of the pickle, number of buffers
_SPAN = struct.Struct("!QQ")  # a buffer's offset in the file and its length
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_NORESERVE = 0x4000  # sys/mman.h; Python's mmap has it since 3.12
_SMALL_BYTES = 1 << 16
_WRITE_BYTES = 1 << 30  # Linux writes at most 2 GiB at once
# linux/memfd.h and linux/fcntl.h. A Python that was built with old headers lacks them, whatever the system has.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS = 1033
_NO_MORE_SEALS, _NO_SHRINKING, _NO_GROWING, _NO_WRITING = 1, 2, 4, 8


class FileContents(NamedTuple):
    """A file's pickle and buffers, as views of one private mapping; of a small pickle, a copy."""

    pickle: memoryview
    buffers: list[memoryview]


def memory_file(name: str) -> int:
    """Create an anonymous memory file, and return its descriptor. The file lives as long as a descriptor or mapping."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC | _MFD_ALLOW_SEALING)
    descriptor = int(ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _MFD_CLOEXEC | _MFD_ALLOW_SEALING))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def appending_file(name: str) -> int:
    """Create an anonymous memory file to which every write appends, and return its descriptor."""
    made = memory_file(name)
    try:  # a second open is the only way to set O_APPEND
        return os.open(f"/proc/self/fd/{made}", os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    finally:
        os.close(made)


def make_unwritable(descriptor: int) -> None:
    """Seal the memory file against all changes, even through this descriptor. Private mappings still work."""
    # Not imported at the top, so that this module can be imported on systems without Linux's calls.
    fcntl = importlib.import_module("fcntl")
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _NO_MORE_SEALS | _NO_SHRINKING | _NO_GROWING | _NO_WRITING)


def write(descriptor: int, head: bytes, pickle: memoryview, buffers: Sequence[Block | Whole]) -> int:
    """Fill an empty memory file, and return its length in bytes, holes included. Raise a MemoryError without room."""
    position = _PREFIX.size + _SPAN.size * len(buffers) + len(head) + len(pickle)
    spans = []
    for buffer in buffers:
        position = -(-position // mmap.PAGESIZE) * mmap.PAGESIZE
        spans.append((position, buffer.size_bytes))
        position += buffer.size_bytes
    start = _PREFIX.pack(len(head), len(pickle), len(buffers)) + b"".join(_SPAN.pack(*span) for span in spans) + head
    with _raising_memory_errors():
        os.ftruncate(descriptor, position)
        write_at(descriptor, memoryview(start), 0)
        write_at(descriptor, pickle, len(start))
        for buffer, (offset, _) in zip(buffers, spans, strict=True):
            for place, piece in buffer.pieces():
                write_at(descriptor, piece, offset + place)
    return position


def fill(descriptor: int, data: memoryview) -> None:
    """Copy another file's content, from ``whole``, into an empty memory file. Raise a MemoryError if it has no room."""
    with _raising_memory_errors():
        write_at(descriptor, data, 0)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of the data, starting at an offset."""
    rest = data
    while rest:
        written = os.pwrite(descriptor, rest[:_WRITE_BYTES], offset)
        rest, offset = rest[written:], offset + written


def whole(descriptor: int) -> memoryview:
    """Return the whole content of a file, mapped privately."""
    return _map_privately(descriptor) if os.fstat(descriptor).st_size else memoryview(b"")


def read_head(descriptor: int) -> bytes:
    """Return the head of a file."""
    length, _, count = _PREFIX.unpack(os.pread(descriptor, _PREFIX.size, 0))
    return os.pread(descriptor, length, _PREFIX.size + count * _SPAN.size)


def read(descriptor: int) -> FileContents:
    """Return the pickle and the buffers of a file, mapped privately. The descriptor may be closed afterwards."""
    head_bytes, pickle_bytes, count = _PREFIX.unpack(os.pread(descriptor, _PREFIX.size, 0))
    if not count and pickle_bytes <= _SMALL_BYTES:  # a copy is quicker than a mapping
        return FileContents(memoryview(os.pread(descriptor, pickle_bytes, _PREFIX.size + head_bytes)), [])
    mapped = _map_privately(descriptor)
    spans = [_SPAN.unpack_from(mapped, _PREFIX.size + index * _SPAN.size) for index in range(count)]
    start = _PREFIX.size + count * _SPAN.size + head_bytes
    buffers = [mapped[offset : offset + length] for offset, length in spans]
    return FileContents(mapped[start : start + pickle_bytes], buffers)


def _map_privately(descriptor: int) -> memoryview:
    """Map the file copy-on-write.

    Not by ``mmap.mmap``: before Python 3.13 it keeps a duplicate of the descriptor as long as the mapping, and a
    notebook with many results would run out of descriptors.
    """
    length = os.fstat(descriptor).st_size
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # Reserve nothing: because of its holes, the file may be larger than the machine's memory.
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    address = libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mapping a memory file failed")
    block = (ctypes.c_ubyte * length).from_address(address)
    # Don't unmap at the interpreter's end, when tensors in these pages may be freed in any order.
    weakref.finalize(block, libc.munmap, address, length).atexit = False
    return memoryview(block).cast("B")


@contextlib.contextmanager
def _raising_memory_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise MemoryError(os.strerror(error.errno)) from error
        raise

"""Moves a process's own memory into huge pages, which makes forks of it, and their ends, several times as fast.

A fork copies an entry for each page that the process has written, and an end gives each back: with torch imported, that
is 55,000 of them, and most of the time that a rank takes to start. Linux 6.1 and later can make one page of 512. What a
fork then writes to is split again, for that fork alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

__all__ = ["collapse", "stretches"]

_HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # linux/mman.h
_AT_ONCE = 8  # some milliseconds' work


def stretches() -> Iterator[tuple[int, int]]:
    """Address and length of what can be moved, in pieces that don't take long. Nothing where it can't be known."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if not permissions.startswith("rw-p") or inode != "0" or (name and name[0].startswith("[stack")):
            continue
        low, high = (int(address, 16) for address in addresses.split("-"))
        low, high = -(-low // _HUGE_BYTES) * _HUGE_BYTES, high // _HUGE_BYTES * _HUGE_BYTES
        step = _AT_ONCE * _HUGE_BYTES
        yield from ((start, min(step, high - start)) for start in range(low, high, step))


def collapse(address: int, length: int) -> None:
    """Moves the memory there, as far as the system can. Its content stays what it is."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start in range(address, address + length, _HUGE_BYTES):  # one that can't be moved must not stop the others
        libc.madvise(start, _HUGE_BYTES, _MADV_COLLAPSE)

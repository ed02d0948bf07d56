"""Sending each rank an object of its own, in one message."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["ObjectScatter"]

# The longest of all ranks' objects, and the length of this rank's, in bytes.
_HEADER = struct.Struct("qq")
_FIRST_CAPACITY_BYTES = 1 << 12


class ObjectScatter:
    """Gives each rank an object of rank 0's.

    torch's own takes three messages, since ranks have to learn first how much they are sent. Here all ranks expect as
    much as they were sent before, and only longer objects take a second message.

    Args:
        device: What the group carries.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._capacity_bytes = _FIRST_CAPACITY_BYTES

    def __call__(self, values: Sequence[Any] | None) -> Any:
        """The object at this rank's place in rank 0's ``values``. All ranks call it; others give ``None``."""
        pickled = None if values is None else [pickle.dumps(value, pickle.HIGHEST_PROTOCOL) for value in values]
        received = self._exchange(pickled)
        longest, length = _HEADER.unpack_from(received)
        if longest > self._capacity_bytes:
            self._capacity_bytes = 1 << longest.bit_length()
            received = self._exchange(pickled)
        return pickle.loads(memoryview(received)[_HEADER.size : _HEADER.size + length])

    def _exchange(self, pickled: Sequence[bytes] | None) -> bytearray:
        size_bytes = _HEADER.size + self._capacity_bytes
        messages = None
        if pickled is not None:
            longest = max(map(len, pickled))
            fits = longest <= self._capacity_bytes
            texts = [_HEADER.pack(longest, len(text)) + (text if fits else b"") for text in pickled]
            messages = [_tensor(bytearray(text.ljust(size_bytes, b"\0"))).to(self._device) for text in texts]
        buffer = bytearray(size_bytes)
        received = _tensor(buffer)
        if self._device.type == "cpu":
            dist.scatter(received, messages, src=0)
        else:
            on_device = received.to(self._device)
            dist.scatter(on_device, messages, src=0)
            received.copy_(on_device)
        return buffer


def _tensor(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)

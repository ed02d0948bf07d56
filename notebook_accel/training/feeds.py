"""How batches get from the host to the device: by a copy, or by something that does it while the model computes."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, Protocol

import torch

from notebook_accel.training.backends.backend import Uploader
from notebook_accel.training.trees import leaves_of, map_leaves

__all__ = ["Copying", "Feed", "Uploading"]


class Feed(Protocol):
    """A pass's way to the device. Batches are taken in the order in which they are sent."""

    def send(self, batch: Any) -> Any:
        """Begins with a batch that will be taken later; returns what to hold until then."""

    def begin(self) -> None:
        """Begins to take to the device what was sent and waits for that, if it does. ``take`` does so too."""

    def take(self, held: Any) -> Any:
        """The batch on the device, for what ``send`` has returned."""

    def close(self) -> None:
        """Ends the pass."""


class Copying:
    """Copies each batch when it is sent, one step before it is used.

    Args:
        copy: Makes the copy; ``None`` leaves batches where they are.
    """

    def __init__(self, copy: Callable[[Any], Any] | None) -> None:
        self._copy = copy

    def send(self, batch: Any) -> Any:
        return batch if self._copy is None else self._copy(batch)

    def begin(self) -> None:
        pass

    def take(self, held: Any) -> Any:
        return held

    def close(self) -> None:
        pass


class Uploading:
    """Hands the tensors of each batch to an uploader, and puts them back into their places when they are there.

    Args:
        uploader: A backend's.
        device: Where it takes them.
    """

    def __init__(self, uploader: Uploader, device: torch.device) -> None:
        self._uploader = uploader
        self._device = device
        self._sent: collections.deque[Any] = collections.deque()

    def send(self, batch: Any) -> Any:
        self._uploader.send([leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor)])
        self._sent.append(batch)
        return batch

    def begin(self) -> None:
        self._uploader.begin()

    def take(self, held: Any) -> Any:
        assert self._sent.popleft() is held
        tensors = iter(self._uploader.take())

        def placed(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return next(tensors)
            return leaf.to(self._device) if hasattr(leaf, "to") else leaf

        return map_leaves(placed, held)

    def close(self) -> None:
        self._uploader.close()

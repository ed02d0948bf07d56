"""torch's modes, which an interrupt can leave as they were inside a context: it may come in the middle of its end.

A rank whose gradients are off from then on, or whose autocast goes on with weights of before, is no use any more, and
nothing says so. Runs in the rank.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["Modes"]

_DEVICES = ("cpu", "cuda")  # that have an autocast of their own


class Modes:
    """The modes of this thread as they are now; none where torch hasn't been imported."""

    def __init__(self) -> None:
        self._torch: Any = sys.modules.get("torch")
        if self._torch is not None:
            self._has_gradients = self._torch.is_grad_enabled()
            self._autocast = [self._torch.is_autocast_enabled(device) for device in _DEVICES]
            self._nesting = self._autocast_nesting()

    def restore(self) -> None:
        """Makes them what they were."""
        if self._torch is None:
            return
        self._torch.set_grad_enabled(self._has_gradients)
        for device, was_enabled in zip(_DEVICES, self._autocast, strict=True):
            self._torch.set_autocast_enabled(device, was_enabled)
        for _ in range(self._autocast_nesting() - self._nesting):
            self._torch.autocast_decrement_nesting()
        if self._nesting == 0:
            self._torch.clear_autocast_cache()

    def _autocast_nesting(self) -> int:
        """How many autocasts there are around each other; the outermost one's end empties the cache of weights."""
        self._torch.autocast_increment_nesting()
        return int(self._torch.autocast_decrement_nesting())

"""torch's state that persists in a rank between cells: its modes, and the default process group."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

_DEVICES = ("cpu", "cuda")  # device types with an autocast of their own


def let_cells_make_their_group_again() -> None:
    """Let a cell that calls ``init_process_group`` run twice: a repeated call with equal arguments does nothing.

    torch refuses calls with other arguments.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    if not distributed.is_available():  # as in some builds for macOS
        return
    make_group = distributed.init_process_group
    made_with: list[Any] = []

    @functools.wraps(make_group)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not (distributed.is_initialized() and made_with == [args, kwargs]):
            make_group(*args, **kwargs)
            made_with[:] = args, kwargs

    distributed.init_process_group = init_process_group


class Modes:
    """A snapshot of this thread's grad mode and autocast; empty if torch hasn't been imported.

    An interrupt may come in the middle of a context's exit and leave its mode on. A rank without gradients, or with
    autocast on cached weights, would silently give wrong results from then on.
    """

    def __init__(self) -> None:
        self._torch: Any = sys.modules.get("torch")
        if self._torch is not None:
            self._has_gradients = self._torch.is_grad_enabled()
            self._autocast = [self._torch.is_autocast_enabled(device) for device in _DEVICES]
            self._nesting = self._autocast_nesting()

    def restore(self) -> None:
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
        """Return the depth of nested autocasts. The end of the outermost one clears the weight cache."""
        self._torch.autocast_increment_nesting()
        return int(self._torch.autocast_decrement_nesting())

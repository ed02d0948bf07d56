"""What rank 0 displays, under a cell of this kernel, where no panel does so."""

from __future__ import annotations

import builtins
import contextvars
import sys
from collections.abc import Callable
from typing import Any

from notebook_accel.protocol import events

__all__ = ["KernelDisplay"]


class KernelDisplay:
    """Shows it under the cell in which this was made, or that was named last."""

    def __init__(self) -> None:
        self._shown: set[str] = set()
        self.begin_cell()

    def begin_cell(self) -> None:
        """What comes from now on belongs under the running cell, whichever thread shows it."""
        self._context = contextvars.copy_context()

    def show(self, event: events.Display) -> bool:
        """Shows it, if it is more than text, and this is a kernel; returns whether it was shown."""
        display = _display_of_kernel()
        has_place = event.display_id in self._shown
        if display is None or not (has_place or event.data.keys() - {"text/plain"}):
            return False
        if event.display_id:
            self._shown.add(event.display_id)
        options: dict[str, Any] = {"metadata": event.metadata, "display_id": event.display_id or None}
        if event.is_update and has_place:
            options["update"] = True
        self._context.copy().run(display, event.data, raw=True, **options)
        return True


def _display_of_kernel() -> Callable[..., Any] | None:
    """IPython's ``display``, which it makes known to every cell; ``None`` outside of kernels."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(builtins, "display", None) if hasattr(shell, "kernel") else None

"""Notes which cell has initialised CUDA in the kernel, and at which line, for the message that says so; or XLA.

torch calls what was queued for it in the middle of its initialisation, with the guilty cell on the stack. Nothing is
queued before torch has been imported by somebody else: an entry of ``sys.meta_path`` sees that happen, and goes then.
"""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from notebook_accel.launching import device_state

__all__ = ["CudaWatch"]


class CudaWatch:
    """Watches one shell, from ``start`` to ``stop``."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._is_queued = False
        self._was_initialized = False
        self._was_xla_initialized = False

    def start(self) -> None:
        """Begin to watch. What was initialised before can't be told any more."""
        self._was_initialized = device_state.is_cuda_initialized()
        self._was_xla_initialized = device_state.is_xla_initialized()
        self._shell.events.register("post_run_cell", self._after_cell)
        if not self._queue():
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """End it. An entry in torch's queue stays: it does nothing but take a note."""
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("post_run_cell", self._after_cell)
        self._leave_imports()

    def find_spec(self, *_: object, **__: object) -> None:
        """Called by every import that is not done yet. Finds nothing, ever."""
        if self._queue():
            self._leave_imports()

    def _leave_imports(self) -> None:
        # Another list: this one may be gone through at this moment, and would skip who stands behind us.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def _queue(self) -> bool:
        """Has torch call us when it initialises CUDA; whether that is arranged."""
        cuda: Any = sys.modules.get("torch.cuda")
        if self._is_queued or cuda is None:
            return self._is_queued
        # torch may be in the middle of its import, and the function is a private one: then the cell has to be enough.
        with contextlib.suppress(Exception):
            if not cuda.is_initialized():
                cuda._lazy_call(self._initializing)
            self._is_queued = True
        return self._is_queued

    def _initializing(self) -> None:
        """Called by torch while it initialises CUDA. Must not raise: torch would."""
        with contextlib.suppress(Exception):
            frame: FrameType | None = sys._getframe()
            while frame is not None and frame.f_globals is not self._shell.user_ns:
                frame = frame.f_back
            if frame is not None:
                device_state.note_cuda_origin(f"{self._label(frame)}, line {frame.f_lineno}")

    def _label(self, frame: FrameType) -> str:
        """``In[3]``, of the cell that the code is in; a function's may be another than the one that runs."""
        named = getattr(self._shell.compile, "format_code_name", lambda _: None)(frame.f_code.co_filename)
        return str(named[1]) if named is not None else f"In[{self._shell.execution_count}]"

    def _after_cell(self, result: Any) -> None:
        if not self._was_initialized and device_state.is_cuda_initialized():
            self._was_initialized = True
            device_state.note_cuda_origin(f"In[{result.execution_count}]")
        if not self._was_xla_initialized and device_state.is_xla_initialized():
            self._was_xla_initialized = True
            device_state.note_xla_origin(f"In[{result.execution_count}]")

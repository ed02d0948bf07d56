"""Records which cell initialised CUDA or XLA in the kernel, for CUDA with the line, so that errors can name it.

torch calls a queued function during CUDA's initialisation, with the guilty cell on the stack. The function is queued
once the user's code imports torch: a finder in ``sys.meta_path`` notices the import and removes itself.
"""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from notebook_accel import torch_internals
from notebook_accel.launching import device_state


class CudaWatch:
    """Watches a shell for CUDA's and XLA's initialisation, from ``start`` to ``stop``."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._is_queued = False
        self._was_cuda_initialized = self._was_xla_initialized = False

    def start(self) -> None:
        """Start watching. An earlier initialisation can't be attributed any more."""
        self._was_cuda_initialized = device_state.is_cuda_initialized()
        self._was_xla_initialized = device_state.is_xla_initialized()
        self._shell.events.register("post_run_cell", self._after_cell)
        if not self._queue():
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Stop watching. The function in torch's queue stays, and does nothing but record a cell."""
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("post_run_cell", self._after_cell)
        self._leave_imports()

    def find_spec(self, *_: object, **__: object) -> None:
        """Check for torch at each import. As an import finder, never find a module."""
        if self._queue():
            self._leave_imports()

    def _leave_imports(self) -> None:
        # A new list: an import may be iterating over the old one, and would skip the next finder.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def _queue(self) -> bool:
        """Register ``_initializing`` for torch's CUDA initialisation. Return whether it is registered."""
        cuda: Any = sys.modules.get("torch.cuda")
        if self._is_queued or cuda is None:
            return self._is_queued
        # torch may be half imported, and the function is private. On failure, only the cell is recorded, not the line.
        with contextlib.suppress(Exception):
            if not cuda.is_initialized():
                torch_internals.at_cuda_start(self._initializing)
            self._is_queued = True
        return self._is_queued

    def _initializing(self) -> None:
        """Record the running cell. torch calls this while it initialises CUDA, and would raise its exception there."""
        with contextlib.suppress(Exception):
            frame: FrameType | None = sys._getframe()
            while frame is not None and frame.f_globals is not self._shell.user_ns:
                frame = frame.f_back
            if frame is not None:
                device_state.note_cuda_origin(f"{self._label(frame)}, line {frame.f_lineno}")

    def _label(self, frame: FrameType) -> str:
        """Return ``In[3]``, the cell of the frame's code. A function may come from an earlier cell."""
        named = getattr(self._shell.compile, "format_code_name", lambda _: None)(frame.f_code.co_filename)
        return str(named[1]) if named is not None else f"In[{self._shell.execution_count}]"

    def _after_cell(self, result: Any) -> None:
        if not self._was_cuda_initialized and device_state.is_cuda_initialized():
            self._was_cuda_initialized = True
            device_state.note_cuda_origin(f"In[{result.execution_count}]")
        if not self._was_xla_initialized and device_state.is_xla_initialized():
            self._was_xla_initialized = True
            device_state.note_xla_origin(f"In[{result.execution_count}]")

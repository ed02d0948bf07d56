"""Notes which cell initialised CUDA or XLA in the kernel, for CUDA with the line, so that errors can name it.

torch calls functions that were queued with it in the middle of its initialisation, with the guilty cell on the stack.
Nothing is queued before somebody else imports torch. A finder in ``sys.meta_path`` notices that and removes itself.
"""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from notebook_accel.launching import device_state


class CudaWatch:
    """Watches a shell for CUDA's and XLA's initialisation, from ``start`` to ``stop``."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._is_queued = False
        self._was_cuda_initialized = self._was_xla_initialized = False

    def start(self) -> None:
        """Begin to watch. An earlier initialisation can't be attributed any more."""
        self._was_cuda_initialized = device_state.is_cuda_initialized()
        self._was_xla_initialized = device_state.is_xla_initialized()
        self._shell.events.register("post_run_cell", self._after_cell)
        if not self._queue():
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Stop watching. The entry in torch's queue stays, and does no more than take a note."""
        with contextlib.suppress(ValueError):
            self._shell.events.unregister("post_run_cell", self._after_cell)
        self._leave_imports()

    def find_spec(self, *_: object, **__: object) -> None:
        """Look for torch, as an import finder that never finds anything itself."""
        if self._queue():
            self._leave_imports()

    def _leave_imports(self) -> None:
        # A new list: an import may be iterating over the old one, and would skip the next finder.
        sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def _queue(self) -> bool:
        """Have torch call us when it initialises CUDA. Return whether that is arranged."""
        cuda: Any = sys.modules.get("torch.cuda")
        if self._is_queued or cuda is None:
            return self._is_queued
        # torch may be half imported, and the function is private: then the cell's number, without a line, has to do.
        with contextlib.suppress(Exception):
            if not cuda.is_initialized():
                cuda._lazy_call(self._initializing)
            self._is_queued = True
        return self._is_queued

    def _initializing(self) -> None:
        """Note the running cell. Torch calls this while it initialises CUDA, and would pass on an exception."""
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

"""Records which lines of the user's code hold a rank's memory when it is at its peak.

A mode of torch's dispatcher, which is the same on every device, sees each operator with its tensors. A tensor's memory
belongs to the line that ran when it was made, until no tensor uses it any more. Tensors that were there before are
known from the first operator that uses them.

These are the bytes of tensors, not those of the allocator: what libraries such as cuBLAS and NCCL take isn't in them.
"""

from __future__ import annotations

import collections
import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from notebook_accel.launching.ranks.phases import compiled_graphs, place_of
from notebook_accel.protocol import events

_MOST_LINES = 20
_BEFORE = ("", "")  # place and text of what was made before
_COMPILED = "what torch.compile has compiled runs uncompiled in these steps, so its memory is that of the plain code"

_Line = tuple[str, str]


class MemoryRecorder:
    """Records what holds memory, in the thread that trains and in those of its backward passes."""

    warmup_steps = 0

    def __init__(self) -> None:
        self._tensors = _Tensors()
        self._mode: Any = None

    def begin(self) -> str:
        # Modes form a stack, and who leaves a mode takes the top one off it.
        if _modes():
            return "its code runs in a mode of torch's dispatcher itself, such as FlopCounterMode"
        self._tensors.is_on = True
        self._mode = _mode_class()(self._tensors)
        self._mode.__enter__()
        return ""

    def step(self, done: int) -> None:
        """Do nothing: steps aren't told apart."""

    def stop(self) -> None:
        """Record no more."""
        self._tensors.is_on = False
        # If the user's code has put another mode on top, this one stays and does nothing.
        if _modes()[-1:] == [self._mode]:
            self._mode.__exit__(None, None, None)
        self._mode = None

    def event(self, *, number: str, why: str, steps: int) -> events.Profiled:
        """Return what was recorded."""
        notes = [why, _COMPILED if compiled_graphs() else ""]
        held = [events.HeldMemory(*line, size) for line, size in self._tensors.at_peak.most_common(_MOST_LINES) if size]
        return events.Profiled(
            number=number,
            why="; ".join(filter(None, notes)),
            steps=steps,
            peak_bytes=self._tensors.peak_bytes,
            held=held,
        )


def _modes() -> list[Any]:
    return list(sys.modules["torch.utils._python_dispatch"]._get_current_dispatch_mode_stack())


class _Tensors:
    """The memory of tensors by the line that made them.

    Attributes:
        is_on: True while they are recorded.
        peak_bytes: Most bytes at one time.
        at_peak: The bytes of each line at that time.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.peak_bytes = 0
        self.at_peak: collections.Counter[_Line] = collections.Counter()
        self._bytes = 0
        self._by_line: collections.Counter[_Line] = collections.Counter()
        self._held: dict[int, tuple[weakref.ref[Any], int, _Line]] = {}  # by the id of the storage
        self._freed: collections.deque[int] = collections.deque()
        self._device = "cuda" if sys.modules["torch"].cuda.is_initialized() else "cpu"
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True where tensors are recorded; false in a fork, such as a worker of a loader."""
        return self.is_on and self._pid == os.getpid()

    def take(self, tensors: Any, line: _Line) -> None:
        """Take note of the tensors in a structure, if they are new, and of those that have gone meanwhile."""
        for storage in _storages(tensors):
            # Storages may go at any time and in any thread. Here all that have gone are counted, in their order.
            while self._freed:
                _, size, of_line = self._held.pop(self._freed.popleft())
                self._bytes -= size
                self._by_line[of_line] -= size
            number = id(storage)
            if number not in self._held and storage.device.type == self._device:
                size = storage.nbytes()
                gone = functools.partial(_append, self._freed, number)
                self._held[number] = (weakref.ref(storage, gone), size, line)
                self._bytes += size
                self._by_line[line] += size
        if self._bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak = self._bytes, self._by_line.copy()


def _append(freed: collections.deque[int], number: int, _: object) -> None:
    freed.append(number)


def _storages(structure: Any) -> Iterator[Any]:
    """Yield the storage of each tensor in a structure, and of those that tensors such as a DTensor are made of."""
    torch = sys.modules["torch"]
    for item in sys.modules["torch.utils._pytree"].tree_leaves(structure):
        if isinstance(item, torch.Tensor):
            if hasattr(item, "__tensor_flatten__"):
                yield from _storages([getattr(item, name) for name in item.__tensor_flatten__()[0]])
            elif item.layout == torch.strided:
                yield item.untyped_storage()


def _running_line() -> _Line:
    """Return the user's line that runs. Backward passes on a GPU have threads of their own, in which none does."""
    main = threading.main_thread().ident or 0
    # A variable with this function's own frame would be a cycle, which keeps the operator's tensors until it is found.
    is_here = threading.get_ident() == main
    _, place, text = place_of(sys._getframe() if is_here else sys._current_frames()[main])
    return place or "library code", text


@functools.cache
def _mode_class() -> Any:
    base: Any = sys.modules["torch.utils._python_dispatch"].TorchDispatchMode

    class MemoryMode(base):  # type: ignore[misc]  # torch isn't imported above
        """Takes note of the tensors of each operator."""

        supports_higher_order_operators = True

        def __init__(self, tensors: _Tensors) -> None:
            super().__init__()
            self._tensors = tensors

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not self._tensors.is_here:
                return func(*args, **(kwargs or {}))
            self._tensors.take((args, kwargs), _BEFORE)
            result = func(*args, **(kwargs or {}))
            self._tensors.take(result, _running_line())
            return result

    return MemoryMode

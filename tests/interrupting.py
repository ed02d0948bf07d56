"""Interrupts at chosen bytecodes of this process's main thread."""

from __future__ import annotations

import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from notebook_accel import interrupts


class Interrupting:
    """Raises SIGINT at the n-th bytecode that this thread runs in some files, and perhaps at the next ones.

    Args:
        step: The number of the bytecode.
        times: The number of signals. A trace that has raised ends, so later ones come only if the first raised nothing.
        paths: Files, or folders with files, in which bytecodes count.
    """

    def __init__(self, step: int, times: int = 1, paths: tuple[str, ...] = ()) -> None:
        self._left = step
        self._times = times
        self._paths = (interrupts.__file__, *paths)
        self.has_come = False

    def _trace(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._paths) or code is interrupts.Interrupts.arrive.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if -self._times < self._left <= 0:
                self.has_come = True
                signal.raise_signal(signal.SIGINT)
        return self._trace

    def call(self, act: Callable[[], object]) -> bool:
        """Call ``act``, and return whether it has ended by a KeyboardInterrupt."""
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks whether any frame wants it only when a trace is set
        sys.settrace(self._trace)
        try:
            act()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


def every_step(times: int, *paths: str) -> Iterator[Interrupting]:
    """Yield an ``Interrupting`` for each step, until an act ends before its step."""
    step = 0
    goes_on = True
    while goes_on:
        step += 1
        made = Interrupting(step, times, paths)
        yield made
        goes_on = made.has_come


@pytest.fixture
def kernel_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the handler that a kernel has while a cell runs. It must be there in the end."""
    monkeypatch.setattr(interrupts, "_SAME_CLICK_S", 60.0)  # however slow the machine is
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler

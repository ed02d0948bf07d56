"""A latch stays intact wherever an interrupt strikes the main thread."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
import types
from typing import Any

import pytest

from notebook_accel.uninterruptible import Latch

_DEADLINE_S = 10.0


def test_waiters_go_on_when_the_latch_is_set() -> None:
    latch = Latch()
    seen: list[bool] = []
    waiters = [threading.Thread(target=lambda: seen.append(latch.wait(_DEADLINE_S)), daemon=True) for _ in range(5)]
    for waiter in waiters:
        waiter.start()
    assert not latch.is_set
    latch.set()
    for waiter in waiters:
        waiter.join(_DEADLINE_S)
    assert seen == [True] * 5
    latch.set()  # again
    assert latch.is_set and latch.wait(0) and latch.wait()


@pytest.mark.parametrize("timeout_s", [0.001, 0, -1.0])
def test_wait_that_times_out_returns_false_and_leaves_nothing_behind(timeout_s: float) -> None:
    latch = Latch()
    assert not latch.wait(timeout_s)
    assert not latch._waiters


def test_several_threads_can_set_it() -> None:
    for _ in range(200):
        latch = Latch()
        setters = [threading.Thread(target=latch.set) for _ in range(4)]
        for setter in setters:
            setter.start()
        assert latch.wait(_DEADLINE_S)
        for setter in setters:
            setter.join(_DEADLINE_S)


class _Interrupts:
    """Raises KeyboardInterrupt at the n-th opcode of this thread in ``uninterruptible.py``."""

    def __init__(self, step: int) -> None:
        self._left = step
        self.has_come = False

    def trace(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != sys.modules["notebook_accel.uninterruptible"].__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left == 0:
                self.has_come = True
                raise KeyboardInterrupt
        return self.trace


def test_an_interrupt_at_any_step_of_waiting_leaves_it_whole() -> None:
    steps, goes_on = 0, True
    while goes_on:
        latch = Latch()
        interrupts = _Interrupts(steps + 1)
        sys.settrace(interrupts.trace)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                latch.wait(0.001)
        finally:
            sys.settrace(None)
        goes_on = interrupts.has_come
        steps += goes_on
        setter = threading.Thread(target=latch.set, daemon=True)
        setter.start()
        setter.join(_DEADLINE_S)
        assert not setter.is_alive(), f"after an interrupt at step {steps}, setting it waits for ever"
        assert latch.wait(_DEADLINE_S)
    assert steps > 20


def test_an_interrupt_ends_the_waiting() -> None:
    latch = Latch()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not latch._waiters:
            time.sleep(0)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        latch.wait(_DEADLINE_S)
    thread.join(_DEADLINE_S)
    latch.set()
    assert latch.is_set

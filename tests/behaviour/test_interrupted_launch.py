"""Interrupts that come while a launch is on its way, or one of them is heeded: no rank is left to itself."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
import types
from typing import Any

import pytest

from notebook_accel import notebook_launcher
from notebook_accel.config import LaunchConfig
from notebook_accel.launching.kernel import foreground, launcher
from notebook_accel.launching.kernel.job import Job
from tests import processes


def _run(start_method: str) -> None:
    notebook_launcher(time.sleep, (60,), 2, use_cpu=True, view="none", start_method=start_method, grace_s=1)


def _nothing_is_left(standing: set[int]) -> bool:
    is_rank_left = not {process.pid for process in processes.descendants(os.getpid())} <= standing
    return not is_rank_left and processes.memory_files(os.getpid()) <= {"notebook-accel-agent-log"}


@pytest.mark.parametrize("start_method", ["spawn", pytest.param("fork", marks=pytest.mark.slow)])
def test_interrupt_at_any_moment_of_a_launch(template: None, start_method: str) -> None:
    standing = {process.pid for process in processes.descendants(os.getpid())}
    for milliseconds in range(0, 40, 4):
        timer = threading.Timer(milliseconds / 1000, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            _run(start_method)
        timer.join()
        processes.wait_until(lambda: _nothing_is_left(standing), "no rank is left, and no file for its result")


class _SecondInterrupt:
    """Raises KeyboardInterrupt in ``foreground``, so many lines after the first one was raised."""

    def __init__(self, lines: int) -> None:
        self._lines = lines
        self._has_begun = False

    def begin(self, *_: Any) -> None:
        """The first."""
        self._has_begun = True
        raise KeyboardInterrupt

    @property
    def has_come(self) -> bool:
        return self._lines <= 0

    def trace(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != foreground.__file__:
            return None
        if event == "line" and self._has_begun:
            self._lines -= 1
            if self.has_come:
                raise KeyboardInterrupt  # after which Python traces no more
        return self.trace


@pytest.mark.slow
def test_interrupt_at_any_moment_of_heeding_another(template: None, monkeypatch: pytest.MonkeyPatch) -> None:
    standing = {process.pid for process in processes.descendants(os.getpid())}
    for lines in itertools.count(1):
        second = _SecondInterrupt(lines)
        monkeypatch.setattr(foreground, "_draw_until_done", second.begin)
        sys.settrace(second.trace)
        try:
            with pytest.raises(KeyboardInterrupt):
                _run("spawn")
        finally:
            sys.settrace(None)
        processes.wait_until(lambda: _nothing_is_left(standing), f"after {lines} lines no rank is left, and no file")
        if not second.has_come:
            break
    assert lines > 10


def test_interrupt_before_a_run_in_the_background_is_handed_over(template: None) -> None:
    standing = {process.pid for process in processes.descendants(os.getpid())}

    def show(job: Job) -> None:
        assert not job.done
        raise KeyboardInterrupt

    config = LaunchConfig(num_processes=2, use_cpu=True, view="none")
    with pytest.raises(KeyboardInterrupt):
        launcher.launch_function(time.sleep, (60,), {}, config, show=show)
    processes.wait_until(lambda: _nothing_is_left(standing), "no rank is left, and no file for its result")

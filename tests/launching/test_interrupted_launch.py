"""An interrupt that comes while a launch is on its way: no rank goes on without anybody who follows it."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from notebook_accel import notebook_launcher
from tests import processes


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_interrupt_at_any_moment_of_a_launch(template: None, start_method: str) -> None:
    standing = {process.pid for process in processes.descendants(os.getpid())}
    for milliseconds in range(0, 40, 4):
        timer = threading.Timer(milliseconds / 1000, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            notebook_launcher(time.sleep, (60,), 2, use_cpu=True, view="none", start_method=start_method, grace_s=1)
        timer.join()
        processes.wait_until(
            lambda: {process.pid for process in processes.descendants(os.getpid())} <= standing, "no rank is left"
        )

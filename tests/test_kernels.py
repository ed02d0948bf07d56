"""The helper for tests with a kernel, and its leak checks."""

from __future__ import annotations

import pathlib
import time

import pytest

from tests import kernels, processes


def test_outcome_has_streams_result_and_displays(kernel: kernels.Kernel) -> None:
    outcome = kernel.run(
        "import sys\nprint('out')\nprint('err', file=sys.stderr)\ndisplay({'text/plain': 'shown'}, raw=True)\n6 * 7"
    )
    assert (outcome.status, outcome.stdout, outcome.stderr, outcome.result) == ("ok", "out\n", "err\n", "42")
    assert [content["data"] for content in outcome.displays] == [{"text/plain": "shown"}]


def test_outcome_of_an_exception(kernel: kernels.Kernel) -> None:
    outcome = kernel.run("raise ValueError('boom')")
    assert (outcome.status, outcome.error_name, outcome.error_value) == ("error", "ValueError", "boom")
    assert "boom" in outcome.traceback


def test_interrupt_keeps_the_kernel(kernel: kernels.Kernel) -> None:
    kernel.run("kept = 1")
    cell = kernel.start("import time\nprint('started', flush=True)\ntime.sleep(60)")
    cell.wait_for_output("started")
    kernel.interrupt()
    assert cell.finish().error_name == "KeyboardInterrupt"
    assert kernel.value("kept") == "1"


@pytest.mark.parametrize("goes_on", ["time.sleep(60)", "while True: print('more', flush=True); time.sleep(0.001)"])
def test_waiting_for_a_cell_has_a_deadline(kernel: kernels.Kernel, goes_on: str) -> None:
    cell = kernel.start(f"import time\nprint('started', flush=True)\n{goes_on}")
    cell.wait_for_output("started")  # an earlier interrupt would be lost
    started = time.monotonic()
    with pytest.raises(AssertionError, match="not in time"):
        cell.finish(timeout_s=0.3)
    assert time.monotonic() - started < 10
    kernel.interrupt()
    cell.finish()


def test_killed_kernel_is_noticed(tmp_path: pathlib.Path) -> None:
    with kernels.running(tmp_path) as kernel:
        cell = kernel.start("import time\nprint('started', flush=True)\ntime.sleep(60)")
        cell.wait_for_output("started")
        kernel.kill()
        with pytest.raises(AssertionError, match="the kernel died"):
            cell.finish()
    assert not kernel.process.is_alive


def test_descendants_are_seen_through_a_session_of_their_own(kernel: kernels.Kernel) -> None:
    kernel.run("import subprocess\nchild = subprocess.Popen(['sleep', '60'], start_new_session=True)")
    pid = int(kernel.value("child.pid"))
    assert pid in [process.pid for process in kernel.descendants()]
    kernel.run("child.kill(); child.wait()")
    processes.wait_until(lambda: pid not in [process.pid for process in kernel.descendants()], "the child is gone")

"""Interrupts at any moment of a launch, of its wait, of an attachment and of an end: one outcome, and nothing left."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

import notebook_accel
from notebook_accel import interrupts, notebook_launcher
from notebook_accel.config import LaunchConfig
from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import detached, foreground, launcher
from notebook_accel.launching.kernel.cell import parse
from notebook_accel.launching.kernel.job import Job
from tests import processes
from tests.interrupting import kernel_handler  # noqa: F401 - a fixture

_PACKAGE = str(pathlib.Path(notebook_accel.__file__).parent)
_CONFIG = LaunchConfig(num_processes=2, use_cpu=True, view="none", grace_s=1)
_MOST_CALLS = 700  # of functions of the package; the longest trip has some 600
pytestmark = pytest.mark.usefixtures("template", "kernel_handler")


class _Strikes:
    """Raises SIGINT at the n-th call of a function of this package in this thread, and once more some calls later."""

    def __init__(self, first: int, then: int | None) -> None:
        self._at = {first, first + then} if then is not None else {first}
        self._calls = 0

    def _see(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            self._calls += 1
            if self._calls in self._at:
                signal.raise_signal(signal.SIGINT)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)


def _in_foreground(start_method: str = "spawn") -> None:
    values = notebook_launcher(time.sleep, (0.05,), 2, use_cpu=True, view="none", start_method=start_method, grace_s=1)
    assert values == [None, None]


def _forked() -> None:
    _in_foreground("fork")


def _pulls() -> None:
    pulled: dict[str, Any] = {}
    cell = parse("import os\nfound = int(os.environ['RANK'])\nfound", "In[1]")
    values = foreground.run_in_foreground(
        lambda: launcher.launch_cell(
            cell, _CONFIG, namespace={}, pull=["found"], set_variables=pulled.update, is_background=False
        )
    )
    assert values == [0, 1] and pulled == {"found": 0}


def _in_background() -> None:
    job = launcher.launch_function(time.sleep, (60,), {}, _CONFIG)
    try:
        job.interrupt()
        assert job.wait(60)
    finally:  # it has been handed over, so that its end is the owner's business
        with interrupts.held():
            job.discard()


def _attaches() -> None:
    job = detached.attach()
    assert job.status in ("starting", "running")


def _standing() -> tuple[set[int], set[str]]:
    """Return the ranks below this process, and the memory files that it holds: other tests' fixtures have some too."""
    ranks = {process.pid for process in processes.descendants(os.getpid()) if "rank" in process.command}
    return ranks, processes.memory_files(os.getpid())


def _nothing_is_left(pids: set[int], files: set[str]) -> bool:
    now_pids, now_files = _standing()
    return now_pids <= pids and now_files <= files


# Python can't hold back a second signal that comes microseconds after the first, where that is about to be handled.
@hypothesis.given(first=strategies.integers(1, _MOST_CALLS), then=strategies.none() | strategies.integers(20, 200))
@hypothesis.settings(
    max_examples=20, suppress_health_check=list(hypothesis.HealthCheck), deadline=None, derandomize=True
)
@pytest.mark.parametrize(
    "trip", [_in_foreground, _pulls, _in_background, pytest.param(_forked, marks=pytest.mark.slow)]
)
def test_wherever_interrupts_strike_there_is_one_outcome_and_nothing_is_left(
    trip: Callable[[], None], first: int, then: int | None
) -> None:
    pids, files = _standing()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupts, "_SAME_CLICK_S", 0.0)  # each of them counts
        with contextlib.suppress(KeyboardInterrupt), _Strikes(first, then).on():
            trip()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupts._of_this_thread() is None
    processes.wait_until(lambda: _nothing_is_left(pids, files), "no rank is left, and no file for its result")
    _in_foreground()


def test_interrupt_before_a_run_in_the_background_is_handed_over() -> None:
    def show(job: Job) -> None:
        assert not job.done
        raise KeyboardInterrupt

    pids, files = _standing()
    with pytest.raises(KeyboardInterrupt):
        launcher.launch_function(time.sleep, (60,), {}, _CONFIG, show=show)
    processes.wait_until(lambda: _nothing_is_left(pids, files), "no rank is left, and no file for its result")


def _interrupts_its_kernel(kernel_pid: int, folder: str) -> str:
    try:
        pathlib.Path(folder, os.environ["RANK"]).touch()
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
        if os.environ["RANK"] == "0":
            os.kill(kernel_pid, signal.SIGINT)
        time.sleep(600)
    except KeyboardInterrupt:
        return f"rank {os.environ['RANK']} has saved"
    return ""


def test_values_of_code_that_takes_the_interrupt_are_returned(tmp_path: pathlib.Path) -> None:
    """As in a usual cell. After https://github.com/keras-team/keras/issues/122 and pytorch/pytorch#15805."""
    given = os.getpid(), str(tmp_path)
    values = notebook_launcher(_interrupts_its_kernel, given, 2, use_cpu=True, view="none", grace_s=20)
    assert values == ["rank 0 has saved", "rank 1 has saved"]


def _saves_for_too_long(kernel_pid: int) -> None:
    try:
        os.kill(kernel_pid, signal.SIGINT)
        time.sleep(600)
    except KeyboardInterrupt:
        time.sleep(600)


def test_rank_that_is_terminated_while_it_saves_is_named_with_what_to_type() -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        notebook_launcher(_saves_for_too_long, (os.getpid(),), 1, use_cpu=True, view="none", grace_s=1)
    [text] = raised.value._render_traceback_()  # type: ignore[attr-defined]
    assert "rank 0 went on, and was terminated after the grace period: --grace_s 30 (grace_s=30) leaves" in text


def test_attaching_that_is_interrupted_can_be_done_again(state_home: pathlib.Path) -> None:
    """The last of this module: the detached run takes the template along that the others share."""
    job = launcher.launch_function(time.sleep, (600,), {}, _CONFIG, detach=True)
    for first in range(1, _MOST_CALLS, 97):
        with contextlib.suppress(KeyboardInterrupt), _Strikes(first, None).on():
            _attaches()
        _attaches()
    [folder] = run_folders.every()
    detached.stop(folder)
    assert job.wait(60) and job.status == "stopped"

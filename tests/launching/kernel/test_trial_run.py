"""The trial run of the debug mode: real ranks, a real group, before the launch."""

from __future__ import annotations

import functools
import os
import time

import pytest

from notebook_accel import notebook_launcher
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import PreflightError
from notebook_accel.launching.kernel import launcher

pytestmark = pytest.mark.usefixtures("engine")


def test_debug_mode_holds_a_trial_run_before_the_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCEL_DEBUG", "on")
    assert list(notebook_launcher(os.getenv, ("NOTEBOOK_ACCEL_DEBUG",), 2, use_cpu=True, view="none")) == ["on"] * 2
    shown = capsys.readouterr().out
    assert shown.startswith("The trial run went well, in ")
    assert shown.endswith("Launching training on 2 CPUs.\n")


def test_without_debug_mode_there_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCEL_DEBUG", "no")
    notebook_launcher(os.getpid, (), 1, use_cpu=True, view="none")
    assert capsys.readouterr().out == "Launching training on 1 CPU.\n"


@pytest.mark.slow
def test_ranks_that_cannot_meet_are_found_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCEL_DEBUG", "1")
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "NONE")  # ranks can be started, and not meet
    with pytest.raises(PreflightError) as caught:
        notebook_launcher(os.getpid, (), 2, use_cpu=True, view="none")
    [finding] = caught.value.findings
    assert finding.what.startswith("The trial run before the launch has failed")
    assert "rank" in finding.why and "Traceback" in finding.why
    assert "doctor --trial" in finding.fix


@pytest.mark.slow
def test_trial_run_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_TRIAL_DEADLINE_S", 1.0)
    monkeypatch.setattr(launcher, "_use_device", functools.partial(time.sleep, 60))
    with pytest.raises(PreflightError, match="took longer than its timeout_s of 1 s"):
        launcher.try_out(LaunchConfig(num_processes=2, use_cpu=True))


@pytest.mark.parametrize("start_method", [pytest.param("fork", marks=pytest.mark.slow), "inline"])
def test_other_start_methods_hold_it_too(
    start_method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCEL_DEBUG", "1")
    assert list(notebook_launcher(abs, (-3,), 1, use_cpu=True, view="none", start_method=start_method)) == [3]
    assert capsys.readouterr().out.startswith("The trial run went well, in ")

"""``doctor --trial``: real launches and a real session on the CPU, and the report."""

from __future__ import annotations

import getpass
import json
import os
import pathlib
import socket
import time

import pytest
import torch

from notebook_accel import cli, environment, nccl, trial
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError
from notebook_accel.launching.ranks import device_checks
from notebook_accel.launching.ranks.device_checks import Outcome
from notebook_accel.launching.ranks.phases import StepClock
from notebook_accel.training.backends.devices import TorchDevice

ALONE = ["memory", "fp32 step", "bf16 step", "workers", "peak memory"]
TOGETHER = ["meeting", "all_reduce", "step together"]
STOP = "stop in a collective"


@pytest.mark.usefixtures("engine")
def test_report_has_every_check_and_no_names(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "--trial", "--report", "--use_cpu", "-n", "2"]) == 0
    shown = capsys.readouterr().out
    text = (tmp_path / trial.REPORT).read_text()
    assert text in shown and shown.index("✓ memory") < shown.index(text)
    report = json.loads(text)
    assert report["passed"]
    assert [check["name"] for check in report["checks"]] == [*ALONE, *TOGETHER, STOP]
    assert all(check["passed"] and check["note"] and not check["fix"] for check in report["checks"])
    assert report["facts"]["torch"] == torch.__version__
    for name in (socket.gethostname(), str(pathlib.Path.home()), str(tmp_path), os.sep + getpass.getuser()):
        assert name not in text.replace("/dev/shm", "")


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
def test_checks_that_fail_leave_the_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device_checks, "alone", nothing)
    monkeypatch.setenv("GLOO_DEVICE_TRANSPORT", "NONE")  # ranks can't meet
    assert cli.main(["doctor", "--trial", "--use_cpu", "-n", "2", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["trial"]["checks"]
    assert {check["name"]: check["passed"] for check in checks} == dict.fromkeys([*TOGETHER, STOP], False)
    assert all("unsupported gloo device" in check["note"] and check["fix"] for check in checks if not check["passed"])


def nothing() -> list[Outcome]:
    """Check nothing."""
    return []


def hang() -> list[Outcome]:
    """Hang as NCCL may."""
    time.sleep(600)
    return []


@pytest.mark.usefixtures("engine")
def test_ranks_that_hang_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_DEADLINE_S", 1.0)
    monkeypatch.setattr(device_checks, "alone", hang)
    monkeypatch.setattr(device_checks, "together", hang)
    monkeypatch.setattr(trial, "_stop_in_collective", lambda _: trial.Check(STOP, True, 0.0, ""))
    tried = trial.run(LaunchConfig(num_processes=2, use_cpu=True), show=len)
    hung = ["each device alone", "all together"]
    assert [(check.name, check.passed) for check in tried.checks] == [*((name, False) for name in hung), (STOP, True)]
    assert all("took longer than its timeout_s of 1 s" in check.note for check in tried.checks[:2])


def test_check_says_which_ranks_have_failed() -> None:
    went_well, failed = Outcome("memory", 0.1, "64 MiB"), Outcome("memory", 0.3, "", "RuntimeError: no room in /tmp/a")
    assert trial.judged([went_well, went_well]) == trial.Check("memory", True, 0.1, "64 MiB")
    found = trial.judged([went_well, failed, failed])
    assert found == trial.Check("memory", False, 0.3, "rank 1, 2: RuntimeError: no room in PATH")
    assert str(found) == "✗ memory (0.3 s): rank 1, 2: RuntimeError: no room in PATH"


@pytest.mark.parametrize(
    ("name", "on_gpus", "said"),
    [
        ("all_reduce", True, "NCCL_P2P_DISABLE=1"),
        ("on one GPU: all_reduce", True, "NCCL_P2P_DISABLE=1"),
        ("all together", True, "NCCL_P2P_DISABLE=1"),
        ("all_reduce", False, "--report"),
        ("loader's copies", True, "NOTEBOOK_ACCEL_COPY_STREAM=0"),
        ("each device alone", True, "NOTEBOOK_ACCEL_COPY_STREAM=0"),
        (STOP, True, "NOTEBOOK_ACCEL_NCCL_ABORT=0"),
        ("workers", False, "--shm-size"),
        ("fp16 step", True, "--report"),
    ],
)
def test_failed_check_says_what_to_try(name: str, on_gpus: bool, said: str) -> None:
    assert said in trial.fix_of(name, on_gpus=on_gpus)


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("no file ~/data/a.csv, nor '/srv/b'", "no file PATH, nor 'PATH'"),
        (f"{socket.gethostname()}:29500 refused it", "HOST:29500 refused it"),
        ("[node7.lab.example]:29500 at 10.0.0.7", "[HOST]:29500 at ADDRESS"),
        ("ratio 1/2 of 3.5 GiB, torch 2.13.0", "ratio 1/2 of 3.5 GiB, torch 2.13.0"),
        ("'/homes/Ada (old) Byron/a.csv' isn't there", "'PATH' isn't there"),
    ],
)
def test_report_hides_paths_and_names(text: str, hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "node7.lab.example")
    monkeypatch.setenv("HOME", "/homes/Ada (old) Byron")
    assert trial.anonymous(text) == hidden


def test_report_that_cannot_be_written_is_one_clear_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"The report can't be written to .*: No such file or directory"):
        trial.write(trial.Trial({}, ()), tmp_path / "no" / "such.json", "{}")


def test_switches_turn_paths_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch in environment.SWITCHES:
        assert environment.is_on(switch)
        monkeypatch.setenv(switch, "0")
        assert not environment.is_on(switch)
    device = TorchDevice()
    device.device = torch.device("cuda")
    assert device.uploader(non_blocking=True) is None
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    nccl.let_ranks_survive()
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    assert not StepClock()._marks_steps

"""The command line, as a user calls it."""

from __future__ import annotations

import importlib.metadata
import pathlib
import subprocess
import sys

import pytest

import notebook_accel
from notebook_accel import cli


@pytest.fixture(autouse=True)
def _no_configuration_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCEL_CONFIG_FILE", str(tmp_path / "config.yaml"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_env_has_the_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["notebook-accel"] == notebook_accel.__version__
    assert lines["torch"] == importlib.metadata.version("torch")
    assert lines["torch-xla"] in {"not installed", "2.9.0"}
    assert lines["devices"] == "1 CPU"


def test_doctor_finds_nothing_against_a_launch_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--num_processes", "2"]) == 0
    assert capsys.readouterr().out == "Nothing speaks against a launch.\n"


def test_doctor_says_what_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--mixed_precision", "fp16"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("refused: mixed_precision='fp16' was asked for, and the ranks run on the CPU.\n")
    assert "Fix: --mixed_precision bf16" in shown


def test_doctor_reads_the_configuration_file(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.yaml").write_text("mixed_precision: fp16\n")
    assert cli.main(["doctor"]) == 1
    assert "fp16" in capsys.readouterr().out


def test_option_that_is_not_allowed_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--num_processes", "two"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("num_processes='two' is not a whole number.\nFix: ")


@pytest.mark.parametrize("arguments", [[], ["launch"], ["doctor", "--gpus", "2"]])
def test_unknown_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: notebook-accel" in capsys.readouterr().err


@pytest.mark.parametrize("program", [
    [str(pathlib.Path(sys.executable).with_name("notebook-accel"))],
    [sys.executable, "-m", "notebook_accel"],
], ids=["console script", "module"])  # fmt: skip
def test_installed_program(program: list[str]) -> None:
    run = subprocess.run([*program, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == f"notebook-accel {notebook_accel.__version__}\n"

"""The tools that pyproject.toml configures for style, types and import contracts find nothing."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests import beside

_ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("tool", [["ruff", "check"], ["ruff", "format", "--check"], ["lint-imports"]], ids=" ".join)
def test_finds_nothing(tool: list[str]) -> None:
    program = pathlib.Path(sys.executable).with_name(tool[0])
    run = subprocess.run([program, *tool[1:]], cwd=_ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.timeout(300)  # long enough without a cache from an earlier run
def test_types(mypy: beside.Program) -> None:
    status, said = mypy.wait()
    assert status == 0, said

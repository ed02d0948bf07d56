"""The tools that pyproject.toml configures for style and import contracts find nothing. CI runs mypy by itself."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("tool", [["ruff", "check"], ["ruff", "format", "--check"], ["lint-imports"]], ids=" ".join)
def test_finds_nothing(tool: list[str]) -> None:
    program = pathlib.Path(sys.executable).with_name(tool[0])
    run = subprocess.run([program, *tool[1:]], cwd=_ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stdout + run.stderr

"""A script on XLA devices, from the command line."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.xla.conftest import PJRT

pytestmark = pytest.mark.xla

_SCRIPT = """
import torch
from notebook_accel import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.ones(2, device=accelerator.device)).sum()
print(accelerator.device.type, accelerator.num_processes, total.item())
"""


def test_script_runs_where_a_tpu_was_asked_for(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    variables = {**os.environ, **PJRT, "NOTEBOOK_ACCEL_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-W", "ignore", "-m", "notebook_accel", "launch", "--tpu", str(script)]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 0, run.stderr
    assert "Launching training on 1 XLA CPU." in run.stdout
    assert "0 │ xla 1 2.0\n" in run.stdout

"""What is found before a launch. What needs a GPU to be found is in tests/gpu."""

from __future__ import annotations

import subprocess
import sys

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.launching import preflight


def test_fp16_on_a_cpu_is_refused_with_the_reason() -> None:
    [finding] = preflight.check(LaunchConfig(mixed_precision="fp16", use_cpu=True))
    assert finding.refuses
    assert "CPU" in finding.what and "scaling" in finding.why and "bf16" in finding.fix


def test_nothing_speaks_against_two_ranks_on_the_cpu() -> None:
    assert preflight.check(LaunchConfig(num_processes=2, use_cpu=True)) == ()


def test_devices_are_described_with_their_number() -> None:
    devices = preflight.Devices.find(LaunchConfig(use_cpu=True))
    assert (devices.available, devices.describe(1), devices.describe(2)) == (1, "1 CPU", "2 CPUs")


def test_no_gpu_is_visible_where_none_is_named() -> None:
    assert preflight.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert preflight.visible_gpus({"CUDA_VISIBLE_DEVICES": "-1,0"}) == 0


@pytest.mark.parametrize("statement", ["preflight.check(LaunchConfig())", "preflight.visible_gpus()"])
def test_finding_out_imports_no_torch(statement: str) -> None:
    code = (
        "import sys; from notebook_accel.config import LaunchConfig; from notebook_accel.launching import preflight;"
        f"{statement}; assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_more_ranks_than_gpus_names_how_many_there_are() -> None:
    [finding] = preflight.check(LaunchConfig(num_processes=3), preflight.Devices("GPU", 1))
    assert finding.refuses
    assert "3 processes were asked for, and there is 1 GPU." in finding.what
    assert preflight.check(LaunchConfig(num_processes=2), preflight.Devices("GPU", 2)) == ()
    assert preflight.check(LaunchConfig(), preflight.Devices("GPU", 2)) == ()

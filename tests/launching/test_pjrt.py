"""What PJRT would give ranks, by the machine's devices: these machines are made of files."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.launching import launcher
from notebook_accel.launching.checks import pjrt, preflight
from notebook_accel.launching.checks.devices import Devices


def _pci_device(root: pathlib.Path, number: int, vendor: str, device: str) -> None:
    folder = root / "sys/bus/pci/devices" / f"0000:00:{number:02}.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")


def _machine(root: pathlib.Path, kind: str, chips: int) -> None:
    for number in range(chips):
        _pci_device(root, number, "0x1ae0", kind)


def _driver_files(root: pathlib.Path, pattern: str, count: int) -> None:
    (root / "dev" / pattern).parent.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (root / "dev" / pattern.format(number)).touch()


@pytest.fixture
def with_torch_xla(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be found, which is all that is asked of it."""
    (tmp_path / "packages" / "torch_xla").mkdir(parents=True)
    (tmp_path / "packages" / "torch_xla" / "__init__.py").write_text("raise RuntimeError('imported in the kernel')")
    monkeypatch.syspath_prepend(tmp_path / "packages")


def test_chips_are_those_on_the_bus(tmp_path: pathlib.Path) -> None:
    _machine(tmp_path, "0x0063", 2)
    _pci_device(tmp_path, 6, "0x1ae0", "0x0042")  # Google's network card
    _pci_device(tmp_path, 7, "0x10de", "0x0063")
    assert pjrt.chips(tmp_path) == ("v5e", "v5e")


def test_chips_where_the_bus_is_hidden(tmp_path: pathlib.Path) -> None:
    _driver_files(tmp_path, "accel/accel{}", 1)  # where other vendors' are
    assert pjrt.chips(tmp_path) == ()
    _driver_files(tmp_path, "accel{}", 4)
    assert pjrt.chips(tmp_path) == ("of some kind",) * 4


def test_a_machine_with_eight_chips_gives_eight_or_one(tmp_path: pathlib.Path, with_torch_xla: None) -> None:
    _machine(tmp_path, "0x0063", 8)
    found = pjrt.find({}, tmp_path)
    assert found == pjrt.Platform("TPU", 8)
    assert found.counts == (1, 8)
    assert found.variables() == {"PJRT_DEVICE": "TPU"}
    assert [found.findings(asked) for asked in (None, 8, 1)] == [[], [], []]
    [finding] = found.findings(4)
    assert finding.refuses
    assert finding.what == "4 processes were asked for, and PJRT has 8 TPU devices."
    assert finding.fix.startswith("--num_processes 1 or --num_processes 8;")


@pytest.mark.parametrize(("kind", "variables"), [("0x0027", {}), ("", {"TPU_ACCELERATOR_TYPE": "v3-8"})])
def test_chips_of_two_cores_give_one_rank_and_say_why(
    tmp_path: pathlib.Path, with_torch_xla: None, kind: str, variables: dict[str, str]
) -> None:
    if kind:
        _machine(tmp_path, kind, 4)
    else:
        _driver_files(tmp_path, "accel{}", 4)
    found = pjrt.find(variables, tmp_path)
    assert found == pjrt.Platform("TPU", 4, cores=2)
    assert found.findings(1) == []
    [finding] = found.findings(None)  # not silently fewer than there are
    assert finding.refuses
    assert "8 TPU devices" in finding.what and "for threads" in finding.why and "--num_processes 1" in finding.fix


def test_files_of_a_driver_that_others_use_too_need_a_word(tmp_path: pathlib.Path) -> None:
    _driver_files(tmp_path, "vfio/{}", 8)
    _driver_files(tmp_path, "vfio/vfio", 1)
    assert pjrt.find({}, tmp_path) is None
    assert pjrt.find({"PJRT_DEVICE": "TPU"}, tmp_path) == pjrt.Platform("TPU", 8)


def test_the_cpu_in_the_place_of_a_tpu(tmp_path: pathlib.Path, with_torch_xla: None) -> None:
    assert pjrt.find({"PJRT_DEVICE": "CPU"}, tmp_path) == pjrt.Platform("XLA CPU", 1)
    two = pjrt.find({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}, tmp_path)
    assert two is not None
    assert (two.counts, len(two.findings(None)), two.variables()) == ((1,), 1, {"PJRT_DEVICE": "CPU"})


def test_other_machines_have_none(tmp_path: pathlib.Path) -> None:
    assert pjrt.find({}, tmp_path) is None
    assert pjrt.find({"PJRT_DEVICE": "TPU"}, tmp_path) is None
    assert pjrt.find({"PJRT_DEVICE": "NEURON"}, tmp_path) is None


def test_a_tpu_without_torch_xla_is_refused_with_what_to_install(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # where nothing is installed
    [finding] = pjrt.Platform("TPU", 8).findings(8)
    assert finding.refuses
    assert "torch_xla isn't installed" in finding.what and "pip install 'torch_xla[tpu]'" in finding.fix


def test_ranks_on_a_tpu_are_forks_with_its_variables(with_torch_xla: None) -> None:
    devices = Devices("TPU", 8, pjrt.Platform("TPU", 8))
    assert devices.describe(8) == "8 TPUs"
    assert devices.start_method(LaunchConfig()) == "fork"
    assert devices.start_method(LaunchConfig(start_method="spawn")) == "spawn"
    assert Devices("CPU", 1).start_method(LaunchConfig()) == "auto"
    variables = launcher._variables(LaunchConfig(mixed_precision="bf16"), devices)
    assert variables == {"ACCELERATE_MIXED_PRECISION": "bf16", "PJRT_DEVICE": "TPU"}


def test_preflight_asks_what_pjrt_can_give_and_what_a_fork_can(with_torch_xla: None) -> None:
    devices = Devices("TPU", 8, pjrt.Platform("TPU", 8))
    config = LaunchConfig(num_processes=3, mixed_precision="fp16")
    found = [finding.what for finding in preflight.check(config, devices) if finding.refuses]
    assert found == [
        "mixed_precision='fp16' was asked for, and the ranks run on 8 TPUs.",
        "3 processes were asked for, and PJRT has 8 TPU devices.",
    ]


def test_looking_imports_nothing() -> None:
    code = (
        "import sys; from notebook_accel.launching.checks import pjrt; pjrt.find({'PJRT_DEVICE': 'CPU'});"
        "assert not {'torch', 'torch_xla', 'jax'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

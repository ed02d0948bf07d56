"""PJRT's devices on machines that are made of files."""

from __future__ import annotations

import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from notebook_accel import environment
from notebook_accel.config import LaunchConfig
from notebook_accel.launching.kernel import launcher, pjrt, preflight
from notebook_accel.launching.kernel.devices import Devices


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


@pytest.fixture(autouse=True)
def root(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder in place of the machine's root."""
    monkeypatch.setattr(pjrt, "_ROOT", tmp_path)
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "TPU_ACCELERATOR_TYPE"):
        monkeypatch.delenv(name, raising=False)
    pjrt.chips.cache_clear()
    yield tmp_path
    pjrt.chips.cache_clear()


def _platform(**variables: str) -> pjrt.Platform | None:
    with environment.patched(variables):
        return pjrt.find_platform()


@pytest.fixture
def with_torch_xla(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name, which nothing imports."""
    (tmp_path / "packages" / "torch_xla").mkdir(parents=True)
    (tmp_path / "packages" / "torch_xla" / "__init__.py").write_text("raise RuntimeError('imported in the kernel')")
    monkeypatch.syspath_prepend(tmp_path / "packages")


def test_chips_are_those_on_the_bus(tmp_path: pathlib.Path) -> None:
    _machine(tmp_path, "0x0063", 2)
    _pci_device(tmp_path, 6, "0x1ae0", "0x0042")  # Google's network card
    _pci_device(tmp_path, 7, "0x10de", "0x0063")
    assert pjrt.chips() == ("v5e", "v5e")


def test_chips_where_the_bus_is_hidden(tmp_path: pathlib.Path) -> None:
    _driver_files(tmp_path, "accel/accel{}", 1)  # where other vendors' are
    assert pjrt.chips() == ()
    _driver_files(tmp_path, "accel{}", 4)
    pjrt.chips.cache_clear()
    assert pjrt.chips() == ("of some kind",) * 4


def test_a_machine_with_eight_chips_gives_eight_or_one(tmp_path: pathlib.Path, with_torch_xla: None) -> None:
    _machine(tmp_path, "0x0063", 8)
    found = _platform()
    assert found == pjrt.Platform("TPU", 8)
    assert found.variables() == {"PJRT_DEVICE": "TPU"}
    assert [found.findings(count) for count in (8, 1)] == [[], []]
    [finding] = found.findings(4)
    assert finding.refuses
    assert finding.what == "4 processes were asked for, and PJRT has 8 TPU devices."
    assert finding.fix.startswith("--num_processes 1 or --num_processes 8;")


@pytest.mark.parametrize(("kind", "variables"), [("0x0027", {}), ("", {"TPU_ACCELERATOR_TYPE": "v3-8"})])
def test_chips_of_two_cores_give_a_rank_each_and_say_what_stays_idle(
    tmp_path: pathlib.Path, with_torch_xla: None, kind: str, variables: dict[str, str]
) -> None:
    if kind:
        _machine(tmp_path, kind, 4)
    else:
        _driver_files(tmp_path, "accel{}", 4)
    found = _platform(**variables)
    assert found == pjrt.Platform("TPU", 4, cores=2)
    for count, said in ((4, "4 ranks will compute on 4 of this TPU's 8 cores."), (1, "1 rank will compute on 1 of")):
        [warning] = found.findings(count)
        assert not warning.refuses
        assert warning.what.startswith(said) and "by way of the host" in warning.why
    [refusal] = found.findings(8)
    assert refusal.refuses
    assert "8 TPU devices" in refusal.what and "for threads" in refusal.why
    assert refusal.fix.startswith("--num_processes 1 or --num_processes 4;")


def test_files_of_a_driver_that_others_use_too_need_a_word(tmp_path: pathlib.Path) -> None:
    _driver_files(tmp_path, "vfio/{}", 8)
    _driver_files(tmp_path, "vfio/vfio", 1)
    assert _platform() is None
    assert _platform(PJRT_DEVICE="TPU") == pjrt.Platform("TPU", 8)


def test_the_cpu_in_the_place_of_a_tpu(tmp_path: pathlib.Path, with_torch_xla: None) -> None:
    assert _platform(PJRT_DEVICE="CPU") == pjrt.Platform("XLA CPU", 1)
    two = _platform(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2")
    assert two == pjrt.Platform("XLA CPU", 2)
    assert [two.findings(count) for count in (1, 2, 3)] == [[], [], []]
    assert two.variables() == {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}  # that of each rank


def test_other_machines_have_none(tmp_path: pathlib.Path) -> None:
    assert _platform() is None
    assert _platform(PJRT_DEVICE="TPU") is None
    assert _platform(PJRT_DEVICE="NEURON") is None


def test_a_tpu_without_torch_xla_is_refused_with_what_to_install(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # where nothing is installed
    [finding] = pjrt.Platform("TPU", 8).findings(8)
    assert finding.refuses
    assert "torch_xla isn't installed" in finding.what and "pip install 'torch_xla[tpu]'" in finding.fix


def test_ranks_on_a_tpu_are_forks_with_its_variables(with_torch_xla: None) -> None:
    tpus = Devices("TPU", 8, pjrt.Platform("TPU", 8))
    assert tpus.describe(8) == "8 TPUs"
    assert tpus.start_method(LaunchConfig()) == "fork"
    assert tpus.start_method(LaunchConfig(start_method="spawn")) == "spawn"
    assert Devices("CPU", 1).start_method(LaunchConfig()) == "auto"
    variables = launcher._variables(LaunchConfig(mixed_precision="bf16"), tpus)
    assert {"ACCELERATE_MIXED_PRECISION": "bf16", "PJRT_DEVICE": "TPU"}.items() <= variables.items()


def test_preflight_asks_what_pjrt_can_give_and_what_a_fork_can(with_torch_xla: None) -> None:
    tpus = Devices("TPU", 8, pjrt.Platform("TPU", 8))
    config = LaunchConfig(num_processes=3, mixed_precision="fp16")
    found = [finding.what for finding in preflight.check(config, tpus) if finding.refuses]
    assert found == [
        "mixed_precision='fp16' was asked for, and the ranks run on 8 TPUs.",
        "3 processes were asked for, and PJRT has 8 TPU devices.",
    ]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_tpu_that_the_kernel_holds_is_refused_to_ranks(
    with_torch_xla: None, monkeypatch: pytest.MonkeyPatch, method: Literal["fork", "spawn"]
) -> None:
    compiled: Any = types.ModuleType("_XLAC")
    compiled._xla_runtime_is_initialized = lambda: True
    monkeypatch.setitem(sys.modules, "_XLAC", compiled)
    tpus = Devices("TPU", 8, pjrt.Platform("TPU", 8))
    [finding] = preflight.check(LaunchConfig(start_method=method), tpus)
    assert finding.refuses
    assert "XLA is initialised in this kernel" in finding.what and "holds the TPU" in finding.why

"""The GPUs that are counted, the findings about others, and the description of a machine.

These tests need no GPU. Device files and the PCI bus are made-up folders, and NVIDIA's library, torch's build and the
programs that count GPUs are replaced; only one test really asks for a driver, which isn't there.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import types
from collections.abc import Callable, Mapping

import pytest

from notebook_accel import environment, notebook_launcher
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import PreflightError
from notebook_accel.launching.kernel import devices, launcher, preflight
from notebook_accel.launching.kernel.devices import Devices, Gpu, Machine

_NO_FILES: Mapping[str, str] = {}
_UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44")
_T4 = Gpu("Tesla T4", 15 << 30, (7, 5))
_A100 = Gpu("NVIDIA A100-SXM4-80GB", 80 << 30, (8, 0))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """A machine: torch's build, the UUIDs that NVIDIA's library knows, and files."""

    def make(
        build: devices.Build, uuids: tuple[str, ...] | None = None, files: Mapping[str, str] = _NO_FILES
    ) -> pathlib.Path:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(devices, "_ROOT", tmp_path)
        monkeypatch.setattr(devices, "build_of_torch", lambda: build)
        monkeypatch.setattr(devices, "_installed_gpus", lambda: uuids)
        return tmp_path

    for name in devices._VISIBILITY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    devices._counted.cache_clear()
    return make


def card(vendor: str, device: str, product: str = "") -> dict[str, str]:
    folder = "sys/class/drm/renderD128/device"
    files = {"dev/dri/renderD128": "", f"{folder}/vendor": vendor, f"{folder}/device": device}
    return files | ({f"{folder}/product_name": product} if product else {})


@pytest.mark.parametrize(("listed", "seen"), [
    (None, [0, 1, 2, 3]), ("", []), ("2,0", [2, 0]), (" 1 ,3", [1, 3]), ("0,9,1", [0]), ("0,-1,1", [0]), ("9", []),
    ("0,0", []), ("0,1,0", []), ("1gpu2,2ampere", [1, 2]), ("+1", [1]), ("a", []), ("0,,1", [0]), ("0,GPU-aa22", [0]),
    ("GPU-aa22,GPU-b", [1, 2]), ("GPU-aa", []), ("GPU-zz,GPU-aa22", []), ("GPU-aa22,GPU-zz,GPU-bb33", [1]),
    ("GPU-aa22,GPU-aa22", []), ("GPU-aa22,0", [1]), ("MIG-aa11", None), ("MIG-a,MIG-b", None),
])  # fmt: skip
def test_a_list_is_read_as_cuda_reads_it(listed: str | None, seen: list[int] | None) -> None:
    assert devices.visible(_UUIDS, listed) == seen
    if listed is None or not listed.startswith("MIG-"):
        assert devices.visible((*_UUIDS, "MIG-"), listed) is None  # of a divided one CUDA shows one part


@pytest.mark.parametrize(
    "listed", ["2,0", "0,9,1", "0,-1,1", "0,1,0", "1gpu2,2ampere", "GPU-aa22,GPU-b", "GPU-aa22,GPU-aa22"]
)
def test_torch_reads_a_list_alike(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    read = torch.cuda._parse_visible_devices()
    if read and isinstance(read[0], str):
        read = torch.cuda._transform_uuid_to_ordinals(read, list(_UUIDS))
    ends = next((place for place, index in enumerate(read) if int(index) >= len(_UUIDS)), len(read))
    assert devices.visible(_UUIDS, listed) == read[:ends]  # torch.cuda._device_count_nvml ends a list there


def test_parts_of_gpus_are_counted_by_a_process_of_their_own(
    made_up: Callable[..., pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up("cuda", _UUIDS)
    counts = "import os; print(len(os.environ['CUDA_VISIBLE_DEVICES'].split(',')))"
    monkeypatch.setitem(devices._COUNTING_PROGRAMS, "cuda", counts)
    for listed, count in (("MIG-1", 1), ("MIG-1,MIG-2", 2), ("3,1,7", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert devices.visible_gpus() == count


def test_gpus_without_nvidias_library_are_counted_too(
    made_up: Callable[..., pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up("cuda", None, {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": ""})
    monkeypatch.setitem(devices._COUNTING_PROGRAMS, "cuda", "print('a warning'); print(2)")
    assert Devices.find(LaunchConfig()) == Devices("GPU", 2)
    assert Devices.find(LaunchConfig(use_cpu=True)) == Devices("CPU", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Devices.find(LaunchConfig()) == Devices("CPU", 1)


def test_a_gpu_that_nobody_can_count_refuses_a_launch(made_up: Callable[..., pathlib.Path]) -> None:
    model = "proc/driver/nvidia/gpus/0000:01:00.0/information"
    made_up("cuda", None, {"dev/nvidia0": "", model: "Model: \t\t Tesla T4\nIRQ: 1\n"})
    with pytest.raises(PreflightError) as caught:  # asks the driver really, and there is none
        notebook_launcher(print, (), 1, view="none")
    [finding] = caught.value.findings
    assert finding.what.startswith("This machine has an NVIDIA GPU (Tesla T4), but ranks may not be able")
    assert "libcuda.so.1" in finding.why and "--use_cpu" in finding.fix
    assert preflight.check(LaunchConfig(use_cpu=True)) == ()


def test_amds_gpus_are_launched_on_as_on_cuda(
    made_up: Callable[..., pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up("hip", None, {"dev/kfd": ""})
    counts = "import os; print(len(os.environ.get('HIP_VISIBLE_DEVICES', '0,1,2').split(',')))"
    monkeypatch.setitem(devices._COUNTING_PROGRAMS, "hip", counts)
    found = Devices.find(LaunchConfig())
    assert found == Devices("GPU", 3)
    variables = launcher._variables(LaunchConfig(), found)
    assert variables["NOTEBOOK_ACCEL_OVERSUBSCRIBE"] == "false"
    assert variables.keys().isdisjoint(["CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU"])  # a script may choose the CPU
    with environment.patched({"ACCELERATE_USE_CPU": "true"}):
        assert launcher._variables(LaunchConfig(), found)["ACCELERATE_USE_CPU"] == "false"
    shared = LaunchConfig(num_processes=4, oversubscribe=True)
    assert launcher._variables(shared, found)["NOTEBOOK_ACCEL_OVERSUBSCRIBE"] == "true"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1,2")
    assert Devices.find(LaunchConfig()) == Devices("GPU", 2)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    assert Devices.find(LaunchConfig()) == Devices("CPU", 1)
    hidden = launcher._variables(LaunchConfig(use_cpu=True), Devices("CPU", 1))
    assert (hidden["CUDA_VISIBLE_DEVICES"], hidden["HIP_VISIBLE_DEVICES"]) == ("", "-1")
    assert launcher._variables(LaunchConfig(), Devices("CPU", 1))["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize(("build", "files", "named", "says"), [
    ("cpu", {"dev/kfd": "", **card("0x1002", "0x740f", "AMD Instinct MI210")}, "an AMD GPU (AMD Instinct MI210)",
     "built for the CPU only"),
    ("cuda", {"dev/kfd": "", **card("0x1002", "0x740f")}, "an AMD GPU (1002:740f)", "built for NVIDIA's GPUs"),
    ("cpu", {"dev/nvidia0": ""}, "an NVIDIA GPU", "built for the CPU only"),
    ("cpu", card("0x8086", "0x0bd5"), "an Intel GPU (8086:0bd5)", "built for the CPU only"),
    ("xpu", card("0x8086", "0x0bd5"), "an Intel GPU (8086:0bd5)", "torch.xpu"),
])  # fmt: skip
def test_a_gpu_that_ranks_do_not_use_is_named(
    made_up: Callable[..., pathlib.Path], build: devices.Build, files: dict[str, str], named: str, says: str
) -> None:
    made_up(build, None, files)
    [finding] = preflight.check(LaunchConfig())
    assert finding.what == f"This machine has {named}, and ranks run on the CPU."
    assert says in finding.why and "--use_cpu if the CPU is meant" in finding.fix and not finding.refuses
    assert preflight.check(LaunchConfig(use_cpu=True)) == ()


def test_nothing_is_said_of_a_part_of_the_processor_or_of_what_is_hidden(
    made_up: Callable[..., pathlib.Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = made_up("cpu", None, {"dev/dri/renderD128": "", "sys/bus/0000:00:02.0/vendor": "0x8086",
                                 "sys/bus/0000:00:02.0/device": "0x9a49"})  # fmt: skip
    (root / "sys/class/drm/renderD128").mkdir(parents=True)
    (root / "sys/class/drm/renderD128/device").symlink_to(root / "sys/bus/0000:00:02.0")
    assert preflight.check(LaunchConfig()) == ()
    made_up("xpu")
    assert [finding.refuses for finding in preflight.check(LaunchConfig())] == [False]
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0")
    assert preflight.check(LaunchConfig()) == ()


@pytest.mark.parametrize(("text", "build"), [
    ("cuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = None\n", "cpu"),
    ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda"),
    ("cuda = '12.8'\n", "cuda"),
    ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4.43482'\nrocm: Optional[str] = '6.4.0'\n", "hip"),
    ("cuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = '20250200'\n", "xpu"),
    (None, "cpu"),
])  # fmt: skip
def test_what_torch_is_built_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, text: str | None, build: str
) -> None:
    if text is not None:
        (tmp_path / "version.py").write_text(f"from typing import Optional\n\n__version__ = '2.13.0'\n{text}")
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "torch" else None)
    assert devices.build_of_torch.__wrapped__() == build


def test_the_form_shows_what_ranks_would_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a library that stands in for NVIDIA's."""
    library = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda index: _UUIDS[index],
        nvmlDeviceGetMigMode=lambda index: (1 if index == 1 else 0, 0),
        nvmlDeviceGetName=lambda index: f"GPU number {index}",
        nvmlDeviceGetCudaComputeCapability=lambda _: (8, 0),
        nvmlDeviceGetMemoryInfo=lambda _: types.SimpleNamespace(total=1 << 30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0,5")
    assert [gpu.name for gpu in devices._gpus()] == ["GPU number 1", "GPU number 0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,1")
    assert devices._gpus() == ()
    assert devices._installed_gpus.__wrapped__() == ("GPU-aa11", "MIG-")


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    here = Machine.find()
    assert (here.devices, here.gpus) == (Devices("CPU", 1), ())
    assert here.cores == len(os.sched_getaffinity(0))
    assert 1 << 28 < here.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert dict(here.facts())["devices"] == "no GPU: ranks run on the CPU"


def test_facts_for_a_person() -> None:
    several = Machine(Devices("GPU", 2), (_T4, _T4), cores=4, memory_bytes=30 << 30, host="Kaggle", tpus=("v5e",))
    assert several.facts() == (
        ("devices", "2 GPUs: Tesla T4, 15 GiB each"),
        ("machine", "4 CPU cores, 30 GiB of memory"),
        ("TPU", "1 chip v5e"),
        ("notebook", "Kaggle"),
    )
    assert Machine(Devices("GPU", 1), (_A100,)).facts()[0] == ("devices", "1 GPU: NVIDIA A100-SXM4-80GB, 80 GiB")
    assert Machine(Devices("GPU", 1)).facts()[0] == ("devices", "1 GPU")


@pytest.mark.parametrize(("found", "use_cpu", "unfit"), [
    (Machine(Devices("CPU", 1)), False, {"fp16"}),
    (Machine(Devices("GPU", 1), (_A100,)), False, set()),
    (Machine(Devices("GPU", 1), (_A100,)), True, {"fp16"}),
    (Machine(Devices("GPU", 2), (_A100, _T4)), False, {"bf16"}),
])  # fmt: skip
def test_precisions_that_fit(found: Machine, use_cpu: bool, unfit: set[str]) -> None:
    reasons = found.precisions(use_cpu=use_cpu)
    assert set(reasons) == {"no", "bf16", "fp16"}
    assert {name for name, reason in reasons.items() if reason} == unfit


@pytest.mark.parametrize(("folder", "variable", "said"), [
    ("content", "COLAB_RELEASE_TAG", "Colab"),
    ("kaggle/working", "KAGGLE_KERNEL_RUN_TYPE", "Kaggle"),
])  # fmt: skip
def test_two_signs_of_a_service_are_needed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, folder: str, variable: str, said: str
) -> None:
    monkeypatch.setattr(devices, "_ROOT", tmp_path)
    (tmp_path / folder).mkdir(parents=True)
    assert devices.notebook_service() == ""
    monkeypatch.setenv(variable, "1")
    assert devices.notebook_service() == said
    (tmp_path / folder).rmdir()
    assert devices.notebook_service() == ""


def test_a_package_is_a_sign(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "content").mkdir()
    package = tmp_path / "packages" / "google" / "colab"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "google", raising=False)
    monkeypatch.setattr(devices, "_ROOT", tmp_path)
    assert devices.notebook_service() == "Colab"
    sys.modules.pop("google", None)

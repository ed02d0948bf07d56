"""What a machine is found to be, by what is there."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

from notebook_accel.launching.kernel import devices
from notebook_accel.launching.kernel.devices import Devices, Gpu, Machine

_T4 = Gpu("Tesla T4", 15 << 30, (7, 5))
_A100 = Gpu("NVIDIA A100-SXM4-80GB", 80 << 30, (8, 0))


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
def test_two_signs_of_a_service_are_needed(tmp_path: pathlib.Path, folder: str, variable: str, said: str) -> None:
    assert devices.notebook_service(tmp_path, {variable: "1"}) == ""
    (tmp_path / folder).mkdir(parents=True)
    assert devices.notebook_service(tmp_path, {}) == ""
    assert devices.notebook_service(tmp_path, {variable: "1"}) == said


def test_a_package_is_a_sign(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "content").mkdir()
    package = tmp_path / "packages" / "google" / "colab"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "google", raising=False)
    assert devices.notebook_service(tmp_path, {}) == "Colab"
    sys.modules.pop("google", None)

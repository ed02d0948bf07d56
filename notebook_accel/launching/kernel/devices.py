"""The devices of this machine, counted without initialising them.

The driver's management library (NVML) counts NVIDIA's GPUs. If it isn't in the container, or if parts of GPUs (MIG) are
asked for, a separate process asks CUDA. For AMD's GPUs such a process asks torch, which uses CUDA's names for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from notebook_accel import environment, host_memory
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import Finding
from notebook_accel.formatting import format_count, format_size
from notebook_accel.launching.kernel import pjrt
from notebook_accel.launching.kernel.pjrt import Platform

Build = Literal["cuda", "hip", "xpu", "cpu"]

_ROOT = pathlib.Path("/")
_COUNTING_DEADLINE_S = 120.0  # torch may have to be read from a slow disk
# Programs that print the number of devices. The driver's function is CUDA's own count, and needs no torch.
_COUNTING_PROGRAMS = {
    "cuda": "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); count = ctypes.c_int(); "
    "error = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)); "
    "assert error == 0, f'the driver answers cuInit with error {error}'; print(count.value)",
    "hip": "import torch; print(torch.cuda.device_count())",
}
_HIDING_VALUES = {"", "-1", "NoDevFiles"}
_BUILT_FOR = {"cuda": "NVIDIA's GPUs", "hip": "AMD's GPUs", "xpu": "Intel's GPUs", "cpu": "the CPU only"}
_PERMISSIONS = {
    "NVIDIA": "see that the driver fits torch, and that the container is given the GPU (--gpus all, and "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
    "AMD": "see that the driver fits torch, and that you may open /dev/kfd and /dev/dri (the groups video and render)",
}
_VISIBILITY_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_COUNTING_VARIABLES = (*_VISIBILITY_VARIABLES, "LD_LIBRARY_PATH", "PYTHONPATH")
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_INTEGRATED = "0000:00:02.0"  # the PCI address of an Intel GPU that is part of the processor
_NVIDIA_FILE = r"nvidia\d+|nvhost-gpu"  # nvhost-gpu: on a Jetson


class UncountableError(Exception):
    """This machine has GPUs that can't be counted. ``finding`` tells the user what to do."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that ranks will run on.

    Attributes:
        kind: The kind of devices; ``TPU`` and ``XLA CPU`` are PJRT's.
        available: Number of devices; for CPUs, the default number of ranks, which is one.
        platform: PJRT's devices, if ranks will run on them.
        finding: A finding about GPUs that ranks won't use, although the user hasn't asked for the CPU.
    """

    kind: Literal["CPU", "GPU", "TPU", "XLA CPU"]
    available: int
    platform: Platform | None = None
    finding: Finding | None = None

    @classmethod
    def find(cls, config: LaunchConfig) -> Devices:
        """Return the devices of this machine for these options."""
        platform = None if config.use_cpu else pjrt.find_platform()
        if platform is not None:
            return cls(platform.kind, 1 if config.start_method == "inline" else platform.processes, platform)
        if config.use_cpu:
            return cls("CPU", 1)
        try:
            gpus = visible_gpus()
        except UncountableError as error:
            return cls("CPU", 1, finding=error.finding)
        if gpus and config.start_method == "inline":
            gpus = 1  # one process is one rank
        return cls("GPU", gpus) if gpus else cls("CPU", 1, finding=_unused_gpus(build_of_torch()))

    def start_method(self, config: LaunchConfig) -> str:
        """Return the start method that the options ask for, or the best one for these devices.

        On TPUs ranks are forks of the kernel, so that they share the memory of a model made in the notebook.
        """
        return "fork" if config.start_method == "auto" and self.platform is not None else config.start_method

    def describe(self, count: int) -> str:
        """Return the devices of ``count`` ranks in words: ``2 CPUs``, or ``1 GPU shared by 2 ranks``."""
        if self.kind == "GPU" and count > self.available:
            return f"{self.describe(self.available)} shared by {count} ranks"
        return f"{count} {self.kind}{'' if count == 1 else 's'}"

    def hiding(self) -> dict[str, str]:
        """Return the variables that hide GPUs in a rank that computes on the CPU."""
        # HIP ignores an empty CUDA_VISIBLE_DEVICES, and then reads HIP_VISIBLE_DEVICES.
        return {"CUDA_VISIBLE_DEVICES": ""} | ({"HIP_VISIBLE_DEVICES": "-1"} if build_of_torch() == "hip" else {})


def visible_gpus() -> int:
    """Return the number of GPUs that a new process would see, without initialising one in this process.

    Raises:
        UncountableError: There are GPUs, but counting them fails.
    """
    build = build_of_torch()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if build == "hip":
        listed = os.environ.get("HIP_VISIBLE_DEVICES") or listed
    if build not in ("cuda", "hip") or listed in _HIDING_VALUES:
        return 0
    if build == "hip":
        return _count_in_process("hip") if _has_device_file("kfd|dxg") else 0  # dxg: in WSL
    uuids = _installed_gpus() if environment.is_on(environment.NVML) else None
    if uuids is None:
        return _count_in_process("cuda") if _has_device_file(_NVIDIA_FILE) else 0
    seen = visible(uuids, listed) if uuids else []
    return _count_in_process("cuda") if seen is None else len(seen)


def visible(uuids: Sequence[str], listed: str | None) -> list[int] | None:
    """Return the indices of the GPUs that CUDA would show, in order; ``None`` if only CUDA itself can tell.

    The list ends at the first entry that names no GPU, and a list that names a GPU twice shows none, as in torch's
    reading of the variable (``torch.cuda._parse_visible_devices``) and CUDA's programming guide.

    Args:
        uuids: The UUIDs of the installed GPUs, by index; ``MIG-`` for a GPU that is divided.
        listed: The value of ``CUDA_VISIBLE_DEVICES``, ``None`` if it isn't set.
    """
    if "MIG-" in uuids or (listed is not None and listed.startswith("MIG-")):
        return None
    if listed is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in listed.split(","):
        index = _index(entry, uuids, by_uuid=listed.startswith("GPU-"))
        if index in found:
            return []
        if index is None:
            break
        found.append(index)
    return found


def _index(entry: str, uuids: Sequence[str], *, by_uuid: bool) -> int | None:
    if by_uuid:  # a unique prefix of a UUID is enough
        matching = [index for index, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
        return matching[0] if len(matching) == 1 else None
    number = re.match(r"\s*\+?(\d+)", entry)  # as C's strtoul, which ignores whatever follows the number
    return int(number[1]) if number and int(number[1]) < len(uuids) else None


@contextlib.contextmanager
def open_nvml() -> Iterator[tuple[Any, list[Any]]]:
    """Yield NVIDIA's management library and a handle of each installed GPU."""
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        yield nvml, [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


@functools.cache  # the library starts slowly, and a machine's GPUs don't change
def _installed_gpus() -> tuple[str, ...] | None:
    """Return the UUIDs of NVIDIA's GPUs, ``MIG-`` for a divided one; ``None`` without the driver's library."""
    with contextlib.suppress(Exception), open_nvml() as (nvml, handles):  # no library, no driver, no permission
        return tuple("MIG-" if _is_divided(nvml, gpu) else os.fsdecode(nvml.nvmlDeviceGetUUID(gpu)) for gpu in handles)
    return None


def _is_divided(nvml: Any, handle: Any) -> bool:
    with contextlib.suppress(Exception):  # a GPU that can't be divided
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == 1)
    return False


def _count_in_process(build: Literal["cuda", "hip"]) -> int:
    return _counted(build, tuple(map(os.environ.get, _COUNTING_VARIABLES)))


@functools.cache  # exceptions are not cached
def _counted(build: Literal["cuda", "hip"], variables: tuple[str | None, ...]) -> int:  # noqa: ARG001 - a cache's key
    """Return the number of devices that another process counts, which depends on these variables.

    Raises:
        UncountableError: The process fails, or takes too long.
    """
    command = [sys.executable, "-c", _COUNTING_PROGRAMS[build]]
    try:
        done = subprocess.run(
            command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_COUNTING_DEADLINE_S, check=True,
        )  # fmt: skip
        return int(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        why = str(error)
    vendor = "NVIDIA" if build == "cuda" else "AMD"
    raise UncountableError(
        Finding(
            f"This machine has {_named(vendor)}, but ranks may not be able to use it.",
            f"A process that tried to count its devices failed: {why}",
            f"{_PERMISSIONS[vendor]}; or --use_cpu to train on the CPU",
        )
    )


def _unused_gpus(build: Build) -> Finding | None:
    """Return a finding about GPUs of this machine that ranks won't use."""
    if any(name in os.environ for name in _VISIBILITY_VARIABLES):  # the user has chosen the devices
        return None
    builds: dict[str, Build] = {}
    if _has_device_file(_NVIDIA_FILE):
        builds["NVIDIA"] = "cuda"
    if _has_device_file("kfd"):
        builds["AMD"] = "hip"
    # Many processors have an integrated GPU, which few people want to train on.
    if any(vendor == "Intel" and (build == "xpu" or place != _INTEGRATED) for vendor, place, _ in _cards(_ROOT)):
        builds["Intel"] = "xpu"
    for vendor, its_build in builds.items():
        fix = f"install torch for {_BUILT_FOR[its_build]} (https://pytorch.org/get-started/locally)"
        why = f"The torch that is installed here is built for {_BUILT_FOR[build]}."
        if build == its_build != "xpu":
            why, fix = "torch finds none that it can use.", _PERMISSIONS[vendor]
        elif build == its_build:
            why = "Launches use NVIDIA's and AMD's GPUs so far. In a rank, torch.xpu works as it does anywhere."
            fix = "in your code, torch.device('xpu', int(os.environ['LOCAL_RANK']))"
        what = f"This machine has {_named(vendor)}, and ranks run on the CPU."
        return Finding(what, why, f"{fix}; or --use_cpu if the CPU is meant", refuses=False)
    return None


@functools.cache
def build_of_torch() -> Build:
    """Return the accelerator that torch is built for, read from its ``version.py`` without importing torch."""
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "cpu"
    text = ""
    with contextlib.suppress(OSError):
        text = (pathlib.Path(spec.origin).parent / "version.py").read_text()
    builds: tuple[Build, ...] = ("hip", "cuda", "xpu")
    for build in builds:
        if re.search(rf"^{build}\b.*=\s*['\"]", text, re.MULTILINE):
            return build
    return "cpu"


def _has_device_file(pattern: str) -> bool:
    return any(re.fullmatch(pattern, file) for file in _device_files(_ROOT))


@functools.cache  # every launch asks, and a machine's GPUs don't change
def _device_files(root: pathlib.Path) -> frozenset[str]:
    with contextlib.suppress(OSError):
        return frozenset(os.listdir(root / "dev"))
    return frozenset()


@functools.cache
def _cards(root: pathlib.Path) -> tuple[tuple[str, str, str], ...]:
    """Return vendor, PCI address and name of each GPU that has a file in ``/dev/dri``."""
    found = []
    for file in sorted(root.glob("dev/dri/renderD*")):
        device = root / "sys/class/drm" / file.name / "device"
        with contextlib.suppress(OSError):
            vendor = (device / "vendor").read_text().strip()
            name = f"{vendor[2:]}:{(device / 'device').read_text().strip()[2:]}"
            with contextlib.suppress(OSError):
                name = (device / "product_name").read_text().strip() or name
            found.append((_VENDORS.get(vendor, ""), device.resolve().name, name))
    return tuple(found)


def _named(vendor: str) -> str:
    """Return a phrase such as ``an AMD GPU (AMD Instinct MI210)``."""
    names = sorted({name for of, _, name in _cards(_ROOT) if of == vendor})
    if vendor == "NVIDIA":
        for file in _ROOT.glob("proc/driver/nvidia/gpus/*/information"):
            with contextlib.suppress(OSError):
                names += re.findall(r"Model:\s*(.*\S)", file.read_text())
    named = f" ({', '.join(dict.fromkeys(names))})" if names else ""
    return f"an {vendor} GPU{named}"


# Compute capability: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions
_BF16_SINCE = (8, 0)
# A folder, a module and a variable of each service. A single sign may come from elsewhere, such as an installed package
# or a variable in an image; two signs are proof.
_SIGNS = {
    "Colab": ("content", "google.colab", "COLAB_RELEASE_TAG"),
    "Kaggle": ("kaggle/working", "kaggle_secrets", "KAGGLE_KERNEL_RUN_TYPE"),
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU that ranks would see."""

    name: str  # the model, such as ``NVIDIA A100-SXM4-80GB``
    memory_bytes: int
    capability: tuple[int, int]  # CUDA's compute capability, such as ``(8, 0)``


@dataclasses.dataclass(frozen=True)
class Machine:
    """This machine: its devices, memory and notebook service.

    Attributes:
        devices: The ranks' devices by default.
        gpus: The GPUs that ranks would see. Also empty if the driver's library can't describe them.
        cores: Number of CPU cores that this process may use, within a container's quota.
        memory_bytes: Memory that this process may use.
        host: The notebook service, ``Colab`` or ``Kaggle``; empty elsewhere.
        tpus: The generation of each TPU chip, such as ``("v5e", "v5e")``.
    """

    devices: Devices
    gpus: tuple[Gpu, ...] = ()
    cores: int = 1
    memory_bytes: int = 0
    host: str = ""
    tpus: tuple[str, ...] = ()

    @classmethod
    def find(cls) -> Machine:
        """Return a description of this machine."""
        devices, gpus = Devices.find(LaunchConfig()), _gpus()
        return cls(devices, gpus, host_memory.cores(), host_memory.total_bytes(), notebook_service(), pjrt.chips())

    def precisions(self, *, use_cpu: bool = False) -> dict[str, str]:
        """Return for each precision the reason why it doesn't suit the devices; empty if it suits them."""
        reasons = {"no": "", "bf16": "", "fp16": ""}
        if use_cpu or self.devices.kind != "GPU":
            reasons["fp16"] = "needs a GPU"
        elif old := [gpu.name for gpu in self.gpus if gpu.capability < _BF16_SINCE]:
            reasons["bf16"] = f"is slow on {old[0]}, which has to emulate it"
        return reasons

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return a human-readable description: pairs of a label and a text."""
        cores = format_count(self.cores, "CPU core")
        facts = [("devices", self._devices()), ("machine", f"{cores}, {format_size(self.memory_bytes)} of memory")]
        if self.tpus:
            kinds = " and ".join(sorted(set(self.tpus)))
            facts.append(("TPU", f"{format_count(len(self.tpus), 'chip')} {kinds}"))
        if self.host:
            facts.append(("notebook", self.host))
        return tuple(facts)

    def _devices(self) -> str:
        text = self.devices.describe(self.devices.available)
        if self.devices.kind == "CPU":
            return self.devices.finding.what if self.devices.finding else "no GPU: ranks run on the CPU"
        kinds = dict.fromkeys(f"{gpu.name}, {format_size(gpu.memory_bytes)}" for gpu in self.gpus)
        return f"{text}: {'; '.join(kinds)}{' each' if len(self.gpus) > 1 else ''}" if kinds else text


def _gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that a new process would see, by the driver's library, which doesn't initialise CUDA."""
    found = []
    if not environment.is_on(environment.NVML):
        return ()
    # No library, driver or permission; a divided GPU.
    with contextlib.suppress(Exception), open_nvml() as (nvml, handles):
        seen = visible([nvml.nvmlDeviceGetUUID(handle) for handle in handles], os.environ.get("CUDA_VISIBLE_DEVICES"))
        for handle in (handles[index] for index in seen or ()):
            name = os.fsdecode(nvml.nvmlDeviceGetName(handle))
            capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            found.append(Gpu(name, int(nvml.nvmlDeviceGetMemoryInfo(handle).total), tuple(capability)))
    return tuple(found)


def notebook_service() -> str:
    """Return ``Colab`` or ``Kaggle`` if two of the service's three signs are present, otherwise empty text."""
    for name, (folder, module, variable) in _SIGNS.items():
        signs = ((_ROOT / folder).is_dir(), pjrt.is_installed(module), variable in os.environ)
        if sum(signs) >= 2:
            return name
    return ""

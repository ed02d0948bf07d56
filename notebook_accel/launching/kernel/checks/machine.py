"""What this machine is: its devices and their memory, and who lends it, told by what is there.

A form shows it, and the precisions that are worth offering follow from it. Nothing here wakes a device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import pathlib
from collections.abc import Iterator, Mapping

from notebook_accel import host_memory
from notebook_accel.config import LaunchConfig
from notebook_accel.formatting import format_count, format_size
from notebook_accel.launching.kernel.checks import pjrt
from notebook_accel.launching.kernel.checks.devices import Devices, visible

__all__ = ["Gpu", "Machine", "host"]

_BF16_SINCE = (
    8,
    0,
)  # compute capability: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions
# Of three signs of a service one may be left over from something else, such as a package of that name that somebody
# has installed, or a variable in an image; two are not.
_SIGNS = {
    "Colab": ("content", "google.colab", "COLAB_RELEASE_TAG"),
    "Kaggle": ("kaggle/working", "kaggle_secrets", "KAGGLE_KERNEL_RUN_TYPE"),
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU that ranks would see.

    Attributes:
        name: Such as ``NVIDIA A100-SXM4-80GB``.
        memory_bytes: All of its memory.
        capability: CUDA's compute capability, such as ``(8, 0)``.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Machine:
    """This machine.

    Attributes:
        devices: What ranks run on unless they are told otherwise.
        gpus: The GPUs that ranks would see. Empty also where they could not be asked.
        cores: CPU cores that this process may use, by a container's quota too.
        memory_bytes: Memory that this process may use.
        host: ``Colab`` or ``Kaggle``, empty elsewhere.
        tpus: The TPU chips, by their generation, such as ``("v5e", "v5e")``.
    """

    devices: Devices
    gpus: tuple[Gpu, ...] = ()
    cores: int = 1
    memory_bytes: int = 0
    host: str = ""
    tpus: tuple[str, ...] = ()

    @classmethod
    def find(cls) -> Machine:
        """What is there."""
        devices, gpus = Devices.find(LaunchConfig()), tuple(_gpus(os.environ))
        return cls(devices, gpus, host_memory.cores(), host_memory.total_bytes(), host(), pjrt.chips())

    def precisions(self, *, use_cpu: bool = False) -> dict[str, str]:
        """Each precision, and why it doesn't fit the devices; empty if it does."""
        reasons = {"no": "", "bf16": "", "fp16": ""}
        if use_cpu or self.devices.kind != "GPU":
            reasons["fp16"] = "needs a GPU"
        elif old := [gpu.name for gpu in self.gpus if gpu.capability < _BF16_SINCE]:
            reasons["bf16"] = f"is slow on {old[0]}, which has to imitate it"
        return reasons

    def facts(self) -> tuple[tuple[str, str], ...]:
        """What to tell a person: pairs of a word and what there is."""
        facts = [("devices", self._devices())]
        facts.append(("machine", f"{format_count(self.cores, 'CPU core')}, {format_size(self.memory_bytes)} of memory"))
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


def _gpus(environ: Mapping[str, str]) -> Iterator[Gpu]:
    """Those that a new process would see, asked of the driver's management library, which leaves CUDA asleep."""
    with contextlib.suppress(Exception):  # no library, no driver, no permission, a part of a GPU: nothing to tell
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            seen = visible([nvml.nvmlDeviceGetUUID(handle) for handle in handles], environ.get("CUDA_VISIBLE_DEVICES"))
            for handle in (handles[index] for index in seen or ()):
                name = nvml.nvmlDeviceGetName(handle)
                major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
                memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
                yield Gpu(name if isinstance(name, str) else name.decode(), memory_bytes, (major, minor))
        finally:
            nvml.nvmlShutdown()


def host(root: pathlib.Path = pathlib.Path("/"), environ: Mapping[str, str] = os.environ) -> str:
    """Whose notebook service this is: ``Colab``, ``Kaggle``, or empty. Two of three signs have to be there."""
    for name, (folder, module, variable) in _SIGNS.items():
        signs = ((root / folder).is_dir(), _is_installed(module), variable in environ)
        if sum(signs) >= 2:
            return name
    return ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent isn't there, or is something odd
        return False

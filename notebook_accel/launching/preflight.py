"""What is checked before a launch, without importing torch or waking a device.

Every check returns what it finds; a launch refuses with all findings at once, and ``doctor`` prints the same list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Literal

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import Finding
from notebook_accel.launching import forkable, processes

__all__ = ["Devices", "check", "visible_gpus"]


@dataclasses.dataclass(frozen=True)
class Devices:
    """What ranks will run on.

    Attributes:
        kind: ``CPU`` or ``GPU``.
        available: How many there are; for CPUs, how many ranks run by default, which is one.
    """

    kind: Literal["CPU", "GPU"]
    available: int

    @classmethod
    def find(cls, config: LaunchConfig) -> Devices:
        """Those of this machine, with these options."""
        gpus = 0 if config.use_cpu else visible_gpus()
        if gpus and config.start_method == "inline":
            gpus = 1  # one process is one rank
        return cls("GPU", gpus) if gpus else cls("CPU", 1)

    def describe(self, count: int) -> str:
        """``2 CPUs``, ``1 GPU``."""
        return f"{count} {self.kind}{'' if count == 1 else 's'}"


def visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """How many GPUs a new process would see, asked of the driver's management library, which leaves CUDA asleep.

    ``CUDA_VISIBLE_DEVICES`` is read as the driver does: the list ends at the first entry that names no device.
    """
    installed = _installed_gpus()
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return installed
    count = 0
    for entry in listed.split(","):
        name = entry.strip()
        is_index = name.isdigit() and int(name) < installed
        if not is_index and not name.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return count


def _installed_gpus() -> int:
    with contextlib.suppress(Exception):  # no library, no driver, no permission: all mean that ranks would see none
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            return int(nvml.nvmlDeviceGetCount())
        finally:
            nvml.nvmlShutdown()
    return 0


def check(config: LaunchConfig, devices: Devices | None = None) -> tuple[Finding, ...]:
    """All that speaks against a launch with these options, from this process, on these devices. Default: those here."""
    devices = devices or Devices.find(config)
    findings = [_half_precision_on_cpu(config, devices)]
    if config.start_method == "inline":
        findings += [_more_than_one_inline(config), _limit_inline(config)]
    else:
        findings += [_platform(), _too_many_ranks(config, devices)]
        if config.start_method == "fork":
            findings += forkable.check()
        else:
            findings += [_cuda_in_use(config, devices)]
    return tuple(finding for finding in findings if finding is not None)


def _more_than_one_inline(config: LaunchConfig) -> Finding | None:
    if config.num_processes in (None, 1):
        return None
    return Finding(
        f"{config.num_processes} processes were asked for, and start_method='inline' runs in the kernel's own.",
        "One process is one rank.",
        "--num_processes 1 to debug it here, or --start_method spawn for several ranks",
    )


def _limit_inline(config: LaunchConfig) -> Finding | None:
    if config.timeout_s is None:
        return None
    return Finding(
        f"timeout_s={config.timeout_s:g} was given, and start_method='inline' runs in the kernel's own process.",
        "Nobody could end it there without ending the kernel.",
        "leave out timeout_s, and interrupt the kernel when it takes too long",
    )


def _platform() -> Finding | None:
    if processes.are_supported():
        return None
    return Finding(
        f"Launching needs Linux 5.3 or later; this is {sys.platform}.",
        "Ranks are started and cleaned up with process descriptors and anonymous memory files, which only Linux has.",
        "use Linux, or WSL 2 on Windows; --start_method inline runs one rank in this process, anywhere",
    )


def _too_many_ranks(config: LaunchConfig, devices: Devices) -> Finding | None:
    if devices.kind == "CPU" or config.num_processes is None or config.num_processes <= devices.available:
        return None
    return Finding(
        f"{config.num_processes} processes were asked for, and there {'is' if devices.available == 1 else 'are'} "
        f"{devices.describe(devices.available)}.",
        "Each rank needs a GPU of its own: NCCL refuses two ranks on one.",
        f"--num_processes {devices.available}, or --use_cpu to train on the CPU",
    )


def _half_precision_on_cpu(config: LaunchConfig, devices: Devices) -> Finding | None:
    if config.mixed_precision != "fp16" or devices.kind != "CPU":
        return None
    return Finding(
        "mixed_precision='fp16' was asked for, and the ranks run on the CPU.",
        "fp16 needs gradient scaling, which works on GPUs; on a CPU most operations have no fp16 version.",
        "--mixed_precision bf16, or no",
    )


def _cuda_in_use(config: LaunchConfig, devices: Devices) -> Finding | None:
    torch = sys.modules.get("torch")
    if torch is None or devices.kind == "CPU" or not torch.cuda.is_initialized():
        return None
    held = sum(torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count()))
    return Finding(
        f"CUDA is in use in this kernel: it holds {held / 2**20:,.0f} MiB of GPU memory, and what the driver needs.",
        "What the kernel holds, the ranks can't have; and a model that is on the GPU can't be sent to them.",
        "restart the kernel and make tensors on the GPU only inside the cell or function; "
        "or --allow_initialized_cuda (allow_initialized_cuda=True) to go on: ranks start clean",
        refuses=not config.allow_initialized_cuda,
    )

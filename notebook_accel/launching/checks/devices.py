"""The devices of this machine, counted without waking them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Mapping
from typing import Literal

from notebook_accel.config import LaunchConfig
from notebook_accel.launching.checks import pjrt

__all__ = ["Devices", "visible_gpus"]


@dataclasses.dataclass(frozen=True)
class Devices:
    """What ranks will run on.

    Attributes:
        kind: ``CPU``, ``GPU``, or what PJRT has.
        available: How many there are; for CPUs, how many ranks run by default, which is one.
        platform: What PJRT has, if ranks are to run on that.
    """

    kind: Literal["CPU", "GPU", "TPU", "XLA CPU"]
    available: int
    platform: pjrt.Platform | None = None

    @classmethod
    def find(cls, config: LaunchConfig) -> Devices:
        """Those of this machine, with these options."""
        platform = None if config.use_cpu else pjrt.find()
        if platform is not None:
            return cls(platform.kind, 1 if config.start_method == "inline" else platform.processes, platform)
        gpus = 0 if config.use_cpu else visible_gpus()
        if gpus and config.start_method == "inline":
            gpus = 1  # one process is one rank
        return cls("GPU", gpus) if gpus else cls("CPU", 1)

    def start_method(self, config: LaunchConfig) -> str:
        """How ranks come into being: as asked for, or as is best for these devices.

        On TPUs ranks are forks of the kernel, so that a model which was made in the notebook is there once.
        """
        return "fork" if config.start_method == "auto" and self.platform is not None else config.start_method

    def describe(self, count: int) -> str:
        """``2 CPUs``, ``1 GPU``; where several ranks have to share, ``1 GPU shared by 2 ranks``."""
        if self.kind == "GPU" and count > self.available:
            return f"{self.describe(self.available)} shared by {count} ranks"
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


@functools.cache  # the library takes its time to start, and GPUs come with a machine
def _installed_gpus() -> int:
    with contextlib.suppress(Exception):  # no library, no driver, no permission: all mean that ranks would see none
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            return int(nvml.nvmlDeviceGetCount())
        finally:
            nvml.nvmlShutdown()
    return 0

"""The devices that PJRT, XLA's runtime, gives to ranks: TPUs, or the CPU in their place. Initialises nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
from typing import Literal

from notebook_accel.errors import Finding
from notebook_accel.formatting import format_count

_ROOT = pathlib.Path("/")
_DEVICE = "PJRT_DEVICE"
_CPU_DEVICES = "CPU_NUM_DEVICES"
_ACCELERATOR_TYPE = "TPU_ACCELERATOR_TYPE"  # such as v3-8; set where the PCI bus is hidden
_GOOGLE = "0x1ae0"
# The PCI devices that are TPUs. https://github.com/pytorch/xla/blob/v2.9.0/torch_xla/_internal/tpu.py
_TPUS = {"0x0027": "v2 or v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7x"}
_TWO_CORES = re.compile(r"v[23]\b")
_UNKNOWN = "of some kind"


@dataclasses.dataclass(frozen=True)
class Platform:
    """The devices that PJRT would give to ranks.

    Attributes:
        kind: The devices: TPUs, or the CPU in place of a TPU.
        processes: The most processes that would each have devices, and the default number of ranks.
        cores: Number of devices of each of these processes. A rank is a process and computes on one device.
    """

    # If a process has several devices, torch_xla gives each to a thread. Ranks can't be threads, for two reasons.
    # First, threads would share everything that Python has once per process: the names that a cell assigns, the model,
    # random generators, variables, standard output, interrupts. Second, threads fail even on the CPU: threads that end
    # a step at the same time each compile it, and wait for each other's collectives in vain until PJRT ends the process
    # (tests/xla/two_threads.py: always). A lock around the end of a step doesn't help: the end waits for the previous
    # step, which waits for the other thread. Even when threads took turns to end steps, one run of fifty crashed while
    # both threads were in an all-reduce.

    kind: Literal["TPU", "XLA CPU"]
    processes: int
    cores: int = 1

    def variables(self) -> dict[str, str]:
        """Return the variables that tell a rank to use this platform."""
        return {_DEVICE: "TPU"} if self.kind == "TPU" else {_DEVICE: "CPU", _CPU_DEVICES: "1"}

    def findings(self, count: int) -> list[Finding]:
        """Return the findings against this number of ranks on the platform."""
        found = []
        if not is_installed("torch_xla"):
            found.append(
                Finding(
                    "This machine has a TPU, and torch_xla isn't installed.",
                    "PyTorch reaches a TPU through it.",
                    "pip install 'torch_xla[tpu]', of the same version as torch; or --use_cpu",
                )
            )
        if self.kind == "TPU" and count not in (1, self.processes):
            found.append(self._wrong_number(count))
        elif self.cores > 1:
            found.append(self._idle_cores(count))
        return found

    def _wrong_number(self, count: int) -> Finding:
        possible = "--num_processes 1" + (f" or --num_processes {self.processes}" if self.processes > 1 else "")
        return Finding(
            f"{count} processes were asked for, and PJRT has "
            f"{format_count(self.processes * self.cores, 'TPU device')}.",
            f"It gives each process {self.cores} devices, for threads; a rank here is a process, and has one."
            if self.cores > 1
            else "It gives one device to one process, or all of them to as many processes.",
            f"{possible}; or --use_cpu",
        )

    def _idle_cores(self, count: int) -> Finding:
        return Finding(
            f"{format_count(count, 'rank')} will compute on {count} of this TPU's {self.processes * self.cores} cores.",
            f"Each of its chips has {self.cores}, for threads of one process. A rank here is a process and uses one; "
            "and gradients are averaged by way of the host, since PJRT joins all cores or none.",
            "leave it so; or take a TPU of a later generation (v4, v5e, v5p, v6e), whose chips are used whole",
            refuses=False,
        )


def find_platform() -> Platform | None:
    """Return PJRT's platform; ``None`` if there is none or ``PJRT_DEVICE`` names another device.

    ``PJRT_DEVICE=CPU`` asks for the CPU in place of a TPU, if torch_xla is installed. Any number of ranks can use it;
    the default is ``CPU_NUM_DEVICES``.
    """
    asked = os.environ.get(_DEVICE, "").upper()
    if asked == "CPU":
        count = os.environ.get(_CPU_DEVICES, "")
        return Platform("XLA CPU", max(1, int(count)) if count.isdigit() else 1) if is_installed("torch_xla") else None
    if asked not in ("", "TPU"):
        return None
    kinds = chips()
    if not kinds and asked == "TPU":
        # Later TPUs share a driver with other devices, so its files mean TPUs only if the user sets PJRT_DEVICE.
        kinds = (_UNKNOWN,) * sum(path.name.isdigit() for path in _ROOT.glob("dev/vfio/*"))
    if not kinds:
        return None
    kind = os.environ.get(_ACCELERATOR_TYPE, "") if kinds[0] == _UNKNOWN else kinds[0]
    return Platform("TPU", len(kinds), 2 if _TWO_CORES.match(kind) else 1)


@functools.cache  # every launch asks, and a machine's TPUs don't change
def chips() -> tuple[str, ...]:
    """Return the generation of each TPU chip on the PCI bus or, if the bus is hidden, of each device file."""
    found = []
    for device in sorted(_ROOT.glob("sys/bus/pci/devices/*")):
        with contextlib.suppress(OSError):  # no permission to look at this device
            if (device / "vendor").read_text().strip() == _GOOGLE:
                found.append(_TPUS.get((device / "device").read_text().strip(), ""))
    known = tuple(filter(None, found))
    # The TPU driver's files are /dev/accel0 and so on. Other vendors' files are in a folder, /dev/accel.
    return known or (_UNKNOWN,) * sum(bool(re.fullmatch(r"accel\d+", path.name)) for path in _ROOT.glob("dev/accel*"))


def is_installed(module: str) -> bool:
    """Return whether a module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the parent package is missing or invalid
        return False

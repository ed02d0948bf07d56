"""The devices of this machine, counted without initialising them.

NVIDIA's GPUs are counted by the driver's management library. Where that can't tell (it isn't in the container, or parts
of GPUs are asked for), CUDA is asked, in a process of its own, and so is torch for AMD's GPUs, which it knows by the
names of CUDA.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from notebook_accel import host_memory
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import Finding
from notebook_accel.formatting import format_count, format_size

__all__ = [
    "Build",
    "Devices",
    "Gpu",
    "Machine",
    "Platform",
    "UncountableError",
    "build_of_torch",
    "chips",
    "find_platform",
    "notebook_service",
    "visible",
    "visible_gpus",
]

Build = Literal["cuda", "hip", "xpu", "cpu"]

_ROOT = pathlib.Path("/")
_ASK_DEADLINE_S = 120.0  # torch may have to be read from a slow disk
# What a process counts its own devices with. The driver's function is CUDA's own count, and needs no torch.
_QUESTIONS = {
    "cuda": "import ctypes; cuda = ctypes.CDLL('libcuda.so.1'); count = ctypes.c_int(); "
    "error = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)); "
    "assert error == 0, f'the driver answers cuInit with error {error}'; print(count.value)",
    "hip": "import torch; print(torch.cuda.device_count())",
}
_HIDES_ALL = {"", "-1", "NoDevFiles"}
_BUILT_FOR = {"cuda": "NVIDIA's GPUs", "hip": "AMD's GPUs", "xpu": "Intel's GPUs", "cpu": "the CPU only"}
_PERMISSIONS = {
    "NVIDIA": "see that the driver fits torch, and that the container is given the GPU (--gpus all, and "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
    "AMD": "see that the driver fits torch, and that you may open /dev/kfd and /dev/dri (the groups video and render)",
}
_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_ANSWERED_BY = (*_LISTS, "LD_LIBRARY_PATH", "PYTHONPATH")
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_INTEGRATED = "0000:00:02.0"  # where Intel's GPUs are that are part of a processor
_NVIDIA_FILE = r"nvidia\d+|nvhost-gpu"  # the second is a Jetson's


class UncountableError(Exception):
    """The GPUs can't be counted. ``finding`` tells the user what to do."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that ranks will run on.

    Attributes:
        kind: ``CPU``, ``GPU``, or what PJRT has.
        available: Number of devices; for CPUs, the default number of ranks, which is one.
        platform: PJRT's devices, if ranks are to run on them.
        finding: A finding about GPUs that ranks won't use, although nobody has asked for the CPU.
    """

    kind: Literal["CPU", "GPU", "TPU", "XLA CPU"]
    available: int
    platform: Platform | None = None
    finding: Finding | None = None

    @classmethod
    def find(cls, config: LaunchConfig) -> Devices:
        """Return the devices of this machine, with these options."""
        platform = None if config.use_cpu else find_platform()
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
        """Return the start method: as asked for, or as is best for these devices.

        On TPUs ranks are forks of the kernel, so that a model which was made in the notebook is there once.
        """
        return "fork" if config.start_method == "auto" and self.platform is not None else config.start_method

    def describe(self, count: int) -> str:
        """Return ``2 CPUs``, ``1 GPU``; where ranks share a device, ``1 GPU shared by 2 ranks``."""
        if self.kind == "GPU" and count > self.available:
            return f"{self.describe(self.available)} shared by {count} ranks"
        return f"{count} {self.kind}{'' if count == 1 else 's'}"

    def hiding(self) -> dict[str, str]:
        """Return the variables that hide GPUs in a rank that computes on the CPU."""
        # HIP takes an empty list for none at all, and then looks at the other one.
        return {"CUDA_VISIBLE_DEVICES": ""} | ({"HIP_VISIBLE_DEVICES": "-1"} if build_of_torch() == "hip" else {})


def visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of GPUs that a new process would see, without initialising one in this process.

    Raises:
        UncountableError: There are GPUs, and what would count them fails.
    """
    build = build_of_torch()
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if build == "hip":
        listed = environ.get("HIP_VISIBLE_DEVICES") or listed
        return _asked("hip", environ) if _is_there("kfd|dxg") and listed not in _HIDES_ALL else 0  # dxg: in WSL
    if build != "cuda" or listed in _HIDES_ALL:
        return 0
    uuids = _installed_gpus()
    if uuids is None:
        return _asked("cuda", environ) if _is_there(_NVIDIA_FILE) else 0
    if not uuids:
        return 0
    seen = visible(uuids, listed)
    return _asked("cuda", environ) if seen is None else len(seen)


def visible(uuids: Sequence[str], listed: str | None) -> list[int] | None:
    """Return the numbers of the GPUs that CUDA would show, in order; ``None`` where only CUDA itself knows.

    The list ends at the first entry that names no GPU, and a list that names a GPU twice shows none, as in torch's
    reading of the variable (``torch.cuda._parse_visible_devices``) and CUDA's programming guide.

    Args:
        uuids: The UUIDs of the installed GPUs, in the order of their numbers; ``MIG-`` for a GPU that is divided.
        listed: ``CUDA_VISIBLE_DEVICES``.
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
    if by_uuid:  # the beginning of one is enough, if no other has it
        matching = [index for index, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
        return matching[0] if len(matching) == 1 else None
    number = re.match(r"\s*\+?(\d+)", entry)  # as C's strtoul: what follows the number doesn't count
    return int(number[1]) if number and int(number[1]) < len(uuids) else None


@functools.cache  # the library takes its time to start, and GPUs come with a machine
def _installed_gpus() -> tuple[str, ...] | None:
    """Return the UUIDs of NVIDIA's GPUs, ``MIG-`` for a divided one; ``None`` without the driver's library."""
    with contextlib.suppress(Exception):  # no library, no driver, no permission
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            return tuple(_uuid(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        finally:
            nvml.nvmlShutdown()
    return None


def _uuid(nvml: object, index: int) -> str:
    asked: object = nvml.nvmlDeviceGetHandleByIndex(index)  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):  # a GPU that can't be divided
        if nvml.nvmlDeviceGetMigMode(asked)[0] == 1:  # type: ignore[attr-defined]
            return "MIG-"
    uuid = nvml.nvmlDeviceGetUUID(asked)  # type: ignore[attr-defined]
    return uuid if isinstance(uuid, str) else uuid.decode()


def _asked(build: Literal["cuda", "hip"], environ: Mapping[str, str]) -> int:
    return _answer(build, tuple((name, environ[name]) for name in _ANSWERED_BY if name in environ))


@functools.cache  # errors are not kept
def _answer(build: Literal["cuda", "hip"], variables: tuple[tuple[str, str], ...]) -> int:
    """Return the number of devices that a process with these variables counts.

    Raises:
        UncountableError: It fails, or takes too long.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _ANSWERED_BY} | dict(variables)
    command = [sys.executable, "-c", _QUESTIONS[build]]
    try:
        done = subprocess.run(
            command, env=environ, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_ASK_DEADLINE_S, check=True,
        )  # fmt: skip
        return int(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        why = str(error)
    vendor = "NVIDIA" if build == "cuda" else "AMD"
    raise UncountableError(
        Finding(
            f"This machine has {_named(vendor)}, and it can't be found out whether ranks can use it.",
            f"A process that looked for it ended so: {why}",
            f"{_PERMISSIONS[vendor]}; or --use_cpu to train on the CPU",
        )
    )


def _unused_gpus(build: Build) -> Finding | None:
    """Return a finding about GPUs of this machine that ranks won't use."""
    if any(name in os.environ for name in _LISTS):  # whoever sets one has looked, and nothing is silent about it
        return None
    builds: dict[str, Build] = {}
    if _is_there(_NVIDIA_FILE):
        builds["NVIDIA"] = "cuda"
    if _is_there("kfd"):
        builds["AMD"] = "hip"
    # Those in processors are nearly everywhere, and few people mean them.
    if any(vendor == "Intel" and (build == "xpu" or place != _INTEGRATED) for vendor, place, _ in _cards(_ROOT)):
        builds["Intel"] = "xpu"
    for vendor, its_build in builds.items():
        fix = f"install torch for {_BUILT_FOR[its_build]} (https://pytorch.org/get-started/locally)"
        why = f"The torch that is installed here is built for {_BUILT_FOR[build]}."
        if build == its_build != "xpu":
            why, fix = "torch counts none that it could use.", _PERMISSIONS[vendor]
        elif build == its_build:
            why = "Launches use NVIDIA's and AMD's GPUs so far. In a rank, torch.xpu works as it does anywhere."
            fix = "in your code, torch.device('xpu', int(os.environ['LOCAL_RANK']))"
        what = f"This machine has {_named(vendor)}, and ranks run on the CPU."
        return Finding(what, why, f"{fix}; or --use_cpu if the CPU is meant", refuses=False)
    return None


@functools.cache
def build_of_torch() -> Build:
    """Return the accelerator that torch is built for, read in its folder without importing it."""
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


def _is_there(name: str) -> bool:
    """Return whether there is a device file whose name matches."""
    return any(re.fullmatch(name, file) for file in _device_files(_ROOT))


@functools.cache  # every launch looks at it, and GPUs come with a machine
def _device_files(root: pathlib.Path) -> frozenset[str]:
    with contextlib.suppress(OSError):
        return frozenset(os.listdir(root / "dev"))
    return frozenset()


@functools.cache
def _cards(root: pathlib.Path) -> tuple[tuple[str, str, str], ...]:
    """Return the GPUs with files in ``/dev/dri``: vendor, place on the PCI bus, and name."""
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


_ASKED_FOR = "PJRT_DEVICE"
_CPU_DEVICES = "CPU_NUM_DEVICES"
_KIND = "TPU_ACCELERATOR_TYPE"  # such as v3-8; set where the bus is hidden
_GOOGLE = "0x1ae0"
# The PCI devices that are TPUs. https://github.com/pytorch/xla/blob/v2.9.0/torch_xla/_internal/tpu.py
_TPUS = {"0x0027": "v2 or v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "v7x"}
_TWO_CORES = re.compile(r"v[23]\b")
_UNKNOWN = "of some kind"


@dataclasses.dataclass(frozen=True)
class Platform:
    """The devices that PJRT would give to ranks.

    Attributes:
        kind: The devices: TPUs, or the CPU in the place of one.
        processes: The most processes that would have a device of their own, and how many ranks run by default.
        cores: Devices that each of them would have. A rank is a process and computes on one.
    """

    # Where a process has several devices, torch_xla gives each to a thread. Ranks can't be threads here, for two
    # reasons. What Python has once in a process they would share: the names that a cell assigns, the model, random
    # generators, variables, standard output, interrupts. And where it can be tried, on the CPU, it doesn't hold.
    # Threads that end a step at the same time each compile it, and wait for each other's collectives in vain until PJRT
    # ends the process (tests/xla/two_threads.py: always). A lock around that doesn't help, since the end of a step
    # waits for the step before, which waits for the other thread. With ends of steps in turns, one run of fifty has
    # still crashed, while both threads were in an all-reduce.

    kind: Literal["TPU", "XLA CPU"]
    processes: int
    cores: int = 1

    def variables(self) -> dict[str, str]:
        """Return the variables that tell a rank to use this platform."""
        return {_ASKED_FOR: "TPU"} if self.kind == "TPU" else {_ASKED_FOR: "CPU", _CPU_DEVICES: "1"}

    def findings(self, count: int) -> list[Finding]:
        """Return the findings against so many ranks on this platform."""
        found = []
        if not _is_installed("torch_xla"):
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
            "leave it so; or take a TPU of a later generation (v4, v5e, v5p, v6e), which is used whole",
            refuses=False,
        )


def find_platform(environ: Mapping[str, str] = os.environ, root: pathlib.Path = _ROOT) -> Platform | None:
    """Return the platform of PJRT, ``None`` if there is none or if ``PJRT_DEVICE`` says so.

    Args:
        environ: ``PJRT_DEVICE=CPU`` asks for the CPU in the place of a TPU, where torch_xla is installed. Any number
            of ranks can have that; ``CPU_NUM_DEVICES`` do by default.
        root: The folder that ``/dev`` and ``/sys`` are in.
    """
    asked = environ.get(_ASKED_FOR, "").upper()
    if asked == "CPU":
        count = environ.get(_CPU_DEVICES, "")
        return Platform("XLA CPU", max(1, int(count)) if count.isdigit() else 1) if _is_installed("torch_xla") else None
    if asked not in ("", "TPU"):
        return None
    kinds = chips(root) if root != _ROOT else _chips_here()
    if not kinds and asked == "TPU":
        # Later TPUs have a driver that is not theirs alone, so this needs somebody's word.
        kinds = (_UNKNOWN,) * sum(path.name.isdigit() for path in root.glob("dev/vfio/*"))
    if not kinds:
        return None
    kind = environ.get(_KIND, "") if kinds[0] == _UNKNOWN else kinds[0]
    return Platform("TPU", len(kinds), 2 if _TWO_CORES.match(kind) else 1)


def chips(root: pathlib.Path = _ROOT) -> tuple[str, ...]:
    """Return the generation of each TPU chip on the PCI bus or, where the bus is hidden, of each device file."""
    found = []
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        with contextlib.suppress(OSError):  # a device that may not be looked at
            if (device / "vendor").read_text().strip() == _GOOGLE:
                found.append(_TPUS.get((device / "device").read_text().strip(), ""))
    known = tuple(filter(None, found))
    # The driver's files are accel0, accel1, …; in the folder accel, where other vendors' are, they would have another
    # name.
    return known or (_UNKNOWN,) * sum(bool(re.fullmatch(r"accel\d+", path.name)) for path in root.glob("dev/accel*"))


@functools.cache  # it is looked for at every launch, and TPUs come with a machine
def _chips_here() -> tuple[str, ...]:
    return chips()


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
    """This machine: its devices, memory and notebook service.

    Attributes:
        devices: The ranks' devices by default.
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
        """Return a description of this machine."""
        devices, gpus = Devices.find(LaunchConfig()), tuple(_gpus(os.environ))
        return cls(devices, gpus, host_memory.cores(), host_memory.total_bytes(), notebook_service(), chips())

    def precisions(self, *, use_cpu: bool = False) -> dict[str, str]:
        """Return each precision with the reason why it doesn't fit the devices; empty if it does."""
        reasons = {"no": "", "bf16": "", "fp16": ""}
        if use_cpu or self.devices.kind != "GPU":
            reasons["fp16"] = "needs a GPU"
        elif old := [gpu.name for gpu in self.gpus if gpu.capability < _BF16_SINCE]:
            reasons["bf16"] = f"is slow on {old[0]}, which has to imitate it"
        return reasons

    def facts(self) -> tuple[tuple[str, str], ...]:
        """Return facts for people: pairs of a label and a text."""
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
    """Yield the GPUs that a new process would see. The driver's library answers, and CUDA stays uninitialised."""
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


def notebook_service(root: pathlib.Path = pathlib.Path("/"), environ: Mapping[str, str] = os.environ) -> str:
    """Return ``Colab``, ``Kaggle``, or empty text. Two of three signs of a service have to be there."""
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

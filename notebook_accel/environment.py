"""Environment variables of ranks, the place that they give a rank in the run, and this machine's network addresses.

The names are torchrun's (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables), so that code
that reads them works inside a rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence

from notebook_accel.errors import ConfigError

MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
GRADIENT_ACCUMULATION_STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
DYNAMO = "ACCELERATE_DYNAMO_"  # prefix of the settings of torch.compile
USE_CPU = "ACCELERATE_USE_CPU"
USE_FSDP = "ACCELERATE_USE_FSDP"
USE_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"
COMPAT = "NOTEBOOK_ACCEL_COMPAT"
CONFIG_FILE = "NOTEBOOK_ACCEL_CONFIG_FILE"
SESSION_FOLDER = "NOTEBOOK_ACCEL_SESSION_FOLDER"  # where ranks wait for a kernel, if their session was detached later
STORE = "NOTEBOOK_ACCEL_STORE"  # host:port of the store through which a rank and the processes that it starts meet
OVERSUBSCRIBE = "NOTEBOOK_ACCEL_OVERSUBSCRIBE"
PROFILE = "NOTEBOOK_ACCEL_PROFILE"
# Switches: 0 turns a path off that isn't torch's plain one, in case a device or its driver doesn't bear it.
COPY_STREAM = "NOTEBOOK_ACCEL_COPY_STREAM"  # loaders copy batches in a CUDA stream of their own
CUDA_TELEMETRY = "NOTEBOOK_ACCEL_CUDA_TELEMETRY"  # CUDA's events in steps, and copies of metrics without waiting
NVML = "NOTEBOOK_ACCEL_NVML"  # NVIDIA's library counts GPUs, and reads their memory, utilisation and clock
NCCL_ABORT = "NOTEBOOK_ACCEL_NCCL_ABORT"  # communicators are aborted, to free ranks that wait in NCCL
SWITCHES = (COPY_STREAM, CUDA_TELEMETRY, NVML, NCCL_ABORT)
# Settings of sharded models: their names in Accelerate's flags and files, without ``fsdp_``, and the names of their
# variables, without ``FSDP_``.
FSDP_OPTIONS = {
    **{
        name: name.upper()
        for name in (
            "activation_checkpointing", "activation_checkpointing_offload", "auto_wrap_policy", "backward_prefetch",
            "cpu_ram_efficient_loading", "forward_prefetch", "ignored_modules", "min_num_params", "offload_params",
            "reshard_after_forward", "sharding_strategy", "state_dict_type", "sync_module_states", "use_orig_params",
            "version",
        )
    },
    "transformer_layer_cls_to_wrap": "TRANSFORMER_CLS_TO_WRAP",
}  # fmt: skip
# Debug mode: ranks compare their collectives before they run them. The second is Accelerate's name.
DEBUG = ("NOTEBOOK_ACCEL_DEBUG", "ACCELERATE_DEBUG_MODE")
# Variables of this package that belong to no option. The last three are for its tests.
OWN = (
    *(COMPAT, SESSION_FOLDER, CONFIG_FILE, STORE, DEBUG[0], "NOTEBOOK_ACCEL_NAMESPACE", "NOTEBOOK_ACCEL_TIME_LIMIT"),
    *SWITCHES,
    *("NOTEBOOK_ACCEL_CHAOS_S", "NOTEBOOK_ACCEL_CHAOS_SEED", "NOTEBOOK_ACCEL_SCREENSHOTS"),
)

# Prefixes of variables that change the training. Ranks that differ in one compute other numbers, or wait for ever.
_OF_TRAINING = (
    *(MIXED_PRECISION, GRADIENT_ACCUMULATION_STEPS, DYNAMO, USE_CPU, USE_FSDP, USE_PARALLELISM),
    *("FSDP_", "PARALLELISM_CONFIG_", COMPAT, OVERSUBSCRIBE, *DEBUG),
)

# Prefixes of variables that torch, its math libraries, Python and the Hugging Face libraries read once, when they are
# imported or load their shared objects. A template that has imported them has the old values.
_READ_AT_IMPORT = (
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "MALLOC_", "LD_", "PYTHON"),
    *("PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "CUDA_", "NCCL_", "GLOO_", "HF_"),
)
# torch reads the first two when a device or a group is first used, which in a rank comes after the fork. torch and
# scikit-learn set the others themselves, in the kernel, when they are imported or make an optimizer.
_READ_LATER = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TORCHINDUCTOR_CACHE_DIR",
)

# Variables in which schedulers and MPI launchers describe a process, with torchrun's names for the same numbers. The
# kernel's own values would mislead libraries that prefer them to RANK: Ignite takes its local rank from SLURM_LOCALID,
# and refuses a SLURM_NTASKS above WORLD_SIZE (ignite/distributed/comp_models/native.py). Variables that an MPI library
# reads itself, such as PMI_RANK and PMIX_RANK, aren't here.
_TASKS = {
    "NODE_RANK": "GROUP_RANK",
    **dict.fromkeys(("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK"), "RANK"),
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), "WORLD_SIZE"),
    **dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE"), "WORLD_SIZE"),
    **dict.fromkeys(("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"), "LOCAL_RANK"),
    **dict.fromkeys(("OMPI_COMM_WORLD_NODE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "MPI_LOCALRANKID"), "LOCAL_RANK"),
    **dict.fromkeys(("SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "LOCAL_WORLD_SIZE"),
    **dict.fromkeys(("MV2_COMM_WORLD_LOCAL_SIZE", "JSM_NAMESPACE_LOCAL_SIZE", "MPI_LOCALNRANKS"), "LOCAL_WORLD_SIZE"),
    "SLURM_NODEID": "GROUP_RANK",
    "SLURM_STEP_NUM_NODES": "GROUP_WORLD_SIZE",
}
_SLURM_JOB = "SLURM_JOB_ID"
_OF_EACH_SLURM_TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS")


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """One rank's place among all."""

    rank: int = 0  # 0 to ``world_size - 1``, over all nodes
    world_size: int = 1
    local_rank: int = 0  # 0 to ``local_world_size - 1``, on this node
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"  # host of the store through which ranks find each other
    master_port: int = 0  # its TCP port

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> RankPlace:
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

        Raises:
            ConfigError: One of them isn't a number, or the rank isn't below the world size.
        """
        place = cls(
            rank=_number(environ, "RANK", 0),
            world_size=_number(environ, "WORLD_SIZE", 1),
            local_rank=_number(environ, "LOCAL_RANK", 0),
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", 1),
            master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(environ, "MASTER_PORT", 0),
        )
        if not 0 <= place.rank < place.world_size:
            raise ConfigError(
                f"RANK is {place.rank} and WORLD_SIZE is {place.world_size}.",
                why="A rank is a number from 0 to the world size - 1.",
                fix="unset RANK and WORLD_SIZE, or set both as the launcher of your ranks should have",
            )
        return place

    def variables(self) -> dict[str, str]:
        """Return the environment variables of this place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"The environment variable {name} is {text!r}, which isn't a whole number.", fix=f"unset {name}"
        ) from None


def is_true(text: str) -> bool:
    """Return whether an environment variable's text means yes: 1, true, t, yes, y or on, in any case."""
    return text.strip().lower() in {"1", "true", "t", "yes", "y", "on"}


def is_false(text: str) -> bool:
    """Return whether an environment variable's text means no: 0, false, f, no, n or off, in any case."""
    return text.strip().lower() in {"0", "false", "f", "no", "n", "off"}


def is_flag(text: str) -> bool:
    """Return whether an environment variable's text means yes or no."""
    return is_true(text) or is_false(text)


def flag(name: str, environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return whether a variable means yes; ``None`` if it isn't set, or empty.

    Raises:
        ConfigError: It means neither yes nor no.
    """
    text = environ.get(name, "")
    if text and not is_flag(text):
        raise ConfigError(
            f"The environment variable {name} is {text!r}.",
            why="It is a switch, which is on or off.",
            fix=f"{name}=true or {name}=false, or unset {name}",
        )
    return is_true(text) if text else None


def is_on(switch: str) -> bool:
    """Return whether one of ``SWITCHES`` is on, as it is by default. Ask when something is prepared, not in each step.

    Raises:
        ConfigError: The variable means neither yes nor no.
    """
    return flag(switch) is not False


def is_debugging(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether debug mode is on.

    Raises:
        ConfigError: A variable means neither yes nor no.
    """
    return any(flag(name, environ) for name in DEBUG)


def follows_accelerate(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether training behaves as Accelerate does even where that is worse.

    Raises:
        ConfigError: The variable has another value than ``accelerate``.
    """
    text = environ.get(COMPAT, "")
    if text not in ("", "accelerate"):
        raise ConfigError(
            f"The environment variable {COMPAT} is {text!r}.",
            why="Its only value is accelerate, for the behaviour of Accelerate even where that is worse.",
            fix=f"{COMPAT}=accelerate, or unset {COMPAT}",
        )
    return bool(text)


def training_options(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change what ranks compute together, by the names of their options."""
    found = {
        name: value.lower() if is_flag(value) else value
        for name, value in environ.items()
        if value and name.startswith(_OF_TRAINING)
    }
    unset = {"mixed_precision": "no", "dynamo_backend": "no", "use_fsdp": "false"}
    return unset | {name.removeprefix("ACCELERATE_").lower(): value for name, value in found.items()}


def import_time_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that libraries read at import, so that a change needs a fresh process."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(_READ_AT_IMPORT) and name not in _READ_LATER
    }


def tasks_of_schedulers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the scheduler's variables in ``environ`` with a rank's values, so that they agree with its ``RANK``."""
    tasks = {name: environ[same] for name, same in _TASKS.items() if name in environ and same in environ}
    if _SLURM_JOB in environ:  # a batch script lacks some of these variables, but a rank is a task
        tasks |= {name: environ[_TASKS[name]] for name in _OF_EACH_SLURM_TASK if _TASKS[name] in environ}
    nodes, on_each = environ.get("GROUP_WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE", "")
    for name in ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"):
        if name in environ and on_each:
            tasks[name] = on_each if nodes == "1" else f"{on_each}(x{nodes})"
    return tasks


def sendable(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that can be encoded in UTF-8, which excludes text with lone surrogates."""
    variables = dict(environ)
    if _is_text("".join((*variables, *variables.values()))):  # nearly always
        return variables
    return {name: value for name, value in variables.items() if _is_text(name + value)}


def import_path() -> list[str]:
    """Return ``sys.path`` without entries that aren't strings, which Python ignores too."""
    entries: list[object] = list(sys.path)
    return [entry for entry in entries if isinstance(entry, str)]


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def fsdp_variables(options: Sequence[str]) -> dict[str, str]:
    """Return the variables of ranks that shard models, from settings such as ``min_num_params=1000``.

    Several values for one setting, such as names of classes, are joined with commas. Raises a ``ConfigError`` for an
    unknown setting.
    """
    variables = {USE_FSDP: "true"}
    for option in options:
        name, _, value = option.partition("=")
        known = FSDP_OPTIONS.get(name.strip().removeprefix("fsdp_"))
        if known is None or not value.strip():
            raise ConfigError(
                f"fsdp_options has {option!r}, which isn't a setting with a value.",
                fix="name=value, with one of the names " + ", ".join(sorted(FSDP_OPTIONS)),
            )
        before = variables.get(f"FSDP_{known}")
        variables[f"FSDP_{known}"] = value.strip() if before is None else f"{before},{value.strip()}"
    return variables


def without_variables(options: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the settings of sharded models for which ``environ`` has no variable."""
    return [option for option in options if not any(map(environ.get, fsdp_variables([option]).keys() - {USE_FSDP}))]


def become(variables: Mapping[str, str]) -> None:
    """Make these the only environment variables of this process."""
    _apply({**dict.fromkeys(os.environ), **variables})


@contextlib.contextmanager
def patched(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables (unset those with ``None``) in a ``with`` block, and restore them at its end."""
    before = {name: os.environ.get(name) for name in variables}
    _apply(variables)
    try:
        yield
    finally:
        _apply(before)


def _apply(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value


_SIOCGIFADDR = 0x8915  # linux/sockios.h


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to another; loopback if there is no route. Nothing is sent."""
    with contextlib.suppress(OSError, UnicodeError):  # the latter for a path, where the nodes meet in a file
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    return "127.0.0.1"


def interface_of(address: str) -> str:
    """Return the network interface that has an address, such as ``eth0``; empty if none is known."""
    if address.startswith("127.") or address == "::1":
        return "lo"
    return next((name for name, its in _addresses() if its == address), "")


def own_addresses() -> list[str]:
    """Return this machine's addresses, loopback last."""
    return [address for _, address in sorted(_addresses(), key=lambda pair: pair[0] == "lo")] or ["127.0.0.1"]


def _addresses() -> list[tuple[str, str]]:
    fcntl = importlib.import_module("fcntl")  # not above: this module can be imported outside of Linux too
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    return found

"""Train on every accelerator of this machine, from a notebook cell.

The names here are the public interface. Importing this package imports neither torch nor IPython; each name imports its
module when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_accel.config import LaunchConfig
    from notebook_accel.errors import (
        CheckpointError,
        CollectiveError,
        ConfigError,
        LaunchError,
        NotebookAccelError,
        PayloadError,
        PreflightError,
        RankFailedError,
        ResultError,
        RunError,
        RunStoppedError,
        RunTimeoutError,
        TrainingError,
    )
    from notebook_accel.launching.kernel.config_draft import write_basic_config
    from notebook_accel.launching.kernel.detached import attach, detach
    from notebook_accel.launching.kernel.job import Job
    from notebook_accel.launching.kernel.notebook_launcher import debug_launcher, notebook_launcher
    from notebook_accel.launching.results import Results
    from notebook_accel.reporting import report
    from notebook_accel.sessions.kernel.session import Session
    from notebook_accel.training.accelerator import Accelerator
    from notebook_accel.training.accumulation import GradientAccumulationPlugin
    from notebook_accel.training.checkpoint_folders import ProjectConfiguration
    from notebook_accel.training.data import DataLoaderConfiguration, prepare_data_loader
    from notebook_accel.training.fsdp_plugin import FullyShardedDataParallelPlugin
    from notebook_accel.training.handlers import (
        AutocastKwargs,
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    from notebook_accel.training.loaders import skip_first_batches
    from notebook_accel.training.memory_estimate import MemoryEstimate, estimate_memory
    from notebook_accel.training.parallelism import ParallelismConfig
    from notebook_accel.training.random_state import synchronize_rng_states
    from notebook_accel.training.states import AcceleratorState, DistributedType, PartialState
    from notebook_accel.utils.imports import is_rich_available
    from notebook_accel.utils.memory import find_executable_batch_size

# This package's own version, which its metadata, `notebook-accel --version` and `notebook-accel env` show.
VERSION = "0.1.0"
# The version that programs compare. Those written for Accelerate turn features on by
# `version.parse(accelerate.__version__) >= version.parse("0.16.0")`, and they must not lose them when the import is
# renamed. So the public part is the release of Accelerate whose names are here, and the local part (PEP 440) is our own
# version, which comparisons with `>=` ignore. An epoch such as "1!0.1.0" would also claim every future feature, and
# `__version__.split(".")` would find no number in it.
__version__ = f"1.15.0+notebook.accel.{VERSION}"

# A table of names instead of imports: every kernel that loads the extension would pay for the imports, and the kernel
# must not import torch.
_NAMES = {
    "config": "LaunchConfig",
    "errors": (
        "CheckpointError CollectiveError ConfigError LaunchError NotebookAccelError PayloadError PreflightError "
        "RankFailedError ResultError RunError RunStoppedError RunTimeoutError TrainingError"
    ),
    "launching.kernel.config_draft": "write_basic_config",
    "launching.kernel.detached": "attach detach",
    "launching.kernel.job": "Job",
    "launching.kernel.notebook_launcher": "debug_launcher notebook_launcher",
    "launching.results": "Results",
    "reporting": "report",
    "sessions.kernel.session": "Session",
    "training.accelerator": "Accelerator",
    "training.accumulation": "GradientAccumulationPlugin",
    "training.checkpoint_folders": "ProjectConfiguration",
    "training.data": "DataLoaderConfiguration prepare_data_loader",
    "training.fsdp_plugin": "FullyShardedDataParallelPlugin",
    "training.handlers": (
        "AutocastKwargs DDPCommunicationHookType DistributedDataParallelKwargs GradScalerKwargs "
        "InitProcessGroupKwargs ProfileKwargs"
    ),
    "training.loaders": "skip_first_batches",
    "training.memory_estimate": "MemoryEstimate estimate_memory",
    "training.parallelism": "ParallelismConfig",
    "training.random_state": "synchronize_rng_states",
    "refusals": (
        "DeepSpeedPlugin cpu_offload cpu_offload_with_hook disk_offload dispatch_model "
        "infer_auto_device_map init_empty_weights init_on_device load_checkpoint_and_dispatch "
        "load_checkpoint_in_model prepare_pippy"
    ),
    "training.states": "AcceleratorState DistributedType PartialState",
    "utils.imports": "is_rich_available",
    "utils.memory": "find_executable_batch_size",
}
# The modules that are there after `import accelerate`, as in `accelerate.utils.set_seed(0)`.
_MODULES = [
    "accelerator", "big_modeling", "data_loader", "hooks", "inference", "launchers", "logging", "optimizer",
    "parallelism_config", "scheduler", "state", "tracking", "utils",
]  # fmt: skip
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Accelerator", "AcceleratorState", "AutocastKwargs", "CheckpointError", "CollectiveError", "ConfigError",
    "DDPCommunicationHookType", "DataLoaderConfiguration", "DeepSpeedPlugin", "DistributedDataParallelKwargs",
    "DistributedType", "FullyShardedDataParallelPlugin", "GradScalerKwargs", "GradientAccumulationPlugin",
    "InitProcessGroupKwargs", "Job", "LaunchConfig", "LaunchError", "MemoryEstimate", "NotebookAccelError",
    "ParallelismConfig", "PartialState", "PayloadError", "PreflightError", "ProfileKwargs", "ProjectConfiguration",
    "RankFailedError", "ResultError", "Results", "RunError", "RunStoppedError", "RunTimeoutError", "Session",
    "TrainingError", "attach", "config_widget", "cpu_offload", "cpu_offload_with_hook", "debug_launcher", "detach",
    "disk_offload", "dispatch_model", "estimate_memory", "find_executable_batch_size",
    "infer_auto_device_map", "init_empty_weights", "init_on_device", "is_rich_available",
    "load_checkpoint_and_dispatch", "load_checkpoint_in_model", "notebook_launcher", "prepare_data_loader",
    "prepare_pippy", "report", "skip_first_batches", "synchronize_rng_states", "write_basic_config",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    if name in ("debug_launcher", "notebook_launcher"):  # a notebook that uses them is about to launch
        importlib.import_module(f"{__name__}.launching.kernel.local").engine().warm_in_kernel()
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def config_widget() -> Any:
    """Return the form that writes a configuration file. Where no widgets are shown, it is printed as text."""
    return importlib.import_module("kernel_ext.config_form").ConfigForm()


def load_ipython_extension(shell: Any) -> None:
    """Load the extension, the package ``kernel_ext``: ``%load_ext notebook_accel``."""
    importlib.import_module("kernel_ext").load_ipython_extension(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Remove the magics and stop all runs: ``%unload_ext notebook_accel``."""
    importlib.import_module("kernel_ext").unload_ipython_extension(shell)

"""The names that users of Accelerate import from ``accelerate.utils``."""

from notebook_accel.launching.configuring import write_basic_config
from notebook_accel.training.accumulation import GradientAccumulationPlugin
from notebook_accel.training.batch_size import find_executable_batch_size
from notebook_accel.training.checkpoint_folders import ProjectConfiguration
from notebook_accel.training.data import DataLoaderConfiguration
from notebook_accel.training.handlers import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from notebook_accel.training.operations import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    send_to_device,
    tqdm,
    wait_for_everyone,
)
from notebook_accel.training.process_control import DistributedType
from notebook_accel.training.profiling import ProfileKwargs
from notebook_accel.training.random_state import set_seed, synchronize_rng_states
from notebook_accel.training.tracking import LoggerType

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "LoggerType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "broadcast",
    "broadcast_object_list",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "pad_across_processes",
    "reduce",
    "send_to_device",
    "set_seed",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
    "write_basic_config",
]

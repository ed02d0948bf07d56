"""Settings and enumerations. Each is defined in the module of ``training`` that it configures."""

from typing import TYPE_CHECKING

from notebook_accel.refusals import names_elsewhere
from notebook_accel.training.accumulation import GradientAccumulationPlugin
from notebook_accel.training.checkpoint_folders import ProjectConfiguration
from notebook_accel.training.compiling import DynamoBackend, TorchDynamoPlugin
from notebook_accel.training.data import DataLoaderConfiguration
from notebook_accel.training.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.handlers import (
    AutocastKwargs,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from notebook_accel.training.parallelism import ParallelismConfig
from notebook_accel.training.precision import PrecisionType
from notebook_accel.training.random_state import RNGType
from notebook_accel.training.states import DistributedType
from notebook_accel.training.tracking import LoggerType
from notebook_accel.utils.operations import TensorInformation

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "ParallelismConfig",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TensorInformation",
    "TorchDynamoPlugin",
]

if not TYPE_CHECKING:  # so that a type checker still finds unknown names
    __getattr__ = names_elsewhere(__name__)

"""Settings and enumerations. Each is defined in the module of ``training`` that it configures."""

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
from notebook_accel.training.refusals import (
    AORecipeKwargs,
    DeepSpeedPlugin,
    FP8RecipeKwargs,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    TorchTensorParallelPlugin,
)
from notebook_accel.training.states import DistributedType
from notebook_accel.training.tracking import LoggerType

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TERecipeKwargs",
    "TorchDynamoPlugin",
    "TorchTensorParallelPlugin",
]

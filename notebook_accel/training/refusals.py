"""What Accelerate has and this package doesn't. Asking for it is an error that says what to do instead."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from notebook_accel.errors import ConfigError

__all__ = [
    "AORecipeKwargs",
    "DeepSpeedPlugin",
    "DynamoBackend",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "MSAMPRecipeKwargs",
    "MegatronLMPlugin",
    "ParallelismConfig",
    "TERecipeKwargs",
    "TorchDynamoPlugin",
    "TorchTensorParallelPlugin",
    "cpu_offload",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "prepare_pippy",
    "refuse",
]

_WHOLE = "Each rank holds the whole model, as it was given to prepare."
_SHARDING = (
    "torch's own fully_shard(model), and don't give that model to prepare; or Accelerate itself, which runs in these "
    "ranks too"
)
_INSTEAD = {
    "deepspeed_plugin": _SHARDING,
    "deepspeed_plugins": _SHARDING,
    "fsdp_plugin": _SHARDING,
    "megatron_lm_plugin": _SHARDING,
    "parallelism_config": _SHARDING,
    "torch_tp_plugin": _SHARDING,
    "dynamo_backend": "torch.compile(model, backend=...), before prepare",
    "dynamo_plugin": "torch.compile(model), before prepare",
}


def refuse(given: Mapping[str, Any]) -> None:
    """Refuses arguments that would have to change how training works, and don't.

    Raises:
        ConfigError: One of Accelerate's was given.
        TypeError: One was given that nobody knows.
    """
    for name, value in given.items():
        if name not in _INSTEAD:
            raise TypeError(f"Accelerator() got an unexpected keyword argument {name!r}")
        if value is not None and str(getattr(value, "value", value)).lower() != "no":
            raise ConfigError(
                f"Accelerator({name}=...) isn't there.",
                why=_WHOLE,
                fix=_INSTEAD[name],
            )


class DynamoBackend(str, enum.Enum):
    """Backends of ``torch.compile``, as text: ``Accelerator(dynamo_backend=...)`` takes ``NO`` only."""

    NO = "NO"
    AOT_EAGER = "AOT_EAGER"
    CUDAGRAPHS = "CUDAGRAPHS"
    EAGER = "EAGER"
    INDUCTOR = "INDUCTOR"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"


# Programs import these names, and some ask whether an object is one. So there are such classes, without objects.


class _NotThere:
    _why = _WHOLE
    _fix = _SHARDING

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"{cls.__name__} isn't there.", why=cls._why, fix=cls._fix)


class DeepSpeedPlugin(_NotThere):
    """DeepSpeed isn't there."""


class FullyShardedDataParallelPlugin(_NotThere):
    """FSDP isn't there."""


class MegatronLMPlugin(_NotThere):
    """Megatron-LM isn't there."""


class ParallelismConfig(_NotThere):
    """Parallelism other than over the data isn't there."""


class TorchTensorParallelPlugin(_NotThere):
    """Tensor parallelism isn't there."""


class TorchDynamoPlugin(_NotThere):
    """``prepare`` doesn't compile."""

    _why = "prepare leaves a model as it was given."
    _fix = _INSTEAD["dynamo_plugin"]


class FP8RecipeKwargs(_NotThere):
    """Arithmetic in 8 bits isn't there."""

    _why = "There is no arithmetic in 8 bits here."
    _fix = "mixed_precision='bf16'"


class AORecipeKwargs(FP8RecipeKwargs):
    """Arithmetic in 8 bits isn't there."""


class MSAMPRecipeKwargs(FP8RecipeKwargs):
    """Arithmetic in 8 bits isn't there."""


class TERecipeKwargs(FP8RecipeKwargs):
    """Arithmetic in 8 bits isn't there."""


def _not_there(name: str) -> Callable[..., NoReturn]:
    def refuse_to(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{name} isn't there.",
            why="Models that don't fit on one device are no subject of this package.",
            fix=f"from accelerate import {name}: that works in these ranks too",
        )

    refuse_to.__name__ = refuse_to.__qualname__ = name
    refuse_to.__doc__ = "Models that don't fit on one device are no subject of this package."
    return refuse_to


cpu_offload = _not_there("cpu_offload")
disk_offload = _not_there("disk_offload")
dispatch_model = _not_there("dispatch_model")
infer_auto_device_map = _not_there("infer_auto_device_map")
init_empty_weights = _not_there("init_empty_weights")
init_on_device = _not_there("init_on_device")
load_checkpoint_and_dispatch = _not_there("load_checkpoint_and_dispatch")
load_checkpoint_in_model = _not_there("load_checkpoint_in_model")
prepare_pippy = _not_there("prepare_pippy")

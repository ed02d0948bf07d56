"""Accelerate's arguments and names that this package refuses, with errors that say what to do instead."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from notebook_accel.errors import ConfigError

_WHOLE_MODEL = "Models are whole on each rank, or sharded by fully_shard (FSDP 2)."
_SHARDING = "fsdp_plugin=FullyShardedDataParallelPlugin() to shard it; or Accelerate itself, which runs in ranks too"
_INSTEAD = {
    "deepspeed_plugin": _SHARDING,
    "deepspeed_plugins": _SHARDING,
    "megatron_lm_plugin": _SHARDING,
    "parallelism_config": _SHARDING,
    "torch_tp_plugin": _SHARDING,
    "dynamo_backend": "torch.compile(model, backend=...), before prepare",
    "dynamo_plugin": "torch.compile(model), before prepare",
}


def refuse(given: Mapping[str, Any]) -> None:
    """Refuse arguments of ``Accelerator`` that this package can't honour.

    Raises:
        ConfigError: An argument exists in Accelerate only.
        TypeError: An argument is unknown.
    """
    for name, value in given.items():
        if name not in _INSTEAD:
            raise TypeError(f"Accelerator() got an unexpected keyword argument {name!r}")
        if value is not None and str(getattr(value, "value", value)).lower() != "no":
            raise ConfigError(f"Accelerator({name}=...) isn't supported.", why=_WHOLE_MODEL, fix=_INSTEAD[name])


class DynamoBackend(str, enum.Enum):
    """Backends of ``torch.compile``. ``Accelerator(dynamo_backend=...)`` accepts ``NO`` only."""

    NO = "NO"
    AOT_EAGER = "AOT_EAGER"
    CUDAGRAPHS = "CUDAGRAPHS"
    EAGER = "EAGER"
    INDUCTOR = "INDUCTOR"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    TVM = "TVM"


# Programs import these names, and use them in isinstance. So they are classes, which can't be instantiated.


class _Unsupported:
    _why = _WHOLE_MODEL
    _fix = _SHARDING

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"{cls.__name__} isn't supported.", why=cls._why, fix=cls._fix)


class DeepSpeedPlugin(_Unsupported):
    """DeepSpeed isn't supported."""


class MegatronLMPlugin(_Unsupported):
    """Megatron-LM isn't supported."""


class ParallelismConfig(_Unsupported):
    """Only data parallelism is supported."""


class TorchTensorParallelPlugin(_Unsupported):
    """Tensor parallelism isn't supported."""


class TorchDynamoPlugin(_Unsupported):
    """``prepare`` doesn't compile models."""

    _why = "prepare doesn't compile models."
    _fix = _INSTEAD["dynamo_plugin"]


class FP8RecipeKwargs(_Unsupported):
    """Arithmetic in 8 bits isn't supported."""

    _why = "There is no arithmetic in 8 bits here."
    _fix = "mixed_precision='bf16'"


class AORecipeKwargs(FP8RecipeKwargs):
    """Arithmetic in 8 bits isn't supported."""


class MSAMPRecipeKwargs(FP8RecipeKwargs):
    """Arithmetic in 8 bits isn't supported."""


class TERecipeKwargs(FP8RecipeKwargs):
    """Arithmetic in 8 bits isn't supported."""


def _unsupported(name: str) -> Callable[..., NoReturn]:
    def refuse_to(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{name} isn't supported.",
            why="Models that don't fit on one device are outside of this package.",
            fix=f"from accelerate import {name}: that works in these ranks too",
        )

    refuse_to.__name__ = refuse_to.__qualname__ = name
    refuse_to.__doc__ = "Raise, since models that don't fit on one device are outside of this package."
    return refuse_to


cpu_offload = _unsupported("cpu_offload")
disk_offload = _unsupported("disk_offload")
dispatch_model = _unsupported("dispatch_model")
infer_auto_device_map = _unsupported("infer_auto_device_map")
init_empty_weights = _unsupported("init_empty_weights")
init_on_device = _unsupported("init_on_device")
load_checkpoint_and_dispatch = _unsupported("load_checkpoint_and_dispatch")
load_checkpoint_in_model = _unsupported("load_checkpoint_in_model")
prepare_pippy = _unsupported("prepare_pippy")

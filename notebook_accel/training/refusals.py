"""Arguments of Accelerate's ``Accelerator`` that can't be honoured here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notebook_accel.errors import ConfigError

__all__ = ["refuse"]

_SHARDING = "torch's own fully_shard(model), before prepare; or Accelerate itself, which runs in these ranks too"
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
                why="Each rank holds the whole model, as it was given to prepare.",
                fix=_INSTEAD[name],
            )

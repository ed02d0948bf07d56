"""Settings of sharded models, under Accelerate's names and from the variables of a launch."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch

from notebook_accel import environment
from notebook_accel.errors import ConfigError

_PREFIX = "FSDP_"
_WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_STATE_DICTS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
_MIN_NUM_PARAMS = 100_000_000  # the default of torch's size_based_auto_wrap_policy
# Strategies of FSDP 1, by name and by number, and the value of reshard_after_forward that does the same.
_STRATEGIES = {
    "FULL_SHARD": True, "1": True, "SHARD_GRAD_OP": False, "2": False,
    "HYBRID_SHARD": True, "4": True, "HYBRID_SHARD_ZERO2": False, "5": False,
}  # fmt: skip
_HYBRID = ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "5")
_DTYPES = {"fp32": torch.float32, "no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Settings of FSDP 1, with the values that match what FSDP 2 does.
_OBSOLETE: Mapping[str, tuple[Any, ...]] = {
    "backward_prefetch": (None, "NO_PREFETCH"),
    "forward_prefetch": (None, False),
    "limit_all_gathers": (True,),
    "optim_state_dict_config": (None,),
    "param_init_fn": (None,),
    "state_dict_config": (None,),
    "use_orig_params": (None, True),
}


@dataclasses.dataclass
class FullyShardedDataParallelPlugin:
    """Settings of models that are sharded over the ranks, by torch's ``fully_shard`` (FSDP 2).

    Settings that aren't given come from the launch's variables, such as ``FSDP_MIN_NUM_PARAMS``, or have defaults.

    Attributes:
        fsdp_version: 2; version 1 is treated as 2, with a warning.
        sharding_strategy: FSDP 1's name for ``reshard_after_forward``. ``"HYBRID_SHARD"`` and ``"HYBRID_SHARD_ZERO2"``
            shard one replica of the model per node, or as ``ParallelismConfig`` says.
        reshard_after_forward: Free a block's gathered parameters after its forward pass, and gather them again for the
            backward pass. ``False`` keeps them, which is faster and needs more memory.
        backward_prefetch: A setting of FSDP 1; FSDP 2 always prefetches.
        mixed_precision_policy: torch's ``MixedPrecisionPolicy``, a dictionary of its dtypes, or ``"bf16"``, ``"fp16"``
            or ``"fp32"``. By default parameters and activations have the ``Accelerator``'s precision, and gradients are
            averaged in float32.
        auto_wrap_policy: The blocks that are gathered one at a time: ``"transformer_based_wrap"`` (the default),
            ``"size_based_wrap"``, ``"no_wrap"`` for the whole model at once, or one of torch's policies.
        cpu_offload: Keep shards, gradients and the optimizer's state in the host's memory.
        ignored_modules: Modules that stay whole on every rank, or a regular expression that matches their names.
        state_dict_type: ``"sharded_state_dict"``: in a checkpoint each rank writes its share. ``"full_state_dict"``:
            rank 0 writes whole models, in files that other libraries read.
        state_dict_config: A setting of FSDP 1.
        optim_state_dict_config: A setting of FSDP 1.
        limit_all_gathers: A setting of FSDP 1.
        use_orig_params: A setting of FSDP 1, always on in FSDP 2.
        param_init_fn: A setting of FSDP 1.
        sync_module_states: Give all ranks rank 0's weights before they are sharded; on by default.
        forward_prefetch: A setting of FSDP 1.
        activation_checkpointing: Recompute a block's activations in the backward pass instead of keeping them.
        activation_checkpointing_offload: Not supported.
        cpu_ram_efficient_loading: Let only rank 0 load a pretrained model of Transformers; the other ranks get their
            shards from it.
        transformer_cls_names_to_wrap: Class names of the blocks for ``"transformer_based_wrap"``. By default the
            model's ``_no_split_modules``, or else the members of each ``ModuleList``, and those of each ``Sequential``
            that are of one class. A model that has none of these is gathered whole.
        min_num_params: The smallest block for ``"size_based_wrap"``, in parameters.

    Raises:
        ConfigError: A setting has an invalid value.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: bool | str | None = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Callable[..., Any] | str | None = None
    cpu_offload: Any = None
    ignored_modules: Iterable[torch.nn.Module] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[..., Any] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Iterable[str] | str | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        self._version()
        self.reshard_after_forward = self._reshards()
        for name, variable, default in (
            ("cpu_offload", "OFFLOAD_PARAMS", False),
            ("sync_module_states", "SYNC_MODULE_STATES", True),
            ("activation_checkpointing", "ACTIVATION_CHECKPOINTING", False),
            ("activation_checkpointing_offload", "ACTIVATION_CHECKPOINTING_OFFLOAD", False),
            ("cpu_ram_efficient_loading", "CPU_RAM_EFFICIENT_LOADING", False),
        ):
            value = getattr(self, name)
            setattr(self, name, _flag(variable, default) if value is None else value)
        if self.cpu_ram_efficient_loading:
            os.environ[f"{_PREFIX}CPU_RAM_EFFICIENT_LOADING"] = "true"  # Transformers reads it when it loads a model
        self.auto_wrap_policy = self._wrap()
        self.state_dict_type = _choice("state_dict_type", self.state_dict_type, "STATE_DICT_TYPE", _STATE_DICTS)
        names = self.transformer_cls_names_to_wrap or _variable("TRANSFORMER_CLS_TO_WRAP") or ()
        self.transformer_cls_names_to_wrap = names.split(",") if isinstance(names, str) else list(names)
        self.min_num_params = self._smallest()
        self.ignored_modules = self.ignored_modules or _variable("IGNORED_MODULES") or ()
        self._check()

    def _version(self) -> None:
        version = str(self.fsdp_version or _variable("VERSION") or 2)
        if version not in ("1", "2"):
            raise ConfigError(f"fsdp_version is {version!r}.", fix="fsdp_version=2")
        if version == "1":
            warnings.warn("fsdp_version=1 is taken as 2: models are sharded by torch's fully_shard.", stacklevel=4)
        self.fsdp_version = 2

    def _reshards(self) -> bool:
        asked = self.sharding_strategy if self.reshard_after_forward is None else self.reshard_after_forward
        if asked is None:
            asked = _variable("RESHARD_AFTER_FORWARD") or _variable("SHARDING_STRATEGY") or "true"
        if isinstance(asked, bool):
            return asked
        text = str(getattr(asked, "name", asked))
        if text != "1" and environment.is_flag(text):
            return environment.is_true(text)
        if text.upper() not in _STRATEGIES:
            raise ConfigError(
                f"The sharding strategy {text!r} isn't supported.",
                why="FSDP 2 keeps or frees blocks after a pass, and shards over all ranks or over those of a node.",
                fix="FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or HYBRID_SHARD_ZERO2; no plugin at all for NO_SHARD",
            )
        return _STRATEGIES[text.upper()]

    def _wrap(self) -> Callable[..., Any] | str:
        given: Any = self.auto_wrap_policy
        if given is None or isinstance(given, str):
            return _choice("auto_wrap_policy", given, "AUTO_WRAP_POLICY", _WRAPS)
        if not callable(given) and not hasattr(given, "_run_policy"):
            raise ConfigError(f"auto_wrap_policy is {given!r}.", fix='"transformer_based_wrap"')
        policy: Callable[..., Any] = given
        return policy

    def _smallest(self) -> int:
        given: Any = self.min_num_params
        text = str((_variable("MIN_NUM_PARAMS") or _MIN_NUM_PARAMS) if given is None else given)
        if not text.isdecimal():
            raise ConfigError(f"min_num_params is {text!r}.", fix="a number of parameters, such as 1000000")
        return int(text)

    def _check(self) -> None:
        if self.activation_checkpointing_offload:
            raise ConfigError(
                "activation_checkpointing_offload isn't supported.",
                fix="activation_checkpointing=True alone: only a block's inputs stay on the device",
            )
        for name, harmless in _OBSOLETE.items():
            value = getattr(self, name)
            if value not in harmless and str(value).upper() not in map(str, harmless):
                warnings.warn(f"{name}={value!r} has no effect: FSDP 2 has no such setting.", stacklevel=4)
        self.precision_policy(None)

    @property
    def replicates(self) -> bool:
        """True if each node has a replica of the model, sharded over its ranks."""
        given = self.sharding_strategy or _variable("SHARDING_STRATEGY")
        return str(getattr(given, "name", given)).upper() in _HYBRID

    @property
    def saves_whole(self) -> bool:
        """True if rank 0 writes whole models into checkpoints."""
        return str(self.state_dict_type) == "FULL_STATE_DICT"

    def precision_policy(self, dtype: torch.dtype | None) -> Any:
        """Return torch's ``MixedPrecisionPolicy`` for an ``Accelerator`` whose autocast would use ``dtype``.

        Raises:
            ConfigError: ``mixed_precision_policy`` has an invalid value.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy

        given = self.mixed_precision_policy
        if isinstance(given, MixedPrecisionPolicy):
            return given
        if given is None:
            # Autocast averages gradients in float32 too.
            return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
        dtypes = {"param_dtype": given, "reduce_dtype": given} if isinstance(given, str) else given
        try:
            found = {name: _DTYPES.get(str(value), value) for name, value in dict(dtypes).items() if value is not None}
            if all(isinstance(value, torch.dtype) or name == "cast_forward_inputs" for name, value in found.items()):
                return MixedPrecisionPolicy(**cast(Any, found))
        except (TypeError, ValueError):
            pass
        raise ConfigError(
            f"mixed_precision_policy is {given!r}.",
            fix="torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
        )


def of_launch(plugin: FullyShardedDataParallelPlugin | None) -> FullyShardedDataParallelPlugin | None:
    """Return this program's plugin: the given one, or that of the launch; ``None`` if no model is to be sharded."""
    if plugin is not None and not isinstance(plugin, FullyShardedDataParallelPlugin):
        raise ConfigError(f"fsdp_plugin is {plugin!r}.", fix="FullyShardedDataParallelPlugin()")
    if plugin is None and environment.flag(environment.USE_FSDP):
        return FullyShardedDataParallelPlugin()
    return None if plugin is None else dataclasses.replace(plugin)  # validated again, since it may have been changed


def _variable(name: str) -> str:
    return os.environ.get(_PREFIX + name, "")


def _flag(name: str, default: bool) -> bool:
    asked = environment.flag(_PREFIX + name)
    return default if asked is None else asked


def _choice(name: str, given: Any, variable: str, choices: tuple[str, ...]) -> str:
    """Return a name in capitals; the default is the first choice."""
    text = str(getattr(given, "name", given) or _variable(variable) or choices[0]).upper()
    if text not in choices:
        raise ConfigError(f"{name} is {text.lower()!r}.", fix="one of " + ", ".join(map(str.lower, choices)))
    return text

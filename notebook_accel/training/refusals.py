"""Accelerate's arguments and names that this package refuses, with errors that say what to do instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from notebook_accel.errors import ConfigError

_WHOLE_MODEL = "Models are whole on each rank, or sharded by fully_shard (FSDP 2)."
_NO_FP8 = "There is no arithmetic in 8 bits here."
_SHARDING = "fsdp_plugin=FullyShardedDataParallelPlugin() to shard it; or Accelerate itself, which runs in ranks too"
_INSTEAD = {
    "deepspeed_plugin": _SHARDING,
    "deepspeed_plugins": _SHARDING,
    "megatron_lm_plugin": _SHARDING,
    "torch_tp_plugin": "parallelism_config=ParallelismConfig(tp_size=...), and torch's parallelize_module",
}


def refuse(**given: object) -> None:
    """Refuse arguments of ``Accelerator`` that this package can't honour.

    Raises:
        ConfigError: An argument has another value than ``None`` or ``"no"``.
    """
    for name, value in given.items():
        if value is not None and str(getattr(value, "value", value)).lower() != "no":
            raise ConfigError(f"Accelerator({name}=...) isn't supported.", why=_WHOLE_MODEL, fix=_INSTEAD[name])


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


class TorchTensorParallelPlugin(_Unsupported):
    """``ParallelismConfig`` has taken its place."""

    _why = "A model's parts are made by torch's parallelize_module."
    _fix = "parallelism_config=ParallelismConfig(tp_size=...)"


class DummyOptim(_Unsupported):
    """DeepSpeed's place holder for an optimizer isn't supported."""

    _why = "It stands for an optimizer that DeepSpeed makes, and ranks don't train by DeepSpeed."
    _fix = "torch.optim.AdamW(parameters)"


class DummyScheduler(_Unsupported):
    """DeepSpeed's place holder for a scheduler isn't supported."""

    _why = "It stands for a scheduler that DeepSpeed makes, and ranks don't train by DeepSpeed."
    _fix = "a scheduler of torch.optim.lr_scheduler"


class FP8RecipeKwargs(_Unsupported):
    """Arithmetic in 8 bits isn't supported."""

    _why = _NO_FP8
    _fix = "mixed_precision='bf16'"


class AORecipeKwargs(FP8RecipeKwargs):
    """Arithmetic in 8 bits isn't supported."""


class MSAMPRecipeKwargs(FP8RecipeKwargs):
    """Arithmetic in 8 bits isn't supported."""


class TERecipeKwargs(FP8RecipeKwargs):
    """Arithmetic in 8 bits isn't supported."""


_TOO_LARGE = "Models that don't fit on one device are outside of this package."


def _unsupported(name: str, module: str = "accelerate", why: str = _TOO_LARGE) -> Callable[..., NoReturn]:
    def refuse_to(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"{name} isn't supported.", why=why, fix=f"from {module} import {name}: that works in these ranks too"
        )

    refuse_to.__name__ = refuse_to.__qualname__ = name
    refuse_to.__doc__ = f"Raise: {why}"
    return refuse_to


cpu_offload = _unsupported("cpu_offload")
cpu_offload_with_hook = _unsupported("cpu_offload_with_hook")
disk_offload = _unsupported("disk_offload")
dispatch_model = _unsupported("dispatch_model")
infer_auto_device_map = _unsupported("infer_auto_device_map")
init_empty_weights = _unsupported("init_empty_weights")
init_on_device = _unsupported("init_on_device")
load_checkpoint_and_dispatch = _unsupported("load_checkpoint_and_dispatch")
load_checkpoint_in_model = _unsupported("load_checkpoint_in_model")
prepare_pippy = _unsupported("prepare_pippy")

# Names of Accelerate's documented modules that are neither here nor above, by what is to be said about them.
_NO_HOOKS = "Hooks that move a model's weights between devices are outside of this package."
_ELSEWHERE = {
    _TOO_LARGE: (
        "BnbQuantizationConfig CustomDtype OffloadedWeightsLoader PrefixedDataset calculate_maximum_sizes "
        "check_device_map check_tied_parameters_in_config check_tied_parameters_on_same_device compute_module_sizes "
        "dtype_byte_size extract_submodules_state_dict find_tied_parameters get_balanced_memory get_max_layer_size "
        "has_4bit_bnb_layers has_offloaded_params id_tensor_storage load_and_quantize_model load_offloaded_weight "
        "load_offloaded_weights load_state_dict named_module_tensors offload_state_dict offload_weight "
        "retie_parameters save_offload_index set_module_tensor_to_device"
    ),
    _NO_HOOKS: (
        "AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook "
        "add_hook_to_module align_module_device attach_align_device_hook attach_align_device_hook_on_blocks "
        "attach_execution_device_hook attach_layerwise_casting_hooks remove_hook_from_module "
        "remove_hook_from_submodules"
    ),
    _WHOLE_MODEL: (
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DeepSpeedSequenceParallelConfig "
        "HfDeepSpeedConfig TorchContextParallelConfig TorchTensorParallelConfig disable_fsdp_ram_efficient_loading "
        "enable_fsdp_ram_efficient_loading ensure_weights_retied get_active_deepspeed_plugin load_fsdp_model "
        "load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer"
    ),
    _NO_FP8: (
        "apply_fp8_autowrap contextual_fp8_autocast convert_model convert_model_to_fp8_ao "
        "filter_first_and_last_linear_layers has_ao_layers has_transformer_engine_layers"
    ),
}
_REASONS = {name: reason for reason, names in _ELSEWHERE.items() for name in names.split()}


def names_elsewhere(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module that has Accelerate's name for names that only Accelerate has.

    A name in capitals is a class, for ``isinstance``, and any other a function. Both can be imported, so that a program
    runs that only mentions them, and raise a ``ConfigError`` when they are called.
    """

    @functools.cache
    def pointer(name: str) -> Any:
        if name not in _REASONS:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        there = module.replace("notebook_accel", "accelerate")
        function = _unsupported(name, there, _REASONS[name])
        if not name[0].isupper():
            return function
        return type(name, (), {"__new__": function, "__doc__": function.__doc__, "__module__": module})

    return pointer

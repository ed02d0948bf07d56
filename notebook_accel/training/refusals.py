"""Accelerate's arguments and names that this package refuses, with errors that say what to do instead."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from notebook_accel.errors import ConfigError

_WHOLE_MODEL = "Models are whole on each rank, or sharded by fully_shard (FSDP 2)."
_NO_FP8 = "There is no arithmetic in 8 bits here."
_SHARDING = "fsdp_plugin=FullyShardedDataParallelPlugin() to shard it; or Accelerate itself, which runs in ranks too"
_TENSOR_PARALLEL = "parallelism_config=ParallelismConfig(tp_size=...), and torch's parallelize_module"


def refuse(**given: object) -> None:
    """Refuse arguments of ``Accelerator`` that this package can't honour.

    Raises:
        ConfigError: An argument has another value than ``None`` or ``"no"``.
    """
    for name, value in given.items():
        if value is not None and str(getattr(value, "value", value)).lower() != "no":
            fix = _TENSOR_PARALLEL if name == "torch_tp_plugin" else _SHARDING
            raise ConfigError(f"Accelerator({name}=...) isn't supported.", why=_WHOLE_MODEL, fix=fix)


_TOO_LARGE = "Models that don't fit on one device are outside of this package."
_NO_HOOKS = "Hooks that move a model's weights between devices are outside of this package."
_STANDS_FOR = "It stands for {} that DeepSpeed makes, and ranks don't train by DeepSpeed."
# Names of Accelerate's documented modules that aren't here, by the reason and the advice. Where the advice is empty,
# Accelerate's own name works in these ranks too.
_ELSEWHERE = {
    (_WHOLE_MODEL, _SHARDING): "DeepSpeedPlugin MegatronLMPlugin",
    ("A model's parts are made by torch's parallelize_module.", _TENSOR_PARALLEL): "TorchTensorParallelPlugin",
    (_NO_FP8, "mixed_precision='bf16'"): "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
    (_STANDS_FOR.format("an optimizer"), "torch.optim.AdamW(parameters)"): "DummyOptim",
    (_STANDS_FOR.format("a scheduler"), "a scheduler of torch.optim.lr_scheduler"): "DummyScheduler",
    (_TOO_LARGE, ""): (
        "BnbQuantizationConfig CustomDtype OffloadedWeightsLoader PrefixedDataset calculate_maximum_sizes "
        "check_device_map check_tied_parameters_in_config check_tied_parameters_on_same_device compute_module_sizes "
        "cpu_offload cpu_offload_with_hook disk_offload dispatch_model dtype_byte_size extract_submodules_state_dict "
        "find_tied_parameters get_balanced_memory get_max_layer_size has_4bit_bnb_layers has_offloaded_params "
        "id_tensor_storage infer_auto_device_map init_empty_weights init_on_device load_and_quantize_model "
        "load_checkpoint_and_dispatch load_checkpoint_in_model load_offloaded_weight load_offloaded_weights "
        "load_state_dict named_module_tensors offload_state_dict offload_weight prepare_pippy retie_parameters "
        "save_offload_index set_module_tensor_to_device"
    ),
    (_NO_HOOKS, ""): (
        "AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook "
        "add_hook_to_module align_module_device attach_align_device_hook attach_align_device_hook_on_blocks "
        "attach_execution_device_hook attach_layerwise_casting_hooks remove_hook_from_module "
        "remove_hook_from_submodules"
    ),
    (_WHOLE_MODEL, ""): (
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DeepSpeedSequenceParallelConfig "
        "HfDeepSpeedConfig TorchContextParallelConfig TorchTensorParallelConfig disable_fsdp_ram_efficient_loading "
        "enable_fsdp_ram_efficient_loading ensure_weights_retied get_active_deepspeed_plugin load_fsdp_model "
        "load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer"
    ),
    (_NO_FP8, ""): (
        "apply_fp8_autowrap contextual_fp8_autocast convert_model convert_model_to_fp8_ao "
        "filter_first_and_last_linear_layers has_ao_layers has_transformer_engine_layers"
    ),
}
_REASONS = {name: reason for reason, names in _ELSEWHERE.items() for name in names.split()}


def names_elsewhere(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module, for names that only Accelerate's module of that name has.

    A capitalised name is a class, for ``isinstance``, and any other a function. Programs can import both, and get a
    ``ConfigError`` only when they call them.
    """

    @functools.cache
    def pointer(name: str) -> Any:
        if name not in _REASONS:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        why, fix = _REASONS[name]
        there = module.replace("notebook_accel", "accelerate")
        fix = fix or f"from {there} import {name}: that works in these ranks too"

        def refuse_to(*_: Any, **__: Any) -> NoReturn:
            raise ConfigError(f"{name} isn't supported.", why=why, fix=fix)

        refuse_to.__name__ = refuse_to.__qualname__ = name
        refuse_to.__doc__ = f"Raise: {why}"
        if not name[0].isupper():
            return refuse_to
        return type(name, (), {"__new__": refuse_to, "__doc__": refuse_to.__doc__, "__module__": module})

    return pointer


if not TYPE_CHECKING:  # so that a type checker still finds unknown names
    __getattr__ = names_elsewhere("notebook_accel")

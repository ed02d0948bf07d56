"""The table of what Accelerate has and this package refuses, for the command line, files and programs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from notebook_accel.errors import ConfigError

# The kinds of words in the table, as users write them.
FLAG = r"--(\w+)="  # of `accelerate launch`, with a value; a file may have it as a key
SWITCH = r"--(\w+)"  # of `accelerate launch`; a file may have it as a key
KEY = r"(\w+):"  # of a configuration file only
VARIABLE = r"\$(\w+)"
ARGUMENT = r"(\w+)="  # of ``Accelerator``
NAME = r"(\w+)"  # that programs import

_FSDP = (
    "--fsdp, or fsdp_plugin=FullyShardedDataParallelPlugin(), shards models by fully_shard here; Accelerate itself, "
    "which runs in ranks too, has the rest"
)
_COMPILE = "give the Accelerator a TorchDynamoPlugin(mode=..., fullgraph=...)"
_EMPTY = ("no", "none", "false")


class Row(NamedTuple):
    """A feature of Accelerate.

    Attributes:
        feature: The feature, as it stands after "asks for".
        words: Everything in Accelerate that asks for it.
        fix: What to type instead. Without it, nothing does the same here; Accelerate's own names work in ranks too.
        harmless: Values that don't ask for it, in lower case, besides empty ones; ``None`` for all values.
    """

    feature: str
    words: str
    fix: str = ""
    harmless: tuple[str, ...] | None = ()

    def allows(self, value: object) -> bool:
        """Return whether a value doesn't ask for the feature."""
        if isinstance(value, dict):
            return all(map(self.allows, value.values()))
        text = str(getattr(value, "value", value)).lower()
        return not value or self.harmless is None or text in (*_EMPTY, *self.harmless)

    @property
    def advice(self) -> str:
        """The fix after a semicolon; empty if there is none."""
        return f"; {self.fix}" if self.fix else ""


# The words of Accelerate 1.15: https://huggingface.co/docs/accelerate/package_reference/cli#accelerate-launch
_TABLE = (
    # Tracebacks are the ranks' own, all output is shown and kept, and one machine is one network.
    Row("what happens anyway", "--tee= --quiet --same_network --no_tpu_cluster", harmless=None),
    # How several machines find each other, and a script's function, have no effect in a notebook.
    Row("what has no effect", "machine_rank: main_process_ip: main_training_function:", harmless=None),
    # Only the sizes turn a kind of parallelism on; its other settings have no effect without, as with Accelerate.
    Row(
        "settings of parallelism",
        "--parallelism_config_cp_backend= --parallelism_config_cp_comm_strategy= "
        "--parallelism_config_sp_attn_implementation= --parallelism_config_sp_backend= "
        "--parallelism_config_sp_seq_length= --parallelism_config_sp_seq_length_is_variable= --use_parallelism_config",
        harmless=None,
    ),
    Row("context parallelism", "--parallelism_config_cp_size=", harmless=("1",)),
    Row("sequence parallelism", "--parallelism_config_sp_size=", harmless=("1",)),
    # The entries of these three tables are looked up by themselves, see ``ConfigFile.unfolded``.
    Row("a division of the ranks", "parallelism_config:"),
    Row("settings of FSDP", "fsdp_config:"),
    Row("a compiled model", "dynamo_config:"),
    Row("a mode of torch.compile", "--dynamo_mode=", _COMPILE, ("default",)),
    Row(
        "settings of torch.compile",
        "--dynamo_use_fullgraph --dynamo_use_dynamic --dynamo_use_regional_compilation",
        _COMPILE,
    ),
    Row("another role", "--role=", "every rank has the role default", ("default",)),
    Row(
        "a function of the script",
        "--main_training_function=",
        "the script itself is run, so it has to call its function",
        ("main",),
    ),
    Row("another interpreter", "--no_python", "ranks run Python: give the script, without its interpreter"),
    Row("ranks bound to CPU cores", "--enable_cpu_affinity", "put `numactl` or `taskset` before the command"),
    Row("another float on TPUs", "--downcast_bf16", "Accelerator(downcast_bf16=True)"),
    Row("mpirun", "--mpirun_hostfile= mpirun_config:", "ranks are started without it, on this machine"),
    Row("Intel's extension", "ipex_config:"),
    Row("debug mode", "debug:", "set the variable NOTEBOOK_ACCEL_DEBUG"),
    Row("what is another key now", "fp16:", "write mixed_precision: fp16"),
    Row("certain GPUs", "gpu_ids:", "set the variable CUDA_VISIBLE_DEVICES", ("all",)),
    Row(
        "several machines",
        "num_machines:",
        "write num_nodes, node_rank and master_addr, and as num_processes the number on each machine",
        ("1",),
    ),
    Row("another way of training", "distributed_type:", harmless=("multi_cpu", "multi_gpu", "fsdp", "xla")),
    Row(
        "a TPU pod",
        "--vm= --env= --tpu_cluster --tpu_use_sudo command_file: commands: tpu_env: tpu_name: tpu_use_cluster: "
        "tpu_vm: tpu_zone:",
        "--tpu asks for the TPUs of this machine",
    ),
    Row(
        "a cloud service",
        "--aws_access_key_id= --aws_secret_access_key= compute_environment:",
        harmless=("local_machine",),
    ),
    Row(
        "DeepSpeed",
        "--deepspeed_config_file= --zero_stage= --offload_optimizer_device= --offload_param_device= "
        "--offload_optimizer_nvme_path= --offload_param_nvme_path= --gradient_clipping= --zero3_init_flag= "
        "--zero3_save_16bit_model= --deepspeed_hostfile= --deepspeed_exclusion_filter= --deepspeed_inclusion_filter= "
        "--deepspeed_multinode_launcher= --deepspeed_moe_layer_cls_names= --use_deepspeed deepspeed_config: "
        "$ACCELERATE_USE_DEEPSPEED deepspeed_plugin= deepspeed_plugins= DeepSpeedPlugin",
        _FSDP,
    ),
    Row(
        "Megatron-LM",
        "--megatron_lm_tp_degree= --megatron_lm_use_custom_fsdp= --megatron_lm_no_load_optim= "
        "--megatron_lm_eod_mask_loss= --megatron_lm_overlap_cpu_optimizer_d2h_h2d= --megatron_lm_no_save_optim= "
        "--megatron_lm_optimizer_cpu_offload= --megatron_lm_use_precision_aware_optimizer= "
        "--megatron_lm_decoder_last_pipeline_num_layers= --megatron_lm_pp_degree= --megatron_lm_num_micro_batches= "
        "--megatron_lm_sequence_parallelism= --megatron_lm_recompute_activations= "
        "--megatron_lm_use_distributed_optimizer= --megatron_lm_gradient_clipping= "
        "--megatron_lm_recompute_granularity= --megatron_lm_recompute_method= --megatron_lm_recompute_num_layers= "
        "--megatron_lm_attention_backend= --megatron_lm_expert_model_parallel_size= "
        "--megatron_lm_context_parallel_size= --megatron_lm_attention_dropout= --megatron_lm_hidden_dropout= "
        "--megatron_lm_attention_softmax_in_fp32= --megatron_lm_expert_tensor_parallel_size= "
        "--megatron_lm_calculate_per_token_loss= --megatron_lm_use_rotary_position_embeddings= --use_megatron_lm "
        "megatron_lm_config: $ACCELERATE_USE_MEGATRON_LM megatron_lm_plugin= MegatronLMPlugin",
        _FSDP,
    ),
    Row(
        "arithmetic in 8 bits",
        "--fp8_backend= --fp8_margin= --fp8_interval= --fp8_format= --fp8_amax_history_len= "
        "--fp8_amax_compute_algo= --fp8_override_linear_precision= --fp8_opt_level= "
        "--fp8_enable_fsdp_float8_all_gather= --fp8_pad_inner_dim= --fp8_use_autocast_during_eval fp8_config: "
        "AORecipeKwargs FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs",
        "mixed_precision='bf16' (--mixed_precision bf16)",
    ),
    Row(
        "parts of a model on several devices",
        "torch_tp_plugin= TorchTensorParallelPlugin",
        "parallelism_config=ParallelismConfig(tp_size=...), and torch's parallelize_module",
    ),
    Row("an optimizer that DeepSpeed makes", "DummyOptim", "torch.optim.AdamW(parameters)"),
    Row("a scheduler that DeepSpeed makes", "DummyScheduler", "a scheduler of torch.optim.lr_scheduler"),
    Row(
        "models that don't fit on one device",
        "BnbQuantizationConfig CustomDtype OffloadedWeightsLoader PrefixedDataset calculate_maximum_sizes "
        "check_device_map check_tied_parameters_in_config check_tied_parameters_on_same_device compute_module_sizes "
        "cpu_offload cpu_offload_with_hook disk_offload dispatch_model dtype_byte_size extract_submodules_state_dict "
        "find_tied_parameters get_balanced_memory get_max_layer_size has_4bit_bnb_layers has_offloaded_params "
        "id_tensor_storage infer_auto_device_map init_empty_weights init_on_device load_and_quantize_model "
        "load_checkpoint_and_dispatch load_checkpoint_in_model load_offloaded_weight load_offloaded_weights "
        "load_state_dict named_module_tensors offload_state_dict offload_weight prepare_pippy retie_parameters "
        "save_offload_index set_module_tensor_to_device",
    ),
    Row(
        "hooks that move a model's weights between devices",
        "AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook "
        "add_hook_to_module align_module_device attach_align_device_hook attach_align_device_hook_on_blocks "
        "attach_execution_device_hook attach_layerwise_casting_hooks remove_hook_from_module "
        "remove_hook_from_submodules",
    ),
    Row(
        "models that aren't sharded by fully_shard (FSDP 2)",
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DeepSpeedSequenceParallelConfig "
        "HfDeepSpeedConfig TorchContextParallelConfig TorchTensorParallelConfig disable_fsdp_ram_efficient_loading "
        "enable_fsdp_ram_efficient_loading ensure_weights_retied get_active_deepspeed_plugin load_fsdp_model "
        "load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer",
    ),
    Row(
        "layers in 8 bits",
        "apply_fp8_autowrap contextual_fp8_autocast convert_model convert_model_to_fp8_ao "
        "filter_first_and_last_linear_layers has_ao_layers has_transformer_engine_layers",
    ),
)


@functools.cache
def rows(*kinds: str) -> Mapping[str, Row]:
    """Return the rows by the names of their words of these kinds."""
    words = [(word, row) for row in _TABLE for word in row.words.split()]
    return {match[1]: row for kind in kinds for word, row in words if (match := re.fullmatch(kind, word))}


def row_of_key(key: object) -> Row | None:
    """Return the row of a key of a configuration file; ``None`` if Accelerate has no such key."""
    return rows(FLAG, SWITCH, KEY).get(str(key))


def refuse_arguments(**given: object) -> None:
    """Refuse arguments of ``Accelerator`` that this package can't honour.

    Raises:
        ConfigError: An argument asks for a feature that isn't here.
    """
    for name, value in given.items():
        row = rows(ARGUMENT)[name]
        if not row.allows(value):
            raise ConfigError(f"Accelerator({name}=...) isn't supported.", why=_why(row), fix=row.fix)


def _why(row: Row) -> str:
    return f"It asks for {row.feature}, which isn't supported here."


def names_elsewhere(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module, for names that only Accelerate's module of that name has.

    A capitalised name is a class, for ``isinstance``, and any other a function. Programs can import both, and get a
    ``ConfigError`` only when they call them.
    """

    @functools.cache
    def pointer(name: str) -> Any:
        row = rows(NAME).get(name)
        if row is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        there = module.replace("notebook_accel", "accelerate")
        why, fix = _why(row), row.fix or f"from {there} import {name}: that works in these ranks too"

        def refuse_to(*_: Any, **__: Any) -> NoReturn:
            raise ConfigError(f"{name} isn't supported.", why=why, fix=fix)

        refuse_to.__name__ = refuse_to.__qualname__ = name
        refuse_to.__doc__ = f"Raise an error: {why}"
        if not name[0].isupper():
            return refuse_to
        return type(name, (), {"__new__": refuse_to, "__doc__": refuse_to.__doc__, "__module__": module})

    return pointer


if not TYPE_CHECKING:  # so that a type checker still finds unknown names
    __getattr__ = names_elsewhere("notebook_accel")

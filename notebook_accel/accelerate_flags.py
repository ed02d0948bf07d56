"""The flags of ``accelerate launch`` that are no options here, and the answer to each.

They are understood, so that a line that was written for Accelerate gets one answer about all of it: what such a flag
asks for is done here anyway, or is not done and named with what to do instead. None is passed over.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

from notebook_accel import config
from notebook_accel.errors import ConfigError

__all__ = ["add_arguments", "refuse"]

_WHOLE = (
    "each rank has the whole model: FSDP, DeepSpeed and Megatron-LM are not done here; `accelerate launch` does them"
)
_COMPILE = "a compiled model is made in the script: model = torch.compile(model)"
_POD = "a TPU pod is not done here: this is one machine, whose TPUs --tpu asks for"
_FP8 = "there is no arithmetic in 8 bits here: --mixed_precision bf16"
_AWS = "Amazon SageMaker is not done here"
_PARALLEL = "several kinds of parallelism are not done here: ranks differ by their data alone"


@dataclasses.dataclass(frozen=True)
class _Flag:
    """One flag.

    Attributes:
        name: Without the dashes in front.
        instead: The answer to the flag.
        harmless: The values with which it asks for nothing, or for what is done anyway; ``None`` if all are.
        takes_value: Whether a value follows it.
        short: Another spelling.
    """

    name: str
    instead: str = ""
    harmless: tuple[str, ...] | None = ()
    takes_value: bool = True
    short: str = ""

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        names = [f"--{self.name}", *([self.short] if self.short else [])]
        if self.takes_value:
            parser.add_argument(*names, dest=self.dest, action="append", help=argparse.SUPPRESS)
        else:
            parser.add_argument(*names, dest=self.dest, action="store_const", const=[""], help=argparse.SUPPRESS)

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments, distinct from every option's."""
        return f"accelerate_{self.name}"

    def refused(self, parsed: argparse.Namespace) -> Iterator[str]:
        """Yield the flag as it stands in the line, for each value that can't be honoured."""
        for value in getattr(parsed, self.dest, None) or ():
            if self.harmless is not None and value.lower() not in self.harmless:
                yield f"--{self.name} {value}".rstrip()


def _group(instead: str, names: str, *, switches: str = "") -> list[_Flag]:
    return [
        *(_Flag(name, instead) for name in names.split()),
        *(_Flag(name, instead, takes_value=False) for name in switches.split()),
    ]


# Those of Accelerate 1.15: https://huggingface.co/docs/accelerate/package_reference/cli#accelerate-launch
_FLAGS = (
    # Done anyway: tracebacks are the ranks' own, all output is shown and kept, and one machine is one network.
    _Flag("quiet", harmless=None, takes_value=False, short="-q"),
    _Flag("tee", harmless=None, short="-t"),
    _Flag("same_network", harmless=None, takes_value=False),
    _Flag("no_tpu_cluster", harmless=None, takes_value=False),
    _Flag("role", "every rank has the role default", ("default",)),
    _Flag("main_training_function", "the script itself is run, so it has to call its function", ("main",)),
    _Flag("no_python", "ranks run Python: give the script, without its interpreter", takes_value=False),
    _Flag("enable_cpu_affinity", "put `numactl` or `taskset` before the command", takes_value=False),
    _Flag("downcast_bf16", "say it in the script: Accelerator(downcast_bf16=True)", takes_value=False),
    _Flag("mpirun_hostfile", "ranks are started without mpirun, on this machine"),
    _Flag("dynamo_backend", _COMPILE, ("no",)),
    _Flag("dynamo_mode", _COMPILE, ("default",)),
    *_group(_COMPILE, "", switches="dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation"),
    *_group(_POD, "vm env", switches="tpu_cluster tpu_use_sudo"),
    *_group(_AWS, "aws_access_key_id aws_secret_access_key"),
    *_group(
        _WHOLE,
        "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device offload_optimizer_nvme_path "
        "offload_param_nvme_path gradient_clipping zero3_init_flag zero3_save_16bit_model deepspeed_hostfile "
        "deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher "
        "deepspeed_moe_layer_cls_names fsdp_version fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy "
        "fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch "
        "fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading "
        "fsdp_sync_module_states fsdp_activation_checkpointing fsdp_activation_checkpointing_offload "
        "megatron_lm_tp_degree megatron_lm_use_custom_fsdp megatron_lm_no_load_optim megatron_lm_eod_mask_loss "
        "megatron_lm_overlap_cpu_optimizer_d2h_h2d megatron_lm_no_save_optim megatron_lm_optimizer_cpu_offload "
        "megatron_lm_use_precision_aware_optimizer megatron_lm_decoder_last_pipeline_num_layers megatron_lm_pp_degree "
        "megatron_lm_num_micro_batches megatron_lm_sequence_parallelism megatron_lm_recompute_activations "
        "megatron_lm_use_distributed_optimizer megatron_lm_gradient_clipping megatron_lm_recompute_granularity "
        "megatron_lm_recompute_method megatron_lm_recompute_num_layers megatron_lm_attention_backend "
        "megatron_lm_expert_model_parallel_size megatron_lm_context_parallel_size megatron_lm_attention_dropout "
        "megatron_lm_hidden_dropout megatron_lm_attention_softmax_in_fp32 megatron_lm_expert_tensor_parallel_size "
        "megatron_lm_calculate_per_token_loss megatron_lm_use_rotary_position_embeddings",
        switches="use_deepspeed use_fsdp use_megatron_lm",
    ),
    *_group(
        _FP8,
        "fp8_backend fp8_margin fp8_interval fp8_format fp8_amax_history_len fp8_amax_compute_algo "
        "fp8_override_linear_precision fp8_opt_level fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim",
        switches="fp8_use_autocast_during_eval",
    ),
    *_group(
        _PARALLEL,
        "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size parallelism_config_tp_size "
        "parallelism_config_cp_size parallelism_config_cp_backend parallelism_config_cp_comm_strategy "
        "parallelism_config_sp_size parallelism_config_sp_backend parallelism_config_sp_seq_length "
        "parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation",
        switches="use_parallelism_config",
    ),
)


def _foreign() -> list[_Flag]:
    """Return the flags that aren't options here."""
    options = {option.name for option in config.fields()}
    return [flag for flag in _FLAGS if flag.name not in options]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Teach a parser these flags, without a place in its help."""
    for flag in _foreign():
        flag.add_to(parser)


def refuse(parsed: argparse.Namespace) -> None:
    """Raise for all given flags that can't be honoured, at once.

    Raises:
        ConfigError: There are some.
    """
    by_reason: dict[str, list[str]] = {}
    for flag in _foreign():
        for shown in flag.refused(parsed):
            by_reason.setdefault(flag.instead, []).append(shown)
    if by_reason:
        raise ConfigError(
            "This line asks for what isn't done here:\n"
            + "\n".join(f"  {', '.join(flags)}: {reason}" for reason, flags in by_reason.items()),
            fix="leave these flags out, and do instead what is said of them",
        )

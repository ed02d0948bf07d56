"""Compares the names of Accelerate's documented modules, and of its objects, with those here."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import subprocess
import sys
import types
from typing import Any

import accelerate
import pytest
from packaging import version

import notebook_accel
from notebook_accel import ConfigError, refusals, state

# Names of Accelerate that are missing here. All belong to other ways of training than this package's (DeepSpeed,
# Megatron-LM, pipelines, SageMaker, other devices, launch commands), or are parts of how Accelerate works inside.
MISSING = {
    "": "",
    "accelerator": "",
    "big_modeling": "",
    "data_loader": "DataLoaderAdapter DataLoaderStateMixin SkipDataLoader get_sampler",
    "hooks": "",
    "inference": "build_pipeline find_pippy_batch_size generate_device_map pippy_forward",
    "launchers": "test_launch",
    "local_sgd": "",
    "logging": "",
    "optimizer": "move_to_device patch_optimizer_step",
    "parallelism_config": "",
    "scheduler": "",
    "state": "ThreadLocalSharedDict do_nothing",
    "tracking": "filter_trackers get_available_trackers",
    "utils": "AbstractTrainStep BertTrainStep CannotPadNestedTensorWarning ComputeEnvironment GPTTrainStep "
    "GatheredParameters MITA_PROFILING_AVAILABLE_PYTORCH_VERSION MegatronLMDummyDataLoader MegatronLMDummyScheduler "
    "PROFILE_PATTERN_NAME PrepareForLaunch RNG_STATE_NAME SAMPLER_NAME SCALER_NAME SageMakerDistributedType "
    "T5TrainStep TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_LAUNCH_PARAMS XPU_PROFILING_AVAILABLE_PYTORCH_VERSION "
    "add_model_config_to_megatron_parser avg_losses_across_data_parallel_group check_cuda_fp8_capability "
    "check_cuda_p2p_ib_support check_os_kernel clean_state_dict_for_safetensors "
    "compile_regions_deepspeed compile_regions_fsdp2 convert_dict_to_env_variables deepspeed_required fsdp2_apply_ac "
    "fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters "
    "get_cpu_distributed_information get_fsdp2_grad_scaler get_gpu_info get_grad_scaler "
    "get_mixed_precision_context_manager get_model_tp_size get_module_children_bottom_up has_compiled_regions "
    "install_xla is_habana_gaudi1 model_has_dtensor pad_input_tensors prepare_deepspeed_cmd_env prepare_multi_gpu_env "
    "prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu purge_accelerate_environment "
    "set_numa_affinity torchao_required",
    "utils.dataclasses": "BaseEnum ComputeEnvironment EnumWithContains FP8BackendType SageMakerDistributedType "
    "add_model_config_to_megatron_parser get_module_class_from_name parse_bert_config parse_glm4_moe_config "
    "parse_gpt2_config parse_llama_config parse_t5_config",
    "utils.environment": "CPUInformation check_cuda_fp8_capability check_cuda_p2p_ib_support "
    "convert_dict_to_env_variables get_cpu_distributed_information get_driver_version get_gpu_info "
    "override_numa_affinity purge_accelerate_environment set_numa_affinity",
    "utils.imports": "deepspeed_required is_habana_gaudi1 torchao_required",
    "utils.memory": "",
    "utils.operations": "CannotPadNestedTensorWarning ConvertOutputsToFp32 GatheredParameters chained_operation "
    "gather_tensor_shape get_shape is_torch_xpu_tensor pad_input_tensors verify_operation",
    "utils.other": "check_os_kernel clean_state_dict_for_safetensors compile_regions_deepspeed compile_regions_fsdp2 "
    "get_model_tp_size get_module_children_bottom_up has_compiled_regions has_repeated_blocks is_repeated_blocks "
    "model_has_dtensor",
    "utils.random": "",
    "utils.tqdm": "",
    "utils.versions": "",
}
MISSING_ATTRIBUTES = {
    "Accelerator": "context_parallel_rank deepspeed_ulysses_dl_adapter fp8_backend lomo_backward "
    "pipeline_parallel_rank verify_device_map",
    "PartialState": "set_device",
    "AcceleratorState": "fork_launched get_deepspeed_plugin is_fsdp2 select_deepspeed_plugin",
    "GradientState": "dataloader_references is_xla_gradients_synced num_steps",  # the last is an instance's here
}

beside_its_release = pytest.mark.skipif(
    version.parse(accelerate.__version__).release != version.parse(notebook_accel.__version__).release,
    reason="another release of Accelerate has other names",
)


def public_names(module: types.ModuleType) -> set[str]:
    """Return the names that a module of Accelerate defines, or exports if it is a package."""
    is_package = hasattr(module, "__path__")
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
        if getattr(value, "__module__", "accelerate").startswith("accelerate" if is_package else module.__name__)
        if is_package or hasattr(value, "__module__")
    }


@beside_its_release
@pytest.mark.parametrize("name", MISSING)
def test_missing_names_are_known(name: str) -> None:
    theirs = importlib.import_module(f"accelerate.{name}".rstrip("."))
    ours = importlib.import_module(f"notebook_accel.{name}".rstrip("."))
    missing = {known for known in public_names(theirs) if not hasattr(ours, known)}
    assert missing == set(MISSING[name].split())


@pytest.mark.slow
@beside_its_release
def test_modules_are_there_after_the_import_of_the_package() -> None:
    """As in ``accelerate.utils.set_seed(0)``. A fresh Python has imported no module by itself."""
    code = """if True:
        import types, accelerate, notebook_accel
        names = [name for name, value in vars(accelerate).items() if isinstance(value, types.ModuleType)]
        print(*(name for name in sorted(names) if not hasattr(notebook_accel, name)))
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert run.stdout.split() == ["checkpointing", "commands"]


@beside_its_release
@pytest.mark.parametrize("name", MISSING_ATTRIBUTES)
def test_missing_attributes_are_known(name: str) -> None:
    theirs = getattr(importlib.import_module("accelerate.state"), name, None) or accelerate.Accelerator
    ours = getattr(state, name, None) or notebook_accel.Accelerator
    missing = {known for known in dir(theirs) if not known.startswith("_") and not hasattr(ours, known)}
    assert missing == set(MISSING_ATTRIBUTES[name].split())


@beside_its_release
def test_names_that_point_to_accelerate_exist_there() -> None:
    modules = ["hooks", "big_modeling", "inference", "utils", "utils.deepspeed", "utils.modeling"]
    there = {name for module in modules for name in vars(importlib.import_module(f"accelerate.{module}"))}
    assert set(refusals.rows(refusals.NAME)) <= there


@pytest.mark.parametrize(("module", "name", "reason"), [
    ("hooks", "add_hook_to_module", "move a model's weights"),
    ("utils", "set_module_tensor_to_device", "don't fit on one device"),
    ("utils.modeling", "compute_module_sizes", "don't fit on one device"),
    ("utils.deepspeed", "HfDeepSpeedConfig", "by fully_shard"),
    ("utils", "convert_model", "8 bits"),
    ("big_modeling", "init_empty_weights", "don't fit on one device"),
])  # fmt: skip
def test_a_pointer_can_be_imported_and_raises_when_it_is_used(module: str, name: str, reason: str) -> None:
    pointer: Any = getattr(importlib.import_module(f"notebook_accel.{module}"), name)
    assert pointer is getattr(importlib.import_module(f"notebook_accel.{module}"), name)
    assert isinstance(pointer, type) == name[0].isupper()
    with pytest.raises(ConfigError, match=f"^{name} isn't supported") as raised:
        pointer(1, more=2)
    assert reason in raised.value.why
    assert f"from accelerate.{module} import {name}" in raised.value.fix
    getattr(importlib.import_module(f"accelerate.{module}"), name)


@pytest.mark.parametrize("module", ["hooks", "utils", "utils.modeling", "utils.deepspeed", "big_modeling"])
def test_unknown_names_are_no_pointers(module: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'notebook_accel.{module}' has no attribute 'no_such_name'"):
        importlib.import_module(f"notebook_accel.{module}").no_such_name  # noqa: B018


@beside_its_release
def test_positional_arguments_are_in_order() -> None:
    theirs = [*inspect.signature(accelerate.Accelerator).parameters]
    ours = [
        name
        for name, parameter in inspect.signature(notebook_accel.Accelerator).parameters.items()
        if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    assert ours == theirs
    accelerator = notebook_accel.Accelerator(True, False, "bf16", 3, True)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("bf16", 3)


def test_version_guards() -> None:
    ours = version.parse(notebook_accel.__version__)
    assert ours >= version.parse("0.16.0")
    assert ours >= version.parse("1.15.0")
    assert not ours >= version.parse("1.15.1")
    assert [int(part) for part in notebook_accel.__version__.split(".")[:2]] == [1, 15]
    assert ours.local == f"notebook.accel.{notebook_accel.VERSION}"
    assert str(ours) == notebook_accel.__version__
    assert f"`{notebook_accel.__version__}`" in pathlib.Path("docs/from_accelerate.md").read_text()

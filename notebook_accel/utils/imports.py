"""Checks of which devices and packages are available. All but one import no package to find out."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion


def is_cuda_available() -> bool:
    """Return whether torch sees an NVIDIA GPU."""
    return torch.cuda.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether ``mixed_precision="bf16"`` works here: on CPUs always, on a GPU if it has bf16.

    Args:
        ignore_tpu: Return false for TPUs.
    """
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def is_fp16_available() -> bool:
    """Return whether ``mixed_precision="fp16"`` works here: on a GPU only."""
    return torch.cuda.is_available()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed.

    Args:
        check_is_tpu: Also require the library that drives TPUs.
        check_is_gpu: Also require that it drives GPUs, which it no longer does.
    """
    return not check_is_gpu and _is_installed("torch_xla") and (not check_is_tpu or _is_installed("libtpu"))


def is_tensorboard_available() -> bool:
    """Return whether ``log_with="tensorboard"`` works here."""
    return _is_installed("tensorboard") or _is_installed("tensorboardX")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed.

    Args:
        min_version: Also require this version or a later one.
    """
    if not _is_installed("bitsandbytes"):
        return False
    return min_version is None or TorchVersion(importlib.metadata.version("bitsandbytes")) >= TorchVersion(min_version)


def is_4bit_bnb_available() -> bool:
    """Return whether bitsandbytes is installed in a version that has 4-bit weights."""
    return is_bnb_available("0.39.0")


def is_8bit_bnb_available() -> bool:
    """Return whether bitsandbytes is installed in a version that has 8-bit weights."""
    return is_bnb_available("0.37.2")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Return whether bitsandbytes says that it supports devices other than NVIDIA's. This imports bitsandbytes."""
    return is_bnb_available() and "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", ())


def is_rocm_available() -> bool:
    """Return whether torch is built for AMD's GPUs."""
    return torch.version.hip is not None


def is_torch_distributed_available() -> bool:
    """Return whether torch was built with its distributed package."""
    return torch.distributed.is_available()


def is_weights_only_available() -> bool:
    """Return ``True``: every supported version of torch can load without running code."""
    return True


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _check_of(package: str, module: str = "") -> Callable[[], bool]:
    def check() -> bool:
        return _is_installed(module or package)

    check.__name__ = check.__qualname__ = f"is_{package}_available"
    check.__doc__ = f"Return whether {module or package} is installed."
    return check


is_aim_available = _check_of("aim")
is_amdsmi_available = _check_of("amdsmi")
is_boto3_available = _check_of("boto3")
is_clearml_available = _check_of("clearml")
is_comet_ml_available = _check_of("comet_ml")
is_datasets_available = _check_of("datasets")
is_dvclive_available = _check_of("dvclive")
is_import_timer_available = _check_of("import_timer")
is_matplotlib_available = _check_of("matplotlib")
is_mlflow_available = _check_of("mlflow")
is_numpy_available = _check_of("numpy")
is_pandas_available = _check_of("pandas")
is_peft_available = _check_of("peft")
is_pynvml_available = _check_of("pynvml")
is_pytest_available = _check_of("pytest")
is_rich_available = _check_of("rich")
is_schedulefree_available = _check_of("schedulefree")
is_swanlab_available = _check_of("swanlab")
is_timm_available = _check_of("timm")
is_torchao_available = _check_of("torchao")
is_torchdata_available = _check_of("torchdata")
is_torchvision_available = _check_of("torchvision")
is_tqdm_available = _check_of("tqdm")
is_trackio_available = _check_of("trackio")
is_transformers_available = _check_of("transformers")
is_triton_available = _check_of("triton")
is_wandb_available = _check_of("wandb")
is_lomo_available = _check_of("lomo", "lomo_optim")
is_torchdata_stateful_dataloader_available = _check_of(
    "torchdata_stateful_dataloader", "torchdata"
)  # every version since 0.8 has it


def _never(name: str, reason: str) -> Callable[..., bool]:
    def check(*_: Any, **__: Any) -> bool:
        return False

    check.__name__ = check.__qualname__ = f"is_{name}_available"
    check.__doc__ = f"Return ``False``: {reason}."
    return check


is_fp8_available = _never("fp8", "ranks don't compute in 8 bits")
is_msamp_available = _never("msamp", "ranks don't compute in 8 bits")
is_transformer_engine_available = _never("transformer_engine", "ranks don't compute in 8 bits")
is_transformer_engine_mxfp8_available = _never("transformer_engine_mxfp8", "ranks don't compute in 8 bits")
is_deepspeed_available = _never("deepspeed", "ranks don't train by DeepSpeed, even if it is installed")
is_megatron_lm_available = _never("megatron_lm", "ranks don't train by Megatron-LM, even if it is installed")
is_pippy_available = _never("pippy", "models aren't cut into pipelines")
is_sagemaker_available = _never("sagemaker", "ranks don't run on Amazon SageMaker")
is_hpu_available = _never("hpu", "ranks don't compute on Intel's Gaudi")
is_mlu_available = _never("mlu", "ranks don't compute on Cambricon's devices")
is_mps_available = _never("mps", "ranks don't compute on Apple's GPUs")
is_musa_available = _never("musa", "ranks don't compute on Moore Threads' GPUs")
is_neuron_available = _never("neuron", "ranks don't compute on AWS's Trainium")
is_npu_available = _never("npu", "ranks don't compute on Ascend's NPUs")
is_sdaa_available = _never("sdaa", "ranks don't compute on Tecorigin's devices")
is_xpu_available = _never("xpu", "ranks don't compute on Intel's GPUs")
is_xccl_available = _never("xccl", "ranks don't compute on Intel's GPUs")

__all__ = [name for name in dir() if name.startswith("is_")]

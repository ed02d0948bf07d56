"""Checks of which devices and packages are available. They import no package to find out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

__all__ = [
    "is_bf16_available",
    "is_comet_ml_available",
    "is_cuda_available",
    "is_datasets_available",
    "is_deepspeed_available",
    "is_fp8_available",
    "is_fp16_available",
    "is_matplotlib_available",
    "is_megatron_lm_available",
    "is_mlflow_available",
    "is_mps_available",
    "is_npu_available",
    "is_pandas_available",
    "is_rich_available",
    "is_tensorboard_available",
    "is_torch_xla_available",
    "is_transformers_available",
    "is_wandb_available",
    "is_xpu_available",
]


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


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _check_of(package: str) -> Callable[[], bool]:
    def check() -> bool:
        return _is_installed(package)

    check.__name__ = check.__qualname__ = f"is_{package}_available"
    check.__doc__ = f"Return whether {package} is installed."
    return check


is_comet_ml_available = _check_of("comet_ml")
is_datasets_available = _check_of("datasets")
is_matplotlib_available = _check_of("matplotlib")
is_mlflow_available = _check_of("mlflow")
is_pandas_available = _check_of("pandas")
is_rich_available = _check_of("rich")
is_transformers_available = _check_of("transformers")
is_wandb_available = _check_of("wandb")


def is_fp8_available() -> bool:
    """Return ``False``: ranks don't compute in 8 bits."""
    return False


def is_deepspeed_available() -> bool:
    """Return ``False``: ranks don't train by DeepSpeed, even if it is installed."""
    return False


def is_megatron_lm_available() -> bool:
    """Return ``False``: ranks don't train by Megatron-LM, even if it is installed."""
    return False


def is_mps_available(min_version: str = "1.12") -> bool:  # noqa: ARG001  the name that Accelerate documents
    """Return ``False``: ranks don't compute on Apple's GPUs."""
    return False


def is_npu_available(check_device: bool = False) -> bool:  # noqa: ARG001
    """Return ``False``: ranks don't compute on Ascend's NPUs."""
    return False


def is_xpu_available(check_device: bool = False) -> bool:  # noqa: ARG001
    """Return ``False``: ranks don't compute on Intel's GPUs."""
    return False

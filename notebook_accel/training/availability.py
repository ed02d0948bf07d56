"""What this machine has, for programs that ask before they use it. Nothing is imported to find out."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import operator
from collections.abc import Callable

import torch
from torch.torch_version import TorchVersion

from notebook_accel.errors import ConfigError

__all__ = [
    "compare_versions",
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
    "is_torch_version",
    "is_torch_xla_available",
    "is_transformers_available",
    "is_wandb_available",
    "is_xpu_available",
]

_COMPARISONS: dict[str, Callable[[TorchVersion, TorchVersion], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def is_cuda_available() -> bool:
    """Return whether torch sees an NVIDIA GPU."""
    return torch.cuda.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether ``mixed_precision="bf16"`` works here: on CPUs always, on a GPU if it has bf16.

    Args:
        ignore_tpu: Say no for TPUs.
    """
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


def is_fp16_available() -> bool:
    """Return whether ``mixed_precision="fp16"`` works here: on a GPU only."""
    return torch.cuda.is_available()


def is_fp8_available() -> bool:
    """Return whether ``mixed_precision="fp8"`` works here: it isn't there."""
    return False


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed.

    Args:
        check_is_tpu: And there is the library that drives TPUs.
        check_is_gpu: And it drives GPUs, which it no longer does.
    """
    return not check_is_gpu and _is_installed("torch_xla") and (not check_is_tpu or _is_installed("libtpu"))


def is_mps_available(min_version: str = "1.12") -> bool:  # noqa: ARG001  the name that Accelerate documents
    """Return whether ranks compute on Apple's GPUs: they don't."""
    return False


def is_npu_available(check_device: bool = False) -> bool:  # noqa: ARG001
    """Return whether ranks compute on Ascend's NPUs: they don't."""
    return False


def is_xpu_available(check_device: bool = False) -> bool:  # noqa: ARG001
    """Return whether ranks compute on Intel's GPUs: they don't."""
    return False


def is_deepspeed_available() -> bool:
    """Return whether models are trained by DeepSpeed: they aren't, whether it is installed or not."""
    return False


def is_megatron_lm_available() -> bool:
    """Return whether models are trained by Megatron-LM: they aren't."""
    return False


def is_comet_ml_available() -> bool:
    """Return whether it is installed."""
    return _is_installed("comet_ml")


def is_datasets_available() -> bool:
    """Return whether it is installed."""
    return _is_installed("datasets")


def is_matplotlib_available() -> bool:
    """Return whether it is installed."""
    return _is_installed("matplotlib")


def is_mlflow_available() -> bool:
    """Return whether it is installed."""
    return _is_installed("mlflow")


def is_pandas_available() -> bool:
    """Return whether it is installed."""
    return _is_installed("pandas")


def is_rich_available() -> bool:
    """Return whether it is installed."""
    return _is_installed("rich")


def is_tensorboard_available() -> bool:
    """Return whether ``log_with="tensorboard"`` works here."""
    return _is_installed("tensorboard") or _is_installed("tensorboardX")


def is_transformers_available() -> bool:
    """Return whether it is installed."""
    return _is_installed("transformers")


def is_wandb_available() -> bool:
    """Return whether it is installed."""
    return _is_installed("wandb")


def is_torch_version(operation: str, version: str) -> bool:
    """Return whether torch's version is so: ``is_torch_version(">=", "2.9")``.

    Raises:
        ConfigError: There is no such comparison.
    """
    return _compare(torch.__version__, operation, version)


def compare_versions(library_or_version: str, operation: str, requirement_version: str) -> bool:
    """Return whether the version of a package, or a version, is so: ``compare_versions("numpy", ">=", "2.0")``.

    Raises:
        ConfigError: There is no such comparison.
        importlib.metadata.PackageNotFoundError: There is no such package here.
    """
    is_version = library_or_version[:1].isdigit()
    version = library_or_version if is_version else importlib.metadata.version(library_or_version)
    return _compare(version, operation, requirement_version)


def _compare(version: str, operation: str, other: str) -> bool:
    if operation not in _COMPARISONS:
        raise ConfigError(
            f"Versions can't be compared by {operation!r}.", fix=f"one of {', '.join(map(repr, _COMPARISONS))}"
        )
    return _COMPARISONS[operation](TorchVersion(version), TorchVersion(other))


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None

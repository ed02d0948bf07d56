"""Comparisons of versions."""

from __future__ import annotations

import importlib.metadata
import operator
from collections.abc import Callable

import torch
from torch.torch_version import TorchVersion

from notebook_accel.errors import ConfigError

__all__ = ["compare_versions", "is_torch_version"]

_COMPARISONS: dict[str, Callable[[TorchVersion, TorchVersion], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version: ``is_torch_version(">=", "2.9")``.

    Raises:
        ConfigError: ``operation`` isn't a comparison.
    """
    return _compare(torch.__version__, operation, version)


def compare_versions(library_or_version: str, operation: str, requirement_version: str) -> bool:
    """Compare a version, or the version of a package: ``compare_versions("numpy", ">=", "2.0")``.

    Raises:
        ConfigError: ``operation`` isn't a comparison.
        importlib.metadata.PackageNotFoundError: The package isn't installed.
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

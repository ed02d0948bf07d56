"""The notebook's settings of torch that hold for a whole process, which the ranks take over: they start without any."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any

# By name: a function that reads the setting, its default, and a function that sets it.
_SETTINGS: dict[str, tuple[Callable[[Any], Any], Any, Callable[[Any, Any], object]]] = {
    "default_dtype": (
        lambda torch: str(torch.get_default_dtype()).removeprefix("torch."),
        "float32",
        lambda torch, name: torch.set_default_dtype(getattr(torch, name)),
    ),
    "deterministic_algorithms": (
        lambda torch: torch.get_deterministic_debug_mode(),
        0,
        lambda torch, mode: torch.set_deterministic_debug_mode(mode),
    ),
    "float32_matmul_precision": (
        lambda torch: torch.get_float32_matmul_precision(),
        "highest",
        lambda torch, name: torch.set_float32_matmul_precision(name),
    ),
    # In releases from 2.9. The setting above can't be read if this one was set alone.
    "cuda_matmul_precision": (
        lambda torch: torch.backends.cuda.matmul.fp32_precision,
        "none",
        lambda torch, name: setattr(torch.backends.cuda.matmul, "fp32_precision", name),
    ),
    "anomaly_mode": (
        lambda torch: torch.is_anomaly_enabled(),
        False,
        lambda torch, is_on: torch.autograd.set_detect_anomaly(is_on),
    ),
    "cudnn_benchmark": (
        lambda torch: torch.backends.cudnn.benchmark,
        False,
        lambda torch, is_on: setattr(torch.backends.cudnn, "benchmark", is_on),
    ),
    "cudnn_deterministic": (
        lambda torch: torch.backends.cudnn.deterministic,
        False,
        lambda torch, is_on: setattr(torch.backends.cudnn, "deterministic", is_on),
    ),
}


def settings() -> dict[str, Any]:
    """Return this process's settings that aren't torch's defaults, by name."""
    torch, found = sys.modules.get("torch"), {}
    for name, (read, default, _) in _SETTINGS.items() if torch is not None else ():
        with contextlib.suppress(AttributeError, RuntimeError):  # torch is being imported, or has it set in another way
            value = read(torch)
            if value != default:
                found[name] = value
    return found


def take_over(found: dict[str, Any]) -> None:
    """Apply settings to this process."""
    for name, value in found.items():
        _SETTINGS[name][2](importlib.import_module("torch"), value)

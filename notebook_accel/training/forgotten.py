"""What wasn't prepared, said at the first backward pass: training would run, and not do what it should."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["warn"]


def warn(prepared: Sequence[Any], *, ranks: int, window: int, scales: bool) -> None:
    """Warns of each kind of object that isn't among the prepared ones and should be.

    Args:
        prepared: All that was.
        ranks: How many train together.
        window: Micro-batches in a step of the optimizer, where ``accumulate`` counts them.
        scales: Whether losses are scaled, as in fp16.
    """
    if ranks > 1 and not any(isinstance(item, (torch.nn.Module, torch.Tensor)) for item in prepared):
        _say(
            f"No model has been prepared: each of the {ranks} ranks trains a model of its own. "
            "Fix: model = accelerator.prepare(model), unless it averages its gradients itself"
        )
    if (window > 1 or scales) and not any(isinstance(item, torch.optim.Optimizer) for item in prepared):
        effect = f"would step in each of {window} micro-batches" if window > 1 else "would step with scaled gradients"
        _say(f"No optimizer has been prepared: it {effect}. Fix: optimizer = accelerator.prepare(optimizer)")
    if ranks > 1 and not any(isinstance(item, DataLoader) for item in prepared):
        _say(
            f"No loader has been prepared: each of the {ranks} ranks works on all of the data. "
            "Fix: loader = accelerator.prepare(loader), unless it gives each rank a share itself"
        )


def _say(text: str) -> None:
    warnings.warn(text, stacklevel=5)  # at the call of backward

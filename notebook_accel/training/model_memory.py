"""Reports the memory of a rank's models: after ``prepare``, and after the optimizers' first steps.

Gradients and optimizer state exist only after a step. The second step is the first that has parameters, gradients and
optimizer state at once, so the device's peak memory is reported after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from notebook_accel.payload.sharded_tensors import is_sharded_tensor
from notebook_accel.reporting import reporter

_FOLLOWED_STEPS = 2


class ModelMemoryReports:
    """Reports the memory of an ``Accelerator``'s prepared models and optimizers, and keeps none of them alive."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()

    def track(self, models: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Report the memory now and after the first steps. Outside a launched rank, do nothing."""
        if not reporter().is_connected:
            return
        before = len(self._models)
        for model in models:
            self._models.add(model)
        for optimizer in optimizers:
            if optimizer not in self._steps:
                self._steps[optimizer] = 0
                optimizer.register_step_post_hook(self._stepped)
        if len(self._models) > before:
            self._report(peak_bytes=0)

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps = self._steps.get(optimizer, _FOLLOWED_STEPS)
        if steps < _FOLLOWED_STEPS:
            self._steps[optimizer] = steps + 1
            self._report(peak_bytes=self._peak_bytes() if steps + 1 == _FOLLOWED_STEPS else 0)

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _report(self, peak_bytes: int) -> None:
        found = {id(parameter): parameter for model in self._models for parameter in model.parameters()}
        parameters = list(found.values())
        states = [state for optimizer in self._steps for state in optimizer.state.values()]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        reporter().report_model_memory(
            parameters=sum(parameter.numel() for parameter in parameters),
            held_parameters=sum(_held(parameter).numel() for parameter in parameters),
            parameter_bytes=_bytes(parameters),
            gradient_bytes=_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
            optimizer_bytes=_bytes(tensors),
            peak_bytes=peak_bytes,
        )


def _held(tensor: Any) -> torch.Tensor:
    """Return this rank's share of a tensor: all of it, unless it is sharded."""
    with torch.no_grad():
        share: torch.Tensor = tensor.to_local() if is_sharded_tensor(tensor) else tensor
    return share


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(share.numel() * share.element_size() for share in map(_held, tensors))

"""Local SGD, as in ``accelerate.local_sgd``: ranks train by themselves and average their weights every few steps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.training import fsdp

if TYPE_CHECKING:
    from typing_extensions import Self

    from notebook_accel.training.accelerator import Accelerator

__all__ = ["LocalSGD"]


class LocalSGD:
    """A context in which gradients stay local, and weights are averaged every few steps and at the end.

    The method is from Stich, "Local SGD Converges Fast and Communicates Little" (2019). All ranks have to take the
    same number of steps. ``save_state`` averages the weights too, and the count of steps begins anew from there, as
    after ``load_state``. The optimizer's state, such as momentum, isn't averaged, and a checkpoint has rank 0's.

    Args:
        accelerator: The Accelerator that has prepared the model.
        model: The prepared model, or a bare tensor in place of one.
        local_sgd_steps: Number of calls of ``step`` between two averagings.
        enabled: ``False`` trains as without ``LocalSGD``.

    Raises:
        ConfigError: ``local_sgd_steps`` isn't a whole number from 1.
        TrainingError: The model is sharded.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module | torch.Tensor,
        local_sgd_steps: int,
        enabled: bool = True,
    ) -> None:
        if type(local_sgd_steps) is not int or local_sgd_steps < 1:
            raise ConfigError(f"local_sgd_steps is {local_sgd_steps!r}.", fix="a whole number from 1")
        fsdp.refuse_sharded(
            [model], "LocalSGD", "train it without LocalSGD, with gradient_accumulation_steps to sync less often"
        )
        self._accelerator = accelerator
        self._model = model
        self._period = local_sgd_steps
        self._is_enabled = enabled and accelerator.use_distributed
        self._steps = 0
        self._local = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._is_enabled:
            self._local.enter_context(self._accelerator.no_sync(self._model))
            self._accelerator.before_save.append(self._begin_anew)
            self._local.callback(self._accelerator.before_save.remove, self._begin_anew)
            loading = self._accelerator.register_load_state_pre_hook(lambda *_: self._restart())
            self._local.callback(loading.remove)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._local.close()
        if self._is_enabled and kind is None:  # after an error, the other ranks may never join in
            self._average()

    def step(self) -> None:
        """Count a step, and average the weights after every ``local_sgd_steps``."""
        self._steps += 1
        if self._is_enabled and self._steps % self._period == 0:
            self._average()

    def _begin_anew(self) -> None:
        self._average()
        self._restart()

    def _restart(self) -> None:
        self._steps = 0

    def _average(self) -> None:
        model = self._model
        weights = [model] if isinstance(model, torch.Tensor) else list(model.parameters())
        means = self._accelerator.reduce([weight.detach() for weight in weights], "mean")
        with torch.no_grad():
            for weight, mean in zip(weights, means, strict=True):
                weight.copy_(mean)

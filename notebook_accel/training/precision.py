"""Mixed precision: the forward pass computes in 16 bits; weights and outputs have 32."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from notebook_accel import environment
from notebook_accel.errors import ConfigError
from notebook_accel.training.backends import group_recovery
from notebook_accel.training.handlers import AutocastKwargs, GradScalerKwargs

DTYPES: dict[str, torch.dtype | None] = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class PrecisionType(str, enum.Enum):
    """Values of ``mixed_precision``."""

    NO = "no"
    BF16 = "bf16"
    FP16 = "fp16"


class Precision:
    """The arithmetic of the forward pass.

    Args:
        name: ``"no"``, ``"bf16"`` or ``"fp16"``. ``None`` takes the launch's setting, or ``"no"``.
        device: The device of this rank.
        environ: The environment variables, with the launch's setting.
        autocast: Settings of autocast.
        scaler: Settings of loss scaling.
        downcast_bf16: On a TPU, replace float32 by bf16 and float64 by float32. It has no effect elsewhere.
        computes_in: The backend's method that tries to make the device itself compute in a type.

    Attributes:
        name: ``"no"``, ``"bf16"`` or ``"fp16"``.
        dtype: The type of autocast; ``None`` for ``"no"``, and where the device itself computes in the type.
        scaler: The loss scaler, which keeps small gradients from vanishing in fp16; ``None`` in other precisions.

    Raises:
        ConfigError: There is no such precision, or the device doesn't support it.
    """

    def __init__(
        self,
        name: str | None,
        device: torch.device,
        environ: Mapping[str, str] = os.environ,
        *,
        autocast: AutocastKwargs | None = None,
        scaler: GradScalerKwargs | None = None,
        downcast_bf16: bool = False,
        computes_in: Callable[..., bool] | None = None,
    ) -> None:
        name = str(getattr(name, "value", name) or environ.get(environment.MIXED_PRECISION) or "no")
        if name not in DTYPES:
            why = "There is no arithmetic in 8 bits here." if name == "fp8" else ""
            known = ", ".join(repr(known) for known in DTYPES)
            raise ConfigError(f"mixed_precision is {name!r}.", why=why, fix=f"one of {known}")
        if name == "fp16" and device.type != "cuda":
            raise ConfigError(
                f"mixed_precision='fp16' needs a GPU, and this rank computes on {device.type.upper()}.",
                why="Only GPUs have fast arithmetic in fp16: elsewhere it is slower than float32, and less exact.",
                fix="mixed_precision='bf16', or 'no'",
            )
        self.name = name
        dtype = DTYPES[name]
        is_lowered = dtype is not None and computes_in is not None and computes_in(dtype, downcast=downcast_bf16)
        self.dtype = None if is_lowered else dtype
        scaler = scaler or GradScalerKwargs()
        self.scaler = LossScaler(device, scaler) if name == "fp16" and scaler.enabled else None
        self._device_type = device.type
        self._autocast = autocast or AutocastKwargs()
        if downcast_bf16 and not is_lowered:
            warnings.warn(
                f"downcast_bf16=True has no effect on this device ({device.type}) with mixed_precision={name!r}: it is "
                "for bf16 on TPUs. Fix: leave it out",
                stacklevel=2,
            )

    def autocast(self, options: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which torch's operations use this precision where it is safe."""
        options = options or self._autocast
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, self.dtype, options.enabled, options.cache_enabled)


class LossScaler:
    """torch's ``GradScaler``, made safe for any order of its calls and for several optimizers.

    Before scaling a loss, existing gradients are rescaled to the current scale, such as those of a step that the
    program skipped, or of another optimizer that is still accumulating. So gradients always have a known scale: the
    current one, or 1 from ``unscale`` to the next loss.

    The scale changes before the next loss is scaled rather than right after a step. So all optimizers of one backward
    pass are unscaled by the scale of their gradients.
    """

    def __init__(self, device: torch.device, options: GradScalerKwargs | None = None) -> None:
        self._scaler = torch.amp.GradScaler(device.type, **dataclasses.asdict(options or GradScalerKwargs()))
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        group_recovery.track_state(self)

    @property
    def factor(self) -> float:
        """The factor by which losses are multiplied."""
        return self._scaler.get_scale()

    # Methods of torch's scaler, for programs that call it themselves. All others, such as ``is_enabled``, are its own.

    def get_scale(self) -> float:
        """Return the factor of the next loss, which is smaller after a skipped step."""
        factor: float = self.state_dict()["scale"]
        return factor

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of an optimizer, prepared or not."""
        self.unscale(_own(optimizer))

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update the scale now rather than before the next loss, or set it to ``new_scale``."""
        self._update()
        if new_scale is not None:
            with self._rescaled_gradients():
                self._scaler.update(new_scale)

    def __getattr__(self, name: str) -> Any:
        if name == "_scaler":  # not set yet: the object is being created
            raise AttributeError(name)
        return getattr(self._scaler, name)

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer, to keep its gradients at the current scale from now on."""
        self._optimizers.add(optimizer)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss multiplied by the scale."""
        self._update()
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its growth as of the next loss, without changing them, since a step may be under way."""
        scaler = self._scaler
        if not any(self._checked()):
            return scaler.state_dict()
        tensors = scaler._check_scale_growth_tracker("state_dict")
        before, states = [tensor.clone() for tensor in tensors], copy.deepcopy(scaler._per_optimizer_states)
        scaler.update()
        state = scaler.state_dict()
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
        scaler._per_optimizer_states = states
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that ``state_dict`` has returned."""
        with self._rescaled_gradients():
            self._scaler.load_state_dict(state)

    def _update(self) -> None:
        """Update the scale if gradients were checked for overflows since the last update."""
        checked = self._checked()
        if checked:
            with self._rescaled_gradients():
                if any(checked):  # otherwise no optimizer had a gradient, and torch refuses to update
                    self._scaler.update()

    def _checked(self) -> list[dict[Any, torch.Tensor]]:
        """Return, for each optimizer unscaled since the last update, its overflows by device."""
        return [state["found_inf_per_device"] for state in self._scaler._per_optimizer_states.values()]

    @contextlib.contextmanager
    def _rescaled_gradients(self) -> Iterator[None]:
        """Rescale all gradients from the scale before the body to the scale after it."""
        scale = self._scaler._scale
        before = None if scale is None else scale.clone()
        real = {optimizer for optimizer in self._optimizers if self._is_real(optimizer)}
        yield
        self._scaler._per_optimizer_states.clear()
        if scale is None or before is None:  # no loss has been scaled yet
            return
        for optimizer in self._optimizers:
            factor = scale if optimizer in real else scale / before
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor.to(parameter.grad.device))

    def _is_real(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the optimizer's gradients are unscaled."""
        states = self._scaler._per_optimizer_states
        return id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the optimizer's gradients, unless they are unscaled already."""
        self.add(optimizer)
        if not self._is_real(optimizer):
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step unless a gradient overflowed, and return whether the step was skipped."""
        optimizer = _own(optimizer)
        self.unscale(optimizer)
        # torch's own step would refuse a second step with the same gradients, and a step without gradients.
        found = self._scaler._found_inf_per_device(optimizer)
        overflowed = any(bool(count.item()) for count in found.values())
        if not overflowed:
            optimizer.step()
        return overflowed


def _own(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that a prepared one wraps, any other unchanged."""
    own: torch.optim.Optimizer = optimizer.optimizer if hasattr(optimizer, "step_was_skipped") else optimizer
    return own

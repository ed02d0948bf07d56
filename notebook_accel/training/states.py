"""``AcceleratorState``: what an ``Accelerator`` has decided, for code that doesn't hold it."""

from __future__ import annotations

import weakref

from notebook_accel.training import process_group
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.precision import Precision
from notebook_accel.training.process_control import ProcessControl

__all__ = ["AcceleratorState"]


class AcceleratorState(ProcessControl):
    """This rank and its precision.

    All of a process's are about the same rank. Without arguments the precision is that of the latest ``Accelerator``;
    before there is one, what the launcher was told.

    Args:
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
        cpu: Compute on the CPU, also where there are GPUs, if the process hasn't joined yet.

    Raises:
        ConfigError: There is no such precision, or the device doesn't have it.
        TrainingError: The other ranks didn't come in time, or this one has no device.
    """

    deepspeed_plugin: None = None  # programs ask for it before they use it

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False) -> None:
        super().__init__(process_group.current(cpu=cpu))
        latest = None if _latest is None else _latest()
        self._precision = (
            latest
            if latest is not None and mixed_precision in (None, latest.name)
            else Precision(mixed_precision, self.device, computes_in=self._backend.computes_in)
        )

    @classmethod
    def of(cls, backend: Backend, precision: Precision) -> AcceleratorState:
        """The state of an ``Accelerator``, which is the latest one now."""
        global _latest
        state = cls.__new__(cls)
        ProcessControl.__init__(state, backend)
        state._precision = precision
        _latest = weakref.ref(precision)
        return state

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, mixed_precision={self.mixed_precision!r})"

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"`` or ``"fp16"``."""
        return self._precision.name


_latest: weakref.ref[Precision] | None = None

"""What an ``Accelerator`` was told, for programs that ask it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from notebook_accel.errors import ConfigError
from notebook_accel.training.data import DataLoaderConfiguration
from notebook_accel.training.precision import Precision
from notebook_accel.training.process_control import ProcessControl

__all__ = ["Settings"]


class Settings(ProcessControl):
    """A rank with the settings of its training."""

    # Programs that run with any of Accelerate's ways to spread a model over devices ask for these first.
    deepspeed_plugin: None = None
    parallelism_config: None = None
    is_composable_parallelism_enabled = False
    is_fsdp2 = False

    _device_placement: bool
    _loading: DataLoaderConfiguration
    _precision: Precision

    def _is_placed(self, device_placement: bool | None) -> bool:
        return self._device_placement if device_placement is None else device_placement

    def _placements(self, objects: Sequence[object], device_placement: Sequence[bool | None] | None) -> list[bool]:
        """Which of some objects go to the device."""
        asked: Any = [None] * len(objects) if device_placement is None else device_placement
        if not isinstance(asked, Sequence) or len(asked) != len(objects):
            raise ConfigError(
                f"prepare was given {len(objects)} objects and device_placement={device_placement!r}.",
                fix=f"a list of {len(objects)}: True, False or None for each object",
            )
        return [self._is_placed(placement) for placement in asked]

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"`` or ``"fp16"``."""
        return self._precision.name

    @property
    def split_batches(self) -> bool:
        """As in ``DataLoaderConfiguration``."""
        return self._loading.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """As in ``DataLoaderConfiguration``."""
        return self._loading.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """As in ``DataLoaderConfiguration``."""
        return self._loading.even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """As in ``DataLoaderConfiguration``."""
        return self._loading.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """As in ``DataLoaderConfiguration``."""
        return self._loading.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """As in ``DataLoaderConfiguration``."""
        return self._loading.use_stateful_dataloader

    @property
    def multi_device(self) -> bool:
        """True if there are other ranks, and they have GPUs."""
        return self.use_distributed and self.device.type == "cuda"

    @property
    def should_save_model(self) -> bool:
        """True if this rank is the one that writes weights."""
        return self.is_main_process

"""The name that users of Accelerate import from ``accelerate.accelerator``."""

from notebook_accel.training.accelerator import Accelerator

__all__ = ["Accelerator"]

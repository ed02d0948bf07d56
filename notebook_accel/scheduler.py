"""The name that users of Accelerate import from ``accelerate.scheduler``."""

from notebook_accel.training.optimizers import AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]

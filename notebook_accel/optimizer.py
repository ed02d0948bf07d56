"""The name that users of Accelerate import from ``accelerate.optimizer``."""

from notebook_accel.training.optimizers import AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]

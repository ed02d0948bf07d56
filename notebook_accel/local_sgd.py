"""The name that users of Accelerate import from ``accelerate.local_sgd``."""

from notebook_accel.training.local_sgd import LocalSGD

__all__ = ["LocalSGD"]

"""The name that users of Accelerate import from ``accelerate.parallelism_config``."""

from notebook_accel.training.parallelism import ParallelismConfig

__all__ = ["ParallelismConfig"]

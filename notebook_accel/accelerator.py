"""The names that users of Accelerate import from ``accelerate.accelerator``."""

from notebook_accel.training.accelerator import Accelerator
from notebook_accel.training.accumulation import GradientAccumulationPlugin
from notebook_accel.training.data import DataLoaderConfiguration

__all__ = ["Accelerator", "DataLoaderConfiguration", "GradientAccumulationPlugin"]

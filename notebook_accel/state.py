"""The names that users of Accelerate import from ``accelerate.state``."""

from notebook_accel.training.accumulation import GradientState
from notebook_accel.training.states import AcceleratorState, DistributedType, PartialState, is_initialized

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized"]

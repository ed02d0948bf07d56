"""The names that users of Accelerate import from ``accelerate.state``."""

from notebook_accel.training.accumulation import GradientState
from notebook_accel.training.states import AcceleratorState, DistributedType, PartialState

__all__ = ["AcceleratorState", "DistributedType", "GradientState", "PartialState"]

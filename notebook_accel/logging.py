"""The names that users of Accelerate import from ``accelerate.logging``."""

from notebook_accel.training.rank_logging import get_logger

__all__ = ["get_logger"]

"""The names that users of Accelerate import from ``accelerate.tracking``."""

from notebook_accel.training.tracking import GeneralTracker, TensorBoardTracker, on_main_process, register_tracker_class

__all__ = ["GeneralTracker", "TensorBoardTracker", "on_main_process", "register_tracker_class"]

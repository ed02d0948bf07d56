"""The names of ``accelerate.inference``, which raise errors that point to Accelerate."""

from notebook_accel.training.refusals import prepare_pippy

__all__ = ["prepare_pippy"]

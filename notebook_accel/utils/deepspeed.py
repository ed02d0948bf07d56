"""The names of ``accelerate.utils.deepspeed`` that programs ask about, which raise errors when they are used."""

from typing import TYPE_CHECKING

from notebook_accel.training.refusals import DummyOptim, DummyScheduler, names_elsewhere

__all__ = ["DummyOptim", "DummyScheduler"]

if not TYPE_CHECKING:  # so that a type checker still finds unknown names
    __getattr__ = names_elsewhere(__name__)

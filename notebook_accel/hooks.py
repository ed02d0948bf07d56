"""The names of ``accelerate.hooks``, which raise errors that point to Accelerate."""

from typing import TYPE_CHECKING

from notebook_accel.refusals import names_elsewhere

if not TYPE_CHECKING:  # so that a type checker still finds unknown names
    __getattr__ = names_elsewhere(__name__)

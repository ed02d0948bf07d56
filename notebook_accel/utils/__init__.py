"""The names that users of Accelerate import from ``accelerate.utils``, in modules of the same names."""

from typing import TYPE_CHECKING

from notebook_accel.refusals import names_elsewhere
from notebook_accel.utils import (
    constants,
    dataclasses,
    environment,
    imports,
    memory,
    modeling,
    operations,
    other,
    random,
    versions,
)
from notebook_accel.utils.constants import *
from notebook_accel.utils.dataclasses import *
from notebook_accel.utils.environment import *
from notebook_accel.utils.imports import *
from notebook_accel.utils.memory import *
from notebook_accel.utils.modeling import *
from notebook_accel.utils.operations import *
from notebook_accel.utils.other import *
from notebook_accel.utils.random import *
from notebook_accel.utils.tqdm import tqdm
from notebook_accel.utils.versions import *

__all__ = ["tqdm"]
for _module in (
    constants, dataclasses, environment, imports, memory, modeling, operations, other, random, versions,
):  # fmt: skip
    __all__ += _module.__all__

if not TYPE_CHECKING:  # so that a type checker still finds unknown names
    __getattr__ = names_elsewhere(__name__)

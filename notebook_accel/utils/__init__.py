"""The names that users of Accelerate import from ``accelerate.utils``, in modules of the same names."""

from notebook_accel.training.refusals import infer_auto_device_map, load_checkpoint_in_model
from notebook_accel.utils import dataclasses, environment, imports, memory, operations, other, random, versions
from notebook_accel.utils.dataclasses import *
from notebook_accel.utils.environment import *
from notebook_accel.utils.imports import *
from notebook_accel.utils.memory import *
from notebook_accel.utils.operations import *
from notebook_accel.utils.other import *
from notebook_accel.utils.random import *
from notebook_accel.utils.versions import *

__all__ = ["infer_auto_device_map", "load_checkpoint_in_model"]
__all__ += dataclasses.__all__
__all__ += environment.__all__
__all__ += imports.__all__
__all__ += memory.__all__
__all__ += operations.__all__
__all__ += other.__all__
__all__ += random.__all__
__all__ += versions.__all__

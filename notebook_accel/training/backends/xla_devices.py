"""Which XLA device is this process's, and whether PJRT joins it with those of the other ranks.

PJRT asks the environment, once. torch_xla sets what isn't set there. But notebook services set some of it for the one
process that has the whole TPU, and ranks that believe it wait for each other in vain or fail.

Knows torch_xla, and imports it when it is first used.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch

from notebook_accel.environment import RankPlace
from notebook_accel.errors import TrainingError

__all__ = ["forget_whole_machine", "join", "take_one_chip"]

_VISIBLE = "TPU_VISIBLE_CHIPS"
_ADDRESSES = "TPU_PROCESS_ADDRESSES"
# torch_xla takes the machine's shape from the second where the first isn't set, and sets the first to what is one
# process's of it. https://github.com/pytorch/xla/blob/v2.9.0/torch_xla/_internal/tpu.py
_SHAPE = {
    "TPU_PROCESS_BOUNDS": "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "TPU_CHIPS_PER_HOST_BOUNDS",
    "CLOUD_TPU_TASK_ID": "TPU_WORKER_ID",
}
# With less than all chips in its bounds, a process leaves the others to others.
# https://github.com/tensorflow/tensorflow/blob/02268826b7ed/tensorflow/core/tpu/tpu_initializer_helper.cc
_ONE_CHIP = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}


def join(place: RankPlace) -> tuple[torch.device, bool]:
    """This process's device, and whether PJRT has joined those of all ranks.

    It joins TPU chips of one core. The CPU in the place of a TPU has one process; and of chips of two cores, each rank
    computes on one of the two, while what PJRT joins is all of them.

    Raises:
        TrainingError: PJRT has joined another number of devices than there are ranks.
    """
    import torch_xla
    import torch_xla.runtime
    from torch_xla._internal import pjrt, tpu

    is_tpu = torch_xla.runtime.device_type() == "TPU"
    is_joined = place.world_size > 1 and is_tpu and tpu.num_logical_cores_per_chip() == 1
    if not torch_xla._XLAC._xla_runtime_is_initialized():
        if is_joined:
            forget_whole_machine(place, os.environ)
            pjrt.initialize_multiprocess(place.local_rank, place.local_world_size)
        else:
            if is_tpu and place.world_size > 1:
                take_one_chip(place, os.environ)
            pjrt.initialize_singleprocess()
    found = torch_xla.runtime.global_device_count()
    if is_joined and found != place.world_size:
        raise TrainingError(
            f"There are {place.world_size} ranks, and PJRT has a group of {found} devices.",
            why="Each rank is a process with one XLA device, and all devices that PJRT finds take part.",
            fix=f"num_processes={found}, or 1",
        )
    return torch_xla.device(), is_joined


def take_one_chip(place: RankPlace, environ: MutableMapping[str, str]) -> None:
    """Gives each rank a chip for itself.

    Args:
        place: This rank's.
        environ: The variables.
    """
    environ.update(_ONE_CHIP)
    environ[_VISIBLE] = str(place.local_rank)


def forget_whole_machine(place: RankPlace, environ: MutableMapping[str, str]) -> None:
    """Takes out what was set for one process with the whole TPU. What was set for as many as there are ranks stays.

    Args:
        place: This rank's.
        environ: The variables.
    """
    is_one_machine = place.world_size == place.local_world_size
    if not is_one_machine or environ.get(_ADDRESSES, "").count(",") + 1 == place.world_size:
        return
    for name in (_ADDRESSES, "TPU_PROCESS_PORT", _VISIBLE):
        environ.pop(name, None)
    for of_process, of_machine in _SHAPE.items():
        if of_process in environ:
            environ[of_machine] = environ.pop(of_process)

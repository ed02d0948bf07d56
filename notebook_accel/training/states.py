"""``PartialState`` and ``AcceleratorState``, which stand for this rank, and their base class ``ProcessState``."""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.payload.unpicklable import STAYING, StaysError
from notebook_accel.training import collectives, process_group, sharding
from notebook_accel.training.backends.backend import Backend, sharing
from notebook_accel.training.compiling import TorchDynamoPlugin
from notebook_accel.training.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.handlers import InitProcessGroupKwargs
from notebook_accel.training.parallelism import ParallelismConfig
from notebook_accel.training.precision import Precision

_P = ParamSpec("_P")
_R = TypeVar("_R")


class DistributedType(str, enum.Enum):
    """The kinds of devices and parallelism. Each member equals its name as text.

    This package reports the first four and ``FSDP``; programs for other launchers compare with the rest.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    XLA = "XLA"
    TPU = "XLA"  # noqa: PIE796  # its name before Accelerate 1.0, with which older programs compare
    MULTI_HPU = "MULTI_HPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_NEURON = "MULTI_NEURON"
    MULTI_NPU = "MULTI_NPU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"


_BY_DEVICE = {"cpu": DistributedType.MULTI_CPU, "cuda": DistributedType.MULTI_GPU, "xla": DistributedType.XLA}


class ProcessState:
    """This rank: its number, its device, and functions that only some ranks run.

    Args:
        backend: The backend that connects this rank to the others.
    """

    def __init__(self, backend: Backend) -> None:
        self._own_backend = backend
        self._pid = os.getpid()
        self._is_triggered = False
        self._ranks_per_sample = 1  # several with tensor parallelism
        self._number = next(_numbers)
        _alive[self._number] = self

    @property
    def _backend(self) -> Backend:
        """The backend that connects this rank to the others.

        Raises:
            TrainingError: The object was created in the notebook, and this process is a rank forked from it.
        """
        if os.getpid() != self._pid:
            here = process_group.rank_place()
            if not process_group.is_at(here, self._own_backend):
                raise TrainingError(
                    f"This {type(self).__name__} was made in the notebook, and this is rank {here.rank} of "
                    f"{here.world_size}, a fork of the notebook.",
                    why="It belongs to the notebook's process: each rank would train by itself.",
                    fix="make it inside the cell or the function",
                )
            self._pid = os.getpid()  # a data loader's worker, which has its rank's place
        return self._own_backend

    @property
    def _data_backend(self) -> Backend:
        """The backend in which ranks that work on the same samples count as one."""
        return sharing(self._backend, self._ranks_per_sample)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank {self.process_index} of {self.num_processes}, "
            f"local rank {self.local_process_index}, {self.device}, {self.distributed_type.value})"
        )

    def __init_subclass__(cls) -> None:
        STAYING[cls] = cls._refuse_to_leave

    def _refuse_to_leave(self) -> NoReturn:
        raise StaysError(
            self,
            f"this {type(self).__name__} stands for the process that made it, rank {self.process_index} of "
            f"{self.num_processes}, and a copy elsewhere would act for that rank",
        )

    def __reduce__(
        self,
    ) -> tuple[Any, ...]:  # for pickle and for ``copy.deepcopy``, such as of a model that refers to it
        return _same_object, (type(self).__name__, _PROCESS, os.getpid(), self._number)

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self._backend.device

    @property
    def process_index(self) -> int:
        """This rank, from 0."""
        return self._backend.place.rank

    @property
    def local_process_index(self) -> int:
        """This rank among those of its machine, from 0."""
        return self._backend.place.local_rank

    @property
    def num_processes(self) -> int:
        """The number of ranks."""
        return self._backend.place.world_size

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on the first rank of each machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True on the highest rank."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """True if there are several ranks."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of the ranks' devices; ``NO`` for a single rank."""
        return _BY_DEVICE[self.device.type] if self.use_distributed else DistributedType.NO

    @property
    def backend(self) -> str | None:
        """The library that connects the ranks, ``"nccl"``, ``"gloo"`` or ``"xla"``; ``None`` for a single rank."""
        if not self.use_distributed:
            return None
        if self.device.type == "xla":
            return "xla"
        return "gloo" if f"{self.device.type}:gloo" in dist.get_backend_config() else "nccl"

    @property
    def initialized(self) -> bool:
        """True, since a state joins the group of all ranks when it is made."""
        return True

    # All ranks together

    def wait_for_everyone(self) -> None:
        """Block until every rank has called this method."""
        collectives.wait_for_everyone(self._backend)

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Destroy a group, by default that of all ranks, after which this object can't communicate any more."""
        process_group.end() if group is None else dist.destroy_process_group(group)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Return a context whose body rank 0 runs before the others, such as to download something once."""
        return collectives.first(self._backend, is_first=self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Return a context whose body the first rank of each machine runs before the others."""
        return collectives.first(self._backend, is_first=self.is_local_main_process)

    def set_trigger(self) -> None:
        """Make ``check_trigger`` return True on every rank, for a decision of one rank, such as to stop early."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether any rank has called ``set_trigger`` since the last check. All ranks have to call this."""
        is_triggered = torch.tensor([int(self._is_triggered)], device=self.device)
        self._is_triggered = False
        return bool(collectives.reduce(self._backend, is_triggered, "sum").item())

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this rank's part of ``inputs``, such as prompts.

        Args:
            inputs: A list, a tuple, a tensor, or a mapping of these with one length. With more ranks than items, some
                ranks get none.
            apply_padding: Repeat the last item so that every rank gets as many, and results can be gathered.

        Raises:
            TrainingError: ``inputs`` has another type, or its values have different lengths.
        """
        place = self._data_backend.place
        yield sharding.part_of(inputs, place.rank, place.world_size, apply_padding=apply_padding)

    # One rank alone

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call ``print`` on the first rank of each machine."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def on_main_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
        """Decorate a function that runs on rank 0 only and returns ``None`` on the others."""
        return _only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
        """Decorate a function that runs on the first rank of each machine only and returns ``None`` on the others."""
        return _only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
        """Decorate a function that runs on the highest rank only and returns ``None`` on the others."""
        return _only_if(self.is_last_process, function)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorate a function that runs on one rank only (``@on_process(process_index=3)``)."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _only_if(self.process_index == process_index, function)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorate a function that runs on one rank of each machine only."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _only_if(self.local_process_index == local_process_index, function)


# The objects that can be unpickled here, by number. The random bytes tell processes apart, since pids are reused.
_PROCESS = os.urandom(8)
_numbers = itertools.count()
_alive: weakref.WeakValueDictionary[int, ProcessState] = weakref.WeakValueDictionary()


def _same_object(kind: str, process: bytes, pid: int, number: int) -> ProcessState:
    """Return the object that was pickled, if it was pickled in this process.

    Raises:
        TrainingError: The object was pickled in another process, or doesn't exist any more.
    """
    found = _alive.get(number) if (process, pid) == (_PROCESS, os.getpid()) else None
    if found is None:
        raise TrainingError(
            f"This {kind} was pickled in another process, or it doesn't exist any more.",
            why="It stands for the process that made it, and a copy would act for that rank.",
            fix="make it inside the cell or the function, and leave it out of what is sent",
        )
    return found


def _only_if(is_chosen: bool, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        return function(*args, **kwargs) if is_chosen else None

    return wrapper


class PartialState(ProcessState):
    """This rank, for code that has no ``Accelerator``, such as inference.

    Every ``PartialState`` and ``Accelerator`` of a process is the same rank of one group; the first one joins it.

    Args:
        cpu: Compute on the CPU even where there are GPUs, unless the process has joined already.
        group: Settings of the group, unless the process has joined already: the fields of ``InitProcessGroupKwargs``,
            such as ``backend="gloo"``.

    Raises:
        ConfigError: The environment variables don't describe a rank, or the process has joined with another backend.
        TrainingError: The other ranks didn't join in time, or this rank has no device.
    """

    def __init__(self, cpu: bool = False, **group: Any) -> None:
        options = InitProcessGroupKwargs(**group)
        super().__init__(process_group.current(cpu=cpu, options=options))
        if options.backend is not None and self.backend not in (None, options.backend):
            raise ConfigError(
                f"PartialState(backend={options.backend!r}) comes too late: this rank has joined with {self.backend}.",
                fix=f"make it before the first Accelerator, or leave backend={options.backend!r} out",
            )

    @property
    def default_device(self) -> torch.device:
        """The device that this rank computes on."""
        return self.device

    @classmethod
    def _reset_state(cls) -> None:
        """Do nothing: states share the group only, which ``destroy_process_group`` destroys."""


class AcceleratorState(ProcessState):
    """This rank and its precision, for code that has no ``Accelerator``.

    The default precision is that of the latest ``Accelerator``; before there is one, the launch's.

    Args:
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
        cpu: Compute on the CPU even where there are GPUs, unless the process has joined already.

    Raises:
        ConfigError: There is no such precision, or the device doesn't support it.
        TrainingError: The other ranks didn't join in time, or this rank has no device.
    """

    deepspeed_plugin: None = None  # programs ask for it before they use it
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    parallelism_config: ParallelismConfig | None = None
    device_mesh: Any = None

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False) -> None:
        super().__init__(process_group.current(cpu=cpu))
        latest = None if _latest is None else _latest()
        if latest is not None and mixed_precision in (None, latest.name):
            self._precision = latest
        else:
            self._precision = Precision(mixed_precision, self.device, computes_in=self._backend.computes_in)

    @classmethod
    def from_accelerator(
        cls, backend: Backend, precision: Precision, plugin: FullyShardedDataParallelPlugin | None = None
    ) -> AcceleratorState:
        """Return the state of an ``Accelerator``, whose precision becomes the latest one."""
        global _latest
        state = cls.__new__(cls)
        ProcessState.__init__(state, backend)
        state._precision = precision
        state.fsdp_plugin = plugin
        _latest = weakref.ref(precision)
        return state

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, mixed_precision={self.mixed_precision!r})"

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"`` or ``"fp16"``."""
        return self._precision.name

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of the ranks' devices; ``FSDP`` if models are sharded, and ``NO`` for a single rank."""
        kind = super().distributed_type
        return kind if self.fsdp_plugin is None or kind is DistributedType.NO else DistributedType.FSDP

    @classmethod
    def _reset_state(cls, reset_partial_state: bool = False) -> None:  # noqa: ARG003  there is nothing to reset in it
        """Forget the latest ``Accelerator``'s precision. Each Accelerator has its own even without this."""
        global _latest
        _latest = None


def is_initialized() -> bool:
    """Return whether the latest ``Accelerator`` of this process still exists."""
    return _latest is not None and _latest() is not None


_latest: weakref.ref[Precision] | None = None  # the precision of the latest Accelerator

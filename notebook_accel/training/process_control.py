"""Which rank this is, and what only some ranks do: what ``Accelerator`` and ``PartialState`` have in common."""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch

from notebook_accel.errors import TrainingError
from notebook_accel.payload.unpicklable import StaysError
from notebook_accel.training import collectives, process_group
from notebook_accel.training.backends.backend import Backend

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DistributedType", "PartialState", "ProcessControl"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class DistributedType(str, enum.Enum):
    """How the ranks compute and talk to each other. Equal to its name as text.

    The last ones never occur here; programs that run with other launchers ask for them.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    XLA = "XLA"
    MULTI_HPU = "MULTI_HPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_NPU = "MULTI_NPU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    MEGATRON_LM = "MEGATRON_LM"


_BY_DEVICE = {
    "cpu": DistributedType.MULTI_CPU,
    "cuda": DistributedType.MULTI_GPU,
    "xla": DistributedType.XLA,
}


class ProcessControl:
    """One rank among all.

    Args:
        backend: The way to the others.
    """

    def __init__(self, backend: Backend) -> None:
        self._joined = backend
        self._pid = os.getpid()
        self._is_triggered = False

    @property
    def _backend(self) -> Backend:
        """The way to the others.

        Raises:
            TrainingError: This is a forked rank, and the object the notebook's.
        """
        if os.getpid() != self._pid:
            self._refuse_the_notebooks()
            self._pid = os.getpid()  # a loader's worker, which has its rank's place
        return self._joined

    def _refuse_the_notebooks(self) -> None:
        here = process_group.rank_place()
        if not process_group.is_at(here, self._joined):
            raise TrainingError(
                f"This {type(self).__name__} was made in the notebook, and this is rank {here.rank} of "
                f"{here.world_size}, a fork of it.",
                why="It knows of the notebook's process only: each rank would train by itself.",
                fix="make it inside the cell or the function",
            )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rank {self.process_index} of {self.num_processes}, "
            f"local rank {self.local_process_index}, {self.device}, {self.distributed_type.value})"
        )

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self  # as what stands for this process: a model that has one as an attribute can be copied

    def __reduce__(self) -> NoReturn:
        raise StaysError(
            self,
            f"this {type(self).__name__} stands for the process that it was made in, rank {self.process_index} of "
            f"{self.num_processes}, and a copy would take itself for the same",
        )

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
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
        """True if this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True if this is the first rank of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True if this is the highest rank."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """True if there are other ranks."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> DistributedType:
        """How the ranks compute and talk to each other; ``NO`` for a single one."""
        return _BY_DEVICE[self.device.type] if self.use_distributed else DistributedType.NO

    # All ranks together

    def wait_for_everyone(self) -> None:
        """Returns when every rank has called it."""
        collectives.wait_for_everyone(self._backend)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Lets rank 0 run the body before the others, such as to download something once."""
        return collectives.first(self._backend, is_first=self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Lets the first rank of each machine run the body before the others."""
        return collectives.first(self._backend, is_first=self.is_local_main_process)

    def set_trigger(self) -> None:
        """Lets ``check_trigger`` say true on every rank, for a decision that one rank takes, such as to stop early."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Return whether any rank has called ``set_trigger`` since the last time. All ranks have to ask."""
        is_triggered = torch.tensor([int(self._is_triggered)], device=self.device)
        self._is_triggered = False
        return bool(collectives.reduce(self._backend, is_triggered, "sum").item())

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's part of ``inputs``, such as prompts.

        Args:
            inputs: A list, a tuple, a tensor, or a mapping of such of one length. With more ranks than items some
                ranks get none.
            apply_padding: Give every rank as many, by repeating the last item, so that results can be gathered.

        Raises:
            TrainingError: ``inputs`` is something else.
        """
        yield collectives.part_of(inputs, self.process_index, self.num_processes, apply_padding=apply_padding)

    # One rank alone

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the first rank of each machine."""
        if self.is_local_main_process:
            builtins.print(*args, **kwargs)

    def on_main_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
        """Decorates a function that runs on rank 0 only and returns ``None`` on the others."""
        return _only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
        """Decorates a function that runs on the first rank of each machine only and returns ``None`` on the others."""
        return _only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
        """Decorates a function that runs on the highest rank only and returns ``None`` on the others."""
        return _only_if(self.is_last_process, function)

    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorates a function that runs on one rank only (``@on_process(process_index=3)``)."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _only_if(self.process_index == process_index, function)

    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorates a function that runs on one rank of each machine only."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _only_if(self.local_process_index == local_process_index, function)


class PartialState(ProcessControl):
    """This rank, for code that has no ``Accelerator``, such as inference.

    All of a process's, and its ``Accelerator``, are one rank of one group; making the first joins it.

    Args:
        cpu: Compute on the CPU, also where there are GPUs, if the process hasn't joined yet.

    Raises:
        ConfigError: The environment variables don't describe a rank.
        TrainingError: The other ranks didn't come in time, or this one has no device.
    """

    def __init__(self, cpu: bool = False) -> None:
        super().__init__(process_group.current(cpu=cpu))


def _only_if(is_chosen: bool, function: Callable[_P, _R]) -> Callable[_P, _R | None]:
    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        return function(*args, **kwargs) if is_chosen else None

    return wrapper

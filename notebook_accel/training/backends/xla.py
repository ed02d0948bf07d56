"""XLA devices: TPUs, and the CPU in the place of one, through torch_xla and PJRT.

Only this module and those beside it whose names begin with ``xla`` know torch_xla, and import it when it is used first.

XLA computes a step as a whole: operations are noted, and compiled and run when the step ends. Here it ends when the
prepared loader is asked for its next batch; outside of one, after the optimizer's step.
"""

from __future__ import annotations

import collections
import importlib.util
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError
from notebook_accel.reporting import reporter
from notebook_accel.training.backends import turns, xla_collectives, xla_devices
from notebook_accel.training.backends.single_process import SingleProcess
from notebook_accel.training.backends.torch_distributed import TorchDistributed
from notebook_accel.training.backends.xla_compiling import Compilations
from notebook_accel.training.handlers import DistributedDataParallelKwargs, InitProcessGroupKwargs

__all__ = ["XlaDevice", "is_asked_for"]

_ASKED_FOR = "PJRT_DEVICE"
# What torch_xla reads when the first tensor is made. With the first, both float32 and float64 become bfloat16; with the
# second, float32 becomes bfloat16 and float64 becomes float32.
_USE_BF16, _DOWNCAST_BF16 = "XLA_USE_BF16", "XLA_DOWNCAST_BF16"

_precision: dict[str, str] | None = None  # what this process computes in, once it is decided


def is_asked_for() -> bool:
    """Return whether this process shall compute on an XLA device: by the variable that PJRT itself reads."""
    return bool(os.environ.get(_ASKED_FOR)) and importlib.util.find_spec("torch_xla") is not None


class XlaDevice:
    """A ``Backend`` on one XLA device.

    What is on the host travels between ranks by gloo; what is on devices, between them where PJRT has joined them.

    Args:
        place: This rank's place.
        options: How the ranks' group on the host is made.

    Raises:
        TrainingError: The other ranks didn't come in time, or PJRT gives this process no device of its own.
    """

    def __init__(self, place: RankPlace, options: InitProcessGroupKwargs) -> None:
        self.place = place
        cpu = torch.device("cpu")
        self._host = SingleProcess(place, cpu) if place.world_size == 1 else TorchDistributed(place, cpu, options)
        self.device, is_joined = xla_devices.join(place)
        self._collectives: xla_collectives.Collectives = (
            xla_collectives.BetweenDevices(place.rank, place.world_size)
            if is_joined
            else xla_collectives.ThroughHost(self._host, self._compute)
        )
        self._compilations = Compilations()
        self.seed(torch.initial_seed())
        reporter().hold_metrics()

    @property
    def compares_calls(self) -> bool:
        return self._host.compares_calls  # ranks that disagree would wait for each other for ever

    @property
    def has_left(self) -> bool:
        return self._host.has_left

    def explain(self, error: RuntimeError) -> None:
        self._host.explain(error)

    def leave(self) -> None:
        self._host.leave()

    # The device

    def memory(self) -> Callable[[], tuple[int, int]] | None:
        import torch_xla.core.xla_model as xm

        def used_and_total() -> tuple[int, int]:
            info = xm.get_memory_info(self.device)
            return int(info["bytes_used"]), int(info["bytes_limit"])

        try:
            used_and_total()
        except RuntimeError:  # the CPU in the place of a TPU has none of its own
            return None
        return used_and_total

    def release_memory(self) -> None:
        self._compute()

    def place_model(self, model: torch.nn.Module) -> None:
        # On its way a model is on the host once more, in each rank: those that share one had it there once for all.
        size_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cpu)
        if turns.is_memory_short(size_bytes, self.place.local_world_size):
            with turns.one_at_a_time():
                self._move(model)
                self._wait_for_device()
        else:
            self._move(model)

    def _move(self, model: torch.nn.Module) -> None:
        # Without this, a module's own ``to`` gives it new parameters, and its optimizer would go on with the old ones.
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.to(self.device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
        self._compute()  # what it takes to get there is no part of the first step

    def _wait_for_device(self) -> None:
        import torch_xla.core.xla_model as xm

        xm.wait_device_ops()

    def place_leaf(self, leaf: torch.Tensor) -> None:
        swap: Any = torch.utils.swap_tensors
        swap(leaf, leaf.detach().to(self.device).requires_grad_())

    def to_host(self, state: Any) -> Any:
        self._compute()
        return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), state)

    def uploader(self, *, non_blocking: bool) -> _Uploader:  # noqa: ARG002  # the seam's signature
        return _Uploader(self.device, self._compilations, self.mark_step)

    def mark_step(self) -> None:
        import torch_xla

        torch_xla.sync()
        self._compilations.step_ended()
        reporter().release_metrics()

    def _compute(self) -> None:
        """Has the device compute what was asked of it so far, in the middle of a step or outside of one."""
        import torch_xla.core.xla_model as xm

        # torch_xla takes it for a step's end, after which it draws other numbers. But ranks wait for each other, and
        # read what they save, at moments on which no draw should depend.
        drawn = xm.get_rng_state(str(self.device))
        self.mark_step()
        xm.set_rng_state(drawn, str(self.device))

    def computes_in(self, dtype: torch.dtype, *, downcast: bool) -> bool:
        global _precision
        if dtype is not torch.bfloat16:
            return False
        wanted = {_USE_BF16: str(int(not downcast)), _DOWNCAST_BF16: str(int(downcast))}
        if _precision not in (None, wanted):
            raise ConfigError(
                "This process computes in another form of bf16 already.",
                why="XLA takes its precision from the first tensor that is made, for as long as the process lives.",
                fix="one Accelerator for each launch, or the same mixed_precision and downcast_bf16",
            )
        os.environ.update(wanted)
        _precision = wanted
        return True

    def seed(self, seed: int) -> None:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(seed % 2**63, str(self.device))

    def generator_state(self) -> Mapping[str, Any]:
        import torch_xla.core.xla_model as xm

        self._compute()  # so that the next step goes on from here, as it does where this is put back
        return {"xla": xm.get_rng_state(str(self.device))}

    def set_generator_state(self, state: Mapping[str, Any]) -> None:
        import torch_xla.core.xla_model as xm

        if "xla" in state:
            xm.set_rng_state(state["xla"], str(self.device))

    # The others

    def barrier(self) -> None:
        self._compute()
        self._host.barrier()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._is_on_host(tensor):
            return self._host.all_gather(tensor)
        return self._collectives.all_gather(tensor)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self._is_on_host(tensor):
            self._host.all_reduce(tensor)
        else:
            self._collectives.all_reduce([tensor])

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if self._is_on_host(tensor):
            self._host.broadcast(tensor, source)
        else:
            self._collectives.broadcast([tensor], source)

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return self.place.world_size == 1 or tensor.device.type == "cpu"

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._host.all_gather_object(value)

    def broadcast_object(self, value: Any, source: int) -> Any:
        return self._host.broadcast_object(value, source)

    def scatter_object(self, values: Sequence[Any] | None) -> Any:
        return self._host.scatter_object(values)

    def data_parallel(self, model: torch.nn.Module, options: DistributedDataParallelKwargs) -> torch.nn.Module:
        if options != DistributedDataParallelKwargs():
            raise ConfigError(
                f"{options} has no effect on an XLA device.",
                why="Gradients are averaged there by one collective at the end of a backward pass.",
                fix="leave DistributedDataParallelKwargs out",
            )
        self._collectives.broadcast([*model.parameters(), *model.buffers()], source=0)
        self._compute()
        return xla_collectives.DataParallel(model, self.place.world_size, self._collectives)


class _Uploader:
    """torch_xla's parallel loader, which takes batches to the device in a thread of its own.

    Args:
        device: The device.
        compilations: Told of the shapes.
        mark_step: Called before a batch is taken, and at the end.
    """

    _DEADLINE_S = 600.0

    def __init__(self, device: torch.device, compilations: Compilations, mark_step: Callable[[], None]) -> None:
        from torch_xla.distributed.parallel_loader import ParallelLoader

        self._compilations = compilations
        self._mark_step = mark_step
        self._waiting: queue.SimpleQueue[list[torch.Tensor] | None] = queue.SimpleQueue()
        self._shapes: tuple[tuple[int, ...], ...] | None = None
        self._are_new: collections.deque[bool] = collections.deque()
        self._loader = ParallelLoader(self._batches(), [device], loader_prefetch_size=2, device_prefetch_size=1)
        self._device = device

    def _batches(self) -> Iterator[list[torch.Tensor]]:
        """In the loader's thread."""
        while (tensors := self._waiting.get()) is not None:
            yield tensors

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        self._shapes, is_new = self._compilations.batch(tensors, self._shapes)
        self._are_new.append(is_new)
        self._waiting.put(list(tensors))

    def begin(self) -> None:
        pass  # the loader's thread does

    def take(self) -> Sequence[torch.Tensor]:
        self._mark_step()
        taken: list[torch.Tensor] | None = self._loader.next_item(self._device)
        if taken is None:
            raise self._loader._exception_queue.get(timeout=self._DEADLINE_S)
        self._compilations.step_begins(is_new=self._are_new.popleft())
        return taken

    def close(self) -> None:
        self._waiting.put(None)
        self._loader.close()
        self._mark_step()

"""The backend for XLA devices, TPUs or the CPU in place of one, through torch_xla and PJRT.

Only this module and ``xla_collectives`` use torch_xla, and they import it on first use.

XLA computes a step as a whole: it records operations, and compiles and runs them when the step ends. Here a step ends
when the loop asks the prepared loader for its next batch, or, outside of such a loop, after the optimizer's step.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.util
import os
import pathlib
import queue
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from notebook_accel import host_memory
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.reporting import reporter
from notebook_accel.training.backends import xla_collectives
from notebook_accel.training.backends.single_process import SingleProcess
from notebook_accel.training.backends.torch_distributed import TorchDistributed
from notebook_accel.training.handlers import DistributedDataParallelKwargs, InitProcessGroupKwargs

# torch_xla reads these when the first tensor is made. With the first, both float32 and float64 become bfloat16; with
# the second, float32 becomes bfloat16 and float64 becomes float32.
_USE_BF16, _DOWNCAST_BF16 = "XLA_USE_BF16", "XLA_DOWNCAST_BF16"

_precision: dict[str, str] | None = None  # this process's precision, once it is decided


def is_asked_for() -> bool:
    """Return whether this process should compute on an XLA device, by the variable that PJRT itself reads."""
    return bool(os.environ.get("PJRT_DEVICE")) and importlib.util.find_spec("torch_xla") is not None


class XlaDevice:
    """A ``Backend`` on one XLA device.

    Host tensors are exchanged through gloo, in a group with ``options``; device tensors directly if PJRT has joined the
    devices, otherwise through the host.

    Raises:
        TrainingError: The other ranks didn't join in time, or PJRT gives this process no device of its own.
    """

    def __init__(self, place: RankPlace, options: InitProcessGroupKwargs) -> None:
        self.place = place
        cpu = torch.device("cpu")
        self._host = SingleProcess(place, cpu) if place.world_size == 1 else TorchDistributed(place, cpu, options)
        self.device, is_joined = _join_devices(place)
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
        return self._host.compares_calls  # ranks that disagree would wait for each other forever

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
        except RuntimeError:  # the CPU in place of a TPU reports no memory
            return None
        return used_and_total

    def release_memory(self) -> None:
        self._compute()

    def place_model(self, model: torch.nn.Module) -> None:
        import torch_xla.core.xla_model as xm

        # While a model moves, each rank has a copy on the host; forked ranks shared a single copy before.
        size_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cpu)
        if is_memory_short(size_bytes, self.place.local_world_size):
            with one_at_a_time():
                self._move(model)
                xm.wait_device_ops()
        else:
            self._move(model)

    def _move(self, model: torch.nn.Module) -> None:
        # Otherwise ``to`` gives the module new parameters, and its optimizer keeps the old ones.
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.to(self.device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)
        self._compute()  # keep the move out of the first step

    def place_leaf(self, leaf: torch.Tensor) -> None:
        swap: Any = torch.utils.swap_tensors
        swap(leaf, leaf.detach().to(self.device).requires_grad_())

    def to_host(self, state: Any) -> Any:
        self._compute()
        return _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), state)

    def uploader(self, *, non_blocking: bool) -> _XlaUploader:  # noqa: ARG002  # the interface's signature
        return _XlaUploader(self.device, self._compilations, self.mark_step)

    def mark_step(self) -> None:
        import torch_xla

        torch_xla.sync()
        self._compilations.step_ended()
        reporter().release_metrics()

    def _compute(self) -> None:
        """Run all recorded operations on the device, within a step or outside of one."""
        import torch_xla.core.xla_model as xm

        # torch_xla changes the random state at the end of a step. A barrier or a checkpoint must not change it.
        state = xm.get_rng_state(str(self.device))
        self.mark_step()
        xm.set_rng_state(state, str(self.device))

    def computes_in(self, dtype: torch.dtype, *, downcast: bool) -> bool:
        global _precision
        if dtype is not torch.bfloat16:
            return False
        wanted = {_USE_BF16: str(int(not downcast)), _DOWNCAST_BF16: str(int(downcast))}
        if _precision not in (None, wanted):
            raise ConfigError(
                "This process computes in another form of bf16 already.",
                why="XLA fixes its precision when the first tensor is made, for the life of the process.",
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

        self._compute()  # so that the next step begins with this state, as it does after this state is restored
        return {"xla": xm.get_rng_state(str(self.device))}

    def set_generator_state(self, state: Mapping[str, Any]) -> None:
        import torch_xla.core.xla_model as xm

        if "xla" in state:
            xm.set_rng_state(state["xla"], str(self.device))

    # Communication with other ranks

    def absent_ranks(self) -> Sequence[int]:
        return ()  # unknown: the device's collectives aren't counted

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
        return xla_collectives.XlaDataParallel(model, self.place.world_size, self._collectives)

    def mesh(self, sizes: Any, joint: Any) -> Any:  # noqa: ARG002  # the interface's signature
        raise ConfigError(
            "A model can't be sharded on an XLA device.",
            why="torch's fully_shard is for GPUs and CPUs.",
            fix="leave out fsdp_plugin, and --fsdp of the launch",
        )

    def background_group(self) -> Any:
        return self._host.background_group()


class _XlaUploader:
    """An ``Uploader`` that uses torch_xla's parallel loader, which runs in its own thread.

    It reports the batches' shapes to ``compilations``, and calls ``mark_step`` before it takes a batch and on close.
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
        """Yield the batches that were sent, in the loader's thread."""
        while (tensors := self._waiting.get()) is not None:
            yield tensors

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        self._shapes, is_new = self._compilations.batch(tensors, self._shapes)
        self._are_new.append(is_new)
        self._waiting.put(list(tensors))

    def begin(self) -> None:
        pass  # the loader's thread begins by itself

    def take(self) -> Sequence[torch.Tensor]:
        self._mark_step()
        taken: list[torch.Tensor] | None = self._loader.next_item(self._device)
        if taken is None:
            raise self._loader._exception_queue.get(timeout=self._DEADLINE_S)
        if self._are_new.popleft():
            reporter().is_compiling = True
        return taken

    def close(self) -> None:
        self._waiting.put(None)
        self._loader.close()
        self._mark_step()


_Shapes = tuple[tuple[int, ...], ...]


def compiled_count() -> int:
    """Return the number of graphs that this process has compiled."""
    import torch_xla.debug.metrics as metrics

    data = metrics.metric_data("CompileTime")
    return int(data[0]) if data else 0


class Compilations:
    """Reports the compilations of one device, and warns if batches of another shape cause them.

    XLA compiles a step for the shapes of its tensors, which takes long, and reuses it for later steps of these shapes.
    """

    def __init__(self) -> None:
        self._count = 0
        self._known: set[_Shapes] = set()
        self._warned: set[str] = set()
        self._last: _Shapes = ()

    def batch(self, tensors: Sequence[torch.Tensor], previous: _Shapes | None) -> tuple[_Shapes, bool]:
        """Record a batch on its way to the device; return its shapes, and True if they are new.

        ``previous`` are the shapes of the batch before it in the same iteration, ``None`` for the first batch.
        """
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        is_new = shapes not in self._known
        if is_new:
            if previous is not None:
                self._warn_once(
                    f"The batch's shape has changed from {_shown(previous)} to {_shown(shapes)}.",
                    "DataLoader(..., drop_last=True), or pad batches to one shape",
                )
            elif self._known:
                self._warn_once(
                    f"This loader's batches have the shape {_shown(shapes)}, and earlier ones {_shown(self._last)}.",
                    "the same batch size for training and evaluation, where memory allows it",
                )
            self._known.add(shapes)
        self._last = shapes
        return shapes, is_new

    def step_ended(self) -> None:
        """Report whether the step that ends here was compiled."""
        before, self._count = self._count, compiled_count()
        reporter().is_compiling = self._count > before

    def _warn_once(self, what: str, fix: str) -> None:
        reporter().recompiled = what
        kind = what.partition(" shape")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            text = f"{what} XLA compiles each step anew for it, which takes as long as the first steps. Fix: {fix}"
            warnings.warn(text, stacklevel=2)


def _shown(shapes: _Shapes) -> str:
    return ", ".join(map(str, shapes)) or "()"


_VISIBLE = "TPU_VISIBLE_CHIPS"
_ADDRESSES = "TPU_PROCESS_ADDRESSES"
# torch_xla sets a missing key, for one process, from the variable that its value names, for the whole machine.
# https://github.com/pytorch/xla/blob/v2.9.0/torch_xla/_internal/tpu.py
_SHAPE = {
    "TPU_PROCESS_BOUNDS": "TPU_HOST_BOUNDS",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "TPU_CHIPS_PER_HOST_BOUNDS",
    "CLOUD_TPU_TASK_ID": "TPU_WORKER_ID",
}
# With fewer than all chips in its bounds, a process leaves the rest to other processes.
# https://github.com/tensorflow/tensorflow/blob/02268826b7ed/tensorflow/core/tpu/tpu_initializer_helper.cc
_ONE_CHIP = {"TPU_PROCESS_BOUNDS": "1,1,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1"}


def _join_devices(place: RankPlace) -> tuple[torch.device, bool]:
    """Return this process's device, and True if PJRT has joined the devices of all ranks.

    PJRT reads the environment once, after torch_xla has added missing variables. But notebook services set some of them
    for a single process that has the whole TPU, with which ranks hang or fail.

    PJRT joins TPU chips of one core. It doesn't join CPUs in place of TPUs. On chips of two cores it would join both
    cores, while each rank computes on one.

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
    """Set the variables that give each rank one chip."""
    environ.update(_ONE_CHIP)
    environ[_VISIBLE] = str(place.local_rank)


def forget_whole_machine(place: RankPlace, environ: MutableMapping[str, str]) -> None:
    """Remove variables that describe one process with the whole TPU, unless they describe one process per rank."""
    is_one_machine = place.world_size == place.local_world_size
    if not is_one_machine or environ.get(_ADDRESSES, "").count(",") + 1 == place.world_size:
        return
    for name in (_ADDRESSES, "TPU_PROCESS_PORT", _VISIBLE):
        environ.pop(name, None)
    for of_process, of_machine in _SHAPE.items():
        if of_process in environ:
            environ[of_machine] = environ.pop(of_process)


_MEMORY_SHARE = 0.5  # the share of the available memory that all ranks together may take at the same time
# All ranks of the machine have this folder, and locking it leaves no file behind.
_LOCKED_FOLDER = pathlib.Path(__file__).parent


def is_memory_short(size_bytes: int, ranks: int) -> bool:
    """Return whether the ranks of this machine lack the memory to each take ``size_bytes`` at the same time."""
    return ranks > 1 and ranks * size_bytes > _MEMORY_SHARE * host_memory.available_bytes()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Return a context whose body only one process of this machine runs at a time.

    It is not a collective: ranks move models in their own time. If a process dies, the system releases its lock.
    """
    fcntl = importlib.import_module("fcntl")  # here, since other systems import this module too
    common = os.open(_LOCKED_FOLDER, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A folder mounted from another machine may have no locks. Then ranks run the body at the same time.
        with contextlib.suppress(OSError):
            fcntl.flock(common, fcntl.LOCK_EX)
        yield
    finally:
        os.close(common)

"""Devices that torch supports itself: CPUs and NVIDIA GPUs."""

from __future__ import annotations

import collections
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from notebook_accel import environment, torch_internals
from notebook_accel.environment import RankPlace
from notebook_accel.errors import TrainingError


class TorchDevice:
    """The part of a ``Backend`` that depends on the device alone, a CPU or a GPU."""

    device: torch.device
    mark_step: Callable[[], None] | None = None

    def memory(self) -> Callable[[], tuple[int, int]] | None:
        if self.device.type != "cuda":
            return None
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        if not environment.is_on(environment.NVML):
            return lambda: (torch.cuda.memory_reserved(self.device), total_bytes)
        return functools.partial(_gpu_memory, self.device, total_bytes)

    def release_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def place_model(self, model: torch.nn.Module) -> None:
        model.to(self.device)

    def place_leaf(self, leaf: torch.Tensor) -> None:
        leaf.data = leaf.data.to(self.device)

    def to_host(self, state: Any) -> Any:
        return state  # torch writes tensors from any device to files

    def uploader(self, *, non_blocking: bool) -> CudaUploader | None:
        has_stream = self.device.type == "cuda" and environment.is_on(environment.COPY_STREAM)
        return CudaUploader(self.device, non_blocking=non_blocking) if has_stream else None

    def computes_in(self, dtype: torch.dtype, *, downcast: bool) -> bool:  # noqa: ARG002  # the interface's signature
        return False

    def seed(self, seed: int) -> None:
        pass

    def generator_state(self) -> Mapping[str, Any]:
        return {"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {}

    def set_generator_state(self, state: Mapping[str, Any]) -> None:
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


class CudaUploader:
    """An ``Uploader`` that copies in a CUDA stream of its own while the GPU computes in another.

    A batch's memory is allocated when the previous batch's backward pass begins, or else when the batch is taken. By
    then the loop has released the batch before the previous one, so at most two are on the GPU.
    """

    def __init__(self, device: torch.device, *, non_blocking: bool) -> None:
        self._device = device
        self._non_blocking = non_blocking
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sent: collections.deque[Sequence[torch.Tensor]] = collections.deque()
        self._begun: collections.deque[tuple[list[torch.Tensor], torch.cuda.Event]] = collections.deque(maxlen=1)

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sent.append(tensors)

    def begin(self) -> None:
        # A graph that is being captured can't contain a copy in another stream; `take` makes the copy then.
        if self._sent and not self._begun and not torch.cuda.is_current_stream_capturing():
            self._upload()

    def _upload(self) -> None:
        tensors = self._sent[0]
        if any(tensor.is_cuda for tensor in tensors):  # a dataset on a GPU may still be computing them
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = [tensor.to(self._device, non_blocking=self._non_blocking) for tensor in tensors]
            self._begun.append((copies, self._stream.record_event()))
        self._sent.popleft()  # only now: the copy fails if the GPU is out of memory

    def take(self) -> Sequence[torch.Tensor]:
        if not self._begun:
            self._upload()
        copies, event = self._begun.popleft()
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(event)
        for tensor in copies:
            if tensor.is_cuda:
                tensor.record_stream(computing)  # its memory was allocated in the other stream
        return copies

    def close(self) -> None:
        self._sent.clear()
        self._begun.clear()


def local_device(place: RankPlace, *, cpu: bool, shared: bool = False) -> torch.device:
    """Return this rank's own GPU, after making it the current one, or the CPU without a GPU or with ``cpu``.

    A rank that sees a single GPU gets that one: ``srun --gpus-per-task=1`` and the like show each rank its own. With
    ``shared``, several ranks use one GPU if there aren't enough, which NCCL doesn't allow.

    Raises:
        TrainingError: This machine has several GPUs, but fewer GPUs than ranks.
    """
    if cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if place.local_rank >= visible > 1 and not shared:
        raise TrainingError(
            f"Rank {place.rank} has no GPU of its own.",
            why=f"This process sees {visible} GPUs, and its local rank is {place.local_rank}, counted from 0.",
            fix=f"num_processes={visible}, or Accelerator(cpu=True), or let ranks share a GPU, which is slower: "
            "oversubscribe=True at the launch",
        )
    device = torch.device("cuda", place.local_rank % visible)
    torch.cuda.set_device(device)
    return device


def utilisation_of(device: torch.device) -> Callable[[], float | None] | None:
    """Return a function that returns a GPU's utilisation in per cent; see ``_asking_nvml``."""
    return _asking_nvml(device, lambda: float(torch.cuda.utilization(device)))


def clock_of(device: torch.device) -> Callable[[], float | None] | None:
    """Return a function that returns a GPU's clock in per cent of its highest; see ``_asking_nvml``."""

    def clock() -> float:
        nvml = importlib.import_module("pynvml")
        handle, kind = torch_internals.nvml_handle(device), nvml.NVML_CLOCK_SM
        return 100 * float(nvml.nvmlDeviceGetClockInfo(handle, kind) / nvml.nvmlDeviceGetMaxClockInfo(handle, kind))

    return _asking_nvml(device, clock)


def _asking_nvml(device: torch.device, ask: Callable[[], float]) -> Callable[[], float | None] | None:
    """Return ``ask``, made to return ``None`` where NVML has no answer, as for a part of a GPU; ``None`` for a CPU."""

    def answer() -> float | None:
        try:
            return ask()
        except Exception:  # noqa: BLE001 - NVML's error classes can't be imported without NVML
            return None

    is_asked = device.type == "cuda" and environment.is_on(environment.NVML)
    return answer if is_asked else None


def _gpu_memory(device: torch.device, total_bytes: int) -> tuple[int, int]:
    """Return a GPU's used and total bytes.

    A thread beside training calls this, so it makes no CUDA call, which could break the capture of a CUDA graph.
    """
    try:
        nvml = importlib.import_module("pynvml")
        memory = nvml.nvmlDeviceGetMemoryInfo(torch_internals.nvml_handle(device))
        return int(memory.used), int(memory.total)
    except Exception:  # noqa: BLE001 - as above. For a part of a GPU, or without NVML: report this process's memory
        return torch.cuda.memory_reserved(device), total_bytes

"""The device that a rank computes on, where torch itself knows it: a CPU or an NVIDIA GPU."""

from __future__ import annotations

import collections
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from notebook_accel.environment import RankPlace
from notebook_accel.errors import TrainingError

__all__ = ["SideStream", "TorchDevice", "local_device", "utilisation_of"]


class TorchDevice:
    """What of a ``Backend`` is a matter of the device alone.

    Attributes:
        device: A CPU or a GPU.
    """

    device: torch.device

    def memory(self) -> Callable[[], tuple[int, int]] | None:
        if self.device.type != "cuda":
            return None
        return functools.partial(_gpu_memory, self.device, torch.cuda.get_device_properties(self.device).total_memory)

    def release_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def place_model(self, model: torch.nn.Module) -> None:
        model.to(self.device)

    def place_leaf(self, leaf: torch.Tensor) -> None:
        leaf.data = leaf.data.to(self.device)

    def to_host(self, state: Any) -> Any:
        return state  # files are written from wherever torch's tensors are

    def uploader(self, *, non_blocking: bool) -> SideStream | None:
        return SideStream(self.device, non_blocking=non_blocking) if self.device.type == "cuda" else None

    def mark_step(self) -> None:
        pass

    def computes_in(self, dtype: torch.dtype, *, downcast: bool) -> bool:  # noqa: ARG002  # the seam's signature
        return False

    def seed(self, seed: int) -> None:
        pass

    def generator_state(self) -> Mapping[str, Any]:
        return {"cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {}

    def set_generator_state(self, state: Mapping[str, Any]) -> None:
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


class SideStream:
    """An ``Uploader`` that copies in a stream of its own, while the GPU computes in another.

    A batch's memory is asked for when the backward pass before it begins, or else when it is taken. By then the loop
    has let go of the batch before the running one, so that two at most are on the GPU.

    Args:
        device: The GPU.
        non_blocking: Don't wait for copies out of pinned memory.
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
        # A copy in another stream can't be part of a graph that is being captured: then it waits for `take`.
        if self._sent and not self._begun and not torch.cuda.is_current_stream_capturing():
            self._upload()

    def _upload(self) -> None:
        tensors = self._sent[0]
        if any(tensor.is_cuda for tensor in tensors):  # of a dataset that is on a GPU, which may still compute them
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = [tensor.to(self._device, non_blocking=self._non_blocking) for tensor in tensors]
            self._begun.append((copies, self._stream.record_event()))
        self._sent.popleft()  # not before: the GPU may have no memory for it just now

    def take(self) -> Sequence[torch.Tensor]:
        if not self._begun:
            self._upload()
        copies, event = self._begun.popleft()
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(event)
        for tensor in copies:
            if tensor.is_cuda:
                tensor.record_stream(computing)  # its memory was asked for in the other stream
        return copies

    def close(self) -> None:
        self._sent.clear()
        self._begun.clear()


def local_device(place: RankPlace, *, cpu: bool, shared: bool = False) -> torch.device:
    """This rank's own GPU, made the current one, or the CPU if there is no GPU or ``cpu`` is asked for.

    A rank that sees one GPU only has that one: ``srun --gpus-per-task=1`` and the like show each rank its own.

    Args:
        place: This rank's place.
        cpu: Compute on the CPU.
        shared: Let several ranks have the same GPU if there aren't enough, which NCCL can't.

    Raises:
        TrainingError: There are several GPUs, but fewer than ranks on this machine.
    """
    if cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if place.local_rank >= visible > 1 and not shared:
        raise TrainingError(
            f"Rank {place.rank} has no GPU of its own.",
            why=f"{visible} visible here, and of the ranks on this machine it is number {place.local_rank}, from 0.",
            fix=f"num_processes={visible}, or Accelerator(cpu=True), or let ranks share a GPU, which is slower: "
            "oversubscribe=True at the launch",
        )
    device = torch.device("cuda", place.local_rank % visible)
    torch.cuda.set_device(device)
    return device


def utilisation_of(device: torch.device) -> Callable[[], float | None] | None:
    """What gives the per cent of time in which a GPU computes, ``None`` for others.

    It gives ``None`` too where NVML doesn't know, as for a part of a GPU.
    """
    return functools.partial(_gpu_utilisation, device) if device.type == "cuda" else None


def _gpu_memory(device: torch.device, total_bytes: int) -> tuple[int, int]:
    """Return a GPU's used and total bytes.

    Called by another thread than the one that trains, and so without a call of CUDA's: that could break the capture of
    a CUDA graph.
    """
    try:
        nvml = importlib.import_module("pynvml")
        memory = nvml.nvmlDeviceGetMemoryInfo(torch.cuda._get_pynvml_handler(device))
        return int(memory.used), int(memory.total)
    except Exception:  # noqa: BLE001 - see below; a part of a GPU, or a container without NVML: what this process has
        return torch.cuda.memory_reserved(device), total_bytes


def _gpu_utilisation(device: torch.device) -> float | None:
    try:
        return float(torch.cuda.utilization(device))
    except Exception:  # noqa: BLE001 - NVML's errors have no class that can be had without it
        return None

"""The transfer of batches to a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel.environment import RankPlace
from notebook_accel.training.backends.devices import CudaUploader
from notebook_accel.training.backends.single_process import SingleProcess
from notebook_accel.training.data import DataLoaderConfiguration, shard_dataloader
from notebook_accel.training.loader_position import ACTIVE_ITERATIONS
from notebook_accel.training.loaders import UploadingFeed


class Cuda:
    """A stand-in for CUDA's streams, which records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.is_capturing = False
        for name in ("Stream", "stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)

    def Stream(self, _: torch.device) -> Cuda:  # noqa: N802
        return self

    @contextlib.contextmanager
    def stream(self, _: Cuda) -> Iterator[None]:
        self.done.append("copy")
        yield

    def current_stream(self, _: torch.device) -> Cuda:
        return self

    def record_event(self) -> str:
        return "event"

    def wait_event(self, event: str) -> None:
        self.done.append(f"wait for {event}")


class OnMeta(SingleProcess):
    """A rank whose batches are copied to the meta device, where no batch is yet, by the uploader for GPUs."""

    def __init__(self) -> None:
        super().__init__(RankPlace(), torch.device("meta"))
        self.uploaders: list[CudaUploader] = []

    def uploader(self, *, non_blocking: bool) -> CudaUploader:
        self.uploaders.append(CudaUploader(self.device, non_blocking=non_blocking))
        return self.uploaders[-1]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_tensors_come_back_to_their_places(cuda: Cuda) -> None:
    feed = UploadingFeed(CudaUploader(torch.device("meta"), non_blocking=True), torch.device("cpu"))
    held = feed.send({"x": (torch.ones(2), "a name"), "y": torch.tensor(3)})
    taken = feed.take(held)
    assert [taken["x"][0].shape, taken["x"][1], taken["y"].shape] == [(2,), "a name", ()]
    assert {taken["x"][0].device.type, taken["y"].device.type} == {"meta"}


def test_batch_is_copied_beside_the_step_before_it_and_two_at_most_are_there(cuda: Cuda) -> None:
    """No GPU is needed: streams are replaced, and batches are copied to the meta device."""
    backend = OnMeta()
    loader = shard_dataloader(
        DataLoader(TensorDataset(torch.arange(10.0)), batch_size=2),
        backend=backend,
        config=DataLoaderConfiguration(),
        device=backend.device,
    )
    alive: list[StorageWeakRef] = []
    for step, [x] in enumerate(loader):
        assert x.device.type == "meta"
        alive = [ref for ref in [*alive, StorageWeakRef(x.untyped_storage())] if not ref.expired()]
        assert len(alive) == 1  # nobody but the loop has one, and the next has not begun
        cuda.done.append(f"step {step}")
        ACTIVE_ITERATIONS.upload_next()  # as a backward pass does
    steps = [what for step in range(5) for what in ("wait for event", f"step {step}", "copy")]
    assert cuda.done == ["copy", *steps[:-1]]
    cuda.done.clear()
    for _ in loader:  # an evaluation: a batch is copied when it is taken, while the GPU still has to compute
        cuda.done.append("step")
    assert cuda.done == ["copy", "wait for event", "step"] * 5
    cuda.done.clear()
    for _ in loader:
        break
    backend.uploaders[-1].begin()  # a break leaves no batch that could be copied
    assert cuda.done == ["copy", "wait for event"]


def test_nothing_is_copied_while_a_graph_is_captured(cuda: Cuda) -> None:
    uploader = CudaUploader(torch.device("meta"), non_blocking=True)
    uploader.send([torch.ones(1)])
    cuda.is_capturing = True
    uploader.begin()
    assert cuda.done == []
    cuda.is_capturing = False
    uploader.begin()
    uploader.begin()
    assert [tensor.shape for tensor in uploader.take()] == [(1,)]
    assert cuda.done == ["copy", "wait for event"]

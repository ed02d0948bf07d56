"""The recorder of a GPU's memory, on a machine without a GPU: torch's allocator is made up."""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import pytest
import torch

from notebook_accel.launching.ranks import recorders
from notebook_accel.launching.ranks.recorders import MemoryRecorder


class Allocator:
    """The history of torch's allocator for CUDA, which records while it is asked to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str = "native", *, is_on: bool = False) -> None:
        self.is_on = is_on
        self.trace = [{"action": "alloc", "addr": 1, "size": 7, "frames": []}]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.is_on, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)

    def record(self, enabled: str | None, **_: Any) -> None:
        self.is_on = enabled is not None

    def snapshot(self) -> dict[str, Any]:
        assert self.is_on  # the end of a recording clears the history
        return {"segments": [], "device_traces": [[], self.trace]}


@pytest.mark.parametrize(("most", "why"), [(100, "it ended"), (1, "it ended; of its allocations, only the last 1 ")])
def test_snapshot_is_written_as_the_viewer_reads_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, most: int, why: str
) -> None:
    monkeypatch.setattr(recorders, "_MOST_ENTRIES", most)
    allocator, path = Allocator(monkeypatch), tmp_path / "snapshot.pickle"
    recorder = MemoryRecorder(str(path))
    assert recorder.begin() == ""
    recorder.stop()
    event = recorder.event(number="1", why="it ended", steps=2)
    assert (event.number, event.steps, event.file, allocator.is_on) == ("1", 2, str(path), False)
    assert event.why.startswith(why)
    assert pickle.loads(path.read_bytes())["device_traces"] == [[], allocator.trace]


def test_memory_is_recorded_on_cuda_only() -> None:
    assert MemoryRecorder("path").begin() == "its code doesn't use CUDA, and torch records no other memory"


@pytest.mark.parametrize(
    ("made", "path", "why"),
    [
        ({"backend": "cudaMallocAsync"}, "path", "torch records no memory of the allocator cudaMallocAsync"),
        ({"is_on": True}, "path", "its code records the history of the allocator itself"),
        ({}, "", "its machine has no log folder for the snapshot"),
    ],
)
def test_memory_that_cannot_be_recorded(
    monkeypatch: pytest.MonkeyPatch, made: dict[str, Any], path: str, why: str
) -> None:
    allocator = Allocator(monkeypatch, **made)
    assert MemoryRecorder(path).begin() == why
    assert allocator.is_on == made.get("is_on", False)  # nothing of the program's is changed

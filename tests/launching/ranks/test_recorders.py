"""The allocations that hold a GPU's memory, read from snapshots of torch's allocator in their documented form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_accel.launching.ranks import recorders
from notebook_accel.launching.ranks.recorders import held_at_peak

_MIB = 1 << 20
_TORCH = {"filename": torch.nn.Linear.__init__.__code__.co_filename, "line": 130, "name": "forward"}


def users(line: int) -> dict[str, Any]:
    return {"filename": __file__, "line": line, "name": "step"}


def alloc(address: int, size: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": size, "stream": 0, "frames": list(frames)}


def free(address: int, size: int) -> list[dict[str, Any]]:
    actions = ("free_requested", "free_completed")
    return [{"action": action, "addr": address, "size": size, "stream": 0} for action in actions]


def snapshot(*entries: dict[str, Any], active_bytes: int) -> dict[str, Any]:
    """A snapshot of two GPUs, of which the second has this history, and this memory in use at its end."""
    segments = [
        {"device": device, "address": 4096, "total_size": 64 * _MIB, "active_size": size, "blocks": []}
        for device, size in ((0, 5 * _MIB), (1, active_bytes), (1, 0))
    ]
    return {"segments": segments, "device_traces": [[alloc(7, _MIB)], list(entries)]}


def test_lines_hold_what_they_had_made_at_the_peak() -> None:
    found = snapshot(
        {"action": "segment_alloc", "addr": 4096, "size": 64 * _MIB, "stream": 0},
        alloc(1, 4 * _MIB, _TORCH, users(11), users(80)),  # the user's innermost line
        *free(90, 3 * _MIB),  # was there before
        alloc(2, 6 * _MIB, users(13)),
        alloc(3, 1 * _MIB),  # by a thread without Python
        *free(1, 4 * _MIB),
        alloc(4, 2 * _MIB, users(14)),
        *free(2, 6 * _MIB),
        active_bytes=13 * _MIB,
    )
    peak_bytes, held, is_whole = held_at_peak(found, 1)
    # 13 at the end, of which 3 were made since; so 13 were there at the begin, of which 3 were freed.
    assert peak_bytes == 21 * _MIB
    assert {place: size // _MIB for (place, _), size in held.items()} == {
        "": 10,
        f"{__file__}, line 11": 4,
        f"{__file__}, line 13": 6,
        "library code": 1,
    }
    assert ("", "") in held
    assert (f"{__file__}, line 11", "from notebook_accel.launching.ranks.recorders import held_at_peak") in held
    assert is_whole


def test_address_that_is_used_again_belongs_to_its_latest_line() -> None:
    entries = [alloc(1, _MIB, users(11)), *free(1, _MIB), alloc(1, 2 * _MIB, users(13))]
    peak_bytes, held, _ = held_at_peak(snapshot(*entries, active_bytes=2 * _MIB), 1)
    assert peak_bytes == 2 * _MIB
    assert {place: size for (place, _), size in held.items() if size} == {f"{__file__}, line 13": 2 * _MIB}


def test_memory_that_only_fell_was_at_its_peak_at_the_begin() -> None:
    peak_bytes, held, _ = held_at_peak(snapshot(*free(90, _MIB), active_bytes=2 * _MIB), 1)
    assert (peak_bytes, dict(held)) == (3 * _MIB, {("", ""): 3 * _MIB})


def test_history_that_was_overwritten_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "_MOST_ENTRIES", 3)
    recorder = recorders.AllocatorRecorder()
    recorder._device = 1
    recorder._snapshot = snapshot(alloc(1, _MIB, users(11)), *free(1, _MIB), active_bytes=_MIB)
    event = recorder.event(number="1", why="", steps=2)
    assert "only the last" in event.why
    assert (event.steps, event.peak_bytes) == (2, 2 * _MIB)
    assert [(held.place, held.size_bytes) for held in event.held] == [("", _MIB), (f"{__file__}, line 11", _MIB)]


def test_without_a_gpu_the_tensors_are_recorded() -> None:
    assert isinstance(recorders.memory_recorder(), recorders.MemoryRecorder)

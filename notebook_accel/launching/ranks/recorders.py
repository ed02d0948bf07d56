"""Recorders of a rank's next steps: of where their time goes, with torch's profiler, and of a GPU's memory.

Memory is recorded by torch's allocator, which notes each allocation and each free with the running Python lines. Its
snapshot is for the viewer at https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import collections
import os
import pathlib
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from notebook_accel import torch_internals
from notebook_accel.launching import traces
from notebook_accel.launching.ranks import progress
from notebook_accel.launching.ranks.phases import Line, running_line
from notebook_accel.protocol import events

_SAMPLE_PERIOD_S = 0.002
_MOST_LINES = 12
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"
_MOST_ENTRIES = 100_000  # of the allocator's history, some kilobytes each


class Recorder:
    """Records a few steps. All methods but ``event`` are called in the thread that trains.

    Attributes:
        warmup_steps: Number of steps after ``begin`` that don't count.
    """

    warmup_steps = 0

    def begin(self) -> str:
        """Start recording. Return the reason if that is impossible, else an empty text."""
        raise NotImplementedError

    def step(self, done: int) -> None:
        """Count a finished step; ``done`` steps are finished now."""

    def stop(self) -> None:
        """Stop recording."""
        raise NotImplementedError

    def event(self, *, number: str, why: str, steps: int) -> events.Profiled:
        """Return the recording as the answer to a request.

        Raises:
            OSError: There is no room for the file.
            ValueError: The trace can't be read.
        """
        raise NotImplementedError


class StepRecorder(Recorder):
    """Records the time of steps with torch's profiler. ``path`` is the trace file to write; empty for none."""

    warmup_steps = 1  # of torch's profiler

    def __init__(self, steps: int, path: str) -> None:
        self._steps = steps
        self._path = path
        self._profiler: Any = None
        self._lines: collections.Counter[Line] = collections.Counter()
        self._is_over = threading.Event()
        self._sampler = threading.Thread(target=self._sample_lines, name="notebook-accel-lines", daemon=True)
        self._marks: list[traces.Mark] = []

    def begin(self) -> str:
        torch = sys.modules["torch"]
        if torch_internals.is_profiled():
            return "its code runs a profiler itself"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=self._steps, repeat=1)
        is_ours = _LOG_LEVEL not in os.environ
        if is_ours:  # the profiler's library would write to the rank's output when it starts and stops
            os.environ[_LOG_LEVEL] = _SILENT
        try:
            profiler = torch.profiler.profile(activities=activities, schedule=schedule)
            profiler.start()
        except RuntimeError as error:  # for example, another tool uses the GPU's only profiling interface
            return f"torch's profiler can't be started: {error}"
        finally:
            if is_ours:
                del os.environ[_LOG_LEVEL]
        self._profiler = profiler
        return ""

    def step(self, done: int) -> None:
        if done < self._steps:
            self._profiler.step()
        if done == 0:
            clock = progress.PROGRESS.clock
            if clock is not None:
                clock.begin_trail()
            self._sampler.start()

    def stop(self) -> None:
        self._profiler.stop()
        self._is_over.set()
        if self._sampler.is_alive():
            self._sampler.join()
        clock = progress.PROGRESS.clock
        if clock is not None:
            ahead_s = time.time() - time.perf_counter()
            self._marks = [((now_s + ahead_s) * 1e6, phase) for now_s, phase in clock.end_trail()]

    def event(self, *, number: str, why: str, steps: int) -> events.Profiled:
        with tempfile.TemporaryDirectory(prefix="notebook-accel-profile-") as folder:
            path = pathlib.Path(self._path or f"{folder}/trace.json")
            self._profiler.export_chrome_trace(str(path))
            self._profiler = None
            found = traces.digest(path, self._marks, steps)
        return events.Profiled(
            number=number,
            why=why,
            steps=found.steps,
            age_s=time.time() - found.begin_s,
            spans=found.spans,
            operators=found.operators,
            lines=[events.SampledLine(*line, samples=count) for line, count in self._lines.most_common(_MOST_LINES)],
            samples=self._lines.total(),
            file=self._path,
        )

    def _sample_lines(self) -> None:
        clock = progress.PROGRESS.clock
        while not self._is_over.wait(_SAMPLE_PERIOD_S):
            line = ("" if clock is None else clock.phase, *running_line())
            self._lines[line] += 1


class MemoryRecorder(Recorder):
    """Records a GPU's memory, as ``torch.cuda.memory._dump_snapshot`` writes it. ``path`` is the file to write.

    Compiled code and libraries that take their memory from the allocator, such as cuBLAS, count too. Backward passes
    run in threads without Python, so their memory belongs to no line.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._snapshot: Mapping[str, Any] = {}

    def begin(self) -> str:
        torch = sys.modules["torch"]
        if not torch.cuda.is_initialized():
            return "its code doesn't use CUDA, and torch records no other memory"
        if (allocator := torch.cuda.get_allocator_backend()) != "native":
            return f"torch records no memory of the allocator {allocator}"
        if torch_internals.is_memory_recorded():  # there is only one history
            return "its code records the history of the allocator itself"
        if not self._path:
            return "its machine has no log folder for the snapshot"
        torch_internals.record_memory(_MOST_ENTRIES)
        return ""

    def stop(self) -> None:
        self._snapshot = torch_internals.recorded_memory()

    def event(self, *, number: str, why: str, steps: int) -> events.Profiled:
        with open(self._path, "wb") as file:
            pickle.dump(self._snapshot, file)
        is_whole = all(len(trace) < _MOST_ENTRIES for trace in self._snapshot["device_traces"])
        cut = "" if is_whole else f"of its allocations, only the last {_MOST_ENTRIES:,} were recorded"
        why = "; ".join(filter(None, [why, cut]))
        return events.Profiled(number=number, why=why, steps=steps, file=self._path)

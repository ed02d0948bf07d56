"""Recorders of a rank's next steps: of where their time goes, and of which lines hold the memory at its peak.

Time is recorded with torch's profiler. On a GPU, torch's allocator records each allocation and each free with the
running Python line. Elsewhere a mode of torch's dispatcher sees each operator with its tensors. A tensor's memory
belongs to the line that made it, until no tensor uses the memory. Older tensors are known from the first operator that
uses them.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
import pathlib
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from notebook_accel import code_places
from notebook_accel.launching import traces
from notebook_accel.launching.ranks import loops
from notebook_accel.launching.ranks.phases import Line, compiled_graphs, line_of, place_of, running_line
from notebook_accel.protocol import events

_SAMPLE_PERIOD_S = 0.002
_MOST_LINES = 12
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"
_MOST_HELD = 20  # lines that hold memory
_MOST_ENTRIES = 100_000  # of the allocator's history, some kilobytes each
_BEFORE = ("", "")  # place and text for tensors from before the recording
_LIBRARY = ("library code", "")
_COMPILED = "what torch.compile has compiled runs uncompiled in these steps, so its memory is that of the plain code"
_WRAPPED = (
    f"of its allocations, only the last {_MOST_ENTRIES:,} were recorded; what was made before is larger than it was"
)

_HeldLine = tuple[str, str]
"""Place and text of a line that holds memory."""


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
            OSError: There is no room for the trace.
            ValueError: The trace can't be read.
        """
        raise NotImplementedError


class StepRecorder(Recorder):
    """Records the time of steps with torch's profiler. ``trace`` is the path of the file to write; empty for none."""

    warmup_steps = 1  # of torch's profiler

    def __init__(self, steps: int, trace: str) -> None:
        self._steps = steps
        self._trace = trace
        self._profiler: Any = None
        self._lines: collections.Counter[Line] = collections.Counter()
        self._is_over = threading.Event()
        self._sampler = threading.Thread(target=self._sample_lines, name="notebook-accel-lines", daemon=True)
        self._marks: list[traces.Mark] = []

    def begin(self) -> str:
        torch = sys.modules["torch"]
        if torch.autograd._profiler_enabled():
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
            clock = loops.LOOPS.clock
            if clock is not None:
                clock.begin_trail()
            self._sampler.start()

    def stop(self) -> None:
        self._profiler.stop()
        self._is_over.set()
        if self._sampler.is_alive():
            self._sampler.join()
        clock = loops.LOOPS.clock
        if clock is not None:
            ahead_s = time.time() - time.perf_counter()
            self._marks = [((now_s + ahead_s) * 1e6, phase) for now_s, phase in clock.end_trail()]

    def event(self, *, number: str, why: str, steps: int) -> events.Profiled:
        with tempfile.TemporaryDirectory(prefix="notebook-accel-profile-") as folder:
            path = pathlib.Path(self._trace or f"{folder}/trace.json")
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
            trace=self._trace,
        )

    def _sample_lines(self) -> None:
        clock = loops.LOOPS.clock
        while not self._is_over.wait(_SAMPLE_PERIOD_S):
            line = ("" if clock is None else clock.phase, *running_line())
            self._lines[line] += 1


def memory_recorder() -> Recorder:
    """Return the recorder for this rank's device."""
    torch = sys.modules["torch"]
    # Another allocator has no history, and there is only one history, which the user's code may be recording.
    if (
        torch.cuda.is_initialized()
        and torch.cuda.get_allocator_backend() == "native"
        and not torch._C._cuda_isHistoryEnabled()
    ):
        return AllocatorRecorder()
    return MemoryRecorder()


class AllocatorRecorder(Recorder):
    """Records which lines hold a GPU's memory, by the history of torch's allocator.

    Compiled code and libraries that take their memory from the allocator, such as cuBLAS, count too. Backward passes
    run in threads without Python, so their memory belongs to no line.
    """

    def __init__(self) -> None:
        self._device = 0
        self._snapshot: Mapping[str, Any] = {}

    def begin(self) -> str:
        cuda = sys.modules["torch"].cuda
        self._device = cuda.current_device()
        options = {"context": "alloc", "stacks": "python", "max_entries": _MOST_ENTRIES, "clear_history": True}
        cuda.memory._record_memory_history("all", **options)
        return ""

    def stop(self) -> None:
        memory = sys.modules["torch"].cuda.memory
        self._snapshot = memory._snapshot()
        memory._record_memory_history(None)

    def event(self, *, number: str, why: str, steps: int) -> events.Profiled:
        peak_bytes, held, is_whole = held_at_peak(self._snapshot, self._device)
        notes = "; ".join(filter(None, [why, "" if is_whole else _WRAPPED]))
        return _event(number, notes, steps, peak_bytes, held)


def held_at_peak(snapshot: Mapping[str, Any], device: int) -> tuple[int, collections.Counter[_HeldLine], bool]:
    """Return the peak of a GPU's memory in bytes, each line's bytes at the peak, and whether the history is whole.

    Args:
        snapshot: A snapshot in the form of ``torch.cuda.memory._snapshot``.
        device: The GPU's number.
    """
    segments = [segment for segment in snapshot["segments"] if segment.get("device", device) == device]
    trace = [entry for entry in snapshot["device_traces"][device] if entry["action"] in ("alloc", "free_completed")]
    sizes = [entry["size"] if entry["action"] == "alloc" else -entry["size"] for entry in trace]
    began_bytes = sum(segment["active_size"] for segment in segments) - sum(sizes)
    totals = [*itertools.accumulate(sizes, initial=began_bytes)]
    peak_bytes = max(totals)
    held, lines = collections.Counter({_BEFORE: began_bytes}), dict[int, _HeldLine]()
    for entry, size in zip(trace[: totals.index(peak_bytes)], sizes, strict=False):
        if entry["action"] == "alloc":
            lines[entry["addr"]] = _line_in(entry.get("frames", ()))
            held[lines[entry["addr"]]] += size
        else:
            held[lines.pop(entry["addr"], _BEFORE)] += size
    return peak_bytes, held, len(snapshot["device_traces"][device]) < _MOST_ENTRIES


def _line_in(frames: Iterable[Mapping[str, Any]]) -> _HeldLine:
    """Return the user's innermost line in a stack that begins with the innermost frame."""
    users = (frame for frame in frames if code_places.is_the_users(frame["filename"]))
    frame = next(users, None)
    return _LIBRARY if frame is None else line_of(frame["filename"], frame["line"])


def _event(number: str, why: str, steps: int, peak_bytes: int, held: collections.Counter[_HeldLine]) -> events.Profiled:
    lines = [events.HeldMemory(*line, size) for line, size in held.most_common(_MOST_HELD) if size]
    return events.Profiled(number=number, why=why, steps=steps, peak_bytes=peak_bytes, held=lines)


class MemoryRecorder(Recorder):
    """Records the bytes of tensors, in the thread that trains and in the threads of its backward passes.

    Memory of libraries such as cuBLAS and NCCL isn't included.
    """

    def __init__(self) -> None:
        self._tensors = _Tensors()
        self._mode: Any = None

    def begin(self) -> str:
        # Modes form a stack, and leaving a mode pops the top one.
        if _modes():
            return "its code runs in a mode of torch's dispatcher itself, such as FlopCounterMode"
        self._tensors.is_on = True
        self._mode = _mode_class()(self._tensors)
        self._mode.__enter__()
        return ""

    def stop(self) -> None:
        self._tensors.is_on = False
        # If the user's code has put another mode on top, this one stays and does nothing.
        if _modes()[-1:] == [self._mode]:
            self._mode.__exit__(None, None, None)
        self._mode = None

    def event(self, *, number: str, why: str, steps: int) -> events.Profiled:
        notes = [why, _COMPILED if compiled_graphs() else ""]
        return _event(number, "; ".join(filter(None, notes)), steps, self._tensors.peak_bytes, self._tensors.at_peak)


def _modes() -> list[Any]:
    return list(sys.modules["torch.utils._python_dispatch"]._get_current_dispatch_mode_stack())


class _Tensors:
    """The memory of tensors by the line that made them.

    Attributes:
        is_on: True while they are recorded.
        peak_bytes: Most bytes at one time.
        at_peak: The bytes of each line at that time.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.peak_bytes = 0
        self.at_peak: collections.Counter[_HeldLine] = collections.Counter()
        self._bytes = 0
        self._by_line: collections.Counter[_HeldLine] = collections.Counter()
        self._held: dict[int, tuple[weakref.ref[Any], int, _HeldLine]] = {}  # by the id of the storage
        self._freed: collections.deque[int] = collections.deque()
        self._device = "cuda" if sys.modules["torch"].cuda.is_initialized() else "cpu"
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """True where tensors are recorded; false in a fork, such as a worker of a loader."""
        return self.is_on and self._pid == os.getpid()

    def take(self, tensors: Any, line: _HeldLine) -> None:
        """Add the new tensors in a structure, and remove those that were freed meanwhile."""
        for storage in _storages(tensors):
            # Storages may be freed at any time and in any thread. Here they are removed, in their order.
            while self._freed:
                _, size, of_line = self._held.pop(self._freed.popleft())
                self._bytes -= size
                self._by_line[of_line] -= size
            number = id(storage)
            if number not in self._held and storage.device.type == self._device:
                size = storage.nbytes()
                gone = functools.partial(_append, self._freed, number)
                self._held[number] = (weakref.ref(storage, gone), size, line)
                self._bytes += size
                self._by_line[line] += size
        if self._bytes > self.peak_bytes:
            self.peak_bytes, self.at_peak = self._bytes, self._by_line.copy()


def _append(freed: collections.deque[int], number: int, _: object) -> None:
    freed.append(number)


def _storages(structure: Any) -> Iterator[Any]:
    """Yield the storage of each tensor in a structure, and of the tensors inside a DTensor and the like."""
    torch = sys.modules["torch"]
    for item in sys.modules["torch.utils._pytree"].tree_leaves(structure):
        if isinstance(item, torch.Tensor):
            if hasattr(item, "__tensor_flatten__"):
                yield from _storages([getattr(item, name) for name in item.__tensor_flatten__()[0]])
            elif item.layout == torch.strided:
                yield item.untyped_storage()


def _running_line() -> _HeldLine:
    """Return the user's running line: the main thread's, also for a GPU's backward passes in threads of their own."""
    main = threading.main_thread().ident or 0
    # A variable with this function's own frame would be a cycle, which keeps the tensors until garbage collection.
    is_here = threading.get_ident() == main
    _, place, text = place_of(sys._getframe() if is_here else sys._current_frames()[main])
    return (place, text) if place else _LIBRARY


@functools.cache
def _mode_class() -> Any:
    base: Any = sys.modules["torch.utils._python_dispatch"].TorchDispatchMode

    class MemoryMode(base):  # type: ignore[misc]  # torch isn't imported above
        """Records the tensors of each operator."""

        supports_higher_order_operators = True

        def __init__(self, tensors: _Tensors) -> None:
            super().__init__()
            self._tensors = tensors

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not self._tensors.is_here:
                return func(*args, **(kwargs or {}))
            self._tensors.take((args, kwargs), _BEFORE)
            result = func(*args, **(kwargs or {}))
            self._tensors.take(result, _running_line())
            return result

    return MemoryMode

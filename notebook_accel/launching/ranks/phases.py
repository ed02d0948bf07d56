"""Measures where the time of a rank's steps goes, by phases that add up to the wall time.

The hooks of ``torch_hooks`` tell the clock when a phase begins, in the main thread. On CUDA the clock also marks some
steps with events of the device, which it reads after the device has passed them, so nothing ever waits for the device.
The reporter's thread samples the main thread's frames twenty times a second, to assign times to the user's lines.
"""

from __future__ import annotations

import collections
import copy
import linecache
import statistics
import sys
import threading
import time
import types
import weakref
from collections.abc import Mapping
from typing import Any

from notebook_accel import code_places, environment, host_memory, reporting, torch_internals
from notebook_accel.formatting import plain_text
from notebook_accel.protocol import events

_SEND_PERIOD_S = 1.0
# Measuring takes 4 µs of a step, or some 12 µs if the step's own work has emptied the processor's caches. So above
# this rate only some steps are measured, each time followed by a pause of several times as long.
_ALL_PER_S = 200
_MEASURED_S = 0.05  # between two samples
_LONGEST_PAUSE_S = 0.75
_MOST_LINES = 12
# Exchanges whose duration is known. DDP measures only each hundredth on CUDA, so the last ones may be minutes old.
_FEWEST_EXPOSED, _MOST_EXPOSED = 10, 64
_EXPOSED_S = 30.0  # since one of more than the fewest
_MOST_TEXT = 120
_COPIES = (".to(", ".cuda(")
_COPYING = ("", "to", "cuda")  # functions called by such a line while it copies
# Parts of the paths of library code, and a thread's activity there.
_ACTIVITIES = (
    ("/torch/_dynamo/", "compiling"),
    ("/torch/_inductor/", "compiling"),
    ("/torch/serialization.py", "saving"),
    ("/torch/distributed/checkpoint/", "saving"),
    ("/safetensors/", "saving"),
    ("/notebook_accel/training/checkpoint", "saving"),
    ("/torch/distributed/", "communication"),
)
# Functions of libraries that save checkpoints, which do more than writing tensors.
_SAVING = frozenset(
    ("save_checkpoint", "_save_checkpoint", "save_model", "save_pretrained", "save_state", "_rotate_checkpoints")
)
_WRAPPER_FILE = "/torch/distributed/c10d_logger.py"

Line = tuple[str, str, str, str]
"""Phase, activity, place and text, as in ``events.SampledLine``."""


class StepClock:
    """The phases of this rank's steps.

    The main thread calls ``enter`` and ``begin_step``; the reporter's thread calls ``sample``.

    Attributes:
        phase: The running phase; empty while no loop runs.
        is_on: True while phases are measured. Of very fast steps only some are.
        is_marking: True while a step is marked on the device.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.is_on = True
        self.is_marking = False
        self._paused_until_s = 0.0  # 0 while all steps are measured
        self._is_pause_due = False  # the main thread is to stop measuring for a while
        self._paused_since_s = 0.0
        self._resumed_s = 0.0  # the end of a pause, until the first phase after it begins
        self._times = dict.fromkeys(events.PHASES, 0.0)
        self._since_s = time.perf_counter()
        self._counts = _Counts()
        self._device = _DeviceClock()
        self._marks_steps = environment.is_on(environment.CUDA_TELEMETRY)
        self._sent_s = self._since_s
        self._cores: host_memory.CoreWatch | None = None  # from the first sample on
        self._times_sent: Mapping[str, float] = {}
        self._sending = threading.Lock()
        self._is_examination_due = True  # the main thread is to look at its loader, and to pause if that is due
        self._model: weakref.ref[Any] | None = None  # the latest DistributedDataParallel model
        self._seen_comm: Any = None
        self._lines: collections.Counter[Line] = collections.Counter()
        self._trail: list[tuple[float, str]] | None = None

    def start(self) -> None:
        """Start measuring, in the process of a rank."""
        reporter = reporting.reporter()
        reporter.at_tick = self.sample
        reporter.at_close.append(self.stop)

    # In the main thread -----------------------------------------------------------------------------------------------

    def enter(self, phase: str) -> float:
        """End the running phase, begin another, and return the time."""
        now_s = time.perf_counter()
        if self.phase:
            self._times[self.phase] += now_s - self._since_s
        elif self._resumed_s:
            self._add_gap(now_s)
        self._since_s, self.phase = now_s, phase
        if self._trail is not None:
            self._trail.append((now_s, phase))
        if self.is_marking:
            self._device.mark(phase)
        return now_s

    def _add_gap(self, now_s: float) -> None:
        """Add the time between the end of a pause and now: the rest of a step, or something longer around the steps."""
        gap_s, self._resumed_s = now_s - self._resumed_s, 0.0
        if gap_s < _MEASURED_S:
            self._counts.paused_s += gap_s
        else:
            self._times["other"] += gap_s

    def begin_step(self, workers: int | None, is_stream: bool = False) -> None:
        """Begin a step. Only some steps are examined closely.

        Args:
            workers: Number of the loader's worker processes, ``None`` without a loader.
            is_stream: The loader's dataset is an ``IterableDataset``.
        """
        self._counts.steps += 1
        if self._is_examination_due or self.is_marking:
            self._examine_step(workers, is_stream)

    def _examine_step(self, workers: int | None, is_stream: bool) -> None:
        if self._is_pause_due and not self.is_marking and self._trail is None:
            self._paused_since_s = self.enter("")
            self._is_pause_due = self.is_on = False
            return
        if self._is_examination_due:
            self._is_examination_due = False
            self._counts.workers, self._counts.is_stream = workers, is_stream
        is_on_cuda = self._marks_steps and sys.modules["torch"].cuda.is_initialized()
        self.is_marking = is_on_cuda and self._device.begin_step(self.phase)

    def begin_trail(self) -> None:
        """Record each phase with its start time, until ``end_trail``."""
        self._resume()
        self._trail = [(time.perf_counter(), self.phase)]

    def end_trail(self) -> list[tuple[float, str]]:
        """Return the phases since ``begin_trail``, each with the ``time.perf_counter()`` of its start."""
        trail, self._trail = self._trail, None
        return trail or []

    def stop(self) -> None:
        """Send the times, and stop the clock until the next phase begins. The running phase belongs to no step."""
        self.phase = ""
        self._resume()
        if self._resumed_s:
            self._add_gap(time.perf_counter())
        self.send()
        self._lines.clear()

    def begin_evaluation(self) -> None:
        """Count the start of an evaluation."""
        self._counts.evaluations += 1

    def add_start(self, took_s: float) -> None:
        """Add a time for which a training loop waited for workers that had to start."""
        self._counts.starting_s += took_s

    def add_model(self, model: Any) -> None:
        """Register a ``DistributedDataParallel`` model, whose own measurements tell communication from computing."""
        self._model = weakref.ref(model)
        self._counts.recent_exposed.clear()  # another model's gradients may be smaller
        if model.device_type == "cpu":  # on other devices a measurement can wait for the device
            torch_internals.measure_exchanges(model)

    def end_backward(self, took_s: float) -> None:
        """Add the duration of a backward pass, and now and then read the communication time of an earlier one."""
        counts = self._counts
        counts.backward_s += took_s
        model = None if self._model is None else self._model()
        if model is None or not model.require_backward_grad_sync:  # gradients are accumulated, without an exchange
            return
        counts.exchanges += 1
        if counts.is_reading_due:
            counts.is_reading_due = False
            self._read_communication(model)

    def _read_communication(self, model: Any) -> None:
        """Read the model's measurement of its last exchange of gradients but one."""
        numbers = torch_internals.measured_exchange(model)
        self._counts.gradient_bytes = numbers.get("total_parameter_size_bytes", 0)
        ended = numbers.get("backward_comm_time_end")
        if ended is None or ended == self._seen_comm:
            return
        self._seen_comm = ended
        exposed_ns = numbers.get("backward_comm_time", 0) - numbers.get("backward_compute_comm_overlap_time", 0)
        self._counts.add_exchange(max(exposed_ns, 0) / 1e9)

    # In the reporter's thread -----------------------------------------------------------------------------------------

    def sample(self) -> bool:
        """Sample the main thread's line, and send the times about once a second.

        Returns:
            False during a pause, when samples are pointless.
        """
        self._is_examination_due = self._counts.is_reading_due = True
        self._cores = self._cores or host_memory.CoreWatch()
        now_s = time.perf_counter()
        if self._paused_until_s:
            if now_s >= self._paused_until_s:
                self._resume()
        elif self.is_on and (times := self._counts.steps_per_s() / _ALL_PER_S) > 1:
            self._is_pause_due, self._paused_until_s = True, now_s + min(times * _MEASURED_S, _LONGEST_PAUSE_S)
        phase = self.phase
        if phase:
            line = (phase, *running_line())
            self._lines[line] += 1
        if now_s - self._sent_s >= _SEND_PERIOD_S:
            self.send()
        return not self._paused_until_s

    def _resume(self) -> None:
        """Resume measuring after a pause. The main thread reports no phases until then."""
        self._is_pause_due, self._paused_until_s = False, 0.0
        if not self.is_on:
            self._resumed_s = self._counts.end_pause(self._paused_since_s)
            self.is_on = True

    def send(self) -> None:
        """Send the times since the last call, if a step was done since."""
        with self._sending:
            self._send()

    def _send(self) -> None:
        counts = self._counts
        if not counts.steps:
            return
        self._counts = counts.followed()
        times = dict(self._times)
        now_s = time.perf_counter()
        if self.phase:  # the running phase goes on; its part that is sent now isn't sent again
            times[self.phase] += now_s - self._since_s
        lines, self._lines = self._lines, collections.Counter()
        seconds = {name: max(0.0, times[name] - self._times_sent.get(name, 0.0)) for name in times}
        self._times_sent, self._sent_s = times, now_s
        seconds = self._device.divided(seconds)
        counts.split_backward(seconds)
        _split_by_samples(seconds, lines)
        counts.add_unmeasured_steps(seconds)
        queued = 0.0 if self._cores is None else self._cores.take()
        reporting.reporter().post(counts.event(seconds, lines, queued, is_on_device=self._device.has_measured))


class _Counts:
    """The counts between two sends.

    Attributes:
        is_reading_due: True if the main thread is to read the communication time.
        backward_s: Duration of all backward passes.
        exchanges: Number of backward passes that exchange gradients.
        exposed_s: Measured durations of exchanges, as far as nothing is computed meanwhile.
        recent_exposed: When each of the last ones was read, and its duration, also of earlier sends.
    """

    def __init__(self) -> None:
        # These values carry over from one send to the next.
        self.workers: int | None = None
        self.is_stream = False
        self.gradient_bytes = 0
        self.recent_exposed: collections.deque[tuple[float, float]] = collections.deque(maxlen=_MOST_EXPOSED)
        self._exposed_before_s = 0.0
        self.exposed_s: list[float] = []
        self._begin()

    def followed(self) -> _Counts:
        """Return counts for the time until the next send."""
        following = copy.copy(self)
        following._begin()
        return following

    def _begin(self) -> None:
        """Set all other values to those of the beginning."""
        self._exposed_before_s, self.exposed_s = self._mean_exposed_s, []
        self.is_reading_due = True
        self.steps = self.evaluations = self.exchanges = 0
        self.paused_s = self.starting_s = self.backward_s = 0.0
        self._measured_from = (0, time.perf_counter())  # steps and time at the end of the last pause
        self.graphs_before = torch_internals.compiled_graphs()
        self.xla_before, self.xla_before_s = _xla_compilations()

    def end_pause(self, began_s: float) -> float:
        """Count a pause that ends now, and return the time."""
        now_s = time.perf_counter()
        self.paused_s += now_s - began_s
        self._measured_from = (self.steps, now_s)
        return now_s

    def steps_per_s(self) -> float:
        """Return the steps a second since the last pause."""
        steps, since_s = self._measured_from
        return (self.steps - steps) / max(time.perf_counter() - since_s, 1e-3)

    @property
    def _mean_exposed_s(self) -> float:
        # With few exchanges, the measurement of one may only be there after the next send.
        return statistics.fmean(self.exposed_s) if self.exposed_s else self._exposed_before_s

    def add_exchange(self, exposed_s: float) -> None:
        """Add the measured duration of an exchange."""
        self.exposed_s.append(exposed_s)
        now_s, recent = time.monotonic(), self.recent_exposed
        recent.append((now_s, exposed_s))
        while len(recent) > _FEWEST_EXPOSED and recent[0][0] < now_s - _EXPOSED_S:
            recent.popleft()

    def split_backward(self, seconds: dict[str, float]) -> None:
        """Move communication from the backward pass to its own phase, and waiting for ranks that are late in turns.

        Any rank is the last to arrive in some of its steps if no single one is late. Then it waits for nobody.
        """
        if not self.backward_s or not (mean_s := self._mean_exposed_s):
            return
        exposed_s = seconds["backward"] * min(1.0, self.exchanges * mean_s / self.backward_s)
        seconds["backward"] -= exposed_s
        recent_s = sorted(recent_s for _, recent_s in tuple(self.recent_exposed)) or [mean_s]
        last_to_arrive_s = recent_s[len(recent_s) // 10]
        communication_s = exposed_s * min(1.0, last_to_arrive_s / mean_s)
        seconds["communication"] += communication_s
        seconds[events.WAITING] += exposed_s - communication_s

    def add_unmeasured_steps(self, seconds: dict[str, float]) -> None:
        """Add the steps that weren't measured, assuming that they were like the others."""
        measured_s = sum(seconds.values())
        if self.paused_s and measured_s:
            factor = 1 + self.paused_s / measured_s
            self.steps = round(self.steps * factor)
            for phase in seconds:
                seconds[phase] *= factor

    def event(
        self, seconds: dict[str, float], lines: collections.Counter[Line], queued: float, *, is_on_device: bool
    ) -> events.StepTimes:
        """Return the counts as an event; ``queued`` is the share of the time in which a thread waited for a core."""
        wall_s, (xla, xla_s) = sum(seconds.values()), _xla_compilations()
        graphs, xla = max(0, torch_internals.compiled_graphs() - self.graphs_before), xla - self.xla_before
        recompiled = torch_internals.last_recompilation() if graphs else ""
        if xla:  # the next compilation may have another reason
            recompiled, reporting.reporter().recompiled = reporting.reporter().recompiled, ""
        compiling = sum(count for line, count in lines.items() if line[1] == "compiling") / max(sum(lines.values()), 1)
        return events.StepTimes(
            steps=self.steps,
            seconds=seconds,
            evaluations=self.evaluations,
            compilations=graphs + xla,
            # XLA may also have compiled before the first step, or between two loops.
            compiling_s=min(compiling * wall_s + xla_s - self.xla_before_s, wall_s),
            recompiled=plain_text(recompiled.partition("\n")[0])[:_MOST_TEXT].rstrip("."),
            workers=self.workers,
            is_stream=self.is_stream,
            starting_s=self.starting_s,
            cores=host_memory.cores(),
            gradient_bytes=self.gradient_bytes,
            is_on_device=is_on_device,
            queued_s=queued * wall_s,
            samples=sum(lines.values()),
            lines=[events.SampledLine(*line, samples=count) for line, count in lines.most_common(_MOST_LINES)],
        )


class _DeviceClock:
    """Measures the phases of steps on CUDA, with CUDA's events. One step is marked at a time."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, Any]] = []
        self._passing: list[tuple[str, Any]] = []  # marks of a whole step
        self._times = dict.fromkeys(events.PHASES, 0.0)

    @property
    def has_measured(self) -> bool:
        """True once the device has passed a marked step."""
        return any(self._times.values())

    def mark(self, phase: str) -> None:
        """Mark where a phase begins."""
        event = sys.modules["torch"].cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def begin_step(self, phase: str) -> bool:
        """End the marks of a step; or, if the device has passed the last marks, read them and begin new ones.

        Returns:
            True if the step that begins is marked.
        """
        if sys.modules["torch"].cuda.is_current_stream_capturing():  # an event's query would break the capture
            self._marks = []
            return False
        if self._marks:
            self.mark(phase)
            self._passing, self._marks = self._marks, []
            return False
        if self._passing and not self._passing[-1][1].query():
            return False
        for (name, begin), (_, end) in zip(self._passing, self._passing[1:], strict=False):
            if name:
                self._times[name] += begin.elapsed_time(end) / 1000
        self._passing = []
        self.mark(phase)
        return True

    def divided(self, seconds: dict[str, float]) -> dict[str, float]:
        """Return the host's seconds, divided into phases as measured on the device; unchanged without marks."""
        measured_s = sum(self._times.values())
        if not measured_s:
            return seconds
        wall_s = sum(seconds.values())
        return {name: wall_s * self._times[name] / measured_s for name in seconds}


def _split_by_samples(seconds: dict[str, float], lines: Mapping[Line, int]) -> None:
    """Move collectives and copies to the device out of the phases around them, by their share of samples."""
    of_phase: collections.Counter[str] = collections.Counter()
    parts: collections.Counter[tuple[str, str]] = collections.Counter()
    for (phase, activity, _, _), count in lines.items():
        of_phase[phase] += count
        if activity in ("communication", "copy") and phase in events.SPLIT_PHASES:
            parts[phase, activity] += count
    for (phase, activity), count in parts.items():
        part_s = seconds[phase] * count / of_phase[phase]
        seconds[activity] += part_s
    for phase, count in of_phase.items():
        taken = sum(part for (name, _), part in parts.items() if name == phase)
        seconds[phase] *= 1 - taken / count


def running_line() -> tuple[str, str, str]:
    """Return ``place_of`` the main thread."""
    # The frame isn't kept: it keeps its variables alive, and the thread that drops it last would destroy them.
    return place_of(sys._current_frames()[threading.main_thread().ident or 0])


def place_of(frame: types.FrameType) -> tuple[str, str, str]:
    """Return a thread's activity in libraries, the user's innermost line such as ``In[7], line 12``, and its text."""
    activity = called = ""
    current: types.FrameType | None = frame
    while current is not None and not code_places.is_the_users(current.f_code.co_filename):
        activity = activity or _activity(current.f_code)
        called = current.f_code.co_name
        current = current.f_back
    if current is None:
        return activity, "", ""
    filename, line = current.f_code.co_filename, current.f_lineno or 0
    text = linecache.getline(filename, line).strip()[:_MOST_TEXT]
    # In `net(x.to(device))` the line copies until the network runs. The methods of tensors aren't Python functions.
    if not activity and called in _COPYING and any(part in text for part in _COPIES):
        activity = "copy"
    return activity, f"{code_places.label(filename)}, line {line}", text


def _activity(code: types.CodeType) -> str:
    filename = code.co_filename
    if code.co_name in _SAVING:
        return "saving"
    return next((activity for part, activity in _ACTIVITIES if part in filename and _WRAPPER_FILE not in filename), "")


def _xla_compilations() -> tuple[int, float]:
    """Return the number of graphs that XLA has compiled in this process, and the seconds that it took."""
    read = getattr(sys.modules.get("torch_xla.debug.metrics"), "metric_data", None)
    data = None if read is None else read("CompileTime")
    return (int(data[0]), data[1] / 1e9) if data else (0, 0.0)

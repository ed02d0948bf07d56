"""A rank's reports to the panel: its counters, its metrics and its memory.

Training code counts with one attribute increment a step. A thread samples five times a second and sends the changes, so
that neither the rate of steps nor a slow reader can slow down training.

The sampling thread never calls CUDA. A call might wait for a GPU that waits for other ranks, or break the capture of a
CUDA graph, during which CUDA forbids such calls to every thread. So the thread that reports a GPU tensor also starts
its copy to the host, at most five times a second, and the sampling thread checks whether the copy has arrived.

Outside a launched rank everything here works and nothing is sent.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from notebook_accel import environment, host_memory
from notebook_accel.errors import ConfigError
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import ClosedError

_SAMPLE_PERIOD_S = 0.2
_TICKS_PER_SAMPLE = 4
_MEMORY_PERIOD_SAMPLES = 5
_CLOSE_DEADLINE_S = 10.0
_PATIENCE_S = 1.0  # for a number that is still on the GPU, and for a sampling thread that is held up
_LOOK_PERIOD_S = 0.001
_LOSS = "loss"  # the name under which the loss of any loop is reported
LOSS_ATTRIBUTE = "_notebook_accel_loss"
"""The attribute of a divided or scaled loss that holds the loss before, which is reported instead."""
# Stands for a number that has not arrived: a NaN that no computation produces.
_PENDING_BITS = 0x7FF8_6E62_6163_6365


@dataclasses.dataclass(slots=True, eq=False)
class Counter:
    """Steps of one loader or bar. Training increments ``step``; the sampler reads everything else."""

    label: str = ""  # the name of the counted things
    total: int | None = None  # steps of the epoch, ``None`` if not known
    epoch: int | None = None  # the running epoch from 1, ``None`` if this counts no epochs
    step: int = 0  # steps done in the running epoch

    def start(self, epoch: int | None = None, total: int | None = None) -> None:
        """Begin an epoch, and show this counter in the rank's row."""
        reporter().begin(self, epoch, total)


class _GpuCopy:
    """Copies the latest number of one metric from a GPU, one copy at a time.

    The reporting thread starts copies into pinned host memory, which the GPU writes by itself. The sampling thread
    reads that memory without a call to CUDA. Only the number itself shows that a copy has ended: its eight bytes arrive
    at once.
    """

    def __init__(self) -> None:
        torch: Any = sys.modules["torch"]
        with torch.inference_mode(False):  # otherwise only code in inference mode could write to this memory
            self._number = torch.empty(1, dtype=torch.float64, device="cpu", pin_memory=torch.cuda.is_available())
            self._bits = self._number.view(torch.int64)
        self._started_s = -_SAMPLE_PERIOD_S
        self._is_copying = False
        self._step = 0  # at which the number was reported that is being copied
        self._next: tuple[Any, int] | None = None

    @property
    def is_awaited(self) -> bool:
        """True while the latest value has not been taken."""
        return self._is_copying or self._next is not None

    def report(self, tensor: Any, step: int) -> None:
        """Set the next value to copy, replacing one whose copy hasn't started."""
        tensor = tensor.detach().reshape(1)
        self._next = tensor, step
        if time.monotonic() - self._started_s >= _SAMPLE_PERIOD_S:
            self.start()
        if self._next is not None:  # training may change the tensor in place before the copy starts
            self._next = tensor.clone(), step

    def start(self) -> None:
        """Start the copy of the latest value, unless another one is under way or a CUDA graph is being captured."""
        torch: Any = sys.modules["torch"]
        if self._is_copying or self._next is None or torch.cuda.is_current_stream_capturing():
            return
        (tensor, self._step), self._next, self._started_s = self._next, None, time.monotonic()
        with contextlib.suppress(RuntimeError):  # the device has failed
            self._bits.fill_(_PENDING_BITS)
            self._number.copy_(tensor.to(torch.float64), non_blocking=True)
            self._is_copying = True

    def take(self) -> tuple[float, int] | None:
        """Return the number that has arrived since the last call, and its step; ``None`` if none has."""
        if not self._is_copying or self._bits.item() == _PENDING_BITS:
            return None
        arrived = float(self._number.item()), self._step
        self._is_copying = False  # from here on another copy may use the memory
        return arrived


class Sender(Protocol):
    """The destination of events: a connection, or its substitute."""

    def send(self, body: bytes) -> None:
        """Send an encoded event, or raise ``ClosedError``, or ``TimeoutError`` if the reader doesn't read."""


class Reporter:
    """Samples counters, metrics and memory of this process and sends them to the agent, if there is a connection."""

    def __init__(self, connection: Sender | None = None) -> None:
        self.prepared: Counter | None = None  # of the prepared loader that is read, the innermost of several
        self.outer: Counter | None = None  # of epochs around the shown counter, such as a bar over epochs
        self.is_compiling = False  # whether the running step is compiled
        self.recompiled = ""  # why XLA compiles a step anew, until that is sent; empty if no reason is known
        self.has_own_loss = False  # whether the program has reported a metric named ``loss``
        self.stage = 0  # of a session: even while a cell runs, odd once it has succeeded; it grows with each cell
        self.has_failed = False  # whether the user's code has ended with an error, of a launch
        # Functions to call when the user's code has returned, which wait for its work in the background. Their errors
        # are the rank's.
        self.before_result: list[Callable[[], None]] = []
        self.at_training: list[Callable[[], object]] = []  # functions to call once, in ``begin_training``
        # Functions to call at the end of the user's code, while the process still lives.
        self.at_close: list[Callable[[], None]] = []
        self.before_sample: list[Callable[[], None]] = []  # functions to call in the sampling thread
        # A function to call in the sampling thread: 20 times a second while it returns true, else 5 times.
        self.at_tick: Callable[[], bool] | None = None
        self._connection = connection
        self._lock = threading.Lock()
        self._sampling = threading.Lock()
        # The shown counter and the rank's steps before its epoch: one object, so that a report needs no lock.
        self._counting: tuple[Counter | None, int] = None, 0
        # The latest value of each metric that was reported since the last sample, and the step at which it was.
        self._reported: dict[str, tuple[Any, int]] = {}
        self._names: set[str] = set()  # of all metrics so far, of a session's cell
        self._has_left_out = False
        self._copies: dict[str, _GpuCopy] = {}
        # Until ``release_metrics``: a dict on devices where values exist only when a step ends.
        self._held: dict[str, tuple[Any, int]] | None = None
        self._last_progress: events.Progress | None = None
        self._posted: collections.deque[events.Event] = collections.deque(maxlen=1000)
        self._device = ""
        self._device_memory: Callable[[], tuple[int, int]] | None = None
        self._device_utilisation: Callable[[], float | None] | None = None
        self._device_clock: Callable[[], float | None] | None = None
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_connected(self) -> bool:
        """True in a launched rank; false elsewhere, and in processes that the rank forks."""
        return self._connection is not None and self._pid == os.getpid()

    def start(self) -> None:
        """Start the sampling thread."""
        self._thread = threading.Thread(target=self._run, name="notebook-accel-reporter", daemon=True)
        self._thread.start()

    # Steps ------------------------------------------------------------------------------------------------------------

    @property
    def shown(self) -> Counter | None:
        """The counter that the rank's row shows."""
        return self._counting[0]

    def begin(self, counter: Counter, epoch: int | None, total: int | None) -> None:
        """Set a prepared loader's counter to the beginning of an epoch, and show it."""
        with self._lock:
            before = self._steps()
            counter.step, counter.epoch, counter.total = 0, epoch, total
            self._counting = counter, before
        self.prepared = counter

    def show(self, counter: Counter) -> None:
        """Show this counter in the rank's row, from its present count on."""
        with self._lock:
            self._counting = counter, self._steps() - counter.step

    def end(self, around: Counter | None) -> None:
        """Show the counter of the prepared loader around one that has ended, if there is one."""
        self.prepared = around
        if around is not None:
            self.show(around)

    def _steps(self) -> int:
        counter, before = self._counting
        return before if counter is None else before + counter.step

    def begin_training(self) -> None:
        """Call the functions that wait for the first ``prepare`` or optimizer step, whichever comes first."""
        while self.at_training:
            self.at_training.pop()()

    def position(self) -> str:
        """Return the shown counter's position, such as ``step 12 of 40, epoch 2``; empty if there is no counter."""
        progress = self._progress()
        if progress is None:
            return ""
        of_total = "" if progress.total is None else f" of {progress.total}"
        return f"step {progress.step}{of_total}" + ("" if progress.epoch is None else f", epoch {progress.epoch}")

    # Metrics ----------------------------------------------------------------------------------------------------------

    def begin_cell(self) -> None:
        """Begin with the loaders and metrics of a session's next cell."""
        self.has_own_loss = self._has_left_out = False
        self._names = set()
        self.prepared = None  # an interrupted cell may have left its loader

    def hold_metrics(self) -> None:
        """Hold metrics until ``release_metrics``: reading a tensor earlier would compute its step twice."""
        self._held = self._held or {}

    def release_metrics(self) -> None:
        """Report the held metrics, once their step has been handed to the device."""
        if self._held:
            self._reported.update(self._held)
            self._held = {}

    def set_metrics(self, values: Mapping[str, Any]) -> None:
        """Replace the latest value of each named metric. Tensors on a device are read later, so nothing waits here."""
        self.has_own_loss = self.has_own_loss or _LOSS in values
        self._set_metrics(values)

    def report_loss(self, loss: Any) -> None:
        """Report a tensor as the loss, unless the program reports a metric of that name itself."""
        if not self.has_own_loss:
            self._set_metrics({_LOSS: loss})

    def _set_metrics(self, values: Mapping[str, Any]) -> None:
        if not self.is_connected:
            return
        step = self._steps()
        for name, value in values.items():
            if name not in self._names and not self._add_name(name):
                continue
            if self._held is not None:
                self._held[name] = _as_it_is_now(value), step
            elif getattr(value, "is_cuda", False):
                self._start_copy(name, value, step)
            else:
                self._copies.pop(name, None)
                self._reported[name] = _as_it_is_now(value), step

    def _add_name(self, name: str) -> bool:
        """Add the name of a metric if there is room for another one, else warn of the first that is left out."""
        if len(self._names) < events.MOST_METRICS:
            self._names.add(name)
            return True
        if not self._has_left_out:
            self._has_left_out = True
            warnings.warn(
                f"The metric {name!r} isn't shown, nor are later ones: only the first {events.MOST_METRICS} of a rank "
                "are. Log them all with a tracker: Accelerator(log_with=...).",
                stacklevel=5,
            )
        return False

    def _start_copy(self, name: str, tensor: Any, step: int) -> None:
        with contextlib.suppress(RuntimeError):  # several elements, or no memory: no reason to fail training
            if sys.modules["torch"].cuda.is_current_stream_capturing():
                return  # a graph would record the copy, and memory can't be allocated during the capture
            if name not in self._copies:
                # Asked here, since a rank's reporter is made before the rank has the launch's environment.
                if not environment.is_on(environment.CUDA_TELEMETRY):
                    return
                self._copies[name] = _GpuCopy()
            self._copies[name].report(tensor, step)

    def forget_unread(self) -> None:
        """Drop the numbers that are still on a GPU, since their computation has failed."""
        self._copies = {}

    # Events -----------------------------------------------------------------------------------------------------------

    def post(self, event: events.Event) -> None:
        """Queue an event, which the sampling thread sends. Never blocks."""
        self._posted.append(event)

    def send(self, event: events.Event) -> None:
        """Send one event now. A reader that is gone or doesn't read is no reason to fail training."""
        if self._connection is not None and self.is_connected:
            with contextlib.suppress(ClosedError, TimeoutError):
                self._connection.send(events.encode(event))

    def report_model_memory(self, **fields: int) -> None:
        """Queue an event of the memory that the rank's models take, with the fields of ``ModelMemory``."""
        self.post(events.ModelMemory(**fields))

    def report_time_limit(self, limit: float) -> None:
        """Queue an event that the rank was told to stop before its time limit, in seconds since the epoch."""
        self.post(events.TimeLimitReached(limit=limit))

    def report_checkpoint(self, folder: str) -> None:
        """Queue an event that a checkpoint of all ranks is complete."""
        self.post(events.CheckpointSaved(folder=folder))

    # Samples ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop sampling, and send the last changes."""
        if self._connection is not None and not self.is_connected:
            return  # a fork reports nothing, and may lack the thread that holds a lock here
        for function in list(self.at_close):
            function()
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_DEADLINE_S)
        self.release_metrics()
        self._sample_now()

    def catch_up(self) -> int:
        """Send the latest changes now, and return the number of steps so far.

        This takes a moment at most: numbers that don't arrive from a GPU, which may wait for other ranks, are left out.
        """
        self._sample_now()
        return 0 if self._last_progress is None else self._last_progress.steps

    def _run(self) -> None:
        samples, ticks, next_ticks = 0, 0, 1 if self.at_tick else _TICKS_PER_SAMPLE
        while not self._stop.wait(_SAMPLE_PERIOD_S / _TICKS_PER_SAMPLE * next_ticks):
            ticks += next_ticks
            is_next_due = self.at_tick is not None and self.at_tick()
            next_ticks = 1 if is_next_due else _TICKS_PER_SAMPLE - ticks % _TICKS_PER_SAMPLE
            if ticks % _TICKS_PER_SAMPLE:
                continue
            with self._sampling:
                self._sample()
            if samples % _MEMORY_PERIOD_SAMPLES == 0:
                self.send_memory()
            samples += 1

    def _sample_now(self) -> None:
        """Sample in the calling thread, even if something holds up the sampling thread."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while any(copy.is_awaited for copy in self._copies.values()) and time.monotonic() < deadline_s:
            for copy in self._copies.values():
                copy.start()
            self._take_arrivals()
            time.sleep(_LOOK_PERIOD_S)
        if self._sampling.acquire(timeout=_PATIENCE_S):
            try:
                self._sample()
            finally:
                self._sampling.release()
        else:
            self._sample(reads=False)

    def _sample(self, *, reads: bool = True) -> None:
        """Send what is new, without metrics if another thread waits for one of them (not ``reads``)."""
        while self._posted:
            self.send(self._posted.popleft())
        for function in self.before_sample:
            function()
        progress = self._progress()
        last = self._last_progress
        if progress is not None and (last is None or msgspec.structs.replace(progress, time_s=last.time_s) != last):
            self._last_progress = progress
            self.send(progress)
        self._take_arrivals()
        if reads:
            self._send_metrics()

    def _send_metrics(self) -> None:
        reported = {name: self._reported.pop(name) for name in list(self._reported)}
        values = {name: number for name, (value, _) in reported.items() if (number := _number(value)) is not None}
        if values:
            steps = {name: reported[name][1] for name in values}
            last = max(steps.values())
            earlier = {name: step for name, step in steps.items() if step != last}
            self.send(events.Metrics(step=last, values=values, earlier=earlier))

    def _take_arrivals(self) -> None:
        for name, copy in list(self._copies.items()):
            arrived = copy.take()
            if arrived is not None:
                self._reported[name] = arrived

    def _progress(self) -> events.Progress | None:
        with self._lock:
            counter, outer = self.shown, self.outer
            if counter is None:
                return None
            epoch, epochs = counter.epoch, None
            if outer is not None and outer is not counter and outer.total is not None:
                epoch, epochs = min(outer.step + 1, outer.total), outer.total
            return events.Progress(
                step=counter.step,
                total=counter.total,
                epoch=epoch,
                epochs=epochs,
                steps=self._steps(),
                label=counter.label,
                device=self._device,
                compiling=self.is_compiling,
            )

    # The device -------------------------------------------------------------------------------------------------------

    def set_device(
        self,
        name: str,
        memory: Callable[[], tuple[int, int]] | None = None,
        utilisation: Callable[[], float | None] | None = None,
        clock: Callable[[], float | None] | None = None,
    ) -> None:
        """Set the rank's device.

        Args:
            name: The device's name.
            memory: Function that returns the used and total bytes. Called once a second, like the others.
            utilisation: Function that returns the per cent of time in which the device computes, ``None`` if unknown.
            clock: Function that returns the per cent of its highest clock at which it runs, ``None`` if unknown.
        """
        self._device = name
        self._device_memory = memory
        self._device_utilisation, self._device_clock = utilisation, clock

    def send_memory(self) -> None:
        """Send the present use of memory."""
        if self._device_memory is None:
            self.send(events.Memory(used_bytes=_resident_bytes(), total_bytes=host_memory.total_bytes(), kind="host"))
            return
        try:
            used, total = self._device_memory()
        except RuntimeError:  # the device has failed: training will raise, and the sampler must go on
            return
        utilisation = None if self._device_utilisation is None else self._device_utilisation()
        clock = None if self._device_clock is None else self._device_clock()
        self.send(
            events.Memory(used_bytes=used, total_bytes=total, kind="device", utilisation=utilisation, clock=clock)
        )


def _as_it_is_now(value: Any) -> Any:
    """Return a value that changes in place, as of a running mean, don't reach: the number, or a copy on its device."""
    if getattr(value, "is_cpu", False) or type(value).__module__ == "numpy":
        return _number(value)
    return value.detach().clone() if hasattr(value, "detach") and hasattr(value, "clone") else value


def _number(value: Any) -> float | None:
    item = getattr(value, "item", None)
    try:
        return float(item() if callable(item) else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # complex, or a tensor whose device has failed
        return None


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_reporter = Reporter()


def reporter() -> Reporter:
    """Return this process's reporter."""
    return _reporter


def connect(connection: Sender) -> Reporter:
    """Make this process a rank that reports over ``connection``, and start sampling."""
    global _reporter
    _reporter = Reporter(connection)
    _reporter.start()
    return _reporter


def disconnect() -> None:
    """Undo ``connect``: this process reports nothing any more."""
    global _reporter
    _reporter = Reporter()


def report(**metrics: Any) -> None:
    """Show metrics of this rank in the panel: ``report(loss=loss, accuracy=0.9)``.

    Values are numbers or tensors of one element, as they are at the call: later changes in place don't count. A call
    doesn't wait for tensors on a device. It takes some microseconds, and for tensors on a GPU a small copy there. GPU
    tensors are left out while a CUDA graph is captured. Outside a launched rank nothing is sent.

    Raises:
        ConfigError: A value is neither a number nor something of one element.
    """
    for name, value in metrics.items():
        if not isinstance(value, (int, float)):
            numel = getattr(value, "numel", None)
            count = numel() if callable(numel) else getattr(value, "size", None)
            if count != 1:
                raise ConfigError(
                    f"report({name}=...) takes one number, not {type(value).__name__}.",
                    fix=f"report({name}={name}.mean())" if count else f"report({name}=<a number>)",
                )
            detach = getattr(value, "detach", None)
            metrics[name] = detach() if callable(detach) else value
    _reporter.set_metrics(metrics)

"""Profiles a rank's next steps with torch's profiler, when the kernel asks for it while the rank trains.

The agent forwards the request on the rank's connection, which the reporter's thread looks at five times a second. The
hooks of ``torch_hooks`` call ``begin_step`` where a step begins, since torch's profiler must be started and stopped in
the thread that trains. Reading what it has recorded takes longer and is left to another thread.
"""

from __future__ import annotations

import collections
import os
import pathlib
import select
import sys
import tempfile
import threading
import time
from typing import Any

import msgspec

from notebook_accel import reporting
from notebook_accel.launching import traces
from notebook_accel.launching.ranks import loops
from notebook_accel.launching.ranks.phases import place_of
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import ClosedError, Connection

_SAMPLE_PERIOD_S = 0.002
_LONGEST_WAIT_S = 2.0
_READ_DEADLINE_S = 60.0
_MOST_LINES = 12
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "99"


class StepProfiler:
    """Answers requests for a profile of this rank's next steps, one at a time.

    Attributes:
        is_due: True while ``begin_step`` is to be called at each step.
    """

    def __init__(self) -> None:
        self.is_due = False
        self._lock = threading.Lock()
        self._link: Connection | None = None
        self._poll = select.poll()
        self._current: _Profiling | None = None

    def listen(self, link: Connection) -> None:
        """Take requests from the agent from now on, in the process of a rank."""
        self._link = link
        self._poll.register(link.fileno(), select.POLLIN)
        reporting.reporter().before_sample(self.look)
        reporting.reporter().at_close(lambda: self.end("the rank's code ended"))
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Profile nothing in a fork, such as a worker of a DataLoader."""
        self._lock, self._link, self._current, self.is_due = threading.Lock(), None, None, False

    # In the reporter's thread -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take a request that has come, and give up one that has had its time."""
        try:
            if self._link is not None and self._poll.poll(0):
                for message in self._link.receive():
                    self.take(messages.decode_for_rank(message.body))
        except (ClosedError, msgspec.MsgspecError):  # the agent has gone, or releases this rank
            self._link = None
        with self._lock:
            current = self._current
            if current is None or current.reader is not None or current.left_s > 0:
                return
            if not current.is_given_up:
                current.is_given_up = True
                current.answer(f"it did {current.progress} in {current.request.deadline_s:g} s")
            if not current.has_begun:  # else the main thread stops the profiler at its next step
                self._release()

    def take(self, request: messages.Profile) -> None:
        """Profile the next steps."""
        with self._lock:
            if self._current is not None:
                _answer(request, "it answers an earlier request for a profile")
            elif "torch_xla" in sys.modules:
                _answer(request, "torch's profiler sees nothing of XLA devices; torch_xla.debug.profiler does")
            else:
                self._current = _Profiling(request)
                self.is_due = True

    def _release(self) -> None:
        self._current, self.is_due = None, False

    # In the main thread -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start or stop torch's profiler where that is due, or count a step."""
        with self._lock:
            current = self._current
            if current is None or current.reader is not None:
                self.is_due = False
            elif current.is_given_up:
                current.stop()
                self._release()
            elif current.has_begun:
                current.step()
                if current.done == current.request.steps:
                    current.stop()
                    self._read(current, "")
            elif time.monotonic() >= current.begin_s and (why := current.begin()):
                current.answer(why)
                self._release()

    def end(self, why: str, *, is_final: bool = True) -> None:
        """Stop a profile that goes on, since no further step will come now.

        Args:
            why: The reason.
            is_final: Whether no step will ever come. Otherwise a request that hasn't begun yet goes on waiting.
        """
        with self._lock:
            current = self._current
            if current is not None and current.reader is None and (is_final or current.has_begun):
                current.stop()
                if current.done > 0 and not current.is_given_up:
                    self._read(current, f"{why} after {current.progress}")
                else:
                    if not current.is_given_up:
                        current.answer(f"{why} before a step was profiled")
                    self._release()
        if is_final and current is not None and current.reader is not None:
            current.reader.join(_READ_DEADLINE_S)

    def _read(self, current: _Profiling, why: str) -> None:
        """Let a thread read and send what the profiler has recorded."""
        self.is_due = False

        def read() -> None:
            try:
                event = current.event(why)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is why there is no profile
                event = events.Profiled(number=current.request.number, why=f"its trace can't be read: {error}")
            reporting.reporter().send(event)
            with self._lock:
                self._release()

        current.reader = threading.Thread(target=read, name="notebook-accel-profile", daemon=True)
        current.reader.start()


class _Profiling:
    """One request for a profile.

    Attributes:
        request: The request.
        begin_s: The time of ``time.monotonic()`` after which the profile begins at the next step.
        done: Number of steps that were profiled.
        is_given_up: True once it was answered because it took too long.
        reader: The thread that reads the trace, once there is one.
    """

    def __init__(self, request: messages.Profile) -> None:
        self.request = request
        self._came_s = time.monotonic()
        # A clock of another machine tells nothing here.
        self.begin_s = min(max(request.begin_s, self._came_s), self._came_s + _LONGEST_WAIT_S)
        self.done = 0
        self.is_given_up = False
        self.reader: threading.Thread | None = None
        self._profiler: Any = None
        self._lines = _LineSampler()
        self._marks: list[traces.Mark] = []

    @property
    def has_begun(self) -> bool:
        """True while torch's profiler is on."""
        return self._profiler is not None

    @property
    def progress(self) -> str:
        """The steps that were profiled, in words."""
        return f"{max(0, self.done)} of {self.request.steps} steps"

    @property
    def left_s(self) -> float:
        """Seconds until it is given up."""
        return self._came_s + self.request.deadline_s - time.monotonic()

    def begin(self) -> str:
        """Start torch's profiler, which warms up for a step. Return why that is impossible; empty if it isn't."""
        torch = sys.modules["torch"]
        if torch.autograd._profiler_enabled():
            return "its code runs a profiler itself"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=self.request.steps, repeat=1)
        is_ours = _LOG_LEVEL not in os.environ
        if is_ours:  # the profiler's library would write to the rank's output when it starts and stops
            os.environ[_LOG_LEVEL] = _SILENT
        try:
            profiler = torch.profiler.profile(activities=activities, schedule=schedule)
            profiler.start()
        except RuntimeError as error:  # such as a tool outside that uses the GPU's only profiling interface
            return f"torch's profiler can't be started: {error}"
        finally:
            if is_ours:
                del os.environ[_LOG_LEVEL]
        self._profiler, self.done = profiler, -1
        return ""

    def step(self) -> None:
        """End a step. The first one has only warmed the profiler up."""
        self.done += 1
        if self.done < self.request.steps:
            self._profiler.step()
        if self.done == 0:
            clock = loops.loops().clock
            if clock is not None:
                clock.begin_trail()
            self._lines.start()

    def stop(self) -> None:
        """Stop the profiler, if it is on."""
        if self._profiler is None:
            return
        self._profiler.stop()
        self._lines.stop()
        clock = loops.loops().clock
        if clock is not None:
            ahead_s = time.time() - time.perf_counter()
            self._marks = [((now_s + ahead_s) * 1e6, phase) for now_s, phase in clock.end_trail()]

    def answer(self, why: str) -> None:
        """Send the reason why there is no profile."""
        _answer(self.request, why)

    def event(self, why: str) -> events.Profiled:
        """Return what was recorded.

        Raises:
            OSError: There is no room for the trace.
            ValueError: The trace can't be read.
        """
        with tempfile.TemporaryDirectory(prefix="notebook-accel-profile-") as folder:
            path = pathlib.Path(self.request.trace or f"{folder}/trace.json")
            self._profiler.export_chrome_trace(str(path))
            self._profiler = None
            found = traces.digest(path, self._marks, self.done)
        counts = self._lines.counts
        return events.Profiled(
            number=self.request.number,
            why=why,
            steps=found.steps,
            age_s=time.time() - found.begin_s,
            spans=found.spans,
            operators=found.operators,
            lines=[events.SampledLine(*line, samples=count) for line, count in counts.most_common(_MOST_LINES)],
            samples=counts.total(),
            trace=self.request.trace,
        )


class _LineSampler:
    """Looks at the line that the main thread runs, five hundred times a second at most.

    Attributes:
        counts: How often each phase, activity, place and text was seen.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look."""
        self._thread = threading.Thread(target=self._run, name="notebook-accel-lines", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no longer."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        main, clock = threading.main_thread().ident or 0, loops.loops().clock
        while not self._stop.wait(_SAMPLE_PERIOD_S):
            frame = sys._current_frames().get(main)
            if frame is not None:
                activity, place, text = place_of(frame)
                del frame  # it keeps the user's variables alive
                self.counts["" if clock is None else clock.phase, activity, place, text] += 1


def _answer(request: messages.Profile, why: str) -> None:
    reporting.reporter().post(events.Profiled(number=request.number, why=why))


_profiler = StepProfiler()


def profiler() -> StepProfiler:
    """Return the profiler of this rank."""
    return _profiler

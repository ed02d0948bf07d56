"""Profiles a rank's next steps, when the kernel asks for it while the rank trains.

The agent forwards the request on the rank's connection, and the reporter's thread takes it. The hooks of
``torch_hooks`` call ``begin_step`` where a step begins, since recorders must be started and stopped in the thread that
trains. Reading a recording takes longer and is left to another thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from notebook_accel import reporting
from notebook_accel.launching.ranks import progress
from notebook_accel.launching.ranks.recorders import MemoryRecorder, Recorder, StepRecorder
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events

_LONGEST_WAIT_S = 2.0
_READ_DEADLINE_S = 60.0


class StepProfiler:
    """Answers requests for a profile of this rank's next steps, one at a time.

    Attributes:
        is_due: True while ``begin_step`` is to be called at each step.
    """

    def __init__(self) -> None:
        self.is_due = False
        self._lock = threading.Lock()
        self._current: _Profiling | None = None

    def start(self) -> None:
        """Answer requests from now on, in the process of a rank."""
        reporting.reporter().before_sample.append(self.look)
        reporting.reporter().at_close.append(lambda: self.end("the rank's code ended"))
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Profile nothing in a fork, such as a worker of a DataLoader."""
        self._lock, self._current, self.is_due = threading.Lock(), None, False

    # In the reporter's thread -----------------------------------------------------------------------------------------

    def look(self) -> None:
        """Give up a request whose deadline has passed."""
        if not self._lock.acquire(blocking=False):
            return  # the main thread starts or stops torch's profiler; reports must not wait for that
        try:
            current = self._current
            if current is None or current.reader is not None or current.left_s > 0:
                return
            if not current.is_given_up:
                current.is_given_up = True
                _answer(current.request, f"it did {current.progress} in {current.request.deadline_s:g} s")
            if not current.has_begun:  # else the main thread stops the profiler at its next step
                self._release()
        finally:
            self._lock.release()

    def take(self, request: messages.Profile) -> None:
        """Accept a request, or answer with the reason why not."""
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
        """Start or stop recording where that is due, or count a step."""
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
                _answer(current.request, why)
                self._release()

    def end(self, why: str, *, is_final: bool = True) -> None:
        """Stop the profile in progress, since no further step will come for now, or ever if this ``is_final``.

        If it isn't, a request that hasn't begun yet goes on waiting.
        """
        with self._lock:
            current = self._current
            if current is not None and current.reader is None and (is_final or current.has_begun):
                current.stop()
                if current.done > 0 and not current.is_given_up:
                    self._read(current, f"{why} after {current.progress}")
                else:
                    if not current.is_given_up:
                        _answer(current.request, f"{why} before a step was profiled")
                    self._release()
        if is_final and current is not None and current.reader is not None:
            current.reader.join(_READ_DEADLINE_S)

    def _read(self, current: _Profiling, why: str) -> None:
        """Read the recording and send it in a thread."""
        self.is_due = False

        def read() -> None:
            try:
                event = current.recorder.event(number=current.request.number, why=why, steps=current.done)
            except Exception as error:  # noqa: BLE001 - any error is the reason why there is no profile
                event = events.Profiled(number=current.request.number, why=f"what was recorded can't be read: {error}")
            reporting.reporter().send(event)
            with self._lock:
                self._release()

        current.reader = threading.Thread(target=read, name="notebook-accel-profile", daemon=True)
        current.reader.start()


class _Profiling:
    """One request for a profile.

    Attributes:
        begin_s: The time of ``time.monotonic()`` after which the profile begins at the next step.
        done: Number of steps that were profiled.
        is_given_up: True once it was answered because it took too long.
        reader: The thread that reads the recording, once there is one.
    """

    def __init__(self, request: messages.Profile) -> None:
        self.request = request
        self._came_s = time.monotonic()
        # The time may be of another machine's clock, so it is bounded.
        self.begin_s = min(max(request.begin_s, self._came_s), self._came_s + _LONGEST_WAIT_S)
        self.done = 0
        self.is_given_up = False
        self.has_begun = False
        self.reader: threading.Thread | None = None
        self.recorder: Recorder = (
            MemoryRecorder(request.file) if request.memory else StepRecorder(request.steps, request.file)
        )

    @property
    def progress(self) -> str:
        """The steps that were profiled, in words."""
        return f"{max(0, self.done)} of {self.request.steps} steps"

    @property
    def left_s(self) -> float:
        """Seconds until the request is given up."""
        return self._came_s + self.request.deadline_s - time.monotonic()

    def begin(self) -> str:
        """Start recording. Return the reason if that is impossible, else an empty text."""
        _stop_clock()
        if why := self.recorder.begin():
            return why
        self.has_begun, self.done = True, -self.recorder.warmup_steps
        return ""

    def step(self) -> None:
        """Count a finished step."""
        self.done += 1
        self.recorder.step(self.done)

    def stop(self) -> None:
        """Stop recording, if it has begun."""
        if self.has_begun:
            _stop_clock()
            self.recorder.stop()


def _stop_clock() -> None:
    """Stop the clock of phases until the next one begins: the time of starting or stopping isn't the program's."""
    clock = progress.PROGRESS.clock
    if clock is not None and clock.is_on:
        clock.enter("")


def _answer(request: messages.Profile, why: str) -> None:
    reporting.reporter().post(events.Profiled(number=request.number, why=why))


PROFILER = StepProfiler()
"""The profiler of this rank."""

"""The engine for one machine: the kernel's end of the agent.

One agent serves all runs of a kernel. It is started by a thread that never ends, because the signal that Linux sends a
process when its parent dies is really sent when the parent's *thread* ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from notebook_accel import environment, events, memory_files
from notebook_accel.channel import ClosedError, Connection
from notebook_accel.errors import ConfigError, LaunchError, ProcessStartError, SupervisorLostError
from notebook_accel.launching import messages
from notebook_accel.launching.job import Job
from notebook_accel.launching.processes import bootstrap

__all__ = ["LocalEngine", "check_size", "engine"]

MOST_RANKS = 200  # one message carries the descriptors of all ranks, and Linux allows 253 in one
_SEND_DEADLINE_S = 10.0
_CLOSE_DEADLINE_S = 5.0


def check_size(world_size: int) -> None:
    """Refuses more ranks than one machine can have, before anything is opened for them.

    Raises:
        ConfigError: There would be too many.
    """
    if world_size > MOST_RANKS:
        raise ConfigError(
            f"num_processes={world_size} is too many for one machine.", fix=f"num_processes={MOST_RANKS} or fewer"
        )


class LocalEngine:
    """Runs ranks on this machine, through an agent that is started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agent: _Agent | None = None

    def warm(self) -> None:
        """Starts agent and template in the background, so that the first launch finds them ready."""
        with self._lock:
            self._prepared_agent()

    def start(self, job: Job, payload: int, result_files: Sequence[int]) -> None:
        """Starts a job's ranks. See ``Engine.start``."""
        with self._lock:
            agent = self._prepared_agent()
        agent.launch(job, payload, result_files)

    def close(self) -> None:
        """Ends every run, the agent and the template, and waits until they are gone."""
        with self._lock:
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()

    def _prepared_agent(self) -> _Agent:
        if self._agent is None or self._agent.is_lost:
            self._agent = _Agent()
        self._agent.prepare()
        return self._agent


class _Agent:
    """The agent's process and the thread that started it and reads what it says."""

    def __init__(self) -> None:
        self.is_lost = False
        self._is_closing = False
        self._jobs: dict[str, Job] = {}
        self._prepared_for: object = None
        self._connection, self._theirs = Connection.pair()
        self._connection.set_send_deadline(_SEND_DEADLINE_S)
        self._errors = memory_files.memory_file("notebook-accel-agent-log")
        self._process: subprocess.Popen[bytes] | None = None
        self._start_error: OSError | None = None
        self._has_started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notebook-accel-agent", daemon=True)
        self._thread.start()
        self._has_started.wait(_SEND_DEADLINE_S)
        if self._process is None:
            raise ProcessStartError(f"The agent process could not be started: {self._start_error}.")

    def prepare(self) -> None:
        """Has a template made, unless there is one for the variables that its libraries read at import."""
        wanted = (environment.import_time_variables(), sys.prefix)
        if wanted != self._prepared_for:
            sys_path = environment.import_path()
            self._send(messages.Prepare(environment=environment.sendable(), sys_path=sys_path))
            self._prepared_for = wanted

    def launch(self, job: Job, payload: int, result_files: Sequence[int]) -> None:
        self._jobs[job.id] = job
        job.attach(_LocalControl(self, job.id))
        launch = messages.Launch(
            job_id=job.id,
            world_size=job.world_size,
            port=job.config.main_process_port or 0,
            grace_s=job.config.grace_s,
            timeout_s=job.config.timeout_s,
            log_folder="" if job.log_folder is None else str(job.log_folder),
        )
        try:
            self._send(launch, [payload, *result_files])
        except LaunchError:
            self._jobs.pop(job.id, None)
            raise

    def end(self, job_id: str, how: messages.How) -> None:
        with contextlib.suppress(LaunchError):  # an agent that has gone took its ranks with it
            self._send(messages.End(job_id=job_id, how=how))

    def inspect(self, job_id: str) -> None:
        with contextlib.suppress(LaunchError):
            self._send(messages.Inspect(job_id=job_id))

    def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(LaunchError):
            self._send(messages.Quit())
        self._connection.shutdown()
        assert self._process is not None
        try:
            self._process.wait(_CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_DEADLINE_S)

    def close_in_fork(self) -> None:
        """In a process that the kernel has forked: it must not hold the agent's line open."""
        self._connection.close()

    def _send(
        self,
        message: messages.ToAgent,
        descriptors: Sequence[int] = (),
    ) -> None:
        try:
            _undisturbed(lambda: self._connection.send(messages.encode(message), descriptors))
        except (ClosedError, TimeoutError, OSError) as error:
            raise ProcessStartError(
                "The agent process, which starts and supervises ranks, has gone.",
                why=self._last_words(),
                fix="run the cell again: a new one is started",
            ) from error

    def _run(self) -> None:
        """The thread: starts the agent, then reads until it has gone."""
        try:
            self._process = subprocess.Popen(
                bootstrap("notebook_accel.launching.agent", str(self._theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[self._theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C, or an interrupt of the kernel's group, is not for it
            )
        except OSError as error:
            self._start_error = error
            return
        finally:
            self._theirs.close()
            self._has_started.set()
        try:
            with contextlib.suppress(ClosedError, OSError):
                while True:
                    for frame in self._connection.receive():
                        self._heard(messages.decode_for_kernel(frame.body))
        finally:
            self._lost()

    def _heard(self, said: messages.ToKernel) -> None:
        if isinstance(said, messages.Said):
            job = self._jobs.get(said.job_id)
            if job is not None:
                job.deliver(said.rank, events.decode(bytes(said.event)))
        elif isinstance(said, messages.Inspected):
            job = self._jobs.get(said.job_id)
            if job is not None:
                job.take_dumps(said.ranks)
        elif isinstance(said, messages.RunEnded):
            job = self._jobs.pop(said.job_id, None)
            if job is not None:
                job.end(said.reason)
        elif said.job_id:
            job = self._jobs.pop(said.job_id, None)
            if job is not None:
                job.end("", ProcessStartError(said.text, why=self._last_words()))
        else:
            self._prepared_for = None  # the next launch tries again, and says why if that fails too

    def _lost(self) -> None:
        self.is_lost = True
        assert self._process is not None
        self._connection.shutdown()  # whatever has ended the reading, this ends the agent
        self._connection.close()
        self._process.wait()
        for job in list(self._jobs.values()):
            if self._is_closing:
                job.end("stopped")
            else:
                job.end("", self._loss())
        self._jobs.clear()
        os.close(self._errors)
        self._errors = -1  # the number may soon be another file's

    def _loss(self) -> SupervisorLostError:
        return SupervisorLostError(
            "The agent process, which supervises the ranks, has gone, and the ranks with it.",
            why=self._last_words(),
            fix="run the cell again: a new one is started",
        )

    def _last_words(self) -> str:
        with contextlib.suppress(ValueError, OSError):
            size = os.fstat(self._errors).st_size
            text = os.pread(self._errors, 4000, max(0, size - 4000)).decode(errors="replace").strip()
            return f"It last wrote:\n{text}" if text else ""
        return ""


def _undisturbed(act: Callable[[], None]) -> None:
    """Does something in a thread, where no KeyboardInterrupt can come in the middle of it, and waits for its end."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - raised again by whoever waits
            raised.append(error)

    thread = threading.Thread(target=run, name="notebook-accel-send", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        thread.join(_SEND_DEADLINE_S)  # the descriptors are still being sent
        raise
    if raised:
        raise raised[0]


class _LocalControl:
    def __init__(self, agent: _Agent, job_id: str) -> None:
        self._agent = agent
        self._job_id = job_id

    def interrupt(self) -> None:
        self._agent.end(self._job_id, "interrupt")

    def stop(self) -> None:
        self._agent.end(self._job_id, "stop")

    def kill(self) -> None:
        self._agent.end(self._job_id, "kill")

    def inspect(self) -> None:
        self._agent.inspect(self._job_id)


_engine = LocalEngine()


def engine() -> LocalEngine:
    """This process's engine."""
    return _engine


def _forget_after_fork() -> None:
    global _engine
    agent = _engine._agent
    if agent is not None:
        agent.close_in_fork()
    _engine = LocalEngine()


def _close() -> None:
    _engine.close()


if hasattr(os, "register_at_fork"):  # not on Windows, where this can be imported and not used
    os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_close)

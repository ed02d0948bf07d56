"""The kernel's side of the agent: the messages to and from it and, on this machine, its process and a thread for it.

The thread that starts the agent must outlive it: Linux sends the parent-death signal when the parent's *thread* ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from notebook_accel import environment, time_limit, uninterruptible
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import LaunchError, ProcessStartError, RunError, SupervisorLostError
from notebook_accel.launching.kernel.engine import RunReceiver
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.processes import bootstrap, resume_if_stopped
from notebook_accel.launching.run_folders import RunFolder
from notebook_accel.payload import memory_files
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.agent_messages import ElasticOptions
from notebook_accel.protocol.channel import ClosedError, Connection
from notebook_accel.uninterruptible import Latch

_Receiver = TypeVar("_Receiver", bound=RunReceiver)

_SEND_DEADLINE_S = 10.0
_DETACH_DEADLINE_S = 30.0
_CLOSE_DEADLINE_S = 5.0
_LOOK_PERIOD_S = 0.5
_NO_ANSWER = "its agent, the process that supervises the ranks, doesn't answer"
_SAMPLES_PAUSE_S = 0.05  # so that one read takes the samples of many ranks


@dataclasses.dataclass(frozen=True)
class ForkedTemplate:
    """A template that the kernel has forked: the connection to it, its pid and its pidfd."""

    connection: Connection
    pid: int
    pidfd: int

    def close(self) -> None:
        """Close this process's descriptors. The agent has its own."""
        self.connection.close()
        os.close(self.pidfd)


class AgentLink(Generic[_Receiver]):
    """Sends messages to an agent, wherever it runs, and passes the agent's messages to the runs' jobs."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Receiver] = {}
        self._prepared_for: object = None
        self._preloaded: set[str] = set()
        self._only_samples_since = math.inf

    def prepare(self, options: LaunchConfig) -> None:
        """Request a template, unless the last one fits the import-time variables and has preloaded enough."""
        settings, variables, sys_path = self._environment()
        if settings == self._prepared_for and self._preloaded.issuperset(options.preload):
            return
        self._send(
            messages.Prepare(
                environment=dict(variables),
                sys_path=list(sys_path),
                preload=list(options.preload),
                idle_timeout_s=options.idle_timeout_s,
            )
        )
        self._prepared_for, self._preloaded = settings, set(options.preload)

    def expect(self, job: _Receiver) -> None:
        """Register the job before its Launch message, so that its events can be routed."""
        self._jobs[job.id] = job

    def forget(self, job: _Receiver) -> None:
        """Unregister a job whose launch failed, or that needs no more messages."""
        self._jobs.pop(job.id, None)

    def _launch_message(
        self,
        job: _Receiver,
        *,
        template_pid: int = 0,
        elastic: ElasticOptions | None = None,
        places: Sequence[messages.Place] = (),
    ) -> messages.Launch:
        """Return the message that starts a job's ranks."""
        return messages.Launch(
            job_id=job.id,
            world_size=job.world_size,
            port=job.config.main_process_port or 0,
            grace_s=job.config.grace_s,
            timeout_s=job.config.timeout_s,
            log_folder="" if job.log_folder is None else str(job.log_folder),
            on_death=job.on_death,
            idle_timeout_s=job.config.idle_timeout_s,
            template_pid=template_pid,
            max_restarts=0 if elastic is not None or places else job.config.max_restarts,
            elastic=elastic,
            places=list(places),
            variables=time_limit.variables(job.config.end_at, job.config.end_margin_s),
            saves=job.saves,
        )

    # What depends on where the agent is -----------------------------------------------------------------------------

    def _environment(self) -> tuple[object, Mapping[str, str], Sequence[str]]:
        """Return the settings that a template's imports depend on, and a template's variables and import path."""
        settings = environment.import_time_variables(), sys.prefix
        return settings, environment.sendable(), environment.import_path()

    def _send(self, message: messages.ToAgent, descriptors: Sequence[int] = ()) -> None:
        """Send a message.

        Raises:
            NotebookAccelError: The agent has gone.
        """
        raise NotImplementedError

    def _receive(self) -> Sequence[bytes]:
        """Wait a limited time for messages and return them, possibly none. Raise if the agent has gone."""
        raise NotImplementedError

    def _last_words(self) -> str:
        """Return the end of the agent's log, for an error's ``why``."""
        raise NotImplementedError

    # ----------------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the next messages and process them."""
        bodies = self._receive()
        are_samples = [self._take(body) for body in bodies]
        if not bodies or not all(are_samples):
            self._only_samples_since = math.inf
            return
        now = time.monotonic()
        # Not after the first samples: they may be the last ones of a short run, whose end must not be delayed.
        if now - self._only_samples_since > _SAMPLES_PAUSE_S:
            time.sleep(_SAMPLES_PAUSE_S)
        self._only_samples_since = min(self._only_samples_since, now)

    def _take(self, body: bytes) -> bool:
        """Process one encoded message, and return whether it was a sample: samples are many, and none is urgent."""
        return self._handle(messages.decode_for_kernel(body))

    def _handle(self, said: messages.ToKernel) -> bool:
        """Process one message, and return whether it was a sample."""
        if isinstance(said, messages.Idle):  # only this machine's agent is ended then
            return False
        if isinstance(said, messages.Broken) and not said.job_id:
            self._prepared_for = None  # the next launch tries again, and reports a second failure
            return False
        job = self._jobs.get(said.job_id)
        if isinstance(said, messages.RunEnded | messages.Broken):
            self._jobs.pop(said.job_id, None)
        if job is None:
            return False
        if isinstance(said, messages.Said):
            event = events.decode(bytes(said.event))
            job.deliver(said.rank, event)
            return isinstance(event, events.SAMPLES)
        if isinstance(said, messages.Inspected):
            job.take_dumps(said.ranks)
        elif isinstance(said, messages.Starting):
            job.start(said)
        elif isinstance(said, messages.RunEnded):
            job.end(said.reason, elsewhere=said.elsewhere)
        elif isinstance(said, messages.Broken):
            kind = RunError if said.was_running else ProcessStartError
            job.end("", kind(said.text, why=said.why or self._last_words(), fix=said.fix))
        return False


class AgentProcess(AgentLink[RunReceiver]):
    """This machine's agent: its process and the thread that starts it and reads its messages."""

    def __init__(self, is_idle: Callable[[AgentProcess], None]) -> None:
        super().__init__()
        self.is_lost = False
        self._is_idle = is_idle
        self._is_closing = False
        self._connection, self._theirs = Connection.pair()
        self._connection.set_send_deadline(_SEND_DEADLINE_S)
        self._connection.set_receive_deadline(_LOOK_PERIOD_S)
        self.log = memory_files.memory_file("notebook-accel-agent-log")  # of the agent and its templates
        self._answer = _Answer()
        self._process: subprocess.Popen[bytes] | None = None
        self._start_error: OSError | None = None
        self._has_started = Latch()
        self._thread = threading.Thread(target=self._run, name="notebook-accel-agent", daemon=True)
        self._thread.start()
        self._has_started.wait(_SEND_DEADLINE_S)
        if self._process is None:
            raise ProcessStartError(f"The agent process could not be started: {self._start_error}.")

    @property
    def is_expecting(self) -> bool:
        """True if a run is on its way or runs."""
        return bool(self._jobs)

    def serves(self, job: RunReceiver) -> bool:
        """Return whether this agent serves the job's run and the run hasn't ended."""
        return job.id in self._jobs

    def launch(
        self, job: Job, payload: int, template: ForkedTemplate | None = None, elastic: ElasticOptions | None = None
    ) -> None:
        """Start a run, from its own template if it has a ``template``."""
        job.send_orders_by(self.tell)
        own_template = [] if template is None else [template.connection.fileno(), template.pidfd]
        message = self._launch_message(job, template_pid=0 if template is None else template.pid, elastic=elastic)
        try:
            self._send(message, [payload, *job.result_files.descriptors, *own_template])
        except LaunchError:
            self.forget(job)
            raise

    def detach(self, job: Job, folder: RunFolder, lock: int) -> list[int]:
        """Detach the agent and its run, which must be its only one, from this process. See ``LocalEngine.detach``.

        All messages that the agent has sent are delivered before the job ends.
        """
        self._answer = _Answer(lambda: job.end_detached(folder.facts.name))
        results = job.result_files.descriptors
        try:
            self._send(messages.Detach(job_id=job.id, folder=str(folder.path)), [lock, *results])
        except LaunchError:
            if job.done:  # its result files were closed meanwhile
                raise RunError("The run can't be detached now.", why="It has ended.") from None
            raise
        self._answer.has_come.wait(_DETACH_DEADLINE_S)
        if not self._answer.is_detached:
            why = self._answer.said.why
            raise RunError("The run can't be detached now.", why=f"{why[0].upper()}{why[1:]}.")
        return self._answer.said.sent_log_bytes

    def tell(self, message: messages.ToAgent) -> None:
        with contextlib.suppress(LaunchError):  # an agent that has gone took its ranks with it
            uninterruptible.call(lambda: self._send(message))

    def quit(self) -> None:
        """Order the agent to stop its runs, with their grace period, and to exit."""
        self._is_closing = True
        with contextlib.suppress(LaunchError):
            self._send(messages.Quit())

    def close(self) -> None:
        """Stop the runs and wait until they and the agent are gone. Kill whatever outlasts its grace period."""
        grace_s = max((job.config.grace_s for job in list(self._jobs.values())), default=0.0)
        self.quit()
        if threading.current_thread() is not self._thread:
            self._thread.join(grace_s + _CLOSE_DEADLINE_S)
        self._connection.shutdown()
        self._wait_for_its_end()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_DEADLINE_S)

    def _resume(self) -> None:
        """Resume an agent that was stopped by SIGSTOP: all its ranks and this process wait for it."""
        assert self._process is not None
        if self._process.returncode is None:
            resume_if_stopped(self._process.pid)

    def close_in_fork(self) -> None:
        """Close the agent's connection in a process that the kernel has forked."""
        self._connection.close()

    def _send(self, message: messages.ToAgent, descriptors: Sequence[int] = ()) -> None:
        self._resume()
        try:
            self._connection.send(messages.encode(message), descriptors)
        except (ClosedError, TimeoutError, OSError) as error:
            raise ProcessStartError(
                "The agent process, which starts and supervises ranks, has gone.",
                why=self._last_words(),
                fix="run the cell again: a new one is started",
            ) from error

    def _run(self) -> None:
        """Start the agent and read its messages until it has gone. The thread's function."""
        try:
            self._process = start_process(self._theirs, self.log)
        except OSError as error:
            self._start_error = error
            return
        finally:
            self._theirs.close()
            self._has_started.set()
        try:
            with contextlib.suppress(ClosedError, OSError):
                while not self._answer.is_detached:
                    self._read()
        finally:
            self._lost()

    def _handle(self, said: messages.ToKernel) -> bool:
        if isinstance(said, messages.Idle):
            self._is_idle(self)
        elif isinstance(said, messages.Detached):
            self._answer.resolve(said)
            if not said.why:
                self._jobs.clear()
        else:
            return super()._handle(said)
        return False

    def _receive(self) -> Sequence[bytes]:
        frames = self._connection.receive()
        if not frames and self._jobs:
            self._resume()
        return [frame.body for frame in frames]

    def _lost(self) -> None:
        self.is_lost = True
        assert self._process is not None
        self._connection.shutdown()  # end the agent if the reading ended for another reason
        self._connection.close()
        if self._answer.is_detached:
            self._process.wait()  # this process must reap it as long as it is the parent
        else:
            self._wait_for_its_end()
            self._answer.resolve(messages.Detached(job_id="", why="its agent has gone"))
        for job in list(self._jobs.values()):
            if self._is_closing:
                job.end("stopped")
            else:
                job.end("", agent_lost_error(self._last_words()))
        self._jobs.clear()
        os.close(self.log)
        self.log = -1  # another file may get the number

    def _wait_for_its_end(self) -> None:
        assert self._process is not None
        self._resume()
        try:
            self._process.wait(_CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        return last_words(self.log)


class _Answer:
    """The agent's answer to ``Detach``. ``when_detached`` is called if the agent agrees, however late."""

    def __init__(self, when_detached: Callable[[], None] = lambda: None) -> None:
        self._when_detached = when_detached
        self.has_come = Latch()
        self.said = messages.Detached(job_id="", why=_NO_ANSWER)

    @property
    def is_detached(self) -> bool:
        """True once the agent has agreed."""
        return not self.said.why

    def resolve(self, said: messages.Detached) -> None:
        """Store the first answer."""
        if not self.has_come.is_set:
            self.said = said
            if self.is_detached:
                self._when_detached()
            self.has_come.set()


def start_process(theirs: Connection, log: int) -> subprocess.Popen[bytes]:
    """Start an agent with its end of the connection. The agent is killed when the calling thread ends."""
    return subprocess.Popen(
        bootstrap("notebook_accel.launching.agent.agent", str(theirs.fileno()), str(os.getpid())),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # the agent must not get a terminal's Ctrl-C, or an interrupt of the kernel's group
    )


def last_words(log: int) -> str:
    """Return the end of an agent's log, for an error's ``why``; empty if the log is empty or closed."""
    with contextlib.suppress(ValueError, OSError):
        size = os.fstat(log).st_size
        text = os.pread(log, 4000, max(0, size - 4000)).decode(errors="replace").strip()
        return f"It last wrote:\n{text}" if text else ""
    return ""


def agent_lost_error(why: str) -> SupervisorLostError:
    """Return the error of a run whose agent has gone."""
    return SupervisorLostError(
        "The agent process, which supervises the ranks, has gone, and the ranks with it.",
        why=why,
        fix="run the cell again: a new one is started",
    )

"""The agent as its kernel sees it: the messages to and from it and, on this machine, its process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from notebook_accel import environment, time_limit
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import (
    LaunchError,
    NotebookAccelError,
    ProcessStartError,
    RunError,
    SupervisorLostError,
)
from notebook_accel.interrupts import Latch
from notebook_accel.launching import logs
from notebook_accel.launching.kernel.detached_job import DetachedJob
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.processes import bootstrap, resume_if_stopped
from notebook_accel.launching.run_folders import RunFolder
from notebook_accel.payload import memory_files
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.agent_messages import ElasticOptions
from notebook_accel.protocol.channel import ClosedError, Connection

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


class RunReceiver(Protocol):
    """The receiver of an agent's events: a ``Job``, which documents these members, or a run's part on another node.

    ``saves`` is about the first rank of each node. ``end`` gets the failure on another node that has ended the run.
    """

    @property
    def id(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def config(self) -> LaunchConfig: ...
    @property
    def on_death(self) -> messages.OnDeath: ...
    @property
    def saves(self) -> bool: ...
    @property
    def log_folder(self) -> pathlib.Path | None: ...

    def deliver(self, rank: int, event: events.Event) -> None: ...
    def take_dumps(self, dumps: Sequence[messages.RankDump]) -> None: ...
    def start(self, starting: messages.Starting) -> None: ...
    def end(
        self,
        reason: messages.Reason,
        error: NotebookAccelError | None = None,
        elsewhere: messages.Failure | None = None,
    ) -> None: ...


_Receiver = TypeVar("_Receiver", bound=RunReceiver)


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
            messages.Prepare(environment=dict(variables), sys_path=list(sys_path), preload=list(options.preload))
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
        folder: str = "",
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
            template_pid=template_pid,
            max_restarts=0 if elastic is not None or places else job.config.max_restarts,
            elastic=elastic,
            places=list(places),
            variables=time_limit.variables(job.config.end_at, job.config.end_margin_s),
            saves=job.saves,
            folder=folder,
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
        if isinstance(said, messages.Broken) and not said.job_id:
            self._prepared_for = None  # the next launch tries again, and reports a second failure
            return False
        is_end = isinstance(said, messages.RunEnded | messages.Broken)
        job = self._jobs.pop(said.job_id, None) if is_end else self._jobs.get(said.job_id)
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


class AgentProcess:
    """An agent's process on this machine, the connection to it, and the log of it and its templates.

    A thread starts the process and waits for its end: Linux would kill the agent with the thread that has started it.
    With ``is_daemon``, the process ends at once, and the agent is a fork of it that is nobody's child.

    Raises:
        OSError: The system refuses the process, or a file.
    """

    def __init__(self, *, is_daemon: bool = False) -> None:
        self._arguments = ["daemon"] if is_daemon else []
        self.connection, theirs = Connection.pair()
        self.connection.set_send_deadline(_SEND_DEADLINE_S)
        self.log = memory_files.memory_file("notebook-accel-agent-log")
        started: concurrent.futures.Future[subprocess.Popen[bytes]] = concurrent.futures.Future()
        self.has_ended = Latch()
        name = "notebook-accel-agent-process"
        try:
            threading.Thread(target=self._run, args=(theirs, started), name=name, daemon=True).start()
            self.process = started.result()
        except BaseException:
            theirs.close()  # the thread may not have started
            self.close()
            raise

    def _run(self, theirs: Connection, started: concurrent.futures.Future[subprocess.Popen[bytes]]) -> None:
        try:
            process = subprocess.Popen(
                bootstrap(
                    "notebook_accel.launching.agent.agent", str(theirs.fileno()), str(os.getpid()), *self._arguments
                ),
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # it must not get a terminal's Ctrl-C, or an interrupt of the kernel's group
            )
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            started.set_exception(error)
            return
        finally:
            theirs.close()
        started.set_result(process)
        process.wait()
        self.has_ended.set()

    def resume(self) -> None:
        """Resume an agent that was stopped by SIGSTOP: all its ranks and this process wait for it."""
        if not self.has_ended.is_set:
            resume_if_stopped(self.process.pid)

    def wait(self) -> None:
        """Wait until the process has ended. Kill it if that takes too long."""
        self.resume()
        if not self.has_ended.wait(_CLOSE_DEADLINE_S):
            self.process.kill()
            self.has_ended.wait()

    def close(self) -> None:
        """Close the connection and the log. The agent ends then, unless it was detached."""
        self.connection.shutdown()
        self.connection.close()
        os.close(self.log)
        self.log = -1  # another file may get the number


class LocalAgent(AgentLink[RunReceiver]):
    """The link to this machine's agent, and the thread that reads its messages."""

    def __init__(self, *, is_daemon: bool = False) -> None:
        super().__init__()
        self.is_lost = False
        self._is_closing = False
        self._answer = _Answer()
        try:
            self.process = AgentProcess(is_daemon=is_daemon)
        except (OSError, RuntimeError) as error:  # a RuntimeError if the system refuses a thread
            raise ProcessStartError(f"The agent process could not be started: {error}.") from None
        self.process.connection.set_receive_deadline(_LOOK_PERIOD_S)
        self._thread = threading.Thread(target=self._run, name="notebook-accel-agent", daemon=True)
        self._thread.start()

    def serves(self, job: RunReceiver) -> bool:
        """Return whether this agent serves the job's run and the run hasn't ended."""
        return job.id in self._jobs

    def launch(
        self, job: Job, payload: int, template: ForkedTemplate | None = None, elastic: ElasticOptions | None = None
    ) -> None:
        """Start a run, from its own template if it has a ``template``."""
        job.send_order = self.tell
        own_template = [] if template is None else [template.connection.fileno(), template.pidfd]
        message = self._launch_message(job, template_pid=0 if template is None else template.pid, elastic=elastic)
        try:
            self._send(message, [payload, *job.result_files.descriptors, *own_template])
        except LaunchError:
            self.forget(job)
            raise

    def launch_detached(self, job: DetachedJob, payload: int, lock: int) -> None:
        """Start the first run of this agent, and detach both from this process. See ``LocalEngine.launch_detached``."""
        self._answer = _Answer()
        message = self._launch_message(job, folder=str(job.folder.path))
        self._send(message, [payload, *job.result_files.descriptors, lock])
        if why := self._answer.why_not():
            raise ProcessStartError("The detached run could not be started.", why=why)

    def detach(self, job: Job, folder: RunFolder, lock: int) -> None:
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
        if why := self._answer.why_not():
            raise RunError("The run can't be detached now.", why=why)

    def tell(self, message: messages.ToAgent) -> None:
        with contextlib.suppress(LaunchError):  # an agent that has gone took its ranks with it
            self._send(message)

    def quit(self) -> None:
        """Order the agent to stop its runs, with their grace period, and to exit."""
        self._is_closing = True
        with contextlib.suppress(LaunchError):
            self._send(messages.Quit())

    def close(self) -> None:
        """Stop the runs and wait until they and the agent are gone. Kill whatever outlasts its grace period."""
        grace_s = max((job.config.grace_s for job in list(self._jobs.values())), default=0.0)
        self.quit()
        self._thread.join(grace_s + _CLOSE_DEADLINE_S)
        self.process.connection.shutdown()
        self.process.wait()
        self._thread.join(_CLOSE_DEADLINE_S)

    def close_in_fork(self) -> None:
        """Close the agent's connection in a process that the kernel has forked."""
        self.process.connection.close()

    def _send(self, message: messages.ToAgent, descriptors: Sequence[int] = ()) -> None:
        self.process.resume()
        try:
            self.process.connection.send(messages.encode(message), descriptors)
        except (ClosedError, TimeoutError, OSError) as error:
            raise ProcessStartError(
                "The agent process, which starts and supervises ranks, has gone.",
                why=self._last_words(),
                fix="run the cell again: a new one is started",
            ) from error

    def _run(self) -> None:
        """Read the agent's messages until it has gone. The thread's function."""
        try:
            with contextlib.suppress(ClosedError, OSError):
                while not self._answer.is_detached:
                    self._read()
        finally:
            self._lost()

    def _handle(self, said: messages.ToKernel) -> bool:
        if isinstance(said, messages.Detached):
            self._answer.resolve(said)
            if not said.why:
                self._jobs.clear()
        else:
            return super()._handle(said)
        return False

    def _receive(self) -> Sequence[bytes]:
        frames = self.process.connection.receive()
        if not frames and self._jobs:
            self.process.resume()
        return [frame.body for frame in frames]

    def _lost(self) -> None:
        self.is_lost = True
        self.process.connection.shutdown()  # end the agent if the reading ended for another reason
        if not self._answer.is_detached:
            self.process.wait()
            self._answer.resolve(messages.Detached(job_id="", why="its agent has gone"))
        for job in list(self._jobs.values()):
            if self._is_closing:
                job.end("stopped")
            else:
                job.end("", agent_lost_error(self._last_words()))
        self._jobs.clear()
        self.process.close()

    def _last_words(self) -> str:
        return logs.last_words(self.process.log)


class _Answer:
    """The agent's answer to a wish to detach a run. ``when_detached`` is called if it agrees, however late."""

    def __init__(self, when_detached: Callable[[], None] = lambda: None) -> None:
        self._when_detached = when_detached
        self.has_come = Latch()
        self.said = messages.Detached(job_id="", why=_NO_ANSWER)

    @property
    def is_detached(self) -> bool:
        """True once the agent has agreed."""
        return not self.said.why

    def why_not(self) -> str:
        """Wait for the answer, and return the reason of a refusal as a sentence; empty if the agent agrees."""
        self.has_come.wait(_DETACH_DEADLINE_S)
        why = self.said.why
        return f"{why[0].upper()}{why[1:]}." if why else ""

    def resolve(self, said: messages.Detached) -> None:
        """Store the first answer."""
        if not self.has_come.is_set:
            self.said = said
            if self.is_detached:
                self._when_detached()
            self.has_come.set()


def agent_lost_error(why: str) -> SupervisorLostError:
    """Return the error of a run whose agent has gone."""
    return SupervisorLostError(
        "The agent process, which supervises the ranks, has gone, and the ranks with it.",
        why=why,
        fix="run the cell again: a new one is started",
    )

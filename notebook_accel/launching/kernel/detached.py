"""Detached runs, which go on when the kernel ends: launching them, finding them, and attaching to them.

A detached run has an agent of its own, which is nobody's child, and a folder (``run_folders``). The launching kernel is
the first of those that are attached; the others come through the folder's socket. All get the same stream: the journal
from its beginning, then what the agent tells from there on. So a job that was attached is like one that was launched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import pathlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import msgspec

from notebook_accel import VERSION, environment, uninterruptible
from notebook_accel import config as configuration
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import (
    ConfigError,
    LaunchError,
    NotebookAccelError,
    ProcessStartError,
    RunError,
    SupervisorLostError,
)
from notebook_accel.launching import journal, logs, processes, run_folders
from notebook_accel.launching.kernel import foreground, local, registry, run_payload
from notebook_accel.launching.kernel.agent_process import AgentLink
from notebook_accel.launching.kernel.engine import LaunchRequest
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.kernel.run_payload import PreparedRun, RunFiles
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.results import ResultFile
from notebook_accel.launching.run_folders import JOURNAL_VERSION, RunFacts, RunFolder
from notebook_accel.launching.spec import JobSpec
from notebook_accel.payload import memory_files, serialization
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol.channel import ClosedError, Connection

_DEADLINE_S = 10.0
_START_DEADLINE_S = 60.0  # a busy machine takes its time for a new interpreter
_LOOK_PERIOD_S = 0.5
_PAUSE_S = 0.1
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
_STOP_DEADLINE_S = 30.0


class DetachedJob(Job):
    """The handle of a detached run. Several kernels may have one for the same run.

    Attributes:
        folder: The run's folder.
        is_live: True while messages come as they are told; false while the journal is read.
    """

    def __init__(self, request: LaunchRequest, *, folder: RunFolder, **arguments: Any) -> None:
        super().__init__(request, **arguments)
        self.id = folder.id
        self.folder = folder
        self.is_live = True
        self._by_value: Sequence[Any] = arguments.get("by_value", ())
        self._pull = request.spec.pull

    def pull(self, *names: str) -> Any:
        """Wait for the run's end, and return the values that variables had in rank 0 then.

        Args:
            names: Names that ``--pull`` named at the launch.

        Returns:
            The value; a tuple of the values for several names.

        Raises:
            NotebookAccelError: A name was not named at the launch, or has no value that can be read here.
        """
        unknown = [name for name in names if name not in self._pull]
        if unknown or not names:
            raise NotebookAccelError(
                f"The run {self.name!r} keeps no variable {' or '.join(unknown)}.".replace(" variable .", " variable."),
                why=f"It was launched with --pull {','.join(self._pull)}." if self._pull else "It has no --pull.",
                fix="name the variables with --pull when you launch",
            )
        self.wait()
        descriptor = self.folder.open_result(0)
        try:
            file = ResultFile(descriptor, 0)
            file.unpickle(self._by_value)
        finally:
            os.close(descriptor)
        for name in names:
            if name in file.problems:
                raise file.problems[name]
            if name not in file.values:
                raise RunError(f"The run {self.name!r} has left no value of {name!r}.", why=str(self.error or ""))
        values = tuple(file.values[name] for name in names)
        return values[0] if len(values) == 1 else values

    def _now_s(self) -> float:
        if self.is_live:
            return super()._now_s()
        return max((rank.last_event_s or self.started_s for rank in self.state.ranks), default=self.started_s)


class DetachedEngine:
    """Launches runs that go on when the kernel ends."""

    def launch(self, request: LaunchRequest) -> Job:
        """Start the ranks and return the run's job. See ``Engine``."""
        _refuse_what_cannot_be(request)
        local.check_size(request.spec.world_size)
        pickled, unsent = run_payload.pickle_target(request.target, request.roots, request.optional_names)
        return uninterruptible.call(
            lambda: self._launch(request, pickled, unsent), Job.discard, request.foreground_lock
        )

    def _launch(self, request: LaunchRequest, pickled: serialization.Pickled, unsent: Mapping[str, str]) -> DetachedJob:
        run_folders.remove_old()
        folder, lock = run_folders.make(request.spec.name, is_unique=bool(request.config.name))

        def make_job(request: LaunchRequest, **arguments: Any) -> DetachedJob:
            return DetachedJob(request, folder=folder, **arguments)

        try:
            files = _FolderFiles(folder)
            with run_payload.prepared_run(request, pickled, unsent, files=files, make_job=make_job) as prepared:
                assert isinstance(prepared.job, DetachedJob)
                folder.write_facts(_facts(prepared.job, request))
                _Link(prepared.job).launch(prepared, lock)
        except BaseException:
            folder.remove()
            raise
        finally:
            os.close(lock)
        return prepared.job


class _FolderFiles(RunFiles):
    """The files of a detached run, in its folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def open_payload(self) -> int:
        return self._folder.create_payload()

    def seal_payload(self, payload: int) -> None:
        """Do nothing: only a memory file can be sealed."""

    def open_result(self, rank: int) -> int:
        return self._folder.create_result(rank)

    def log_folder(self, log_dir: str, name: str) -> pathlib.Path | None:
        if log_dir:
            return logs.make_folder(log_dir, name)
        self._folder.log_folder.mkdir(mode=0o700)
        return self._folder.log_folder


def _refuse_what_cannot_be(request: LaunchRequest) -> None:
    config = request.config
    why = ""
    if config.start_method in ("fork", "inline"):
        why = f"With start_method={config.start_method!r} its ranks would be the kernel or forks of it."
    elif config.num_nodes != "1":
        why = "Runs on several nodes end with the kernels that have launched them."
    elif config.engine != "local":
        why = f"Ranks of the engine {config.engine!r} end with the kernel."
    elif request.on_death == "keep":
        why = "A session's ranks take their cells from the kernel."
    if why:
        raise ConfigError("This run can't be detached.", why=why, fix="leave out --detach (detach=True)")


def _facts(job: DetachedJob, request: LaunchRequest) -> RunFacts:
    defaults = msgspec.to_builtins(LaunchConfig())
    options = msgspec.to_builtins(request.config)
    return RunFacts(
        name=job.name,
        world_size=job.world_size,
        devices=job.devices,
        config={name: value for name, value in options.items() if value != defaults[name]},
        log_folder="" if job.log_folder is None else str(job.log_folder),
        began=time.time(),
        began_s=job.started_s,
        keep_days=request.config.keep_days,
        version=VERSION,
        journal_version=JOURNAL_VERSION,
        host=socket.gethostname(),
        boot_id=run_folders.boot_id(),
    )


class _Link(AgentLink[DetachedJob]):
    """Follows one detached run, and sends its agent what the job asks for.

    Args:
        job: The run's job.
    """

    def __init__(self, job: DetachedJob) -> None:
        super().__init__()
        self._job = job
        self._folder = job.folder
        self._connection: Connection | None = None
        self._seen = 0  # the highest number of the messages heard so far
        self._known = 0  # what it was when the present connection began
        self.expect(job)

    @property
    def _is_over(self) -> bool:
        return self._job.id not in self._jobs

    def launch(self, prepared: PreparedRun, lock: int) -> None:
        """Start the agent and the run, and follow it from now on.

        Raises:
            ProcessStartError: The agent can't be started, or has gone again.
        """
        self._job.attach(_Control(self, self._job.id))
        connection, theirs = Connection.pair()
        try:
            with contextlib.closing(theirs):
                _start_agent(self._folder, theirs, lock)
            self._follow(connection)
            self.prepare(prepared.job.config)
            self._send(self._launch_message(self._job), [prepared.payload, *prepared.result_files])
        except (OSError, subprocess.SubprocessError) as error:
            connection.close()
            raise self._start_error(error) from error
        except BaseException:
            connection.close()
            raise
        self._start_thread()

    def attach(self) -> None:
        """Read the journal, and follow the run from now on if it goes on.

        Raises:
            RunError: The agent lives and doesn't answer.
        """
        self._job.attach(_Control(self, self._job.id))
        if self._reconnect():
            if not self._is_over:
                self._start_thread()
        else:
            self._end_lost()

    def hear(self, descriptor: int) -> None:
        """Hear the messages in a file only, and close it."""
        self._replay(descriptor)

    def end_if_lost(self) -> None:
        """End the job of a run whose agent has gone, if the run's end was not among the messages."""
        if not self._is_over:
            self._end_lost()

    def tell(self, message: messages.Order) -> None:
        """Send an order on a connection of its own, which works whatever the state of the one that is followed is."""
        uninterruptible.call(lambda: send_order(self._folder, message))

    # What differs with where the agent is ---------------------------------------------------------------------------

    def _environment(self) -> tuple[object, Mapping[str, str], Sequence[str]]:
        return True, environment.sendable(), environment.import_path()

    def _send(self, message: messages.ToAgent, descriptors: Sequence[int] = ()) -> None:
        assert self._connection is not None
        self._connection.send(messages.encode(message), descriptors)

    def _receive(self) -> Sequence[bytes]:
        assert self._connection is not None
        return self._unknown(journal.split_number(frame.body) for frame in self._connection.receive())

    def _unknown(self, numbered: Iterable[tuple[int, bytes]]) -> list[bytes]:
        """Return the messages that were not heard before this connection began."""
        unknown = [(number, body) for number, body in numbered if number > self._known]
        self._seen = max([self._seen, *(number for number, _ in unknown)])
        return [body for _, body in unknown]

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            text = (self._folder.path / "agent.log").read_text(errors="replace")[-4000:].strip()
            return f"It last wrote:\n{text}" if text else ""
        return ""

    def _heard(self, said: messages.ToKernel) -> bool:
        if isinstance(said, messages.RunEnded):
            self._job.ended_by = said.by
        with contextlib.suppress(msgspec.DecodeError):  # an event that only a newer version knows
            return super()._heard(said)
        return False

    # Following -------------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        threading.Thread(target=self._run, name=f"notebook-accel-attached-{self._job.id}", daemon=True).start()

    def _run(self) -> None:
        """Follow the run to its end. Runs in the thread."""
        try:
            while not self._is_over:
                self._read_while_connected()
        except BaseException as error:  # noqa: BLE001 - whatever it is, nobody waits for ever
            if not self._is_over:
                text = f"The run {self._job.name!r} can't be followed any more; it may go on."
                self._end(
                    RunError(text, why=f"{type(error).__name__}: {error}", fix=f"%distributed attach {self._folder.id}")
                )
        finally:
            self._close()

    def _read_while_connected(self) -> None:
        """Read until the run's end or the connection's. An agent may drop a kernel that has taken nothing for long."""
        with contextlib.suppress(ClosedError, OSError):
            while not self._is_over:
                self._read()
            return
        if not self._reconnect():
            self._end_lost()

    def _reconnect(self) -> bool:
        """Connect to the agent and hear what isn't known yet; if it has gone, hear the rest of the journal.

        Returns:
            False if the agent has gone without a word about the run's end.

        Raises:
            RunError: The agent lives and doesn't answer.
        """
        self._close()
        deadline_s = time.monotonic() + _DEADLINE_S
        while self._folder.is_held:
            with contextlib.suppress(OSError, msgspec.MsgspecError):  # it may be about to end, or to begin
                self._follow(Connection(_connect(self._folder)))
                return True
            if time.monotonic() > deadline_s:
                raise _no_answer(self._folder)
            time.sleep(_PAUSE_S)
        self._known = self._seen
        self._replay(self._folder.open_journal())
        return self._is_over

    def _follow(self, connection: Connection) -> None:
        """Say who this is, and hear what is in the journal. What comes after it comes by the connection."""
        self._connection = connection
        connection.set_send_deadline(_DEADLINE_S)
        connection.set_receive_deadline(_START_DEADLINE_S)
        connection.send(messages.encode(messages.Hello(who=_who_this_is(), follows=True)))
        frames = connection.receive()
        if not frames:
            raise TimeoutError("the agent doesn't answer")
        self._known = self._seen
        [descriptor] = frames[0].descriptors
        self._replay(descriptor, messages.decode_attached(frames[0].body).size_bytes)
        self._job.is_live = True
        for body in self._unknown(journal.split_number(frame.body) for frame in frames[1:]):
            self._heard(messages.decode_for_kernel(body))
        connection.set_receive_deadline(_LOOK_PERIOD_S)

    def _replay(self, descriptor: int, size_bytes: int | None = None) -> None:
        """Hear what is in a journal and isn't known yet, and close it."""
        self._job.is_live = False
        try:
            for body in self._unknown(journal.read(descriptor, size_bytes)):
                self._heard(messages.decode_for_kernel(body))
        finally:
            os.close(descriptor)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _end_lost(self) -> None:
        facts = self._folder.facts
        self._job.is_live = False
        steps = max((rank.steps or 0 for rank in self._job.ranks), default=0)
        last = f" Its last known step is {steps:,}." if steps else ""
        if facts.boot_id != run_folders.boot_id():
            what = f"The run {self._job.name!r} was lost with the machine, which was started again.{last}"
            error = SupervisorLostError(what, fix="launch it again: it continues from a checkpoint that it loads")
        else:
            what = f"The agent process of the run {self._job.name!r} has gone, and the ranks with it.{last}"
            error = SupervisorLostError(what, why=self._last_words(), fix="launch it again")
        self._end(error)

    def _end(self, error: NotebookAccelError) -> None:
        self.forget(self._job)
        self._job.end("", error)

    def _start_error(self, error: Exception) -> ProcessStartError:
        why = "\n".join(filter(None, [f"{type(error).__name__}: {error}", self._last_words()]))
        return ProcessStartError("The agent process of the detached run could not be started.", why=why)


class _Control:
    def __init__(self, link: _Link, job_id: str) -> None:
        self._link = link
        self._job_id = job_id

    def interrupt(self, *, escalate: bool) -> None:
        if escalate:
            self._link.tell(messages.End(job_id=self._job_id, how="interrupt"))
        else:
            self._link.tell(messages.Interrupt(job_id=self._job_id))

    def stop(self) -> None:
        self._link.tell(messages.End(job_id=self._job_id, how="stop"))

    def kill(self) -> None:
        self._link.tell(messages.End(job_id=self._job_id, how="kill"))

    def respawn(self, rank: int) -> None:
        raise LaunchError(f"Rank {rank} of a detached run can't be started again by itself.")

    def inspect(self) -> None:
        self._link.tell(messages.Inspect(job_id=self._job_id))


def attach(which: str = "", *, view: str | None = None) -> DetachedJob:
    """Attach to a detached run of yours on this machine, and show it as the launching notebook does.

    Args:
        which: The run's name or id. Default: the only one that goes on, or the latest.
        view: View of the run: ``auto``, ``panel``, ``lines`` or ``none``. Default: that of the launch.

    Returns:
        The run's job. If the run has ended, it has the results already.

    Raises:
        NotebookAccelError: There is no such run, or a version with another format has launched it.
        RunError: The run's agent lives and doesn't answer.
    """
    return attach_and_show(which, view=view)


def attach_and_show(
    which: str = "",
    *,
    view: str | None = None,
    set_variables: Callable[[dict[str, Any]], object] | None = None,
    show: Callable[[Job], None] = foreground.draw_attached,
) -> DetachedJob:
    """Attach to a run, as ``attach`` does.

    Args:
        which: The run's name or id.
        view: View of the run.
        set_variables: Takes the pulled variables when the results are read.
        show: Shows the run.
    """
    job = open_job(run_folders.find(which), set_variables)
    if view is not None:
        job.config = job.config.replace(view=view)
    uninterruptible.call(_Link(job).attach)
    registry.add(job)
    show(job)
    return job


def open_job(
    folder: RunFolder, set_variables: Callable[[dict[str, Any]], object] | None = None, *, has_results: bool = True
) -> DetachedJob:
    """Return the job of a run that has heard nothing yet.

    Args:
        folder: The run's folder.
        set_variables: Takes the pulled variables when the results are read.
        has_results: Whether the results will be read.

    Raises:
        NotebookAccelError: The folder can't be read, or has the format of another version.
    """
    facts = folder.facts
    if facts.journal_version != JOURNAL_VERSION:
        raise NotebookAccelError(
            f"The run {facts.name!r} can't be read by notebook-accel {VERSION}.",
            why=f"notebook-accel {facts.version} has launched it, and writes its folder in another format "
            f"({facts.journal_version} instead of {JOURNAL_VERSION}).",
            fix=f"attach with notebook-accel {facts.version}; notebook-accel stop {facts.name} works with any",
        )
    payload = folder.open_payload()
    try:
        spec = JobSpec.decode(memory_files.read_head(payload))
    finally:
        os.close(payload)
    known = {option.name for option in configuration.fields()}
    config = LaunchConfig().replace(**{name: value for name, value in facts.config.items() if name in known})
    request = LaunchRequest(
        Target(names={}), {}, spec, config, devices=facts.devices, set_variables=set_variables, detach=True
    )
    job = DetachedJob(
        request,
        folder=folder,
        by_value=_Definitions(folder),
        result_files=[folder.open_result(rank) for rank in range(spec.world_size)] if has_results else [],
        log_folder=pathlib.Path(facts.log_folder) if facts.log_folder else None,
    )
    job.started_s = facts.began_s
    return job


class _Definitions(Sequence[Any]):
    """The functions and classes that a run's payload has by value. The payload is opened when one is asked for."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    @functools.cached_property
    def _loaded(self) -> list[Any]:
        namespace: dict[str, Any] = {}
        descriptor = self._folder.open_payload()
        try:
            opened = serialization.load(descriptor, namespace=namespace)
        finally:
            os.close(descriptor)
        namespace.update({name: obj for name, obj in opened.by_value if name is not None})
        namespace.update(opened.value.names)
        return [obj for _, obj in opened.by_value]

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._loaded[index]

    def __len__(self) -> int:
        return len(self._loaded)


def stop(folder: RunFolder) -> None:
    """Stop a run, and wait until its agent is gone.

    Raises:
        RunError: It is not gone in time.
    """
    send_order(folder, messages.End(job_id=folder.id, how="stop"))
    deadline_s = time.monotonic() + _STOP_DEADLINE_S + 3 * float(folder.facts.config.get("grace_s", 0.0))
    while folder.is_held:
        if time.monotonic() > deadline_s:
            raise RunError(f"The run {folder.facts.name!r} has not ended yet.", fix="try again")
        time.sleep(_PAUSE_S)


def send_order(folder: RunFolder, message: messages.Order) -> None:
    """Send the agent of a run a message, if it lives. A message to an agent that has gone, or is going, is lost.

    Raises:
        RunError: The agent lives and doesn't answer.
    """
    deadline_s = time.monotonic() + _DEADLINE_S
    while folder.is_held:
        with contextlib.suppress(OSError), contextlib.closing(Connection(_connect(folder))) as connection:
            connection.set_send_deadline(_DEADLINE_S)
            connection.set_receive_deadline(_DEADLINE_S)
            connection.send(messages.encode(messages.Hello(who=_who_this_is(), follows=False)))
            if connection.receive():  # it is not refused
                connection.send(messages.encode(message))
                return
        if time.monotonic() > deadline_s:
            raise _no_answer(folder)
        time.sleep(_PAUSE_S)


def _no_answer(folder: RunFolder) -> RunError:
    return RunError(
        f"The agent of the run {folder.facts.name!r} doesn't answer.",
        why="The agent, the process that supervises the ranks, lives. It may be stopped or very busy.",
        fix="try again",
    )


def _connect(folder: RunFolder) -> socket.socket:
    """Connect to the agent of a run, and continue it if somebody has stopped it.

    Raises:
        OSError: Nobody listens, or another user does.
    """
    connected = folder.connect()
    pid, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        connected.close()
        raise PermissionError(errno.EPERM, "another user listens there", str(folder.path))
    processes.resume_if_stopped(pid)
    return connected


def _who_this_is() -> str:
    return f"process {os.getpid()} ({pathlib.Path(sys.argv[0] or sys.executable).name})"


def _start_agent(folder: RunFolder, theirs: Connection, lock: int) -> None:
    """Start the agent of a run. It is nobody's child, since the process that starts it ends at once.

    Raises:
        OSError: It can't be started.
        SubprocessError: It has failed before that.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    log = os.open(folder.path / "agent.log", flags, 0o600)
    arguments = [str(theirs.fileno()), str(folder.path), str(lock)]
    try:
        process = subprocess.Popen(
            processes.bootstrap("notebook_accel.launching.agent.detached", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs.fileno(), lock],
            start_new_session=True,
        )
    finally:
        os.close(log)
    try:
        status = process.wait(_START_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    if status:
        raise subprocess.CalledProcessError(status, "the agent")


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """A detached run in a line.

    Attributes:
        id: Its id.
        name: Its name.
        status: A job's status in a word; ``lost`` if its agent has gone with the machine or was killed; ``unreadable``.
        why: The reason of its end in a line; empty if there is none.
        began: Time of its launch in seconds since the epoch.
        changed: Time of its last sign of life.
        devices: The ranks' devices in words.
        step: Steps of the rank that has done most, ``None`` if none counts any.
        metrics: The latest metrics of the first rank that has some.
        folder: Its folder, with results and logs.
        log_folder: The folder of the logs; empty if there is none.
    """

    id: str
    name: str
    status: str
    why: str
    began: float
    changed: float
    devices: str
    step: int | None
    metrics: dict[str, float]
    folder: str
    log_folder: str

    @property
    def is_going(self) -> bool:
        """True while the run goes on."""
        return self.status in ("starting", "running")


def summaries() -> list[RunSummary]:
    """Return this user's detached runs on this machine, the oldest first."""
    return [summary(folder) for folder in run_folders.every()]


def summary(folder: RunFolder) -> RunSummary:
    """Return a run in a line."""
    facts = folder.facts
    step, metrics, status, why = None, {}, "unreadable", ""
    try:
        job = _job_of_latest(folder)
    except (NotebookAccelError, OSError) as error:
        why = error.what if isinstance(error, NotebookAccelError) else str(error)
    else:
        status = "lost" if isinstance(job.error, SupervisorLostError) else job.status
        why = job.ending.why
        step = max((rank.steps for rank in job.ranks if rank.steps is not None), default=None)
        metrics = next((dict(rank.metrics) for rank in job.ranks if rank.metrics), {})
    return RunSummary(
        id=folder.id,
        name=facts.name,
        status=status,
        why=why,
        began=facts.began,
        changed=folder.changed,
        devices=facts.devices,
        step=step,
        metrics=metrics,
        folder=str(folder.path),
        log_folder=facts.log_folder,
    )


def _job_of_latest(folder: RunFolder) -> DetachedJob:
    """Return the job of a run with its present state and without its history."""
    job = open_job(folder, has_results=False)
    was_held = folder.is_held  # read before the messages, the last of which is written before the agent ends
    with contextlib.suppress(FileNotFoundError):
        _Link(job).hear(folder.open_latest())
    if not job.done and not was_held:  # the disk may have been full
        job = open_job(folder, has_results=False)
        link = _Link(job)
        link.hear(folder.open_journal())
        link.end_if_lost()
    return job

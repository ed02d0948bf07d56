"""The kernel's handle of a run: an engine updates it, a view draws it, and the notebook holds it."""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import pathlib
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import (
    LaunchError,
    NotebookAccelError,
    ProcessStartError,
    RankFailedError,
    ResultError,
    RunError,
    RunStoppedError,
    RunTimeoutError,
)
from notebook_accel.interrupts import Latch, held
from notebook_accel.launching import logs, run_folders, traces
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.results import ResultFiles, Results
from notebook_accel.launching.spec import JobSpec
from notebook_accel.launching.state import failures, profiles
from notebook_accel.launching.state.diagnosis import Diagnosis, diagnose
from notebook_accel.launching.state.profiles import DEFAULT_STEPS, Profile, ProfileRequest
from notebook_accel.launching.state.rank import RankState
from notebook_accel.launching.state.run import RunState
from notebook_accel.launching.state.stacks import RankStack, Silence, StackRequest, Stacks
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol.agent_messages import Failure, OnDeath, RankDump, Reason, RunOrder, Starting
from notebook_accel.protocol.events import Event, Numbered, Respawning, Restarting, Working

_MOST_PENDING_EVENTS = 100_000
_DISCARD_DEADLINE_S = 10.0
_TRACE_DEADLINE_S = 60.0  # for ranks to read what they have recorded

Status = Literal["waiting", "starting", "running", "succeeded", "failed", "stopped", "detached"]


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
    """A launch that has passed all checks, before any process is started for it.

    Attributes:
        target: The function or cell that the ranks run.
        roots: The target's objects by the labels that messages use for them, such as ``argument 1``.
        spec: The ranks' ``JobSpec``, without the sources of functions that are pickled.
        config: The options.
        devices: The ranks' devices in words, such as ``2 CPUs``.
        variables: Environment variables that the launch sets for the ranks.
        optional_names: Names of the target that are left out if they can't be pickled.
        is_background: False if the cell waits for the run.
        set_variables: Function that takes the pulled variables when the results are read. After a failure or an
            interrupt, they have their values at that time.
        on_death: What happens to the other ranks when one dies: ``stop`` or ``keep``.
        detach: True if the run goes on when the kernel ends.
        detached_id: The id of a detached run; empty for a new one.
    """

    target: Target
    roots: Mapping[str, Any]
    spec: JobSpec
    config: LaunchConfig
    devices: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional_names: Sequence[str] = ()
    is_background: bool = True
    set_variables: Callable[[dict[str, Any]], object] | None = None
    on_death: OnDeath = "stop"
    detach: bool = False
    detached_id: str = ""


class Handle(abc.ABC):
    """The handle of code that runs in ranks: the ``Job`` of a launch, or a session's cell in the background.

    Attributes:
        name: The code's name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._ended = Latch()

    @property
    @abc.abstractmethod
    def status(self) -> Status:
        """The status as one word. A cell is ``waiting`` while the ranks run earlier cells."""

    @property
    def done(self) -> bool:
        """True once the code has ended, with or without success."""
        return self._ended.is_set

    @property
    @abc.abstractmethod
    def error(self) -> BaseException | None:
        """The error that ended the code; ``None`` while it runs and after success."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the code has ended, and return whether it has."""
        return self._ended.wait(timeout_s)

    def results(self, timeout_s: float | None = None) -> Results:
        """Wait for the end of the code and return the result of every rank that ran it.

        Args:
            timeout_s: Longest wait in seconds; ``None`` waits until the code has ended.

        Raises:
            RunTimeoutError: The code hasn't ended within ``timeout_s``, and continues.
            RunError: The code has failed or was stopped.
            ResultError: A result can't be read in this process. The error carries the others.
        """
        if not self.wait(timeout_s):
            raise RunTimeoutError(
                f"{self.name!r} has not ended after {timeout_s:g} s.",
                why="The run continues; ask again later.",
                fix="results() to wait for its end, stop() to end it",
            )
        return self._results()

    @abc.abstractmethod
    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in every rank that runs the code. Doesn't wait for the end."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Stop the code. Doesn't wait for the end."""

    @abc.abstractmethod
    def stacks(self, timeout_s: float = 10.0) -> Stacks:
        """Return every rank's stack."""

    @abc.abstractmethod
    def _results(self) -> Results:
        """Return the results of code that has ended, or raise its error."""


@dataclasses.dataclass
class Ending:
    """The outcome of a run. It may outlive the job."""

    status: str = ""  # empty while the run goes on
    why: str = ""  # the reason for a failure or an early end, in one line
    took_s: float = 0.0
    first_rank: int = 0  # this node's, among all
    diagnosis: Diagnosis = dataclasses.field(default_factory=Diagnosis)
    ranks: Sequence[RankState] = ()


@dataclasses.dataclass(frozen=True)
class _EndReport:
    """How a run has ended for its job, as its engine says."""

    reason: Reason = ""
    error: NotebookAccelError | None = None  # what ended the run, if it wasn't a rank here
    elsewhere: Failure | None = None  # the failure on another node, if that ended the run
    raised: BaseException | None = None  # the exception of a rank that is this process
    is_detached: bool = False  # it goes on without this job


class Job(Handle):
    """A started run. The launcher creates the job, an engine updates it, and views and users read it.

    Attributes:
        id: An identifier, unique among this user's runs.
        name: The run's name.
        spec: The description of the run that each rank receives.
        config: The run's options.
        world_size: Number of ranks on this node.
        devices: The ranks' devices in words, such as ``2 CPUs``.
        is_background: Whether the run is in the background, so that its cell doesn't wait for it.
        on_death: What happens to the other ranks when one dies: ``stop`` or ``keep``. With ``keep`` the run goes on,
            even without any rank, until it is stopped or all ranks have finished.
        saves: True if rank 0 has variables to send back, even after a failure of another rank.
        started_s: Time of the start, in seconds of ``time.monotonic()``.
        ended_s: Time of the end, ``None`` while the run goes on.
        ending: The outcome of the run, filled in when the run ends.
        state: The ranks' states, reduced from their events. Other threads change it: read it while holding
            ``state_lock``.
        log_files: Each rank's log of its standard output and error. Empty if no log folder could be made.
        log_folder: The folder of the logs, ``None`` if there are none.
        result_files: The ranks' result files, which the job owns.
        doing: A function that returns the ranks' current work in words. By default it returns empty text.
        ended_by: Who has stopped or interrupted the run, in words, such as a button or another process; may be empty.
        run_here: A function that runs the only rank in this process; ``None`` if ranks are processes.
        send_order: The engine's function that sends an order to the run's agent, without waiting for the answer.
    """

    def __init__(
        self,
        request: LaunchRequest,
        *,
        by_value: Sequence[Any] = (),
        result_files: Sequence[int] = (),
        log_folder: pathlib.Path | None = None,
    ) -> None:
        spec, config = request.spec, request.config
        super().__init__(spec.name)
        self.id = run_folders.new_id(spec.name)
        self.spec = spec
        self.config = config
        self.world_size = spec.world_size
        self.devices = request.devices
        self.is_background = request.is_background
        self.on_death = request.on_death
        self.saves = bool(spec.pull)
        self.started_s = time.monotonic()
        self.ended_s: float | None = None
        self.ending = Ending()
        self.doing: Callable[[], str] = str
        self.ended_by = ""
        self.run_here: Callable[[], None] | None = None
        self.send_order: Callable[[RunOrder], None] | None = None
        self.log_folder = log_folder
        ranks = range(spec.world_size)
        self.log_files = tuple(logs.log_file(log_folder, rank) for rank in ranks) if log_folder is not None else ()
        self.result_files = ResultFiles(result_files, by_value, request.set_variables)
        self._is_discarded = False
        self._can_be_asked_again = False
        self._lock = threading.Lock()
        self._pending: collections.deque[tuple[int, Event]] = collections.deque(maxlen=_MOST_PENDING_EVENTS)
        self.state = RunState(spec.world_size)
        self.state_lock = threading.RLock()
        # Correct if the launch numbers the nodes (node_rank); otherwise the elastic process sends the numbers later.
        total = config.num_nodes * self.world_size
        self.state.apply(0, Numbered(first_rank=config.node_rank * self.world_size, world_size=total))
        self._failures = failures.RunErrors(config.start_method, spec.unsent, by_value)
        self._silence = Silence()
        self._stack_request = StackRequest(spec.world_size, spec.sources)
        self._profile_request: ProfileRequest | None = None
        self._was_started_by_node = False
        self._end_report = _EndReport()  # set when the run ends
        self._read_results: Results | None = None
        self._error: NotebookAccelError | None = None

    # For users ------------------------------------------------------------------------------------------------------

    @property
    def status(self) -> Status:
        """The run's status as one word."""
        if not self.done:
            return "running" if self.state.has_started else "starting"
        return self._end_status()

    def _end_status(self) -> Status:
        if self._end_report.is_detached:
            return "detached"
        if self._has_all_results():
            return "succeeded"
        return "stopped" if self._end_report.reason in ("stopped", "interrupted", "terminated") else "failed"

    @property
    def error(self) -> NotebookAccelError | None:
        """The error that ended the run; ``None`` while it runs and after success."""
        if not self.done or self.status == "succeeded":
            return None
        with self._lock:
            if self._error is None:
                self._error = self._make_error()
            return self._error

    def _results(self) -> Results:
        error = self.error
        if error is not None:
            saved, lost = self.pull_saved()
            if (saved or lost) and isinstance(error, RankFailedError):
                error.pulled, error.not_pulled = saved, lost
            raise error
        with self._lock:
            if self._read_results is None:
                try:
                    self._read_results = self.result_files.read(self.first_rank)
                except ResultError as incomplete:
                    incomplete.job = self
                    self._can_be_asked_again = True
                    raise
        return Results(self._read_results)

    def interrupt(self, *, escalate: bool = True) -> None:
        """Raise KeyboardInterrupt in every rank, as an interrupt of the kernel does. Doesn't wait for the end.

        Args:
            escalate: Whether to terminate ranks that go on: SIGTERM after the grace period, SIGKILL after a second one.
        """
        if escalate:
            self._order(messages.End(job_id=self.id, how="interrupt"))
        else:
            self._order(messages.Interrupt(job_id=self.id))

    def stop(self) -> None:
        """Stop the run. Doesn't wait for the end."""
        self._order(messages.End(job_id=self.id, how="stop"))

    def kill(self) -> None:
        """Kill the ranks, which can't clean up. Doesn't wait for the end."""
        self._order(messages.End(job_id=self.id, how="kill"))

    def respawn(self, rank: int) -> None:
        """Restart a dead rank as a fresh process, which runs the function from its beginning.

        Raises:
            LaunchError: The run stops when a rank dies, or has ended, or the rank is running.
        """
        why = ""
        if self.on_death != "keep":
            why = "It was launched with on_death='stop', so that all ranks end when one does."
        elif self.done:
            why = "The run has ended."
        elif not self.state.ranks[rank].is_dead:
            why = "It is running."
        if why:
            raise LaunchError(f"Rank {rank} of {self.name!r} can't be started again.", why=why)
        self.deliver(rank, Respawning())
        self._order(messages.Respawn(job_id=self.id, rank=rank))

    def death(self, rank: int) -> RankFailedError | None:
        """Return a dead rank's error, ``None`` for a living rank. For runs with ``on_death="keep"``."""
        with self.state_lock:
            state = self.state.ranks[rank]
            return self._failures.of_rank(self.state, state) if state.is_dead else None

    @property
    def first_rank(self) -> int:
        """The number of this node's first rank among all ranks."""
        return self.state.first_rank

    @property
    def total_ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.state.total_ranks

    @property
    def ranks(self) -> list[RankState]:
        """A copy of each rank's state, with its process, device, memory, steps and metrics."""
        with self.state_lock:
            return [rank.copy() for rank in self.state.ranks]

    @property
    def restarts(self) -> tuple[str, ...]:
        """The reason for each restart of all ranks, which names the rank that failed first and its failure."""
        with self.state_lock:
            return tuple(event.why for event in self.state.restartings if event.number)

    def diagnosis(self) -> Diagnosis:
        """Return how each rank spends the time of its last steps, and why they are slow if they are.

        The diagnosis prints as text; its ``to_dict()`` returns plain data.
        """
        with self.state_lock:
            return diagnose(self.state)

    def logs(self, rank: int, tail: int | None = None) -> str:
        """Return the standard output and error of a rank of this node.

        Args:
            rank: Its number among all ranks of the run, as in messages and in the panel.
            tail: Number of last lines to return; ``None`` for all.

        Raises:
            IndexError: There is no such rank on this node.
            NotebookAccelError: The run has no logs, or the log was removed.
        """
        if not self.log_files:
            raise NotebookAccelError("This run has no log files.", why="No folder for them could be made.",
                                     fix="give log_dir a folder that you can write to")  # fmt: skip
        numbers = range(self.first_rank, self.first_rank + self.world_size)
        if rank not in numbers:
            has = "this run" if self.world_size == self.total_ranks else "this node"
            raise IndexError(f"There is no rank {rank}: {has} has ranks {numbers[0]} to {numbers[-1]}")
        return logs.read(self.log_files[numbers.index(rank)], tail)

    def stacks(self, timeout_s: float = 10.0) -> Stacks:
        """Return every rank's stack. A rank that hangs in a collective answers too.

        Raises:
            RunError: The agent, which collects the stacks, has not answered in time; or the run was detached.
        """
        if self._end_report.is_detached:
            raise self.error or RunError(f"The run {self.name!r} was detached.")
        stacks = self._stack_request.ask(lambda: self._order(messages.Inspect(job_id=self.id)), timeout_s)
        if self._stack_request.is_over:
            return Stacks([RankStack(rank.number, rank.pid, "ended") for rank in self.ranks])
        if stacks is not None:
            return stacks
        raise RunError(
            f"The stacks of the ranks of {self.name!r} have not come within {timeout_s:g} s.",
            why="The agent, the process that supervises the ranks, doesn't answer: it may be stopped.",
        )

    def profile(self, steps: int = DEFAULT_STEPS, timeout_s: float = 60.0, *, memory: bool = False) -> Profile:
        """Profile the next steps on all ranks with torch's profiler, while the run goes on, and wait for the result.

        Steps are counted by torch's hooks, so nothing in the code needs to change.

        Args:
            steps: Number of steps, from 1 to 100.
            timeout_s: Seconds that the ranks have for these steps.
            memory: Take a snapshot of each GPU's memory instead, for https://pytorch.org/memory_viz.

        Raises:
            ConfigError: ``steps`` is out of range.
            RunError: The run isn't going on, is being profiled already, or no rank has done a step in time; or
                ``memory`` is asked for and no rank uses CUDA.
        """
        profiles.check_steps(steps)
        request = self._begin_profile(steps, timeout_s, memory=memory)
        try:
            self._order(request.message(self.id))
            request.wait(timeout_s + _TRACE_DEADLINE_S)
        finally:
            self._profile_request = None
        found = request.profile(self.name)
        if not found.measured:
            raise RunError(
                f"No step of {self.name!r} could be profiled.",
                why="\n".join(found.notes),
                fix=profiles.MEMORY_ADVICE if memory else profiles.ADVICE,
            )
        return self._with_trace(found, request.number)

    def _begin_profile(self, steps: int, timeout_s: float, *, memory: bool) -> ProfileRequest:
        with self.state_lock:
            ranks = [rank for rank in self.ranks if rank.pid is not None and not rank.has_ended]
            why = ""
            if self.run_here is not None:
                why = "Its one rank runs in this process (start_method='inline')."
            elif self._profile_request is not None:
                why = "Another profile is being made."
            elif self.done or not ranks:
                why = "It has ended." if self.done or self.state.has_started else "No rank has started yet."
            if why:
                raise RunError(f"The run {self.name!r} can't be profiled now.", why=why)
            self._profile_request = ProfileRequest(int(steps), timeout_s, ranks, memory=memory)
            return self._profile_request

    def _with_trace(self, profile: Profile, number: str) -> Profile:
        """Merge the ranks' traces and return the profile with the merged trace."""
        paths = {rank.rank: rank.trace for rank in profile.ranks if rank.trace is not None}
        if len(paths) < 2 or self.log_folder is None:
            return dataclasses.replace(profile, trace=next(iter(paths.values()), None))
        merged = logs.profile_file(self.log_folder, number, None)
        try:
            traces.merge(paths, merged)
        except (OSError, ValueError) as error:
            return dataclasses.replace(profile, problem=f"The traces of the ranks can't be merged: {error}")
        return dataclasses.replace(profile, trace=merged)

    def __repr__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"<Job {self.name!r}: {self.status}, {ranks} on {self.devices}>"

    def pull_saved(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Set the pulled variables to their values in rank 0 when it failed or was interrupted.

        Returns:
            The names that were set, none if rank 0 was killed or had defined none of them; and the reasons for those
            that rank 0 couldn't save, or whose values can't be unpickled.
        """
        with self._lock:
            first = self.state.ranks[0]
            if self.done and self.saves and first.failed is None and not first.has_result:
                why = f"{', '.join(self.spec.pull)}: rank {self.first_rank} was ended before it could send them"
                return (), dict.fromkeys(self.spec.pull[:1], why)
            is_success = self._has_all_results() and not self._end_report.reason
            if not self.done or not self.result_files.are_open or is_success:
                return (), {}
            return self.result_files.set_saved_variables(self.first_rank)

    def discard(self) -> None:
        """Kill the run if it still runs, and close its result files. For a job that is no longer used.

        If some results couldn't be read, the files stay open, because the error's holder can call ``results`` again.
        """
        self._is_discarded = True
        self.kill()
        has_ended = self.wait(_DISCARD_DEADLINE_S)
        if has_ended and not self._can_be_asked_again:  # an engine may write to the files until the run has ended
            self.result_files.close()

    # For views and engines ------------------------------------------------------------------------------------------

    def events(self) -> list[tuple[int, Event]]:
        """Return the ranks' events since the last call, each with its rank, in order of arrival."""
        drained = []
        with contextlib.suppress(IndexError):
            while True:
                drained.append(self._pending.popleft())
        return drained

    def where_ranks_stood(self) -> list[str]:
        """Return lines such as ``rank 0 was at In[7], line 12``, for ranks that were interrupted."""
        with self.state_lock:
            return failures.where_ranks_stood({rank.number: rank.failed for rank in self.state.ranks})

    def notice_silence(self, now_s: float) -> None:
        """Request the ranks' stacks if a silent rank keeps the others waiting. The findings come as ``events``.

        Called by the thread that draws the run. Doesn't wait.
        """
        with self.state_lock:
            is_due = self._silence.is_due(self.state, now_s)
        if is_due:
            self._order(messages.Inspect(job_id=self.id))

    def expect_steps(self, ranks: Sequence[int]) -> None:
        """Set the ranks that have work from now on; initially all. The silence of idle ranks is ignored."""
        self.deliver(0, Working(ranks=list(ranks)))

    def deliver(self, rank: int, event: Event) -> None:
        """Apply and queue one event of a rank. Called by the engine's thread."""
        with self.state_lock:
            self.state.apply(rank, event)
            self._pending.append((rank, event))
            if self._profile_request is not None:
                self._profile_request.take(rank, event)

    def start(self, starting: Starting) -> None:
        """Record that all ranks are started or restarted. Called by the engine's thread."""
        was_started, self._was_started_by_node = self._was_started_by_node, True
        first = self.state.first_failed
        why = failures.in_a_line(self.state)
        self.deliver(0, Numbered(first_rank=starting.first_rank, world_size=starting.world_size))
        if not was_started and (starting.restarts == 0 or self.config.num_nodes > 1):
            return  # the first start on this node, which may join a run that other nodes have restarted before
        rank = 0
        if starting.cause is not None:
            why = starting.cause.in_a_line
        else:
            rank = 0 if first is None else first.rank
            why = why or "a rank on another node has failed"
        self.deliver(rank, Restarting(number=starting.restarts, of=self.config.max_restarts, why=why))

    def take_dumps(self, dumps: Sequence[RankDump]) -> None:
        """Process the ranks' stacks. Called by the engine's thread."""
        stacks = self._stack_request.answer(dumps, self.first_rank)
        for rank, silent in self._silence.judge(self.state, stacks, time.monotonic()):
            self.deliver(rank, silent)

    def end(self, reason: Reason, error: NotebookAccelError | None = None, elsewhere: Failure | None = None) -> None:
        """Record the end of the run, when every rank is gone. Called once, by the engine's thread."""
        self._end(_EndReport(reason, error, elsewhere))

    def _end(self, report: _EndReport) -> None:
        self._end_report = report
        self.ended_s = self._now_s()
        status, why = self._end_status(), f"by {self.ended_by}" if self.ended_by else ""
        if status == "failed":
            why = "timeout_s has run out" if report.reason == "timeout" else failures.in_a_line(self.state)
            if report.error is not None:
                why = report.error.what
            elif report.elsewhere is not None:
                why = report.elsewhere.in_a_line
        elif status == "succeeded":
            why = self.state.early_end or (f"interrupted {why}".strip() if report.reason else "")
        elif status == "detached" and report.error is not None:
            why = f"it goes on without this notebook: {report.error.fix}"
        ending, ending.first_rank = self.ending, self.first_rank
        ending.why, ending.took_s, ending.diagnosis = why, self.ended_s - self.started_s, self.diagnosis()
        with self.state_lock:
            self.state.close(is_detached=report.is_detached)
        ending.ranks = self.ranks
        ending.status = status  # the last one, so that a thread that sees it also sees the others
        if self._is_discarded or not (self._has_all_results() or self.state.has_saved):
            self.result_files.close()
        self._ended.set()
        self._stack_request.end()
        with self.state_lock:
            if self._profile_request is not None:
                self._profile_request.end()

    def end_detached(self, name: str) -> None:
        """Record that the run goes on, under this name, without this job, which gets no more events."""
        what = f"The run {self.name!r} was detached under the name {name!r}, and goes on without this notebook."
        fix = f"%distributed attach {shlex.quote(name)}, or notebook_accel.attach({name!r})"
        self._end(_EndReport(error=RunError(what, fix=fix), is_detached=True))

    def end_here(self, results: Results | None, raised: BaseException | None) -> None:
        """Record the end of a run whose only rank was this process, with its results or its exception."""
        self._read_results = results
        reason: Reason = (
            "interrupted" if isinstance(raised, KeyboardInterrupt) else "failed" if raised is not None else ""
        )
        self._end(_EndReport(reason, raised=raised))

    def _now_s(self) -> float:
        """Return the time of the event being delivered, in seconds of ``time.monotonic()``."""
        return time.monotonic()

    def _order(self, order: RunOrder) -> None:
        send = self.send_order
        if send is not None and not self.done:
            with held():  # a part of a frame would break the connection for all
                send(order)

    def _has_all_results(self) -> bool:
        """Return whether every rank has a result, also if the user's code has taken an interrupt and returned."""
        report = self._end_report
        return report.error is None and report.reason in ("", "interrupted") and self.state.have_all_results

    def _make_error(self) -> NotebookAccelError:
        report = self._end_report
        if report.error is not None:
            return report.error
        if report.reason == "timeout":
            return RunTimeoutError(
                f"The run {self.name!r} took longer than its timeout_s of {self.config.timeout_s:g} s and was stopped.",
                why="\n".join(self.where_ranks_stood()),
                fix="give timeout_s more time, or leave it out",
            )
        if report.reason in ("stopped", "interrupted"):
            return RunStoppedError(
                f"The run {self.name!r} was {report.reason}.", why=f"By {self.ended_by}." if self.ended_by else ""
            )
        if report.reason == "terminated":
            return RunStoppedError(
                f"The run {self.name!r} was stopped, since its agent process got SIGTERM.",
                why="A batch system such as Slurm sends it before it takes the machine back.",
            )
        if report.reason in ("template lost", "elastic lost"):
            return failures.lost_process_error(report.reason, self.state.memory_shortage)
        if report.elsewhere is not None:
            return self._failures.elsewhere(self.state, report.elsewhere)
        failure = self._failures.first(self.state)
        if failure is not None and report.raised is not None:
            failure.__cause__ = report.raised
            failure.__traceback__ = report.raised.__traceback__  # where a debugger starts
        if failure is not None:
            failure.restarts, failure.local_rank = self.restarts, failure.rank - self.first_rank
            failure.log_file = str(self.log_files[failure.local_rank]) if self.log_files else ""
        return failure or ProcessStartError(f"The run {self.name!r} has ended, but no rank has reported why.")

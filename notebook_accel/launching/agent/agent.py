"""The agent process: supervises the ranks of one kernel, or of one detached run, and never imports torch.

A kernel can be busy, stopped or killed at any time, so its ranks need a supervisor of their own. The agent reads their
output, stops the others when one fails, escalates signals until every rank is gone, restarts ranks if the launch allows
that, and ends everything when the kernel has gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import signal
import socket
import time
from collections.abc import Iterator

import msgspec

from notebook_accel.host_memory import MemoryWatch
from notebook_accel.launching import logs
from notebook_accel.launching.agent.audience import Attachments, Audience, Kernel
from notebook_accel.launching.agent.elastic_runs import ElasticRuns
from notebook_accel.launching.agent.inspection import Inspection
from notebook_accel.launching.agent.runs import Rank, Run, fork_order, open_rank
from notebook_accel.launching.agent.templates import TemplateProcess, Templates
from notebook_accel.launching.journal import NO_NUMBER
from notebook_accel.launching.processes import end_with_parent, kill_group
from notebook_accel.launching.run_folders import AGENT_LOG, RunFolder
from notebook_accel.launching.state.policy import REASONS
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import ClosedError, Connection, EventLoop, Message, close_all

_TICK_S = 0.1
_NO_TEMPLATE = "The process that ranks are forked from could not be started"
_TEMPLATE_FAILED = messages.Broken(text=f"{_NO_TEMPLATE}.")
_TEMPLATE_LOST = messages.Broken(text="The process that ranks are forked from has died.")
_FORK_FAILED = messages.Broken(
    text="The fork of the kernel that the ranks are forked from has not come to life.",
    why="It has none of the kernel's threads. A lock that one of them held at that moment stays locked in it, and what "
    "takes the lock waits for ever.",
    fix="--start_method spawn (start_method='spawn'), or end the kernel's threads before the launch",
)
_LEAVING = messages.Broken(
    text="The agent process, which starts and supervises ranks, has been told to end (SIGTERM).",
    fix="run the cell again: a new one is started",
)
_PRELOAD_REFUSED = "A module that is named in preload can't be preloaded."
_WITHOUT_PRELOAD = "leave it out of preload: ranks then import it themselves"
_MORE_ROOM = "end what else runs here, or raise the limits on open files and processes (ulimit -n, ulimit -u)"
_FIXES = {errno.E2BIG: "shorten the longest environment variables, or sys.path: one alone may have 128 KiB"}


class Agent:
    """The event loop that connects the audience of runs with their templates and ranks."""

    def __init__(self, kernel: Kernel) -> None:
        self._audience: Audience = kernel
        self._loop = EventLoop()
        self._runs: dict[str, Run] = {}
        self._waiting: list[Run] = []
        self._inspections: dict[str, Inspection] = {}
        self._templates = Templates(
            loop=self._loop,
            became_ready=self._start_waiting,
            not_started=self._template_not_started,
            handle_report=self._handle_report,
            lost=self._template_lost,
        )
        self._elastic = ElasticRuns(
            loop=self._loop,
            ending_run_on_error=self._ending_run_on_error,
            start_ranks=self._start_ranks,
            tell_kernel=self._tell_kernel,
        )
        self._memory = MemoryWatch()
        self._is_leaving = False
        self._is_quitting = False
        kernel.begin(self._loop, self._handle_order, self._quit)

    def handle_sigterm(self) -> None:
        """Make a SIGTERM to this process stop every run, and then end ``serve``."""
        signals, raised = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(raised, warn_on_full_buffer=False)  # Python writes the numbers of this process's signals
        signal.signal(signal.SIGTERM, lambda *_: None)  # the loop ends by itself, after it has stopped the runs
        self._loop.watch(signals, lambda: self._read_signals(signals))

    def serve(self) -> None:
        """Serve until the kernel has gone, or until every run has been stopped after a Quit or a SIGTERM."""
        try:
            while not self._has_done_its_work:
                is_busy = self._runs or self._waiting or self._audience.is_leaving
                self._loop.wait(_TICK_S if is_busy else None)
                self._tick(time.monotonic())
                self._audience.flush()
        except ClosedError:
            pass
        finally:
            for run in self._runs.values():
                run.end("kill", "stopped")
            self._templates.close()
            self._audience.close()

    @property
    def _has_done_its_work(self) -> bool:
        if self._is_quitting:
            return True
        is_last = self._is_leaving or self._audience.is_leaving
        return is_last and not self._runs and not self._audience.queued_bytes

    def _tick(self, now_s: float) -> None:
        self._elastic.tick(now_s)
        for run in list(self._runs.values()):
            with self._ending_run_on_error(run):
                run.tick(now_s)
                self._read_logs(run, now_s)
            outcome = run.policy.outcome
            if outcome == "restart":
                with self._ending_run_on_error(run):
                    self._restart(run)
            elif outcome == "over":
                self._run_ended(run)
        for job_id, inspection in list(self._inspections.items()):
            if (dumps := inspection.look(now_s)) is not None:
                del self._inspections[job_id]
                self._tell_kernel(messages.Inspected(job_id=job_id, ranks=dumps))
        self._templates.tick(now_s)
        self._memory.tick(now_s)

    # The kernel ----------------------------------------------------------------------------------------------------

    def _handle_order(self, told: messages.ToAgent, message: Message, who: str) -> None:
        if isinstance(told, messages.Prepare):
            self._templates.start(told)
        elif isinstance(told, messages.Launch):
            self._accept(told, message)
        elif isinstance(told, messages.Interrupt):
            self._interrupt(told.job_id, who)
        elif isinstance(told, messages.Respawn):
            self._respawn(told)
        elif isinstance(told, messages.End):
            self._end(told, who=who)
        elif isinstance(told, messages.Inspect):
            self._inspect(told)
        elif isinstance(told, messages.Profile):
            self._profile(told)
        elif isinstance(told, messages.Detach):
            self._detach(told, message)
        elif isinstance(told, messages.Release):
            if told.job_id in self._runs:
                self._runs[told.job_id].policy.release()
        elif isinstance(told, messages.Quit):
            self._leave("stopped")

    def _read_signals(self, signals: int) -> None:
        if signal.SIGTERM in os.read(signals, 4096):
            self._leave("terminated")

    def _tell_kernel(self, message: msgspec.Struct) -> None:
        """Tell those who listen now something that no kernel needs later."""
        self._audience.tell(message)

    def _tell(self, run: Run, message: msgspec.Struct) -> None:
        """Tell everybody something about a run, also those who attach later."""
        self._audience.tell(message, NO_NUMBER if run.journal is None else run.journal.add(message))

    def _tell_end(self, run: Run, message: messages.RunEnded | messages.Broken) -> None:
        """Tell everybody that a run is over. Its results are where they are looked for then."""
        run.close_descriptors()
        run.keep_results()
        if isinstance(message, messages.RunEnded) and message.reason in ("stopped", "interrupted"):
            message = msgspec.structs.replace(message, by=run.ended_by)
        self._tell(run, message)
        self._audience.flush()  # a cell waits for this message; the cleanup can come later
        if run.journal is not None and isinstance(self._audience, Kernel):
            run.journal.close()

    def _leave(self, reason: messages.Reason) -> None:
        """Stop every run, with its grace period, and exit when the last one has ended."""
        self._is_leaving = True
        for job_id in [run.launch.job_id for run in (*self._waiting, *self._runs.values())]:
            self._end(messages.End(job_id=job_id, how="stop"), reason)

    def _quit(self) -> None:
        self._is_quitting = True

    def _detach(self, told: messages.Detach, message: Message) -> None:
        """Disconnect from the kernel if the run is going on and is the agent's only one."""
        run, folder = self._find(told.job_id), RunFolder(pathlib.Path(told.folder))
        if run is None:
            self._tell_kernel(messages.Detached(job_id=told.job_id, why="it has ended"))
        elif self._leave_kernel(run, folder, is_whole=message.is_whole):
            # The first descriptor is the folder's lock, held as long as this process lives.
            run.outlive_kernel(folder, message.descriptors[1:])
            return
        close_all(message.descriptors)

    def _leave_kernel(self, run: Run, folder: RunFolder, *, is_whole: bool) -> bool:
        """Go on for this run alone, and for all who attach to it, if that is possible. Return whether it is."""
        attachments, why = None, ""
        if any(other is not run for other in (*self._waiting, *self._runs.values())):
            why = "another run of this notebook goes on"
        elif run.journal is None:
            why = "its ranks end with this kernel"
        elif not is_whole:
            why = os.strerror(errno.EMFILE)
        else:
            try:
                attachments = Attachments(folder, run.journal)
            except OSError as error:
                why = str(error)
        self._tell_kernel(messages.Detached(job_id=run.launch.job_id, why=why))
        if attachments is None:
            return False
        assert isinstance(self._audience, Kernel)
        self._audience.leave(folder.path / AGENT_LOG)
        self._audience = attachments
        attachments.begin(self._loop, self._handle_order)
        return True

    def _find(self, job_id: str) -> Run | None:
        return next((run for run in (*self._waiting, *self._runs.values()) if run.launch.job_id == job_id), None)

    # Templates -----------------------------------------------------------------------------------------------------

    def _template_not_started(self, error: OSError) -> None:
        text = f"{_NO_TEMPLATE}: {error.strerror}."
        self._refuse_waiting(messages.Broken(text=text, fix=_FIXES.get(error.errno or 0, _MORE_ROOM)))

    def _handle_report(self, said: messages.Forked | messages.NotForked | messages.Exited) -> None:
        run = self._runs.get(said.job_id)
        if run is None or (said.rank != messages.ELASTIC and not run.awaits(said.rank)):
            if isinstance(said, messages.Forked):  # an error ended the rank here after its fork was ordered
                kill_group(said.pid)
            return
        if said.rank == messages.ELASTIC:
            with self._ending_run_on_error(run):
                self._elastic.handle_report(said)
            return
        rank = run.ranks[said.rank]
        if isinstance(said, messages.Forked):
            rank.forked(said.pid)
        elif isinstance(said, messages.Exited):
            self._rank_ended(run, rank, said.status, said.peak_bytes)
        else:
            self._not_started(run, said.rank, said.why)

    def _template_lost(self, template: TemplateProcess) -> None:
        again: list[Run] = []
        for run in list(template.runs):
            for rank in run.alive:
                self._read_rank(run, rank)
            if run.policy.may_requeue and template.pidfd < 0:
                self._requeue(run, template)
                again.append(run)
                continue
            if not template.is_ready and not run.policy.reason:
                run.refuse(_FORK_FAILED)
            run.end("kill", run.policy.reason or "template lost")
            self._elastic.lost(run)
            for rank in run.alive:
                self._rank_ended(run, rank, -signal.SIGKILL)
        if template.pidfd >= 0:
            return  # an adopted template: no other run waits for it
        if self._templates.current is None:
            broken = _TEMPLATE_LOST
            if not template.is_ready:
                broken = msgspec.structs.replace(_TEMPLATE_FAILED, why=logs.last_words(template.log))
            if template.refusal:
                broken = messages.Broken(text=_PRELOAD_REFUSED, why=template.refusal, fix=_WITHOUT_PRELOAD)
            elif template.error is not None:
                broken = messages.Broken(text=f"{_NO_TEMPLATE}: {template.error.strerror}.", fix=_MORE_ROOM)
            self._refuse_waiting(broken, is_news=not template.is_ready)
        if again:
            self._waiting += again
            self._templates.start_if_needed()
            self._start_waiting()

    def _refuse_waiting(self, broken: messages.Broken, *, is_news: bool = True) -> None:
        """Refuse the runs that wait for a template. With ``is_news``, tell the kernel first; it then prepares anew."""
        if is_news:
            self._tell_kernel(broken)  # before the refusals, since the kernel may launch as soon as it has read them
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            self._refuse(run, broken)

    def _requeue(self, run: Run, template: TemplateProcess) -> None:
        """Make a run wait for the next template: its own died before any rank reached the user's code."""
        for rank in run.alive:
            self._loop.unwatch(rank.connection.fileno())
        run.requeue()
        template.runs.remove(run)
        del self._runs[run.launch.job_id]

    # Runs ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _ending_run_on_error(self, run: Run) -> Iterator[None]:
        """On an ``OSError``, end this run only. The agent's other runs go on."""
        try:
            yield
        except OSError as error:
            text = f"The run {{}}, since the system refused it what it needs: {error}."
            if run.launch.job_id in self._runs:
                was_running = any(rank.said_started for rank in run.ranks)
                said = text.format("was ended" if was_running else "could not be started")
                run.refuse(messages.Broken(text=said, fix=_MORE_ROOM, was_running=was_running))
            else:
                self._refuse(run, messages.Broken(text=text.format("could not be started"), fix=_MORE_ROOM))

    def _accept(self, launch: messages.Launch, message: Message) -> None:
        run = Run(launch, message.descriptors)
        if launch.folder:
            del run.descriptors[-1:]  # the folder's lock, held as long as this process lives
            if not self._leave_kernel(run, RunFolder(pathlib.Path(launch.folder)), is_whole=message.is_whole):
                close_all(message.descriptors)
                return
        if not message.is_whole:
            text = f"The run could not be started: {os.strerror(errno.EMFILE)}."
            self._refuse(run, messages.Broken(text=text, fix=_MORE_ROOM))
        elif self._is_leaving:
            self._refuse(run, _LEAVING)
        elif launch.template_pid:
            *run.descriptors, connection, pidfd = message.descriptors
            with self._ending_run_on_error(run):
                template = self._templates.adopt(Connection.from_descriptor(connection), launch.template_pid, pidfd)
                self._start(run, template)
                self._templates.drop_if_unused(template)
        else:
            self._waiting.append(run)
            self._templates.start_if_needed()
            self._start_waiting()

    def _refuse(self, run: Run, broken: messages.Broken) -> None:
        self._tell_end(run, msgspec.structs.replace(broken, job_id=run.launch.job_id))

    def _start_waiting(self) -> None:
        template = self._templates.current
        if template is None or not template.is_ready:
            return
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            with self._ending_run_on_error(run):
                self._start(run, template)

    def _start(self, run: Run, template: TemplateProcess) -> None:
        if run.launch.places:
            run.become_part()
        elif run.launch.elastic is None and (broken := _open_store(run)) is not None:
            self._refuse(run, broken)
            return
        run.started()
        template.runs.append(run)
        self._runs[run.launch.job_id] = run
        if run.launch.elastic is None:
            self._start_ranks(run)
        else:
            self._elastic.begin(run, template)

    def _restart(self, run: Run) -> None:
        """Restart all ranks of a run, after one has failed and all are gone."""
        run.restart()
        run.tick(time.monotonic())
        if run.policy.reason:  # the run's timeout has passed meanwhile
            return
        if (broken := _open_store(run)) is not None:
            run.refuse(broken)
            return
        size = run.launch.world_size
        self._tell(
            run,
            messages.Starting(job_id=run.launch.job_id, restarts=run.policy.restarts, first_rank=0, world_size=size),
        )
        self._start_ranks(run)

    def _start_ranks(self, run: Run) -> None:
        template = self._templates.of(run)
        for number in range(run.launch.world_size):
            if not self._fork(run, template, number):
                break

    def _respawn(self, told: messages.Respawn) -> None:
        run = self._runs.get(told.job_id)
        if run is None or not run.may_respawn(told.rank):
            return  # the run has ended, or the rank is alive again
        self._send_event(run, run.ranks[told.rank], events.Respawning())  # for kernels that attach later
        self._fork(run, self._templates.of(run), told.rank)

    def _fork(self, run: Run, template: TemplateProcess, number: int) -> bool:
        """Order the fork of one rank, and return whether that was possible."""
        try:
            os.ftruncate(run.descriptors[1 + number], 0)  # an earlier process of this rank may have begun to write
            rank, theirs, complaint = open_rank(run.launch, number, lambda event: self._send_event(run, rank, event))
            with contextlib.closing(theirs):
                run.put(rank)
                self._loop.watch(rank.connection.fileno(), lambda: self._read_rank(run, rank))
                if complaint:
                    self._send_event(run, rank, events.Output(text=complaint))
                template.connection.send(*fork_order(run, rank, theirs))
        except (ClosedError, TimeoutError):
            template.kill()  # _template_lost handles its end
            return False
        except OSError as error:
            self._not_started(run, number, str(error))
            return False
        return True

    def _not_started(self, run: Run, number: int, why: str) -> None:
        text = f"Rank {number} of {run.launch.world_size} could not be started: {why}."
        rank = run.ranks[number] if number < len(run.ranks) else None
        if run.policy.keeps and rank is not None:
            self._send_event(run, rank, events.Output(text=text))
        else:
            run.refuse(messages.Broken(text=text, fix=_MORE_ROOM))
        if rank is not None and rank.status is None:
            self._rank_ended(run, rank, 1)

    def _rank_ended(self, run: Run, rank: Rank, status: int, peak_bytes: int = 0) -> None:
        rank.status, rank.exited_s = status, time.monotonic()
        self._read_rank(run, rank)
        rank.log.finish()
        self._loop.unwatch(rank.connection.fileno())
        rank.close()
        ended = events.Ended(
            exit_code=status if status >= 0 else None,
            signal=-status if status < 0 else None,
            stopped=rank.was_told_to_end and status != 0,
            peak_bytes=peak_bytes,
            shortage=self._memory.shortage() if status else None,
        )
        self._send_event(run, rank, ended)

    def _run_ended(self, run: Run) -> None:
        del self._runs[run.launch.job_id]
        elsewhere = self._elastic.forget(run)
        if run.refusal:
            self._refuse(run, run.refusal)
        else:
            ended = messages.RunEnded(job_id=run.launch.job_id, reason=run.policy.reason, elsewhere=elsewhere)
            self._tell_end(run, ended)
        self._templates.release(run)
        run.ended()

    def _interrupt(self, job_id: str, who: str) -> None:
        run = self._find(job_id)
        if run is not None:
            run.ended_by = run.ended_by or who
            run.interrupt()

    def _end(self, told: messages.End, reason: messages.Reason | None = None, who: str = "") -> None:
        reason, run = reason or REASONS[told.how], self._find(told.job_id)
        if run is None:
            return
        run.ended_by = run.ended_by or who
        if run in self._waiting:
            self._waiting.remove(run)
            self._tell_end(run, messages.RunEnded(job_id=told.job_id, reason=reason))
        else:
            run.end(told.how, reason)
            self._templates.end_unready_fork_for(run)

    def _inspect(self, told: messages.Inspect) -> None:
        run = self._runs.get(told.job_id)
        if told.job_id not in self._inspections:
            self._inspections[told.job_id] = Inspection(run.ranks if run is not None else [], time.monotonic())

    def _profile(self, told: messages.Profile) -> None:
        run = self._runs.get(told.job_id)
        if run is not None:
            folder = run.launch.log_folder
            for rank in run.alive:
                file = str(logs.profile_file(folder, told.number, rank.number, memory=told.memory)) if folder else ""
                rank.tell(msgspec.structs.replace(told, file=file))

    # Events and output of ranks ------------------------------------------------------------------------------------

    def _read_logs(self, run: Run, now_s: float) -> None:
        if self._audience.is_behind:
            return
        for rank, size in run.with_new_output(now_s):
            self._read_rank(run, rank)  # first the events that the rank sent before this output
            rank.log.read(now_s, size)

    def _read_rank(self, run: Run, rank: Rank) -> None:
        try:
            while frames := rank.connection.receive():
                for frame in frames:
                    self._handle_event(run, rank, frame.body)
        except OSError as error:
            self._loop.unwatch(rank.connection.fileno())
            if not isinstance(error, ClosedError):
                with self._ending_run_on_error(run):
                    raise

    def _handle_event(self, run: Run, rank: Rank, body: bytes) -> None:
        try:
            event = events.decode(body)
        except msgspec.DecodeError:
            return  # a garbled message of one rank must not end all runs
        rank.take(event)
        if isinstance(event, events.Started):
            rank.forked(event.pid)  # the template may report the pid later than the rank itself
            run.tell_name(rank)
            if not run.policy.may_start_ranks:
                run.close_descriptors()
        elif isinstance(event, events.Finished):
            finished = [run.first_rank + each.number for each in run.ranks if each.said_finished]
            for other in run.alive:
                if not other.said_finished:
                    other.tell(messages.PeersFinished(ranks=finished))
        elif isinstance(event, events.Progress):
            rank.steps = event.steps
        elif isinstance(event, events.Display):
            rank.log.read(time.monotonic(), event.log_bytes)  # first the lines that were printed before the display
        self._tell(run, messages.Said(job_id=run.launch.job_id, rank=rank.number, event=msgspec.Raw(body)))

    def _send_event(self, run: Run, rank: Rank, event: events.Event) -> None:
        raw = msgspec.Raw(events.encode(event))
        self._tell(run, messages.Said(job_id=run.launch.job_id, rank=rank.number, event=raw))


def _open_store(run: Run) -> messages.Broken | None:
    """Open the listening socket of the ranks' store. Return the error if the port can't be used, otherwise ``None``."""
    try:
        run.store = socket.create_server(("127.0.0.1", run.launch.port), backlog=4096)
    except OSError as error:
        return messages.Broken(text=f"The port {run.launch.port} for the ranks' store can't be used: {error.strerror}.")
    return None


def main(kernel_descriptor: str, kernel_pid: str, daemon: str = "") -> None:
    """Run the agent. The kernel starts a new interpreter that calls this.

    As a ``daemon``, for a run that is detached from its start, it is an orphan, which init reaps. So whoever kills a
    kernel with all its descendants doesn't kill the run.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the kernel handles a terminal's Ctrl-C and tells the agent
    if not daemon:
        end_with_parent(int(kernel_pid))
    elif os.fork():
        os._exit(0)
    else:
        os.setsid()
        os.set_inheritable(int(kernel_descriptor), False)
    agent = Agent(Kernel(Connection.from_descriptor(int(kernel_descriptor)), int(kernel_pid)))
    agent.handle_sigterm()
    agent.serve()

"""The agent's record of runs on several nodes. Each has an elastic process, which decides when ranks are started.

The agent forks, reads, stops and reaps the ranks of such a run like those of any other. When the ranks are gone, the
elastic process decides whether they are restarted, unless the user or the kernel has asked to end the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
import time
from collections.abc import Callable

import msgspec

from notebook_accel.errors import signal_name
from notebook_accel.formatting import plain_lines
from notebook_accel.launching.agent.runs import Run
from notebook_accel.launching.agent.templates import TemplateProcess
from notebook_accel.launching.processes import kill_group, resume_if_stopped
from notebook_accel.launching.state.first_failure import first_failed
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import elastic_messages, events
from notebook_accel.protocol.channel import ClosedError, Connection, EventLoop, Message

_LOOK_PERIOD_S = 0.5
_LEAVING_S = 4.0
_MOST_TRACEBACK_CHARACTERS = 20_000


@dataclasses.dataclass(eq=False)
class _ElasticProcess:
    """The agent's record of one elastic process."""

    run: Run
    connection: Connection  # to the process
    pid: int | None = None  # ``None`` before the fork and after the exit
    attempt: int = 0  # the last one for which the process had ranks started, 0 before the first
    has_ranks: bool = False  # ranks were started whose end wasn't reported to the process
    knows_results: bool = False  # it was told that all ranks have finished
    is_ending: bool = False  # it has sent its last message or is being killed, so that its exit is expected
    elsewhere: messages.Failure | None = None  # the failure on another node that ends the run
    must_go_s: float | None = None  # when the process is killed unless it has exited
    steps: tuple[int, int] | None = None  # the least and the most steps of the ranks, as last reported to the process

    def tell(self, message: elastic_messages.ToElastic) -> None:
        self.connection.post(messages.encode(message))  # if the process has gone, the template reports its exit

    def kill(self) -> None:
        self.is_ending = True
        if self.pid is not None:
            kill_group(self.pid)

    def send_away(self, now_s: float) -> None:
        """Order the process to end the run, as was requested, and to tell the other nodes."""
        policy = self.run.policy
        policy.reason = policy.final_reason or policy.reason
        self.is_ending, self.must_go_s = True, now_s + _LEAVING_S
        self.tell(elastic_messages.Leave(why=f"The run was ended there ({policy.reason})."))


@dataclasses.dataclass(kw_only=True)
class ElasticRuns:
    """The runs that have an elastic process."""

    loop: EventLoop
    ending_run_on_error: Callable[[Run], contextlib.AbstractContextManager[None]]
    start_ranks: Callable[[Run], object]  # at their present places
    tell_kernel: Callable[[msgspec.Struct], None]
    _all: dict[str, _ElasticProcess] = dataclasses.field(default_factory=dict)  # by job
    _next_look_s: float = 0.0

    def begin(self, run: Run, template: TemplateProcess) -> None:
        """Order the fork of a run's elastic process. The run is held until that process is gone."""
        ours, theirs = Connection.pair()
        ours.set_blocking(False)
        elastic = _ElasticProcess(run, ours)
        self.loop.watch(ours.fileno(), lambda: self._read(elastic))
        self._all[run.launch.job_id] = elastic
        run.policy.is_held = True
        launch = run.launch
        assert launch.elastic is not None
        order = messages.ForkElastic(
            job_id=launch.job_id,
            options=launch.elastic,
            world_size=launch.world_size,
            grace_s=launch.grace_s,
        )
        with contextlib.closing(theirs):
            try:
                template.connection.send(messages.encode(order), [theirs.fileno()])
            except (ClosedError, TimeoutError):
                template.kill()  # the agent handles the template's end
            except OSError:
                self._gone(elastic)  # nothing must wait for a process that was never forked
                raise

    def handle_report(self, said: messages.Forked | messages.NotForked | messages.Exited) -> None:
        """Process a template's message about an elastic process."""
        elastic = self._all[said.job_id]
        if isinstance(said, messages.Forked):
            elastic.pid = said.pid
            if elastic.is_ending:
                elastic.kill()
            return
        if isinstance(said, messages.NotForked):
            elastic.run.refuse(messages.Broken(text=f"The run could not be started: {said.why}."))
        self._gone(elastic)

    def lost(self, run: Run) -> None:
        """Record that a run's elastic process is gone with its template."""
        if run.launch.job_id in self._all:
            self._gone(self._all[run.launch.job_id])

    def tick(self, now_s: float) -> None:
        """Report the ranks' state to their elastic processes, and resume processes that were stopped by SIGSTOP."""
        is_time = now_s >= self._next_look_s
        if is_time:
            self._next_look_s = now_s + _LOOK_PERIOD_S
        for elastic in self._all.values():
            with self.ending_run_on_error(elastic.run):
                self._look(elastic, now_s)
                if is_time and elastic.pid is not None:
                    resume_if_stopped(elastic.pid)
                    _tell_steps(elastic)

    def forget(self, run: Run) -> messages.Failure | None:
        """Forget a run that is over, and return the failure on another node that has ended it, if there was one."""
        elastic = self._all.pop(run.launch.job_id, None)
        return None if elastic is None else elastic.elsewhere

    def _look(self, elastic: _ElasticProcess, now_s: float) -> None:
        run = elastic.run
        if elastic.pid is not None:
            with contextlib.suppress(ClosedError):
                elastic.connection.flush()
            if elastic.must_go_s is not None and now_s > elastic.must_go_s:
                kill_group(elastic.pid)
        if elastic.is_ending:
            return
        if elastic.has_ranks and not elastic.knows_results and run.policy.have_all_finished:
            elastic.knows_results = True
            elastic.tell(elastic_messages.RanksFinished(attempt=elastic.attempt))
        if run.alive:
            return
        failure = _first_failure(run)
        if run.policy.is_final:
            elastic.send_away(now_s)
        elif elastic.has_ranks and not (elastic.knows_results and not run.policy.reason):
            elastic.has_ranks, elastic.steps = False, None
            run.restart()
            elastic.tell(elastic_messages.RanksEnded(attempt=elastic.attempt, failure=failure))

    def _read(self, elastic: _ElasticProcess) -> None:
        with self.ending_run_on_error(elastic.run):
            try:
                while frames := elastic.connection.receive():
                    for message in frames:
                        self._handle_message(elastic, message)
            except ClosedError:
                self.loop.unwatch(elastic.connection.fileno())
                elastic.must_go_s = elastic.must_go_s or time.monotonic() + _LEAVING_S

    def _handle_message(self, elastic: _ElasticProcess, message: Message) -> None:
        said = elastic_messages.decode_for_agent(message.body)
        run = elastic.run
        listening = [socket.socket(fileno=descriptor) for descriptor in message.descriptors]
        if isinstance(said, elastic_messages.StartRanks):
            if not message.is_whole:
                run.refuse(messages.Broken(text=f"The ranks could not be started: {os.strerror(errno.EMFILE)}."))
            if not run.policy.reason:
                self._start(elastic, said, listening.pop() if listening else None)
            elif not elastic.is_ending:
                elastic.send_away(time.monotonic())
        elif isinstance(said, elastic_messages.StopRanks):
            # Without ranks there is nothing to stop: the report of their end is already on its way.
            if elastic.has_ranks and said.attempt == elastic.attempt:
                run.policy.fail()
        elif isinstance(said, events.Nodes):
            raw = msgspec.Raw(events.encode(said))
            self.tell_kernel(messages.Said(job_id=run.launch.job_id, rank=0, event=raw))
        elif isinstance(said, elastic_messages.Over):
            elastic.is_ending, elastic.elsewhere = True, said.failure
            elastic.must_go_s = time.monotonic() + _LEAVING_S
            if said.has_succeeded:
                run.policy.release()
            elif said.refusal is not None:
                run.refuse(said.refusal)
            else:
                run.end("kill", "failed")
        for sock in listening:
            sock.close()

    def _start(
        self, elastic: _ElasticProcess, said: elastic_messages.StartRanks, listening: socket.socket | None
    ) -> None:
        run = elastic.run
        run.begin_at(said.places, listening)
        run.policy.restarts = said.restarts
        elastic.attempt, elastic.has_ranks, elastic.knows_results = said.attempt, True, False
        self.tell_kernel(
            messages.Starting(
                job_id=run.launch.job_id,
                restarts=said.restarts,
                first_rank=run.first_rank,
                world_size=said.places[0][0].world_size,
                cause=said.cause,
            )
        )
        elastic.tell(elastic_messages.RanksStand(attempt=said.attempt))
        self.start_ranks(run)

    def _gone(self, elastic: _ElasticProcess) -> None:
        elastic.pid = None
        self._read(elastic)  # the process's last message
        if not elastic.is_ending:
            elastic.run.end("kill", "elastic lost")
        elastic.is_ending = True
        elastic.run.policy.is_held = False
        self.loop.unwatch(elastic.connection.fileno())
        elastic.connection.close()


def _tell_steps(elastic: _ElasticProcess) -> None:
    """Send an elastic process the ranks' steps, for other nodes."""
    counted = [rank.steps for rank in elastic.run.ranks if rank.steps is not None]
    if not counted or not elastic.has_ranks:
        return
    if elastic.steps != (min(counted), max(counted)):
        elastic.steps = min(counted), max(counted)
        elastic.tell(elastic_messages.RanksStand(attempt=elastic.attempt, steps=elastic.steps))


def _first_failure(run: Run) -> messages.Failure | None:
    """Return the failure of the rank that failed first, ``None`` if the ranks were stopped."""
    raised = {rank.number: rank.failure for rank in run.ranks if rank.failure is not None}
    exited = [rank for rank in run.ranks if rank.status is not None and not rank.was_told_to_end]
    died = [rank for rank in exited if rank.failure is None and (rank.status or not rank.said_finished)]
    number = first_failed(raised, {rank.number: rank.exited_s for rank in died})
    if number is None:
        return None
    rank, said = run.ranks[number], raised.get(number)
    place, _ = run.place_of(number)
    if said is None:
        assert rank.status is not None, "a rank that failed has raised or ended"
        end = f"killed by {signal_name(-rank.status)}" if rank.status < 0 else f"exited with status {rank.status}"
        return messages.Failure(what=end, rank=place.rank, status=rank.status)
    at = f" at {said.line}" if said.line else ""
    return messages.Failure(
        what=f"{said.kind}: {next(plain_lines(said.message.strip()), '')}{at}",
        rank=place.rank,
        traceback=said.traceback[-_MOST_TRACEBACK_CHARACTERS:],
        status=_status_of(said.kind, said.message),
        lost_peer=said.lost_peer,
    )


def _status_of(kind: str, message: str) -> int:
    """Return the exit status of a rank that has raised an exception, as Python would."""
    is_number = kind == "SystemExit" and message.removeprefix("-").isdecimal()
    return int(message) % 256 if is_number else 1

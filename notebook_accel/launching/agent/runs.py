"""The agent's record of one run: its ranks, the reason for its end, and the signals still to be sent."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence

import msgspec

from notebook_accel import environment
from notebook_accel.environment import RankPlace
from notebook_accel.launching import logs
from notebook_accel.launching.agent.output import Allowance, LogTail, open_log
from notebook_accel.launching.processes import kill_group, state
from notebook_accel.payload import memory_files
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import Connection, close_all

_LOOK_PERIOD_S = 0.05
# A rank's death breaks its peers' connections, and they may report that before the agent has noticed the death.
_CAUSE_DEADLINE_S = 1.0
_EXIT_DEADLINE_S = 60.0  # from a run's last event to its last exit: an atexit function may upload something
REASONS: dict[messages.How, messages.Reason] = {"interrupt": "interrupted", "stop": "stopped", "kill": "stopped"}
_STRENGTH: dict[messages.How, int] = {"interrupt": 0, "stop": 1, "kill": 2}
_SIGNALS: dict[messages.How, tuple[signal.Signals, ...]] = {
    "interrupt": (signal.SIGINT, signal.SIGTERM, signal.SIGKILL),
    "stop": (signal.SIGTERM, signal.SIGKILL),
    "kill": (signal.SIGKILL,),
}


@dataclasses.dataclass
class Rank:
    """One rank of a run."""

    number: int
    connection: Connection  # on which the rank sends its events
    log: LogTail  # of its standard output and error
    dump: int  # descriptor of the file to which the rank writes its stacks on request
    pid: int | None = None  # ``None`` until it was forked
    status: int | None = None  # of its exit, ``None`` while it lives
    said_started: bool = False  # it has reached the user's code
    said_finished: bool = False  # its result is written
    failure: events.Failed | None = None  # the report of its exception, after which it ends by itself
    steps: int | None = None  # done so far, ``None`` if the rank counts none
    was_told_to_end: bool = False  # a signal was sent to the rank, or will be once its process exists
    must_exit_s: float | None = None  # when the rank is killed if it hasn't exited; ``None``: never
    _waiting_signal: signal.Signals | None = None

    @property
    def has_ended_by_itself(self) -> bool:
        """True if the process is gone and the template has not reported its exit yet."""
        return self.pid is not None and state(self.pid) in ("Z", "X", "")

    def forked(self, pid: int) -> None:
        """Set the rank's process, and send a signal that was waiting for it. A second call does nothing."""
        if self.pid is not None:
            return
        self.pid = pid
        if self.was_told_to_end and self._waiting_signal != signal.SIGKILL:
            self.signal(signal.SIGTERM)  # the process is too young to handle an interrupt
        elif self._waiting_signal is not None:
            self.signal(self._waiting_signal)

    def close(self) -> None:
        """Close the connection and files, once the process is gone."""
        self.connection.close()
        self.log.close()
        close_all([self.dump])

    def tell(self, message: messages.ToRank) -> None:
        """Send the rank a message. Ignores a rank that has ended."""
        self.connection.post(messages.encode(message))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank's process only, so that its code can react; send SIGKILL to its whole group."""
        if self.pid is None:
            self._waiting_signal = number
        elif number == signal.SIGKILL:
            kill_group(self.pid)
        else:
            with contextlib.suppress(OSError):  # the process has ended, or became another user's
                # A stopped process can't react. Resumed later, any of its threads might take the signal.
                os.kill(self.pid, signal.SIGCONT)
                os.kill(self.pid, number)


@dataclasses.dataclass
class Run:
    """One run."""

    launch: messages.Launch
    descriptors: list[int]  # of the message, kept until all ranks run; to the end if ranks may be restarted
    ranks: list[Rank] = dataclasses.field(default_factory=list)  # the ranks in order; empty until the run is started
    reason: messages.Reason = ""  # why the run is ending or has ended early; empty otherwise
    refusal: messages.Broken | None = None  # the message to the user if the run could not be started
    store: socket.socket | None = None  # the listening socket of the ranks' store, kept as long as the descriptors
    places: Sequence[messages.Place] = ()  # the ranks' places and further variables, for a part of a larger run
    restarts: int = 0  # how often the agent has restarted the ranks after a failure
    requested_end: messages.Reason = ""  # the reason of a requested end, after which nothing is started again
    detached_name: str = ""  # the name under which it was detached while it went on; else empty
    is_held: bool = False  # the run goes on even without a rank, because its elastic process may start some
    _is_interrupted_at_start: bool = False
    _was_requeued: bool = False
    _how: messages.How | None = None
    _log_folder: int | None = None
    _next_look_s: float = 0.0
    _deadline_s: float | None = None
    _cause_deadline_s: float | None = None
    _signals_left: list[signal.Signals] = dataclasses.field(default_factory=list)
    _next_signal_s: float | None = None

    @property
    def alive(self) -> list[Rank]:
        """The ranks that have not exited."""
        return [rank for rank in self.ranks if rank.status is None]

    @property
    def first_rank(self) -> int:
        """The number of this node's first rank among the ranks of all nodes."""
        return self.places[0][0].rank if self.places else 0

    def awaits(self, number: int) -> bool:
        """Return whether a rank's fork was ordered and the rank has not exited."""
        return number < len(self.ranks) and self.ranks[number].status is None

    def may_respawn(self, number: int) -> bool:
        """Return whether a rank has exited and may be restarted, since its run keeps the others."""
        return self.keeps and 0 <= number < len(self.ranks) and self.ranks[number].status is not None

    @property
    def keeps(self) -> bool:
        """True if the run goes on when a rank has died, even the last one."""
        return self.launch.on_death == "keep"

    def outlive_kernel(self, folder: str, name: str) -> None:
        """Tell the ranks the name of the detached run. A session's restarted ranks get its folder as a variable."""
        self.detached_name = name
        for rank in self.alive:
            self.tell_name(rank)
        if self.keeps:
            variables = {**self.launch.variables, environment.SESSION_FOLDER: folder}
            self.launch = msgspec.structs.replace(self.launch, variables=variables)

    def tell_name(self, rank: Rank) -> None:
        """Tell a rank the run's name if the run was detached while it went on."""
        if self.detached_name:
            rank.tell(messages.Named(name=self.detached_name))

    @property
    def needs_descriptors(self) -> bool:
        """True if ranks may be started later."""
        may_start_ranks = self.keeps or self.is_held or self._restarts_left > 0
        return may_start_ranks or any(not rank.said_started for rank in self.ranks)

    def place_of(self, number: int) -> messages.Place:
        """Return a rank's place among all ranks and its further environment variables."""
        if self.places:
            place, variables = self.places[number]
            return place, {**self.launch.variables, **variables}
        assert self.store is not None
        size = self.launch.world_size
        place = RankPlace(number, size, number, size, "127.0.0.1", self.store.getsockname()[1])
        return place, {**self.launch.variables, "TORCHELASTIC_RESTART_COUNT": str(self.restarts)}

    @property
    def _restarts_left(self) -> int:
        return 0 if self.requested_end else self.launch.max_restarts - self.restarts

    @property
    def is_to_restart(self) -> bool:
        """True if the ranks, all gone, must be restarted: one has failed, and nothing rules it out."""
        has_failed = not all(rank.said_finished for rank in self.ranks)
        return has_failed and self._restarts_left > 0 and not self.is_ending_for_good

    @property
    def is_ending_for_good(self) -> bool:
        """True if the run can't go on, or was asked to end, also by a KeyboardInterrupt in a rank."""
        if self.requested_end or self.refusal is not None or self.reason not in ("", "failed"):
            return True
        return any(rank.failure is not None and rank.failure.kind == "KeyboardInterrupt" for rank in self.ranks)

    def stop_restarting(self, reason: messages.Reason) -> None:
        """Rule out further restarts. ``reason`` replaces a failure as the reason of the end."""
        self.requested_end = self.requested_end or reason
        if self.launch.max_restarts and self.reason == "failed":
            self.reason = self.requested_end

    @property
    def is_over(self) -> bool:
        """True if every rank has exited and none will be started again."""
        if self.alive or self.is_held:
            return False
        return not self.keeps or self._how is not None or all(rank.said_finished for rank in self.ranks)

    @property
    def may_requeue(self) -> bool:
        """True if the whole run can be restarted unnoticed, at most once: no rank has reached the user's code."""
        if self.reason or self.is_held or self.launch.places or self._was_requeued:
            return False
        return not any(rank.said_started for rank in self.ranks)

    def reset_to_unstarted(self) -> None:
        """Reset the run to its state before the start. Its ranks are gone."""
        self._was_requeued = True
        for rank in self.alive:
            rank.close()
        self.ranks.clear()
        self._close_store()
        self._release_logs()

    def reset_for_restart(self) -> None:
        """Forget the ranks, which are gone, and the reason of their end, so that all can be restarted."""
        self.ranks.clear()
        self.reason, self._how = "", None
        self._signals_left, self._next_signal_s, self._cause_deadline_s = [], None, None
        self._is_interrupted_at_start = False
        self._close_store()

    def started(self) -> None:
        """Start the clock of ``timeout_s``, unless it already runs, and hold the log folder."""
        self._log_folder = logs.hold(self.launch.log_folder)
        if self.launch.timeout_s is not None and self._deadline_s is None:
            self._deadline_s = time.monotonic() + self.launch.timeout_s

    def end_ranks(
        self, how: messages.How, reason: messages.Reason | None = None, *, interrupting: Rank | None = None
    ) -> None:
        """Start to end the run. The first reason stays; a later call has an effect only if its ``how`` is stronger.

        The rank ``interrupting`` gets SIGINT in place of the first signal, and that signal after ``grace_s``.
        """
        if self._how is not None and _STRENGTH[how] <= _STRENGTH[self._how]:
            return
        self._how = how
        self.reason = self.reason or (reason or REASONS[how])
        for rank in self.alive:
            if rank.said_finished:
                rank.connection.shutdown()  # the rank only waits for its release
        self._signals_left = list(_SIGNALS[how])
        if interrupting is not None:
            self._signals_left.insert(0, self._signals_left[0])
        self._send_next_signal(time.monotonic(), interrupting)

    def become_part(self) -> None:
        """Set the ranks' places from the launch, and the store's socket if rank 0 is here."""
        of_all = 1 + self.launch.world_size
        listening = [socket.socket(fileno=descriptor) for descriptor in self.descriptors[of_all:]]
        del self.descriptors[of_all:]
        self.begin_at(self.launch.places, listening.pop() if listening else None)

    def begin_at(self, places: Sequence[messages.Place], store: socket.socket | None) -> None:
        """Set the places and the store of the ranks that are about to be started."""
        self.places, self.store = places, store
        for result in self.descriptors[1:]:
            os.ftruncate(result, 0)  # earlier processes may have begun to write

    def put(self, rank: Rank) -> None:
        """Add a rank, or replace the earlier one with the same number."""
        self.ranks[rank.number : rank.number + 1] = [rank]
        if self._is_interrupted_at_start:
            rank.signal(signal.SIGINT)

    def refuse(self, broken: messages.Broken) -> None:
        """End the run because it could not be started as a whole."""
        self.refusal = self.refusal or broken
        self.end_ranks("kill", "failed")

    def interrupt(self) -> None:
        """Send SIGINT to the ranks that run the user's code, without escalation."""
        self._is_interrupted_at_start = not self.ranks
        for rank in self.alive:
            if not rank.said_finished and rank.failure is None:
                rank.signal(signal.SIGINT)

    def rank_failed(self, rank: Rank) -> None:
        """End the other ranks, unless the run keeps them, after this rank has raised or died without a result.

        If this rank has only lost a peer, the others get a moment, so that the peer's own failure can arrive.
        """
        if self.keeps:
            rank.must_exit_s = time.monotonic() + _EXIT_DEADLINE_S
        elif rank.failure is not None and rank.failure.lost_peer:
            self._cause_deadline_s = self._cause_deadline_s or time.monotonic() + _CAUSE_DEADLINE_S
        elif not self.reason:
            self._end_after_failure()

    def _end_after_failure(self) -> None:
        """Stop the other ranks. The first one is interrupted before, if it has variables to save."""
        first = self.ranks[0]
        is_running = first.status is None and first.said_started and first.failure is None and not first.said_finished
        saves = self.launch.saves and is_running and self._restarts_left <= 0
        self.end_ranks("stop", "failed", interrupting=first if saves else None)

    def release(self) -> None:
        """Let the finished ranks exit. They wait until all have finished, since rank 0 serves the store of all."""
        for rank in self.alive:
            rank.connection.shutdown()
        self._signals_left, self._next_signal_s = [signal.SIGKILL], time.monotonic() + _EXIT_DEADLINE_S

    def tick(self, now_s: float) -> None:
        """Check all deadlines and act on those that have passed."""
        if self._deadline_s is not None and now_s > self._deadline_s and not self.reason:
            self.end_ranks("interrupt", "timeout")  # the interrupt shows where each rank stood
        if self._cause_deadline_s is not None and now_s > self._cause_deadline_s and not self.reason:
            self._end_after_failure()
        if self._next_signal_s is not None and now_s > self._next_signal_s:
            self._send_next_signal(now_s)
        for rank in self.alive:
            if rank.must_exit_s is not None and now_s > rank.must_exit_s:
                rank.signal(signal.SIGKILL)

    def with_new_output(self, now_s: float) -> list[tuple[Rank, int]]:
        """Return the ranks with new output, each with its log's size; none if the next look is not due."""
        if now_s < self._next_look_s:
            return []
        self._next_look_s = now_s + _LOOK_PERIOD_S
        grown = [(rank, rank.log.grown_bytes) for rank in self.alive]
        return [(rank, size) for rank, size in grown if size is not None]

    def ended(self) -> None:
        """Release the logs of the run, which is over, and remove the oldest logs of other runs."""
        self._release_logs()
        logs.remove_old(kernel_pid=os.getppid())

    def close_descriptors(self) -> None:
        """Close the descriptors that came with the launch, and the store's socket."""
        close_all(self.descriptors)
        self.descriptors.clear()
        self._close_store()

    def _close_store(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def _release_logs(self) -> None:
        if self._log_folder is not None:
            close_all([self._log_folder])
            self._log_folder = None

    def _send_next_signal(self, now_s: float, interrupting: Rank | None = None) -> None:
        number = self._signals_left.pop(0)
        for rank in self.alive:
            if rank.failure is not None and number != signal.SIGKILL:
                continue
            rank.was_told_to_end = rank.was_told_to_end or not rank.has_ended_by_itself
            rank.signal(signal.SIGINT if rank is interrupting else number)
        self._next_signal_s = now_s + self.launch.grace_s if self._signals_left else None


def open_rank(
    launch: messages.Launch, number: int, send: Callable[[events.Output], None]
) -> tuple[Rank, Connection, str]:
    """Open the connection and the files that the agent and a rank share.

    Returns the rank, which owns the agent's ends; the rank's end of the connection, for the caller to close; and a
    message to the user if the rank can't have a log file, otherwise an empty one.

    Raises:
        OSError: The system refuses another file or connection. Nothing is left open.
    """
    with contextlib.ExitStack() as opened:
        ours, theirs = Connection.pair()
        opened.callback(ours.close)
        opened.callback(theirs.close)
        ours.set_blocking(False)
        log, complaint = open_log(launch.log_folder, number)
        opened.callback(os.close, log)
        dump = memory_files.appending_file(f"notebook-accel-stacks-{number}")
        opened.callback(os.close, dump)
        rank = Rank(number, ours, LogTail(log, Allowance(launch.world_size), send), dump)
        opened.pop_all()
    return rank, theirs, complaint


def fork_order(run: Run, rank: Rank, theirs: Connection) -> tuple[bytes, list[int]]:
    """Return the message to the template that forks a rank, and its descriptors."""
    payload, *results = run.descriptors
    place, variables = run.place_of(rank.number)
    fork = messages.Fork(job_id=run.launch.job_id, rank=rank.number, place=place, variables=variables)
    files = messages.RankFiles(
        payload=payload,
        result=results[rank.number],
        connection=theirs.fileno(),
        log=rank.log.descriptor,
        dump=rank.dump,
        store=run.store.fileno() if run.store is not None and place.rank == 0 else None,
    )
    return messages.encode(fork), [descriptor for descriptor in files if descriptor is not None]

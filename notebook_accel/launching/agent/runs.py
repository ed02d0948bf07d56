"""The agent's record of one run: its ranks, with processes and files, and the policy that decides about them."""

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
from notebook_accel.launching.journal import Journal
from notebook_accel.launching.processes import kill_group, state
from notebook_accel.launching.run_folders import RunFolder
from notebook_accel.launching.state.policy import RankFacts, Release, RunPolicy
from notebook_accel.payload import memory_files
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import Connection, close_all

_LOOK_PERIOD_S = 0.05


@dataclasses.dataclass
class Rank(RankFacts):
    """One rank of a run."""

    connection: Connection  # on which the rank sends its events
    log: LogTail  # of its standard output and error
    dump: int  # descriptor of the file to which the rank writes its stacks on request
    pid: int | None = None  # ``None`` until it was forked
    exited_s: float = 0.0  # when its exit was reported
    steps: int | None = None  # done so far, ``None`` if the rank counts none
    was_told_to_end: bool = False  # a signal was sent to the rank, or will be once its process exists
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
    """One run: its processes, connections and files, with which it carries out the orders of its policy."""

    launch: messages.Launch
    descriptors: list[int]  # of the message, kept until all ranks run; to the end if ranks may be restarted
    ranks: list[Rank] = dataclasses.field(default_factory=list)  # the ranks in order; empty until the run is started
    refusal: messages.Broken | None = None  # the message to the user if the run could not be started
    store: socket.socket | None = None  # the listening socket of the ranks' store, kept as long as the descriptors
    places: Sequence[messages.Place] = ()  # the ranks' places and further variables, for a part of a larger run
    detached_name: str = ""  # the name under which it was detached while it went on; else empty
    ended_by: str = ""  # the attached kernel or command that has ended it, in words; else empty
    policy: RunPolicy = dataclasses.field(init=False)
    journal: Journal | None = dataclasses.field(init=False)  # ``None`` if the run can't be detached
    _results: tuple[RunFolder, Sequence[int]] | None = None  # those to copy at the end, and where
    _log_folder: int | None = None
    _next_look_s: float = 0.0

    def __post_init__(self) -> None:
        elastic = self.launch.elastic
        self.policy = RunPolicy(
            ranks=self.ranks,
            grace_s=self.launch.grace_s,
            timeout_s=self.launch.timeout_s,
            max_restarts=self.launch.max_restarts if elastic is None else elastic.max_restarts,
            keeps=self.launch.on_death == "keep",
            saves=self.launch.saves,
            is_part=bool(self.launch.places),
        )
        can_be_detached = elastic is None and not (self.launch.places or self.launch.template_pid)
        self.journal = Journal(self.launch.job_id, self.launch.world_size) if can_be_detached else None

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
        """Return whether a rank has exited and may be restarted, since its run keeps the others and isn't ending."""
        keeps = self.policy.keeps and not self.policy.reason
        return keeps and 0 <= number < len(self.ranks) and self.ranks[number].status is not None

    def outlive_kernel(self, folder: RunFolder, results: Sequence[int]) -> None:
        """Tell the ranks the name of the detached run. A session's restarted ranks get its folder as a variable.

        Takes over the descriptors of the ranks' ``results``, which are copied to the folder at the end.
        """
        self._results = folder, results
        self.detached_name = folder.facts.name
        for rank in self.alive:
            self.tell_name(rank)
        if self.policy.keeps:
            variables = {**self.launch.variables, environment.SESSION_FOLDER: str(folder.path)}
            self.launch = msgspec.structs.replace(self.launch, variables=variables)

    def tell_name(self, rank: Rank) -> None:
        """Tell a rank the run's name if the run was detached while it went on."""
        if self.detached_name:
            rank.tell(messages.Named(name=self.detached_name))

    def place_of(self, number: int) -> messages.Place:
        """Return a rank's place among all ranks and its further environment variables."""
        if self.places:
            place, variables = self.places[number]
            return place, {**self.launch.variables, **variables}
        assert self.store is not None
        size = self.launch.world_size
        place = RankPlace(number, size, number, size, "127.0.0.1", self.store.getsockname()[1])
        return place, {**self.launch.variables, "TORCHELASTIC_RESTART_COUNT": str(self.policy.restarts)}

    def requeue(self) -> None:
        """Reset the run to its state before the start. Its ranks are gone."""
        self.policy.was_requeued = True
        for rank in self.alive:
            rank.close()
        self.ranks.clear()
        self._close_store()
        self._release_logs()

    def restart(self) -> None:
        """Forget the ranks, which are gone, and the reason of their end, so that all can be restarted."""
        self.ranks.clear()
        self.policy.restart()
        self._close_store()

    def started(self) -> None:
        """Start the clock of ``timeout_s``, unless it already runs, and hold the log folder."""
        self._log_folder = logs.hold(self.launch.log_folder)
        self.policy.start_clock(time.monotonic())

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
        if self.policy.is_interrupted_at_start:
            rank.signal(signal.SIGINT)

    def refuse(self, broken: messages.Broken) -> None:
        """End the run because it could not be started as a whole."""
        self.refusal = self.refusal or broken
        self.end("kill", "failed")

    def end(self, how: messages.How, reason: messages.Reason) -> None:
        """End the run for good."""
        self.policy.end(how, reason)
        self.tick(time.monotonic())

    def interrupt(self) -> None:
        """Send SIGINT to the ranks that run the user's code, without escalation."""
        for order in self.policy.interrupt():
            self.ranks[order.rank].signal(order.number)

    def tick(self, now_s: float) -> None:
        """Carry out the orders of the policy."""
        for order in self.policy.orders(now_s):
            if isinstance(order, Release):
                for rank in self.alive:
                    rank.connection.shutdown()
                continue
            rank = self.ranks[order.rank]
            if rank.said_finished:
                rank.connection.shutdown()  # the rank only waits for its release
            rank.was_told_to_end = rank.was_told_to_end or not rank.has_ended_by_itself
            rank.signal(order.number)

    def with_new_output(self, now_s: float) -> list[tuple[Rank, int]]:
        """Return the ranks with new output, each with its log's size; none if the next look is not due."""
        if now_s < self._next_look_s:
            return []
        self._next_look_s = now_s + _LOOK_PERIOD_S
        grown = [(rank, rank.log.grown_bytes) for rank in self.alive]
        return [(rank, size) for rank, size in grown if size is not None]

    def keep_results(self) -> None:
        """Copy the results of a run that was detached while it went on, whose ranks are gone, to its folder."""
        if self._results is not None:
            folder, results = self._results
            for rank, result in enumerate(results):
                with contextlib.suppress(OSError):  # a full disk: the reader reports the incomplete file
                    folder.fill_result(rank, result)
            close_all(results)
            self._results = None

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

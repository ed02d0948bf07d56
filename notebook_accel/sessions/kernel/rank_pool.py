"""The kernel's side of a session's ranks: start, request, restart, detach and end."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pathlib
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from notebook_accel import environment
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, LaunchError, NotebookAccelError, RunError, RunStoppedError
from notebook_accel.formatting import ranks_in_words
from notebook_accel.interrupts import Interrupts, held
from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import detached, foreground, launcher
from notebook_accel.launching.kernel.job import Job, Status
from notebook_accel.launching.results import ResultFile, result_error
from notebook_accel.launching.run_folders import RunFolder
from notebook_accel.protocol import session_messages as messages
from notebook_accel.sessions.kernel import failures
from notebook_accel.sessions.kernel.failures import GroupRecovery
from notebook_accel.sessions.kernel.namespace_sync import Inputs, NamespaceSync, Parcel
from notebook_accel.sessions.kernel.output import CellOutput
from notebook_accel.sessions.kernel.pending_request import Console, PendingRequest, RequestQueue
from notebook_accel.sessions.kernel.rank_connections import RankConnections
from notebook_accel.sessions.listener import JoinedRank, Listener
from notebook_accel.sessions.ranks import loop

_START_DEADLINE_S = 180.0  # the template may have to import torch first
_END_DEADLINE_S = 5.0
_LOOKUP_DEADLINE_S = 1.0
_POLL_PERIOD_S = 0.1

Answer: TypeAlias = tuple[messages.Reply, Any]
"""A rank's reply to a request, and the value that came with it."""


class RankPool:
    """All ranks of one session, whose run is ``job``, and their state. The ranks end with this process."""

    outlives_kernel = False

    def __init__(self, config: LaunchConfig) -> None:
        self._numbers = itertools.count(1)
        self._queue = RequestQueue()
        self._is_closed = False
        self._failed_rank: int | None = None  # the rank of the last error
        self._killed: set[int] = set()  # ranks that were killed because they ignored an interrupt
        self._job: Job | None = None  # set as soon as the job is launched
        self._closing = contextlib.ExitStack()
        self._listener: Listener | None = None
        with held() as interrupts:
            self._connections = RankConnections()
            try:
                self._start(config, interrupts)
            except BaseException:
                self._give_up()
                raise
            atexit.register(self._end_with_kernel)  # runs before the engine's, which would leave the listener's folder
            _pools.add(self)

    def _start(self, config: LaunchConfig, interrupts: Interrupts) -> None:
        self._launch(config, self._listen(None).folder)
        self._welcome(range(self.job.world_size), interrupts.check)

    def _listen(self, run: RunFolder | None) -> Listener:
        self._listener = Listener(run)
        self._closing.callback(self._listener.close)
        return self._listener

    def _launch(self, config: LaunchConfig, folder: pathlib.Path, detached_id: str = "") -> None:
        """Start the ranks, which join through a socket in the folder: with a ``detached_id``, the run's new folder."""
        launcher.launch_function(
            loop.serve,
            (str(folder),),
            {"is_detached": bool(detached_id)},
            config,
            name="session",
            show=self._launched,
            on_death="keep",
            detached_id=detached_id,
        )
        self._set_up()

    def _set_up(self) -> None:
        """Create the objects that serve the launched or attached job."""
        assert self._job is not None
        self.job: Job = self._job
        self.job.expect_steps([])
        self.job.doing = self._doing
        self._output = CellOutput(self.job)
        self._closing.callback(self._output.close)
        self.namespace_sync = NamespaceSync(self.job.world_size)
        self._group_recovery = GroupRecovery(self.job.world_size, self._ask)

    def _launched(self, job: Job) -> None:
        self._job = job  # set first, since an interrupt may come
        foreground.show_panel(job)

    @property
    def alive(self) -> list[int]:
        return self._connections.ranks

    @property
    def is_over(self) -> bool:
        """True once the ranks have ended, or this process has left them."""
        return self.job.done or self._is_closed

    @property
    def is_whole(self) -> bool:
        return len(self.alive) == self.job.world_size

    def chosen(self, ranks: Sequence[int] | None) -> list[int]:
        """Return the given ranks in order, by default all. Raise if one of them is dead or doesn't exist."""
        self._refuse_ended()
        chosen = list(range(self.job.world_size)) if ranks is None else self._check_known(ranks)
        for rank in chosen:
            if rank not in self.alive:
                raise self._death_error(rank)
        return chosen

    def run_request(
        self,
        make: Callable[..., messages.ToRank],
        ranks: Sequence[int] | None,
        inputs: Inputs,
        *,
        title: str,
        on_status: Callable[[Status], object] | None = None,
        **fields: Any,
    ) -> dict[int, Answer]:
        """Send ranks, by default all, a request that runs user code. Wait for its end, and return the answers by rank.

        While the ranks are busy, the request waits for its turn. ``on_status`` takes the status of a background job;
        without it, a printed message names the code that the request waits for. Raises as ``Session.execute`` and
        ``Session.pull`` do, and a ``RunError`` if a rank is dead.
        """
        self.chosen(ranks)  # refuse before waiting
        with self._turn(title, on_status) as interrupts:
            chosen = self.chosen(ranks)
            parcels = self.namespace_sync.pack(inputs, chosen)
            resent = sorted({name for parcel in parcels for name in parcel.resent})
            if resent:
                print(f"Sent again after a change in the notebook: {', '.join(resent)}", file=sys.stderr)
            request = self._request(make, chosen, parcels, is_user_code=True, **fields)
            self._output.start()
            self.job.expect_steps(chosen)
            try:
                if on_status is not None:
                    on_status("running")
                self._send_and_settle(request)
                answers = self._conclude(request, parcels, is_pull=make is messages.Pull)
                if request.interrupt is not None:
                    interrupts.forget_taken()  # the code has taken it, and returned
                return answers
            finally:
                self.job.expect_steps([])
                self._connections.drop(request)

    def debug(self, rank: int | None) -> None:
        """Open a debugger at a rank's last error; by default on the rank that failed last. See ``Session.debug``."""
        if rank is None and self._failed_rank is None:
            raise RunError("Nothing has failed in this session yet, so there is nothing to debug.")
        [rank] = self.chosen([self._failed_rank or 0 if rank is None else rank])
        console = Console()
        with self._turn("the debugger") as interrupts:
            self.chosen([rank])
            request = self._request(messages.Debug, [rank], is_user_code=True, console=console)
            self._output.start()
            self._send_and_settle(request)
            interrupts.forget_taken()  # an interrupt is a normal way to leave the debugger
            replies = request.replies
            self._connections.drop(request)
            self._finish(replies)
            # A typed command may have entered a collective.
            self._group_recovery.after(self.alive, is_broken=bool(request.lost or request.interrupted))
        if request.lost:
            raise self._death_error(rank)
        if console.refusal is not None:
            raise console.refusal
        for line in replies[rank].lines:
            raise RunError(line)

    def look_up(self, *, text: str, describes: bool, timeout_s: float | None = None) -> list[str] | None:
        """Ask rank 0 to complete or describe code. Return ``None`` if it is busy or dead, or doesn't answer in time."""
        with held() as interrupts, self._queue.if_free("completion") as is_free:
            if 0 not in self.alive or not is_free:
                return None
            request = self._request(messages.LookUp, [0], text=text, describes=describes)
            timeout_s = _LOOKUP_DEADLINE_S if timeout_s is None else timeout_s
            self._send_with_deadline(request, timeout_s, until=lambda: interrupts.has_pending)
            reply = request.replies.get(0)
            return None if reply is None else reply.lines

    def restart(self, ranks: Sequence[int] | None) -> list[int]:
        """Restart the given ranks, by default those that have died. Return the restarted ranks."""
        with self._turn("the restart"):
            self._refuse_ended()
            dead = [rank for rank in range(self.job.world_size) if rank not in self.alive]
            chosen = dead if ranks is None else self._check_known(ranks)
            for rank in chosen:
                self._connections.signal(rank, signal.SIGKILL)
            for rank in chosen:
                failures.death_error(self.job, rank)  # called only to wait for the agent's report
                self.namespace_sync.forget(rank)
                self._killed.discard(rank)
                self.job.respawn(rank)
            if chosen:
                self._group_recovery.leave([rank for rank in self.alive if rank not in chosen])
                self._welcome(chosen, lambda: None)  # uninterruptible: nobody would own ranks without a welcome
            return chosen

    def close(self) -> None:
        """End the ranks and wait for their end. Idle ranks exit by themselves."""
        if not self._is_closed:
            with held() as interrupts:
                self._close(interrupts)

    def leave(self, name: str = "") -> None:
        """Disconnect this process; the ranks go on and another process can attach. See ``Session.leave``."""
        if self._is_closed and self.outlives_kernel:
            return
        LaunchConfig().replace(name=name)  # refuses a bad name before the ranks hear of it
        with self._turn("the detaching") as interrupts:
            self._refuse_ended()
            if not self.is_whole:
                raise RunError(
                    f"The session {self.job.name!r} can't be detached now.",
                    why="Some of its ranks have died.",
                    fix="%distributed restart, then detach it",
                )
            interrupts.check()
            # First the ranks, then the agent. If this process is killed in between, both end with it.
            self._tell_where_to_wait(str(run_folders.root() / self.job.id))
            try:
                detached.let_go(self.job, name, is_session_told=True)
            finally:
                if self.job.status == "detached":
                    self._close_here()
                else:
                    self._tell_where_to_wait("")

    def _tell_where_to_wait(self, folder: str) -> None:
        """Send the ranks the folder where they wait for the next kernel; empty: end with this one. Uninterruptible."""
        request = self._request(messages.Detach, self.alive, folder=folder)
        self._send_with_deadline(request, _END_DEADLINE_S)

    def _send_with_deadline(
        self, request: PendingRequest, timeout_s: float, until: Callable[[], bool] = lambda: False
    ) -> None:
        """Send a request, and wait for its answers for a limited time."""
        self._connections.send(request)
        deadline_s = time.monotonic() + timeout_s
        while request.pending and (left_s := deadline_s - time.monotonic()) > 0 and not until():
            request.wait(min(left_s, _POLL_PERIOD_S))
        self._connections.drop(request)

    def _close_here(self) -> None:
        """Close this process's part of the session, whose ranks go on."""
        self.outlives_kernel = True
        self._is_closed = True
        atexit.unregister(self._end_with_kernel)
        self._connections.close()
        self._closing.close()

    def _give_up(self) -> None:
        """Undo a failed start."""
        self.close()

    def _end_with_kernel(self) -> None:
        if self.outlives_kernel:
            self.leave()
        else:
            self.close()

    def close_in_fork(self) -> None:
        """Close the descriptors in a fork of this process: to the ranks, whoever holds them is the session's kernel."""
        if self._is_closed:
            return  # other files may have these descriptor numbers by now
        self._is_closed = True
        atexit.unregister(self._end_with_kernel)
        self._connections.close_in_fork()
        if self._listener is not None:
            self._listener.close_in_fork()

    def _close(self, interrupts: Interrupts) -> None:
        self._is_closed = True
        atexit.unregister(self._end_with_kernel)
        is_idle = self._job is not None and len(self.alive) == self._job.world_size and not self._queue.titles
        self._connections.close(messages.Leave() if self.outlives_kernel else None)
        if self._job is not None:
            try:
                ends_s = time.monotonic() + (_END_DEADLINE_S if is_idle else 0.0)
                while time.monotonic() < ends_s and not interrupts.has_pending and not self._job.wait(_POLL_PERIOD_S):
                    pass
            finally:
                self._job.kill()
                self._job.wait(_END_DEADLINE_S)
            with contextlib.suppress(NotebookAccelError):  # the job has already reported its failure
                self._job.results(0)  # called only to close the result files
        self._closing.close()

    # ----------------------------------------------------------------------------------------------------------------

    def _welcome(self, ranks: Sequence[int], check: Callable[[], None]) -> None:
        """Wait until the given fresh ranks have joined. Raise a ``LaunchError`` if one has not joined in time."""
        assert self._listener is not None
        missing, deadline_s = set(ranks), time.monotonic() + _START_DEADLINE_S
        while missing:
            check()
            if self.job.done:
                raise self.job.error or LaunchError("The session ended before it started.")
            for death in filter(None, map(self.job.death, ranks)):
                raise death
            if time.monotonic() > deadline_s:
                text = f"{len(missing)} of the session's ranks have not joined within {_START_DEADLINE_S:g} s."
                raise LaunchError(text)
            joined = self._listener.accept()
            if joined is not None:
                self._add(joined)
                missing.discard(joined.rank)

    def _add(self, joined: JoinedRank) -> None:
        welcome = messages.Welcome(renewals=self._group_recovery.renewals)
        joined.connection.send(messages.encode(welcome))
        self._connections.add(joined)

    def _death_error(self, rank: int) -> RunError:
        return failures.death_error(self.job, rank, was_killed=rank in self._killed)

    def _check_known(self, ranks: Sequence[int]) -> list[int]:
        unknown = [rank for rank in ranks if not 0 <= rank < self.job.world_size]
        if unknown:
            raise ConfigError(
                f"The session has no {ranks_in_words(unknown)}: it has ranks 0 to {self.job.world_size - 1}."
            )
        return sorted(set(ranks))

    def _refuse_ended(self) -> None:
        if self.job.done:
            raise failures.death_error(self.job, 0)

    @contextlib.contextmanager
    def _turn(self, title: str, on_status: Callable[[Status], object] | None = None) -> Iterator[Interrupts]:
        """Wait until the ranks are free, then reserve them and hold back interrupts. See ``RequestQueue.turn``."""

        def check() -> None:
            interrupts.check()
            self._refuse_ended()

        with held() as interrupts, self._queue.turn(title, check, on_status=on_status):
            yield interrupts

    def _request(
        self,
        make: Callable[..., messages.ToRank],
        ranks: Sequence[int],
        parcels: Sequence[Parcel] = (),
        *,
        is_user_code: bool = False,
        console: Console | None = None,
        **fields: Any,
    ) -> PendingRequest:
        """Create a request from the fields of its message. With ``is_user_code``, its output is shown."""
        number = next(self._numbers)
        fields |= {"number": number, "sent_s": time.monotonic(), "import_path": environment.import_path()}
        outgoing: dict[int, tuple[bytes, Sequence[int]]] = {}
        for parcel in parcels:
            body = messages.encode(make(delivery=parcel.delivery, **fields))
            outgoing |= {rank: (body, [parcel.descriptor]) for rank in parcel.ranks}
        have_all = [rank for rank in ranks if rank not in outgoing]
        if have_all:
            plain = messages.encode(make(**fields))
            outgoing |= dict.fromkeys(have_all, (plain, ()))
        return PendingRequest(
            number,
            dict(sorted(outgoing.items())),
            connections=self._connections,
            grace_s=self.job.config.grace_s,
            output=self._output if is_user_code else None,
            console=console,
            stacks=self.job.stacks if is_user_code and console is None else None,
        )

    def _ask(
        self, make: Callable[..., messages.ToRank], ranks: Sequence[int], **fields: Any
    ) -> dict[int, messages.Reply]:
        """Send ranks a request without user code, wait for its end, and return the replies."""
        request = self._request(make, ranks, **fields)
        self._send_and_settle(request)
        self._connections.drop(request)
        return request.replies

    def _send_and_settle(self, request: PendingRequest) -> None:
        """Send a request, and wait until none of its interrupts can hit the next request."""
        with held() as interrupts:
            request.send_and_wait()
            if request.output is not None:  # user code has ended; its follow-up requests can't be interrupted
                interrupts.close()
        self._killed.update(request.killed)
        # A rank may answer just before it is interrupted. A signal may arrive late, but always before anything written
        # to the connection afterwards; so each interrupted rank answers one more, empty request.
        interrupted = [rank for rank in request.interrupted if rank in self.alive]
        if interrupted:
            settled = self._ask(messages.Settle, interrupted)
            request.was_taken = any(not reply.lines for reply in settled.values())

    def _conclude(self, request: PendingRequest, parcels: list[Parcel], *, is_pull: bool) -> dict[int, Answer]:
        """Record the ranks' variables, show their output, and return their answers or raise their failure."""
        replies = dict(sorted(request.replies.items()))
        lacking = [rank for rank, reply in replies.items() if reply.lacks_delivery]
        for parcel in parcels:
            self.namespace_sync.record_sent(parcel, lacking=lacking)
        self._finish(replies)
        if request.lost or any(reply.failed is not None for reply in replies.values()):
            if self._is_closed:
                raise RunStoppedError(self._closed_text)
            self._group_recovery.after(self.alive, is_broken=any(reply.breaks_group for reply in replies.values()))
            raise self._failure(request, replies)
        has_been_handled = request.was_taken and isinstance(request.interrupt, KeyboardInterrupt)
        if request.interrupt is not None and not has_been_handled:  # it came when all ranks had just finished
            raise request.interrupt
        values = self._values(request, is_pull=is_pull)
        return {rank: (reply, values.get(rank)) for rank, reply in replies.items()}

    def _finish(self, replies: Mapping[int, messages.Reply]) -> None:
        """Record which variables the ranks have after user code, and show the rest of its output."""
        for rank, reply in replies.items():
            self.namespace_sync.record(rank, reply.own, reply.deleted, reply.released)
        self._output.finish(replies)

    def _failure(self, request: PendingRequest, replies: Mapping[int, messages.Reply]) -> BaseException:
        deaths = {rank: self._death_error(rank) for rank in sorted(request.lost, key=request.lost.__getitem__)}
        if deaths:
            raised_s = failures.first_raised_s(replies, request.interrupted)
            is_cause = raised_s is None or raised_s > min(request.lost.values())
            if is_cause or self.job.done or request.interrupt is not None:
                return next(iter(deaths.values()))
        if request.interrupt is not None:
            return failures.describe_interrupt(request.interrupt, replies)
        if not deaths and (stopped := failures.interrupted_from_elsewhere(replies)):
            return stopped
        failure = failures.first_failure(replies, request.interrupted, self.job.world_size, self.namespace_sync.origins)
        failures.add_deaths(failure, deaths, request.killed)
        self._failed_rank = failure.rank
        return failure

    def _values(self, request: PendingRequest, *, is_pull: bool) -> dict[int, Any]:
        """Return the values that came with the answers, by rank. Raise a ``ResultError`` if one can't be unpickled."""
        files = {rank: ResultFile(value, rank) for rank, value in sorted(request.values.items())}
        for file in files.values():
            file.unpickle(self.namespace_sync.origins)
        if is_pull and len(files) == 1:
            [file] = files.values()
            self._count_as_pulled(file.values)
        error = result_error(files)
        if error is not None:
            raise error
        return {rank: file.outcome for rank, file in files.items()}

    def _count_as_pulled(self, values: Mapping[str, Any]) -> None:
        """Let values that were pulled count as the ranks' values of these names, so that they aren't sent again."""
        numbers = self.namespace_sync.number_pulled(values)
        replies = self._ask(messages.CountAsPulled, self.alive, numbers=numbers)
        self.namespace_sync.record_pulled(values, {rank: reply.lines for rank, reply in replies.items()})

    @property
    def _closed_text(self) -> str:
        return f"The session {self.job.name!r} was ended, and the code that ran in it too."

    def _doing(self) -> str:
        """Return the ranks' current work in words, for the panel and ``%distributed status``."""
        first, *others = self._queue.titles or [""]
        waiting = f"; {', '.join(others)} wait{'s' if len(others) == 1 else ''}" if others else ""
        return f"busy with {first}{waiting}" if first else "idle"


_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()


def _close_in_fork() -> None:
    for pool in list(_pools):
        pool.close_in_fork()


os.register_at_fork(after_in_child=_close_in_fork)

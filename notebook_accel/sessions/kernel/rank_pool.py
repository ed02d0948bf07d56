"""The ranks of a session: how they are started, asked, started again and ended."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, LaunchError, NotebookAccelError, RunError, RunStoppedError
from notebook_accel.launching.kernel import foreground, launcher
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.results import ResultFile, result_error
from notebook_accel.protocol import session_messages as messages
from notebook_accel.sessions.kernel import failures
from notebook_accel.sessions.kernel.background import BackgroundCell
from notebook_accel.sessions.kernel.console import Console
from notebook_accel.sessions.kernel.group_recovery import Healing
from notebook_accel.sessions.kernel.interrupts import Interrupts, held
from notebook_accel.sessions.kernel.namespace_sync import Ledger, Parcel, Request
from notebook_accel.sessions.kernel.output import Output
from notebook_accel.sessions.kernel.pending_request import Asking
from notebook_accel.sessions.kernel.rank_connections import Answer, Courier, Question
from notebook_accel.sessions.kernel.request_queue import Turns
from notebook_accel.sessions.listener import Meeting
from notebook_accel.sessions.ranks import loop
from notebook_accel.sessions.showing import ranks_in_words

__all__ = ["Crew"]

_START_DEADLINE_S = 180.0  # the template may have to import torch first
_END_DEADLINE_S = 5.0
_LOOK_DEADLINE_S = 1.0
_LOOK_PERIOD_S = 0.1


class Crew:
    """All ranks of one session, and what is known about them.

    Args:
        config: The options.

    Attributes:
        job: The run that they belong to.
        ledger: What they have of the notebook's.

    Raises:
        LaunchError: They could not be started.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self._numbers = itertools.count(1)
        self._turns = Turns()
        self._is_closed = False
        self._failed_rank: int | None = None  # where the last error was
        self._killed: set[int] = set()  # since they went on although they were interrupted
        self._output: Output | None = None
        self._job: Job | None = None
        with held() as interrupts:
            self._meeting = Meeting()
            self._courier = Courier()
            try:
                self._start(config, interrupts)
            except BaseException:
                self.close()
                raise
            atexit.register(self.close)  # before the engine's own, which would leave the meeting's folder

    def _start(self, config: LaunchConfig, interrupts: Interrupts) -> None:
        with interrupts.opened():  # a cluster may take its time
            launcher.launch_function(
                loop.serve,
                (str(self._meeting.folder), self._meeting.secret),
                {},
                config.replace(name=config.name or "session"),
                show=self._launched,
                on_death="keep",
            )
        assert self._job is not None
        self.job: Job = self._job
        self.job.expect_steps([])
        self.job.doing = self._doing
        self._output = Output(self.job)
        self.ledger = Ledger(self.job.world_size)
        self._healing = Healing(self.job.world_size, self._ask_quietly)
        self._welcome(range(self.job.world_size), interrupts.check)

    def _launched(self, job: Job) -> None:
        self._job = job  # at once: an interrupt may come
        foreground.show_panel(job)

    @property
    def alive(self) -> list[int]:
        """The ranks that are there."""
        return self._courier.ranks

    def ask(
        self,
        make: Callable[..., messages.ToRank],
        ranks: Sequence[int] | None = None,
        request: Request = Request(),  # noqa: B008 - it is frozen
        *,
        called: str,
        background: BackgroundCell | None = None,
        **what: Any,
    ) -> dict[int, tuple[messages.Reply, Any]]:
        """Asks ranks something that runs the user's code, and waits for the end; replies and values by rank.

        If the ranks are busy, it waits for its turn.

        Args:
            make: The kind of the message.
            ranks: Which of them. Default: all.
            request: What of the notebook they need for it.
            called: What it is, in words.
            background: The handle of it, if it is asked in the background.
            what: What else the message says.

        Raises:
            PayloadError: Something that they need can't be sent.
            RankFailedError: A rank has raised something, or died.
            ResultError: A value can't be had; those that can are in the error.
            RunError: A rank isn't there.
            KeyboardInterrupt: The kernel was interrupted, and so were they.
        """
        self._chosen(ranks)  # what can't be is said before it waits
        with held() as interrupts:
            check = background.check if background is not None else lambda: self._check_waiting(interrupts)
            with self._turns.turn(called, says=background is None, check=check):
                return self._ask(make, self._chosen(ranks), request, what, background)

    def debug(self, rank: int | None) -> None:
        """Lets the user look around where the last error of a rank was raised; by default of the one that failed last.

        Raises:
            RunError: Nothing has failed there, or nobody can be asked.
        """
        if rank is None and self._failed_rank is None:
            raise RunError("Nothing has failed in this session yet, so there is nothing to look at.")
        [rank] = self._chosen([self._failed_rank or 0 if rank is None else rank])
        console = Console()
        with held() as interrupts, self._turns.turn("the debugger", check=lambda: self._check_waiting(interrupts)):
            self._chosen([rank])
            question = self._question(messages.Debug, {}, [rank], [])
            asking = Asking(self._courier, self._output, self.job.config.grace_s, console=console)
            self._start_output()
            self._have_answered(asking, question)
            interrupts.heeded()  # one has ended the debugger, as it should
            answers = dict(question.answers)
            self._courier.drop(question)
            self._finish_output(answers)
            # What was typed may have called something that only all ranks can do together.
            self._healing.after(self.alive, is_broken=bool(question.lost or asking.interrupted))
        if question.lost:
            raise self._how_it_died(rank)
        if console.refusal is not None:
            raise console.refusal
        for line in answers[rank].reply.lines:
            raise RunError(line)

    def look(self, *, text: str, describes: bool, timeout_s: float | None = None) -> list[str] | None:
        """What rank 0 knows about a piece of code; ``None`` while it is busy or gone, or if it says nothing in time."""
        with held() as interrupts, self._turns.if_free("completion") as is_free:
            if 0 not in self.alive or not is_free:
                return None
            question = self._question(messages.Look, {"text": text, "describes": describes}, [0], [])
            self._courier.ask(question)
            deadline_s = time.monotonic() + (_LOOK_DEADLINE_S if timeout_s is None else timeout_s)
            while question.pending and (left_s := deadline_s - time.monotonic()) > 0 and not interrupts.have_come:
                question.wait(min(left_s, _LOOK_PERIOD_S))
            answer = question.answers.get(0)
            self._courier.drop(question)
            return None if answer is None else answer.reply.lines

    def restart(self, ranks: Sequence[int] | None) -> list[int]:
        """Starts ranks again: those that have died, or these. Returns which."""
        with held() as interrupts, self._turns.turn("the restart", check=lambda: self._check_waiting(interrupts)):
            return self._restart(ranks)

    def _restart(self, ranks: Sequence[int] | None) -> list[int]:
        self._refuse_ended()
        dead = [rank for rank in range(self.job.world_size) if rank not in self.alive]
        chosen = dead if ranks is None else self._known(ranks)
        for rank in chosen:
            self._courier.kill(rank)
        for rank in chosen:
            failures.how_it_died(self.job, rank)  # waits until that is known
            self.ledger.forget(rank)
            self._killed.discard(rank)
            self.job.respawn(rank)
        if chosen:
            self._healing.leave([rank for rank in self.alive if rank not in chosen])
            self._welcome(chosen, lambda: None)  # begun, it is ended: who weren't welcomed would belong to nobody
        return chosen

    def close(self) -> None:
        """Ends the ranks, and waits for that. Those that are idle end by themselves."""
        if not self._is_closed:
            with held() as interrupts:
                self._close(interrupts)

    def _close(self, interrupts: Interrupts) -> None:
        self._is_closed = True
        atexit.unregister(self.close)
        is_idle = self._job is not None and len(self.alive) == self._job.world_size and not self._turns.queue
        self._courier.close()
        if self._job is not None:
            try:
                ends_s = time.monotonic() + (_END_DEADLINE_S if is_idle else 0.0)
                while time.monotonic() < ends_s and not interrupts.have_come and not self._job.wait(_LOOK_PERIOD_S):
                    pass
            finally:
                self._job.kill()
                self._job.wait(_END_DEADLINE_S)
            with contextlib.suppress(NotebookAccelError):  # one that has failed has said so
                self._job.results(0)  # which closes the files for them
        if self._output is not None:
            self._output.close()
        self._meeting.close()

    # ----------------------------------------------------------------------------------------------------------------

    def _welcome(self, ranks: Sequence[int], check: Callable[[], None]) -> None:
        def check_both() -> None:
            check()
            self._check_start(ranks)

        for arrival in self._meeting.arrivals(len(ranks), _START_DEADLINE_S, check_both):
            welcome = messages.Welcome(renewals=self._healing.renewals)
            arrival.connection.send(messages.encode(welcome))
            self._courier.add(arrival)

    def _check_start(self, ranks: Sequence[int]) -> None:
        if self.job.done:
            raise self.job.error or LaunchError("The session has ended before it began.")
        for rank in ranks:
            death = self.job.death(rank)
            if death is not None:
                raise death

    def _chosen(self, ranks: Sequence[int] | None) -> list[int]:
        self._refuse_ended()
        chosen = list(range(self.job.world_size)) if ranks is None else self._known(ranks)
        for rank in chosen:
            if rank not in self.alive:
                raise self._how_it_died(rank)
        return chosen

    def _how_it_died(self, rank: int) -> RunError:
        return failures.how_it_died(self.job, rank, was_killed=rank in self._killed)

    def _known(self, ranks: Sequence[int]) -> list[int]:
        unknown = [rank for rank in ranks if not 0 <= rank < self.job.world_size]
        if unknown:
            raise ConfigError(
                f"The session has no {ranks_in_words(unknown)}: it has ranks 0 to {self.job.world_size - 1}."
            )
        return sorted(set(ranks))

    def _refuse_ended(self) -> None:
        if self.job.done:
            raise failures.how_it_died(self.job, 0)

    def _check_waiting(self, interrupts: Interrupts) -> None:
        interrupts.check()
        self._refuse_ended()

    def _question(
        self, make: Callable[..., messages.ToRank], what: Mapping[str, Any], ranks: Sequence[int], parcels: list[Parcel]
    ) -> Question:
        number, sent_s = next(self._numbers), time.monotonic()
        orders: dict[int, tuple[bytes, Sequence[int]]] = {}
        for parcel in parcels:
            body = messages.encode(make(number=number, sent_s=sent_s, delivery=parcel.delivery, **what))
            orders |= {rank: (body, [parcel.descriptor]) for rank in parcel.ranks}
        have_all = [rank for rank in ranks if rank not in orders]
        if have_all:
            plain = messages.encode(make(number=number, sent_s=sent_s, **what))
            orders |= dict.fromkeys(have_all, (plain, ()))
        return Question(number, dict(sorted(orders.items())))

    def _ask(
        self,
        make: Callable[..., messages.ToRank],
        ranks: list[int],
        request: Request,
        what: Mapping[str, Any],
        background: BackgroundCell | None,
    ) -> dict[int, tuple[messages.Reply, Any]]:
        parcels = self.ledger.pack(request, ranks)
        self._say_what_is_sent_again(parcels)
        question = self._question(make, what, ranks, parcels)
        asking = Asking(self._courier, self._output, self.job.config.grace_s, stacks=self.job.stacks)
        self._start_output()
        self.job.expect_steps(ranks)
        try:
            if background is not None:
                background.begin(asking, question)
            self._have_answered(asking, question)
            return self._concluded(question, asking, parcels)
        finally:
            self.job.expect_steps([])
            self._courier.drop(question)

    def _concluded(
        self, question: Question, asking: Asking, parcels: list[Parcel]
    ) -> dict[int, tuple[messages.Reply, Any]]:
        replies = {rank: answer.reply for rank, answer in sorted(question.answers.items())}
        for parcel in parcels:
            self.ledger.sent(parcel, lacking=[rank for rank, reply in replies.items() if reply.lacks_delivery])
        for rank, reply in replies.items():
            self.ledger.note(rank, reply.bound, reply.unbound)
        self._finish_output(question.answers)
        if question.lost or any(reply.failed is not None for reply in replies.values()):
            if self._is_closed:
                raise RunStoppedError(f"The session {self.job.name!r} was ended, and what ran in it too.")
            self._healing.after(self.alive, is_broken=any(reply.breaks_group for reply in replies.values()))
            self._raise(question, asking, replies)
        if asking.interrupt is not None:  # all had just ended
            raise asking.interrupt
        return {
            rank: (reply, value) for (rank, reply), value in zip(replies.items(), self._values(question), strict=True)
        }

    def _start_output(self) -> None:
        if self._output is not None:
            self._output.start()

    def _finish_output(self, answers: Mapping[int, Answer]) -> None:
        if self._output is not None:
            self._output.finish({rank: answer.reply for rank, answer in answers.items()})

    def _raise(self, question: Question, asking: Asking, replies: Mapping[int, messages.Reply]) -> None:
        if question.lost:
            raise self._how_it_died(min(question.lost))
        if asking.interrupt is not None:
            raise failures.interrupted(asking.interrupt, replies)
        failure = failures.first_failure(replies, asking.interrupted, self.job.world_size, self.ledger.origins)
        assert failure is not None
        self._failed_rank = failure.rank
        raise failure

    def _values(self, question: Question) -> list[Any]:
        """What has come with the answers, in order of rank.

        Raises:
            ResultError: Some of it can't be had; the rest is in the error.
        """
        openings = {
            rank: ResultFile(answer.value, rank)
            for rank, answer in sorted(question.answers.items())
            if answer.value >= 0
        }
        for opening in openings.values():
            opening.unpickle(self.ledger.origins)
        error = result_error(openings)
        if error is not None:
            raise error
        return [openings[rank].outcome if rank in openings else None for rank in sorted(question.answers)]

    def _ask_quietly(
        self, make: Callable[..., messages.ToRank], ranks: Sequence[int], **what: Any
    ) -> dict[int, Answer]:
        question = self._question(make, what, ranks, [])
        asking = Asking(self._courier, None, self.job.config.grace_s)
        self._have_answered(asking, question)
        answers = dict(question.answers)
        self._courier.drop(question)
        return answers

    def _have_answered(self, asking: Asking, question: Question) -> None:
        """Asks, and waits until no interrupt of that can end what is asked next: ranks may have answered just before.

        A signal is not when it is sent where it is sent to, but is before what is sent on the line after it.
        """
        asking.ask(question)
        self._killed.update(asking.killed)
        interrupted = [rank for rank in asking.interrupted if rank in self.alive]
        if interrupted:
            self._ask_quietly(messages.Settle, interrupted)

    def _doing(self) -> str:
        first, *others = self._turns.queue or [""]
        waiting = f"; {', '.join(others)} wait{'s' if len(others) == 1 else ''}" if others else ""
        return f"busy with {first}{waiting}" if first else "idle"

    @staticmethod
    def _say_what_is_sent_again(parcels: Sequence[Parcel]) -> None:
        again = sorted({name for parcel in parcels for name in parcel.again})
        if again:
            print(f"Sent again, since the notebook's has changed: {', '.join(again)}", file=sys.stderr)

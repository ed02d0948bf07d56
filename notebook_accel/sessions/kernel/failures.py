"""The kernel's reaction to a cell whose ranks failed, died or were interrupted: its error, and group recovery."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from notebook_accel.errors import RankEnd, RankFailedError, RunError, RunStoppedError
from notebook_accel.formatting import ranks_in_words
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.state.failures import raised_error, where_ranks_stood
from notebook_accel.launching.state.first_failure import first_failed
from notebook_accel.protocol import session_messages as messages
from notebook_accel.protocol.session_messages import Reply

_RESTART = "%distributed restart, or session.restart(), brings a fresh one; living ranks keep their variables"
_DEATH_DEADLINE_S = 30.0  # for the agent's report of a death, which is late on a busy machine
_POLL_PERIOD_S = 0.02


def first_failure(
    replies: Mapping[int, Reply], interrupted: Sequence[int], world_size: int, origins: Mapping[int, Any]
) -> RankFailedError:
    """Return the error of the rank that failed first. At least one rank must have failed."""
    failed = {rank: reply.failed for rank, reply in sorted(replies.items()) if reply.failed is not None}
    # Interrupted ranks come last, since their errors follow from another rank's.
    first = first_failed({rank: each for rank, each in failed.items() if rank not in interrupted} or failed)
    assert first is not None, "at least one rank has failed"
    error = raised_error(failed[first], first, world_size, origins)
    error.fix = _of_missing_name(replies[first].missing, replies) or error.fix
    error.others = tuple(
        RankEnd(rank, stopped=rank in interrupted, error=other.in_words)
        for rank, other in failed.items()
        if rank != first
    )
    return error


def first_raised_s(replies: Mapping[int, Reply], interrupted: Sequence[int]) -> float | None:
    """Return when the first rank has raised an error that doesn't follow from another rank's; ``None`` if none has."""
    failed = [reply.failed for rank, reply in replies.items() if reply.failed is not None and rank not in interrupted]
    return min((each.time_s for each in failed if not each.lost_peer), default=None)


def add_deaths(error: RankFailedError, deaths: Mapping[int, RunError], killed: Sequence[int]) -> None:
    """Add the ranks that have died since the failure that an error reports."""
    ends = list(error.others)
    for rank, death in deaths.items():
        status = (death.exit_code, death.signal) if isinstance(death, RankFailedError) else (None, None)
        ends.append(RankEnd(rank, *status, stopped=rank in killed))
    error.others = tuple(sorted(ends, key=lambda end: end.rank))
    if deaths:
        error.fix = "; ".join(filter(None, [error.fix, _RESTART]))


def _of_missing_name(name: str, replies: Mapping[int, Reply]) -> str:
    """Return advice for a variable that some ranks lack and the notebook or other ranks have; otherwise empty text."""
    lacking = [rank for rank, reply in replies.items() if reply.missing == name]
    who = f"{ranks_in_words(lacking)} {'has' if len(lacking) == 1 else 'have'}"
    if name in vars(sys.modules["__main__"]):
        return f"the notebook has a {name!r}, and {who} none: %push {name}, or session.push({name}={name})"
    if name and len(lacking) < len(replies):
        return f"{who} no {name!r}, perhaps since a restart: run the cell that assigns it again"
    return ""


def describe_interrupt(interrupt: BaseException, replies: Mapping[int, Reply]) -> BaseException:
    """Make the kernel's interrupt show where the ranks were, instead of a traceback of this package's frames."""
    if not isinstance(interrupt, KeyboardInterrupt):
        return interrupt
    lines = [f"  {line}" for line in _where_ranks_stood(replies)]
    text = "\n".join(["KeyboardInterrupt: the cell was interrupted on all ranks, which keep their variables.", *lines])
    interrupt._render_traceback_ = lambda: [text]  # type: ignore[attr-defined]
    return interrupt


def interrupted_from_elsewhere(replies: Mapping[int, Reply]) -> RunStoppedError | None:
    """Return the error of code that ``%distributed interrupt`` has ended, perhaps another notebook's."""
    if any(reply.failed is not None and reply.failed.kind != "KeyboardInterrupt" for reply in replies.values()):
        return None
    why = "\n".join(_where_ranks_stood(replies))
    return RunStoppedError("The code was interrupted in the ranks, which keep their variables.", why=why)


def _where_ranks_stood(replies: Mapping[int, Reply]) -> list[str]:
    return where_ranks_stood({rank: reply.failed for rank, reply in replies.items()})


def death_error(job: Job, rank: int, *, was_killed: bool = False) -> RunError:
    """Wait for the agent's report of a rank's death, and return the error that explains it."""
    deadline_s = time.monotonic() + _DEATH_DEADLINE_S
    error: RunError | None = None
    while error is None and not job.done and time.monotonic() < deadline_s:
        error = job.death(rank)
        if error is None:
            time.sleep(_POLL_PERIOD_S)
    if job.done:
        return _end_error(job)
    if error is None:
        return RunError(f"Rank {rank} of {job.name!r} no longer answers, for an unknown reason.", fix=_RESTART)
    if was_killed:
        who = f"rank {rank} of {job.world_size}"
        error.what = f"{who} went on although it was interrupted, and was killed. Its variables are lost."
        error.why = ""
        error.args = (error.what,)
    error.fix = "; ".join(filter(None, [error.fix, _RESTART]))
    return error


def _end_error(job: Job) -> RunError:
    error = job.error
    if not isinstance(error, RunError):
        error = RunError(f"The session {job.name!r} has ended.", why=str(error or ""))
    error.fix = error.fix or "%distributed start, or a new Session"
    return error


@dataclasses.dataclass
class GroupRecovery:
    """Checks the ranks' process group after a failure, and replaces a broken one."""

    world_size: int
    # Sends ranks a request without user code. Takes the request's type, the ranks and the fields, and returns the
    # answers of the ranks that are still alive.
    ask: Callable[..., Mapping[int, Reply]]
    renewals: int = 0  # number of abandoned groups

    def after(self, alive: Sequence[int], *, is_broken: bool) -> None:
        """Make a new group if the ranks have entered different collectives. Report what was lost with the old group.

        ``is_broken`` means that the group, or a group about to be made, is known to be unusable.
        """
        if not alive:
            return
        calls = [reply.group_calls for reply in self.ask(messages.InspectGroup, alive).values()]
        is_whole = len(alive) == self.world_size
        if is_whole and not is_broken and all(of_rank == calls[0] for of_rank in calls):
            return
        # The first number tells whether this package made the group. Ranks that differ there can't share one.
        origins = {None if of_rank is None else of_rank[0] for of_rank in calls}
        had_one = origins != {None}
        if is_whole and had_one and len(origins) == 1 and self._renew(alive, rejoins=True):
            return
        self.leave(alive)
        if had_one:
            sys.stderr.write("[the ranks have no process group any more: make a new Accelerator() on all of them]\n")

    def leave(self, alive: Sequence[int]) -> None:
        """Make these ranks leave their group."""
        self._renew(alive, rejoins=False)

    def _renew(self, alive: Sequence[int], *, rejoins: bool) -> bool:
        """Make these ranks leave their group and, if ``rejoins``, form a new one. Return whether all have."""
        # Retry once: the old group's end may disturb the first attempt, and a rank that an interrupt leaves in the old
        # group would wait there for ranks in another group.
        return self._try_to_renew(alive, rejoins=rejoins) or self._try_to_renew(alive, rejoins=rejoins)

    def _try_to_renew(self, alive: Sequence[int], *, rejoins: bool) -> bool:
        self.renewals += 1
        replies = self.ask(messages.RenewGroup, alive, renewals=self.renewals, rejoins=rejoins)
        for rank, reply in replies.items():
            if reply.failed is not None:
                why = f"{reply.failed.kind}: {reply.failed.message}"
                sys.stderr.write(f"[rank {rank} could not go on in a new process group: {why}]\n")
        lost = list(dict.fromkeys(line for reply in replies.values() for line in reply.lines))
        if lost:
            sys.stderr.write(f"[lost with the ranks' process group, which had broken: {'; '.join(lost)}]\n")
        return len(replies) == len(alive) and not any(reply.failed for reply in replies.values())

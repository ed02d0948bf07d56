"""Errors for a cell whose ranks failed, died or were interrupted."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from notebook_accel.errors import RankEnd, RankFailedError, RunError
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.state.failures import raised_error, raised_in_words, where_ranks_stood
from notebook_accel.protocol.session_messages import Reply
from notebook_accel.sessions.kernel.output import ranks_in_words

_RESTART = "%distributed restart, or session.restart(), brings a fresh one; the others keep their variables"
_DEATH_DEADLINE_S = 30.0  # for the agent's report of a death, which is late on a busy machine
_POLL_PERIOD_S = 0.02


def first_failure(
    replies: Mapping[int, Reply], interrupted: Sequence[int], world_size: int, origins: Mapping[int, Any]
) -> RankFailedError:
    """Return the error of the rank that failed first, of at least one that has.

    Interrupted ranks, and ranks that lost a peer, come last: their errors follow from another's.
    """
    failed = {rank: reply.failed for rank, reply in sorted(replies.items()) if reply.failed is not None}
    first = min(failed, key=lambda rank: (rank in interrupted, failed[rank].lost_peer, failed[rank].time_s))
    error = raised_error(failed[first], first, world_size, origins)
    error.fix = _of_missing_name(replies[first].missing, replies) or error.fix
    error.others = tuple(
        RankEnd(rank, stopped=rank in interrupted, error=raised_in_words(other))
        for rank, other in failed.items()
        if rank != first
    )
    return error


def _of_missing_name(name: str, replies: Mapping[int, Reply]) -> str:
    if not name or name not in vars(sys.modules["__main__"]):
        return ""
    lacking = [rank for rank, reply in replies.items() if reply.missing == name]
    who = ranks_in_words(lacking)
    return f"the notebook has a {name!r} that {who} doesn't have: %push {name}, or session.push({name}={name})"


def describe_interrupt(interrupt: BaseException, replies: Mapping[int, Reply]) -> BaseException:
    """Make the kernel's interrupt show where the ranks were, instead of a traceback of our own frames."""
    if not isinstance(interrupt, KeyboardInterrupt):
        return interrupt
    lines = [f"  {line}" for line in where_ranks_stood({rank: reply.failed for rank, reply in replies.items()})]
    text = "\n".join(["KeyboardInterrupt: the cell was interrupted on all ranks, which keep their variables.", *lines])
    interrupt._render_traceback_ = lambda: [text]  # type: ignore[attr-defined]
    return interrupt


def death_error(job: Job, rank: int, *, was_killed: bool = False) -> RunError:
    """Return the error that explains a rank's death. Wait for the agent's report, which takes a moment."""
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
    if isinstance(error, RunError):
        error.fix = error.fix or "%distributed start, or a new Session"
        return error
    return RunError(
        f"The session {job.name!r} has ended.", why=str(error or ""), fix="%distributed start, or a new Session"
    )

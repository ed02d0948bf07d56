"""How a run has failed, read from its state: the rank that failed first, why, and how the others ended."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from notebook_accel.errors import NodeLostError, RankEnd, RankFailedError, RunError, signal_name
from notebook_accel.formatting import first_line, plain_lines
from notebook_accel.launching.state import explanations
from notebook_accel.launching.state.rank import RankState
from notebook_accel.launching.state.run import RunState
from notebook_accel.payload import serialization
from notebook_accel.protocol.agent_messages import Failure
from notebook_accel.protocol.events import Ended, Failed

__all__ = ["Failures", "cause_of", "in_a_line", "raised_in_words"]

_MOST_TRACEBACK_LINES = 300
_FIRST_TRACEBACK_LINES = 50


def in_a_line(state: RunState) -> str:
    """Return which rank failed first, and of what; empty if none has."""
    rank = state.first_failed
    if rank is None:
        return ""
    failed = rank.failed
    if failed is not None:
        return f"rank {rank.number}: {raised_in_words(failed)}" + (f" at {failed.line}" if failed.line else "")
    assert rank.ended is not None, "a rank that failed has raised or ended"
    return f"rank {rank.number} {_how_it_died(rank.ended)}"


@dataclasses.dataclass(frozen=True)
class Failures:
    """Makes errors from the state of a run.

    Attributes:
        start_method: How the ranks come into being.
        left_out: Names that couldn't be sent, with the reason.
        shipped: What was sent to the ranks by value, for the exceptions that come back.
    """

    start_method: str
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shipped: Sequence[Any] = ()

    def first(self, state: RunState) -> RankFailedError | None:
        """Return the error of the rank that failed first, ``None`` if no rank has failed."""
        rank = state.first_failed
        if rank is None:
            return None
        error = self.of_rank(state, rank)
        error.others = _others(state, rank)
        return error

    def of_rank(self, state: RunState, rank: RankState) -> RankFailedError:
        """Return the error of a rank that has raised something or has died."""
        error = self._died(state, rank) if rank.failed is None else self._raised(state, rank, rank.failed)
        error.last_output = tuple(rank.last_lines)
        return error

    def elsewhere(self, state: RunState, failure: Failure) -> RunError:
        """Return the error of a run that has ended because of what happened on another node."""
        if failure.rank is None:
            line = failure.in_a_line
            return NodeLostError(
                line[:1].upper() + line[1:],
                why="A run needs all of its nodes; the ranks here were stopped.",
                fix="launch it again on all nodes; with max_restarts this one waits for the other to come back",
            )
        error = RankFailedError(
            f"rank {failure.rank} of {state.total_ranks} on {failure.where} failed: {failure.what}",
            rank=failure.rank,
            world_size=state.total_ranks,
            remote_traceback=failure.traceback.rstrip("\n"),
            others=_others(state, None),
        )
        error.restarts = tuple(event.why for event in state.restartings if event.number)
        return error

    def _raised(self, state: RunState, rank: RankState, failed: Failed) -> RankFailedError:
        where = f" at {failed.line}" if failed.line else ""
        memory = {other.rank: other.memory for other in state.ranks if other.memory is not None}
        why, fix = explanations.of_exception(failed, rank.ended, memory, self.left_out)
        error = RankFailedError(
            f"rank {rank.number} of {state.total_ranks} failed{where}: {raised_in_words(failed)}",
            rank=rank.number,
            world_size=state.total_ranks,
            why=why,
            fix=fix,
            remote_traceback=_shown(failed.traceback),
            exit_code=1,
        )
        error.__cause__ = cause_of(failed, self.shipped)
        return error

    def _died(self, state: RunState, rank: RankState) -> RankFailedError:
        end = rank.ended
        assert end is not None, "a rank that failed has raised or ended"
        of_what, why, fix = explanations.of_death(end, start_method=self.start_method, ranks=state.total_ranks)
        return RankFailedError(
            f"rank {rank.number} of {state.total_ranks} {_how_it_died(end)}{of_what}.",
            rank=rank.number,
            world_size=state.total_ranks,
            why=why,
            fix=fix,
            remote_traceback=explanations.of_crash(rank.crash),
            exit_code=end.exit_code,
            signal=end.signal,
        )


def _others(state: RunState, reported: RankState | None) -> tuple[RankEnd, ...]:
    return tuple(_end_of(rank, rank.ended) for rank in state.ranks if rank.ended is not None and rank is not reported)


def _end_of(rank: RankState, end: Ended) -> RankEnd:
    raised = "" if rank.failed is None else f"{rank.failed.kind}: {first_line(rank.failed.message)}"
    # One that failed by itself may have been told to end all the same, in the moment before it did.
    return RankEnd(rank.number, end.exit_code, end.signal, end.stopped and not raised, raised)


def _how_it_died(end: Ended) -> str:
    if end.signal is not None:
        return f"was killed by {signal_name(end.signal)}"
    return f"exited with status {end.exit_code} before its function returned"


def _shown(traceback: str) -> str:
    """Return a rank's traceback as a notebook can hold it: what was raised, and where, is at its end."""
    lines = list(plain_lines(traceback.rstrip("\n")))
    left_out = len(lines) - _MOST_TRACEBACK_LINES
    if left_out <= 0:
        return "\n".join(lines)
    first = lines[:_FIRST_TRACEBACK_LINES]
    return "\n".join([*first, f"  [{left_out:,} lines left out]", *lines[left_out + len(first) :]])


def raised_in_words(failed: Failed) -> str:
    """Return in a line what a rank has raised: ``ValueError: no images in data/``."""
    return f"{failed.kind}: {first_line(failed.message)}" if failed.message else failed.kind


def cause_of(failed: Failed, shipped: serialization.Origins) -> BaseException:
    """Return the rank's exception; one of its name and text where it can't be pickled or made again."""
    if failed.exception:
        with contextlib.suppress(Exception):
            cause = serialization.loads(failed.exception, origins=shipped)
            if isinstance(cause, BaseException):
                return cause
    stand_in: type[Exception] = type(failed.kind, (Exception,), {})
    return stand_in(failed.message)

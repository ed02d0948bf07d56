"""What the ranks of a run have said that decides how the run has ended."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from notebook_accel import serialization
from notebook_accel.errors import RankEnd, RankFailedError, signal_name
from notebook_accel.events import Ended, Event, Failed, Finished, Memory, MemoryShortage, Output, Started
from notebook_accel.launching import explanations
from notebook_accel.plain_text import first_line, plain_lines

__all__ = ["Ending", "Record", "cause_of", "raised_in_words"]

_LAST_LINES = 10
_MOST_CRASH_CHARACTERS = 50_000
_MOST_TRACEBACK_LINES = 300
_FIRST_TRACEBACK_LINES = 50


@dataclasses.dataclass
class Ending:
    """How a run has ended, for who no longer has its job.

    Attributes:
        status: In a word; empty as long as it runs.
        why: In a line, what went wrong; empty if nothing did.
        took_s: How long it ran.
    """

    status: str = ""
    why: str = ""
    took_s: float = 0.0

    def fill_in(self, status: str, why: str, took_s: float) -> None:
        """The run has ended. The status comes last: another thread that sees one sees all that belongs to it."""
        self.why, self.took_s = why, took_s
        self.status = status


class Record:
    """Filled with the ranks' events; names the failure that the others follow from.

    Args:
        world_size: Number of ranks.
        start_method: How they come into being.
        left_out: Names that couldn't be sent, with the reason.

    Attributes:
        has_started: Whether a rank has begun to run the user's code.
        finished: The ranks whose result is there.
        failures: What each rank raised that raised something.
        first_rank: The number among all of the first rank here.
        world_size: Number of ranks on all nodes.
    """

    def __init__(self, world_size: int, start_method: str, left_out: Mapping[str, str] = {}) -> None:
        self.has_started = False
        self.finished: set[int] = set()
        self.failures: dict[int, Failed] = {}
        self.first_rank = 0
        self.world_size = world_size
        self._start_method = start_method
        self._memory: dict[int, Memory] = {}
        self._crashes: dict[int, str] = {}
        self._left_out = left_out
        self._ends: dict[int, Ended] = {}
        self._last_lines = [collections.deque[str](maxlen=_LAST_LINES) for _ in range(world_size)]

    @property
    def has_saved(self) -> bool:
        """Whether the names that were to be pulled are there: rank 0 has finished, or has saved them when it failed."""
        return 0 in self.finished or (0 in self.failures and self.failures[0].saved)

    def add(self, rank: int, event: Event) -> None:
        """Takes what matters of an event."""
        if isinstance(event, Output):
            before_crash = "" if rank in self._crashes else event.text.partition(explanations.CRASH)[0]
            if before_crash:
                self._last_lines[rank].extend(list(plain_lines(before_crash.removesuffix("\n")))[-_LAST_LINES:])
            self._note_crash(rank, event)
        elif isinstance(event, Failed):
            self.failures[rank] = event
        elif isinstance(event, Ended):
            self._ends[rank] = event
        elif isinstance(event, Memory):
            self._memory[rank] = event
        elif isinstance(event, Finished):
            self.finished.add(rank)
        elif isinstance(event, Started):
            self.has_started = True

    def _note_crash(self, rank: int, event: Output) -> None:
        if rank in self._crashes or explanations.CRASH in event.text:
            self._crashes[rank] = (self._crashes.get(rank, "") + event.text + "\n")[-_MOST_CRASH_CHARACTERS:]

    @property
    def shortage(self) -> MemoryShortage | None:
        """Of host memory, if there was one when a rank ended."""
        return next((end.shortage for end in self._ends.values() if end.shortage is not None), None)

    def is_dead(self, rank: int) -> bool:
        """Whether a rank is gone without a result, and none has been started in its place."""
        return rank in self._ends and rank not in self.finished

    @property
    def in_a_line(self) -> str:
        """Which rank failed first, and of what; empty if none has."""
        rank = self.first_failed
        if rank is None:
            return ""
        failed = self.failures.get(rank)
        if failed is None:
            return f"rank {self._number(rank)} {_how_it_died(self._ends[rank])}"
        return f"rank {self._number(rank)}: {raised_in_words(failed)}" + (f" at {failed.line}" if failed.line else "")

    def start_over(self) -> None:
        """All ranks are started again: what they have come to is over."""
        self.finished.clear()
        self.failures.clear()
        self._ends.clear()
        self._memory.clear()
        self._crashes.clear()
        for lines in self._last_lines:
            lines.clear()

    def revive(self, rank: int) -> None:
        """A rank is started again: how it ended before is over."""
        self.failures.pop(rank, None)
        self._ends.pop(rank, None)

    def death(self, rank: int, shipped: Sequence[Any]) -> RankFailedError | None:
        """How a rank has died; ``None`` if it hasn't."""
        if not self.is_dead(rank):
            return None
        error = self._raised(rank, shipped) if rank in self.failures else self._died(rank)
        error.last_output = tuple(self._last_lines[rank])
        return error

    def first_failure(self, shipped: Sequence[Any]) -> RankFailedError | None:
        """The error of the rank that failed first.

        Args:
            shipped: What was sent to the ranks by value, for the exception that comes back.
        """
        rank = self.first_failed
        if rank is None:
            return None
        error = self._raised(rank, shipped) if rank in self.failures else self._died(rank)
        error.last_output = tuple(self._last_lines[rank])
        error.others = self._others(rank)
        return error

    def _number(self, rank: int) -> int:
        return self.first_rank + rank

    @property
    def others(self) -> tuple[RankEnd, ...]:
        """How the ranks here have ended, where the one that failed first is elsewhere."""
        return self._others(-1)

    @property
    def first_failed(self) -> int | None:
        """The rank that failed first. One that only lost its peer comes after every other."""
        reasons = [(failed.lost_peer, failed.time_s, rank) for rank, failed in self.failures.items()]
        reasons += [
            (False, end.time_s, rank)
            for rank, end in self._ends.items()
            if not end.stopped and rank not in self.finished and rank not in self.failures
        ]
        return min(reasons)[2] if reasons else None

    def _raised(self, rank: int, shipped: Sequence[Any]) -> RankFailedError:
        failed = self.failures[rank]
        where = f" at {failed.line}" if failed.line else ""
        why, fix = explanations.of_exception(failed, self._ends.get(rank), self._memory, self._left_out)
        error = RankFailedError(
            f"rank {self._number(rank)} of {self.world_size} failed{where}: {raised_in_words(failed)}",
            rank=self._number(rank),
            world_size=self.world_size,
            why=why,
            fix=fix,
            remote_traceback=_shown(failed.traceback),
            exit_code=1,
        )
        error.__cause__ = cause_of(failed, shipped)
        return error

    def _died(self, rank: int) -> RankFailedError:
        end = self._ends[rank]
        of_what, why, fix = explanations.of_death(end, start_method=self._start_method, ranks=self.world_size)
        return RankFailedError(
            f"rank {self._number(rank)} of {self.world_size} {_how_it_died(end)}{of_what}.",
            rank=self._number(rank),
            world_size=self.world_size,
            why=why,
            fix=fix,
            remote_traceback=explanations.of_crash(self._crashes.get(rank, "")),
            exit_code=end.exit_code,
            signal=end.signal,
        )

    def _others(self, reported: int) -> tuple[RankEnd, ...]:
        raised = {rank: f"{failed.kind}: {first_line(failed.message)}" for rank, failed in self.failures.items()}
        return tuple(
            # One that failed by itself may have been told to end all the same, in the moment before it did.
            RankEnd(
                self._number(rank), end.exit_code, end.signal, end.stopped and rank not in raised, raised.get(rank, "")
            )
            for rank, end in sorted(self._ends.items())
            if rank != reported
        )


def _how_it_died(end: Ended) -> str:
    if end.signal is not None:
        return f"was killed by {signal_name(end.signal)}"
    return f"exited with status {end.exit_code} before its function returned"


def _shown(traceback: str) -> str:
    """A rank's traceback as a notebook can hold it: what was raised, and where, is at its end."""
    lines = list(plain_lines(traceback.rstrip("\n")))
    left_out = len(lines) - _MOST_TRACEBACK_LINES
    if left_out <= 0:
        return "\n".join(lines)
    first = lines[:_FIRST_TRACEBACK_LINES]
    return "\n".join([*first, f"  [{left_out:,} lines left out]", *lines[left_out + len(first) :]])


def raised_in_words(failed: Failed) -> str:
    """What a rank has raised, in a line: ``ValueError: no images in data/``."""
    return f"{failed.kind}: {first_line(failed.message)}" if failed.message else failed.kind


def cause_of(failed: Failed, shipped: serialization.Origins) -> BaseException:
    """The rank's exception; where it can't be pickled, or not be made again, one of its name and text."""
    if failed.exception:
        with contextlib.suppress(Exception):
            cause = serialization.loads(failed.exception, origins=shipped)
            if isinstance(cause, BaseException):
                return cause
    stand_in: type[Exception] = type(failed.kind, (Exception,), {})
    return stand_in(failed.message)

"""Where a rank stands, asked from outside: also of one that hangs in a collective, or never looks up from its loop.

A rank arms itself when it starts; the agent sends it a signal, and Python's fault handler, which needs neither the
interpreter's lock nor its consent, writes the stacks of all threads to a file that the agent reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence

from notebook_accel.launching import messages
from notebook_accel.launching.processes import state
from notebook_accel.launching.stack_dumps import SIGNAL
from notebook_accel.launching.supervision.runs import Rank

__all__ = ["Inspection"]

_DEADLINE_S = 3.0
_STOPPED = ("T", "t")  # by a signal, by a debugger


@dataclasses.dataclass
class _Question:
    rank: Rank
    answer: messages.RankDump | None = None
    size_bytes: int = 0  # of what was written when it was last looked at


class Inspection:
    """One round of asking the ranks of a run. Nothing in it waits.

    Args:
        ranks: The ranks.
        now_s: The time, in seconds of ``time.monotonic()``.
    """

    def __init__(self, ranks: Sequence[Rank], now_s: float) -> None:
        self._deadline_s = now_s + _DEADLINE_S
        self._questions = [_Question(rank, _ask(rank)) for rank in ranks]

    def look(self, now_s: float) -> list[messages.RankDump] | None:
        """What each rank says, as soon as all have answered or have had the time to; ``None`` before."""
        for question in self._questions:
            if question.answer is None:
                question.answer = _answer(question, is_late=now_s > self._deadline_s)
        answers = [question.answer for question in self._questions if question.answer is not None]
        return answers if len(answers) == len(self._questions) else None


def _ask(rank: Rank) -> messages.RankDump | None:
    """Sends the signal; an answer at once from a rank that can't have one."""
    if rank.status is not None:
        return _dump(rank, "ended")
    if rank.pid is None or not _is_armed(rank.pid):
        return _dump(rank, "unarmed")
    if state(rank.pid) in _STOPPED:
        return _dump(rank, "stopped")
    os.ftruncate(rank.dump, 0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(rank.pid, SIGNAL)
    return None


def _answer(question: _Question, *, is_late: bool) -> messages.RankDump | None:
    rank = question.rank
    if rank.status is not None:
        return _dump(rank, "ended")
    before, question.size_bytes = question.size_bytes, os.fstat(rank.dump).st_size
    is_whole = question.size_bytes > 0 and question.size_bytes == before  # nothing came since the last look
    if is_whole or is_late:
        text = os.pread(rank.dump, question.size_bytes, 0).decode(errors="replace")
        if text:
            return _dump(rank, "said", text)
        is_stopped = rank.pid is not None and state(rank.pid) in _STOPPED
        return _dump(rank, "stopped" if is_stopped else "mute")
    return None


def _dump(rank: Rank, condition: messages.Condition, text: str = "") -> messages.RankDump:
    return messages.RankDump(rank=rank.number, pid=rank.pid, condition=condition, text=text)


def _is_armed(pid: int) -> bool:
    """Whether the process catches the signal. One that doesn't yet, or no longer, would be killed by it."""
    with contextlib.suppress(OSError, StopIteration), open(f"/proc/{pid}/status", "rb") as file:
        caught = next(line for line in file if line.startswith(b"SigCgt:"))
        return bool(int(caught.split()[1], 16) & 1 << (SIGNAL - 1))
    return False

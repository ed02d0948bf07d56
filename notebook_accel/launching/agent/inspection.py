"""Where a rank stands, asked from outside: also of one that hangs in a collective, or never looks up from its loop.

A rank arms itself when it starts; the agent sends it a signal, and Python's fault handler, which needs neither the
interpreter's lock nor its consent, writes the stacks of all threads to a file that the agent reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence

from notebook_accel.launching.agent.runs import Rank
from notebook_accel.launching.processes import state
from notebook_accel.launching.stack_dumps import SIGNAL
from notebook_accel.protocol import agent_messages as messages

__all__ = ["Inspection"]

_DEADLINE_S = 3.0
_STOPPED = ("T", "t")  # by a signal, by a debugger


@dataclasses.dataclass
class _Question:
    rank: Rank
    answer: messages.RankDump | None = None
    deaf: frozenset[int] = frozenset()  # the threads that had the signal blocked before it was sent


class Inspection:
    """One round of asking the ranks of a run. Nothing in it waits.

    Args:
        ranks: The ranks.
        now_s: The time, in seconds of ``time.monotonic()``.
    """

    def __init__(self, ranks: Sequence[Rank], now_s: float) -> None:
        self._deadline_s = now_s + _DEADLINE_S
        self._questions = [_ask(rank) for rank in ranks]

    def look(self, now_s: float) -> list[messages.RankDump] | None:
        """What each rank says, as soon as all have answered or have had the time to; ``None`` before."""
        for question in self._questions:
            if question.answer is None:
                try:
                    question.answer = _answer(question, is_late=now_s > self._deadline_s)
                except OSError:
                    question.answer = _dump(question.rank, "mute")
        answers = [question.answer for question in self._questions if question.answer is not None]
        return answers if len(answers) == len(self._questions) else None


def _ask(rank: Rank) -> _Question:
    """Sends the signal; a rank that can't answer it has its answer at once."""
    if rank.status is not None:
        return _Question(rank, _dump(rank, "ended"))
    if rank.pid is None or not _is_armed(rank.pid):
        return _Question(rank, _dump(rank, "unarmed"))
    if state(rank.pid) in _STOPPED:
        return _Question(rank, _dump(rank, "stopped"))
    question = _Question(rank, deaf=_deaf(rank.pid))
    with contextlib.suppress(OSError):  # then it has ended, or can't be asked, and doesn't answer in time
        os.ftruncate(rank.dump, 0)
        os.kill(rank.pid, SIGNAL)
    return question


def _answer(question: _Question, *, is_late: bool) -> messages.RankDump | None:
    rank = question.rank
    if rank.status is not None:
        return _dump(rank, "ended")
    assert rank.pid is not None
    # A thread has the signal blocked as long as it handles it: it has begun to write, and is done when it hasn't.
    is_whole = os.fstat(rank.dump).st_size > 0 and _deaf(rank.pid) <= question.deaf
    if is_whole or is_late:
        text = os.pread(rank.dump, os.fstat(rank.dump).st_size, 0).decode(errors="replace")
        if text:
            return _dump(rank, "said", text)
        return _dump(rank, "stopped" if state(rank.pid) in _STOPPED else "mute")
    return None


def _dump(rank: Rank, condition: messages.Condition, text: str = "") -> messages.RankDump:
    return messages.RankDump(rank=rank.number, pid=rank.pid, condition=condition, text=text)


def _is_armed(pid: int) -> bool:
    """Return whether the process catches the signal. One that doesn't yet, or no longer, would be killed by it."""
    return _has_signal(f"/proc/{pid}/status", b"SigCgt:")


def _deaf(pid: int) -> frozenset[int]:
    """The threads of a process that have the signal blocked."""
    with contextlib.suppress(OSError):  # it has just ended
        threads = os.listdir(f"/proc/{pid}/task")
        return frozenset(int(name) for name in threads if _has_signal(f"/proc/{pid}/task/{name}/status", b"SigBlk:"))
    return frozenset()


def _has_signal(status: str, field: bytes) -> bool:
    """Return whether a set of signals in what Linux says of a process or a thread has this one."""
    with contextlib.suppress(OSError, StopIteration), open(status, "rb") as file:
        signals = next(line for line in file if line.startswith(field))
        return bool(int(signals.split()[1], 16) & 1 << (SIGNAL - 1))
    return False

"""Asks ranks for their stacks from outside, so that a rank that hangs in a collective answers too.

The agent sends a rank a signal. Python's fault handler, which doesn't need the interpreter's lock, then writes the
stacks of all threads to a file that the agent reads. A rank installs that handler when it starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence

from notebook_accel.launching.agent.runs import Rank
from notebook_accel.launching.processes import STACKS_SIGNAL, state
from notebook_accel.protocol import agent_messages as messages

_DEADLINE_S = 3.0
_STOPPED = ("T", "t")  # by a signal, by a debugger


@dataclasses.dataclass
class _Question:
    rank: Rank
    answer: messages.RankDump | None = None
    blocked: frozenset[int] = frozenset()  # the threads that had the signal blocked before it was sent


class Inspection:
    """One question to all ranks of a run. It never waits.

    Args:
        ranks: The ranks.
        now_s: The time of ``time.monotonic()`` in seconds.
    """

    def __init__(self, ranks: Sequence[Rank], now_s: float) -> None:
        self._deadline_s = now_s + _DEADLINE_S
        self._questions = [_ask(rank) for rank in ranks]

    def look(self, now_s: float) -> list[messages.RankDump] | None:
        """Return each rank's answer, once all have answered or had the time to; ``None`` before."""
        for question in self._questions:
            if question.answer is None:
                try:
                    question.answer = _answer(question, is_late=now_s > self._deadline_s)
                except OSError:
                    question.answer = _dump(question.rank, "mute")
        answers = [question.answer for question in self._questions if question.answer is not None]
        return answers if len(answers) == len(self._questions) else None


def _ask(rank: Rank) -> _Question:
    """Send the signal. A rank that can't answer it gets its answer at once."""
    if rank.status is not None:
        return _Question(rank, _dump(rank, "ended"))
    if rank.pid is None or not _is_armed(rank.pid):
        return _Question(rank, _dump(rank, "unarmed"))
    if state(rank.pid) in _STOPPED:
        return _Question(rank, _dump(rank, "stopped"))
    question = _Question(rank, blocked=_threads_that_block(rank.pid))
    with contextlib.suppress(OSError):  # it has ended or can't be asked: it won't answer in time
        os.ftruncate(rank.dump, 0)
        os.kill(rank.pid, STACKS_SIGNAL)
    return question


def _answer(question: _Question, *, is_late: bool) -> messages.RankDump | None:
    rank = question.rank
    if rank.status is not None:
        return _dump(rank, "ended")
    assert rank.pid is not None
    # A thread blocks the signal while it handles it, so the dump is complete when no further thread blocks it.
    is_whole = os.fstat(rank.dump).st_size > 0 and _threads_that_block(rank.pid) <= question.blocked
    if is_whole or is_late:
        text = os.pread(rank.dump, os.fstat(rank.dump).st_size, 0).decode(errors="replace")
        if text:
            return _dump(rank, "said", text)
        return _dump(rank, "stopped" if state(rank.pid) in _STOPPED else "mute")
    return None


def _dump(rank: Rank, condition: messages.Condition, text: str = "") -> messages.RankDump:
    return messages.RankDump(rank=rank.number, pid=rank.pid, condition=condition, text=text)


def _is_armed(pid: int) -> bool:
    """Return whether the process catches the signal, which would otherwise kill it."""
    return _has_signal(f"/proc/{pid}/status", b"SigCgt:")


def _threads_that_block(pid: int) -> frozenset[int]:
    """Return the threads of a process that have the signal blocked."""
    with contextlib.suppress(OSError):  # it has just ended
        threads = os.listdir(f"/proc/{pid}/task")
        return frozenset(int(name) for name in threads if _has_signal(f"/proc/{pid}/task/{name}/status", b"SigBlk:"))
    return frozenset()


def _has_signal(status: str, field: bytes) -> bool:
    """Return whether a set of signals in Linux's status of a process or thread contains the signal."""
    with contextlib.suppress(OSError, StopIteration), open(status, "rb") as file:
        signals = next(line for line in file if line.startswith(field))
        return bool(int(signals.split()[1], 16) & 1 << (STACKS_SIGNAL - 1))
    return False

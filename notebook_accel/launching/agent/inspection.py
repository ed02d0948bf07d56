"""The agent's requests for ranks' stacks, by signals, which even a rank that hangs in a collective answers.

The agent sends a rank a signal, and a thread of the rank writes the stacks of all threads to a file that the agent
reads. If that thread can't run, because other code holds the interpreter's lock, a second signal makes Python's fault
handler write the stacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence

from notebook_accel.launching.agent.runs import Rank
from notebook_accel.launching.processes import STACKS_MARK, STACKS_REQUEST, STACKS_SIGNAL, state
from notebook_accel.protocol import agent_messages as messages

_DEADLINE_S = 3.0
_PATIENCE_S = 1.0  # for the rank's own thread to answer
_STOPPED = ("T", "t")  # by a signal, by a debugger


@dataclasses.dataclass
class _Question:
    rank: Rank
    answer: messages.RankDump | None = None
    is_forced: bool = False  # True once STACKS_SIGNAL was sent, which calls the fault handler
    blocked: frozenset[int] = frozenset()  # the threads that blocked STACKS_SIGNAL before it was sent


class Inspection:
    """One request for the stacks of all ranks of a run. Never waits."""

    def __init__(self, ranks: Sequence[Rank], now_s: float) -> None:
        self._began_s = now_s
        self._questions = [_ask(rank) for rank in ranks]

    def look(self, now_s: float) -> list[messages.RankDump] | None:
        """Return each rank's answer once all have answered or their time is over; ``None`` until then."""
        for question in self._questions:
            if question.answer is None:
                try:
                    question.answer = _answer(question, now_s - self._began_s)
                except OSError:
                    question.answer = _dump(question.rank, "unresponsive")
        answers = [question.answer for question in self._questions if question.answer is not None]
        return answers if len(answers) == len(self._questions) else None


def _ask(rank: Rank) -> _Question:
    """Send a rank the signal. For a rank that can't react, return a question that is already answered."""
    if rank.status is not None:
        return _Question(rank, _dump(rank, "ended"))
    if rank.pid is None or not _is_armed(rank.pid):
        return _Question(rank, _dump(rank, "not_ready"))
    if state(rank.pid) in _STOPPED:
        return _Question(rank, _dump(rank, "stopped"))
    question = _Question(rank)
    with contextlib.suppress(OSError):  # the rank has ended or can't be signalled, so its time will run out
        os.ftruncate(rank.dump, 0)
        if _has_signal(f"/proc/{rank.pid}/status", b"SigIgn:", STACKS_REQUEST):
            os.kill(rank.pid, STACKS_REQUEST)
        else:
            _force(question, rank.pid)
    return question


def _force(question: _Question, pid: int) -> None:
    """Send the signal that makes the fault handler write the stacks."""
    question.is_forced, question.blocked = True, _threads_that_block(pid)
    os.kill(pid, STACKS_SIGNAL)


def _answer(question: _Question, took_s: float) -> messages.RankDump | None:
    rank = question.rank
    if rank.status is not None:
        return _dump(rank, "ended")
    assert rank.pid is not None
    # A thread blocks the signal while the fault handler runs in it. So a dump that has begun is complete once no
    # further thread blocks the signal. The order matters: the handler may start between any two of these lines.
    has_begun = os.fstat(rank.dump).st_size > 0
    is_whole = has_begun and question.is_forced and _threads_that_block(rank.pid) <= question.blocked
    text = os.pread(rank.dump, os.fstat(rank.dump).st_size, 0).decode(errors="replace")
    if text.endswith(STACKS_MARK) and text.count(STACKS_MARK) > 1:
        return _dump(rank, "answered", text.split(STACKS_MARK)[-2])
    if (is_whole or took_s > _DEADLINE_S) and text:
        return _dump(rank, "answered", text)
    if took_s > _DEADLINE_S:
        return _dump(rank, "stopped" if state(rank.pid) in _STOPPED else "unresponsive")
    if took_s > _PATIENCE_S and not question.is_forced:
        _force(question, rank.pid)
    return None


def _dump(rank: Rank, condition: messages.Condition, text: str = "") -> messages.RankDump:
    return messages.RankDump(rank=rank.number, pid=rank.pid, condition=condition, text=text)


def _is_armed(pid: int) -> bool:
    """Return whether the process handles STACKS_SIGNAL, which would otherwise kill it."""
    return _has_signal(f"/proc/{pid}/status", b"SigCgt:", STACKS_SIGNAL)


def _threads_that_block(pid: int) -> frozenset[int]:
    """Return the threads of a process that block STACKS_SIGNAL."""
    with contextlib.suppress(OSError):  # the process has just ended
        threads = os.listdir(f"/proc/{pid}/task")
        status = f"/proc/{pid}/task/{{}}/status"
        return frozenset(int(name) for name in threads if _has_signal(status.format(name), b"SigBlk:", STACKS_SIGNAL))
    return frozenset()


def _has_signal(status: str, field: bytes, number: int) -> bool:
    """Return whether a signal is in this set of signals in the ``/proc`` status file of a process or thread."""
    with contextlib.suppress(OSError, StopIteration), open(status, "rb") as file:
        signals = next(line for line in file if line.startswith(field))
        return bool(int(signals.split()[1], 16) & 1 << (number - 1))
    return False

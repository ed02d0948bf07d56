"""The ranks' stacks, parsed from the text of Python's fault handler, and the search for ranks that others wait for.

Printed stacks begin with the user's own lines, with the notebook's labels of its cells; calls into libraries follow.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from notebook_accel import code_places
from notebook_accel.formatting import ranks_in_words
from notebook_accel.interrupts import Latch
from notebook_accel.launching.processes import COLLECTIVE_MARK
from notebook_accel.launching.spec import Source
from notebook_accel.launching.state.run import RunState
from notebook_accel.protocol.agent_messages import Condition, RankDump
from notebook_accel.protocol.events import Silent

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .*:$")
_MOST_LIBRARY_FRAMES = 8
_REPLACEMENTS = os.path.join(code_places.OURS, "launching", "ranks", "")  # has functions in place of torch's
_CONDITIONS: dict[Condition, str] = {
    "stopped": "is stopped (SIGSTOP or a debugger) and shows no stack until it continues (kill -CONT {pid})",
    "unresponsive": "has not answered in time",
    "not_ready": "can't be asked: it is starting, or handles the signal itself",
    "ended": "has ended",
}


@dataclasses.dataclass(frozen=True)
class Frame:
    """One call that has not returned.

    Attributes:
        file: The source file: a path, or a cell's label such as ``In[7]``.
        line: The line in the file.
        function: The function's name.
        source: The line's text, empty if it isn't known.
        is_user: Whether it is the user's code and not that of a library, Python or this package.
    """

    file: str
    line: int
    function: str
    source: str = ""
    is_user: bool = False

    def __str__(self) -> str:
        return f"{self.file}, line {self.line} in {self.function}"


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective that a rank has entered, and may have left again. Each process group numbers its own, from 1."""

    number: int
    name: str
    group: str

    def __str__(self) -> str:
        return f"{self.name}, number {self.number}"


@dataclasses.dataclass(frozen=True)
class RankStack:
    """The stack of one rank.

    Attributes:
        rank: The rank's number among all.
        pid: The id of its process, ``None`` if it has none.
        condition: ``answered`` if there is a stack; else the reason why there is none.
        frames: The calls of its main thread, the innermost first.
        threads: The calls of its other threads, without those of this package.
        collective: The collective that it has entered last, ``None`` if none is known.
    """

    rank: int
    pid: int | None
    condition: Condition
    frames: tuple[Frame, ...] = ()
    threads: tuple[tuple[Frame, ...], ...] = ()
    collective: Collective | None = None

    @property
    def user_line(self) -> str:
        """The innermost line of the user's code, such as ``In[7], line 12 in train``; empty if there is none."""
        return next((str(frame) for frame in self.frames if frame.is_user), "")

    @property
    def waits_in(self) -> str:
        """The call in which the rank waits for others, as ``code_places.awaited`` returns it."""
        below = itertools.takewhile(lambda frame: not frame.is_user, self.frames)
        return code_places.awaited((frame.file, frame.function) for frame in below)

    def __str__(self) -> str:
        who = f"rank {self.rank}" + ("" if self.pid is None else f" (pid {self.pid})")
        if self.condition != "answered":
            return f"{who} {_CONDITIONS[self.condition].format(pid=self.pid)}"
        where = f" is in {self.waits_in}" if self.waits_in else ""
        mine = [f"  {frame}" + (f":  {frame.source}" if frame.source else "") for frame in self.frames if frame.is_user]
        if not mine and self.frames and self.frames[0].file.startswith(code_places.OURS):
            return f"{who} runs none of your code just now"
        below = self.frames[: next((n for n, frame in enumerate(self.frames) if frame.is_user), len(self.frames))]
        lines = [f"{who}{where}, innermost call first:", *mine]
        if below:
            lines.append("  in libraries below:" if mine else "  in libraries:")
            lines += [f"    {_short(frame)}" for frame in below[:_MOST_LIBRARY_FRAMES]]
            more = len(below) - _MOST_LIBRARY_FRAMES
            lines += [f"    … and {more} more"] if more > 0 else []
        if self.collective is not None:
            lines.append(f"  its last collective: {self.collective}")
        for thread in self.threads:
            first = next((frame for frame in thread if frame.is_user), None)
            if first is not None:
                lines.append(f"  another thread: {first}")
        return "\n".join(lines)


class Stacks(tuple[RankStack, ...]):
    """The stacks of all ranks, shown as text; ``stacks[0]`` is rank 0's."""

    __slots__ = ()

    @property
    def disagreement(self) -> str:
        """A sentence about ranks at different collectives of one process group; empty if all are at the same."""
        entered = {stack.rank: stack.collective for stack in self if stack.collective is not None}
        if len(set(entered.values())) < 2 or len({collective.group for collective in entered.values()}) > 1:
            return ""
        by_collective: dict[str, list[int]] = {}
        for rank, collective in entered.items():
            by_collective.setdefault(str(collective), []).append(rank)
        where = "; ".join(f"{ranks_in_words(ranks)}: {name}" for name, ranks in by_collective.items())
        return f"The ranks are not at the same collective. The last one of {where}."

    @property
    def deadlock(self) -> tuple[tuple[str, str, Collective | None], ...]:
        """Where the ranks wait if each is in a collective, at different places and not all in the same one; else empty.

        Ranks that are found there twice wait for each other in vain.
        """
        lines, collectives = {stack.user_line for stack in self}, {stack.collective for stack in self}
        are_in_one = len(collectives) == 1 and all(
            stack.collective is not None and stack.waits_in.startswith(stack.collective.name) for stack in self
        )
        if len(lines) < 2 or are_in_one or not all(stack.waits_in for stack in self):
            return ()
        return tuple((stack.user_line, stack.waits_in, stack.collective) for stack in self)

    def __repr__(self) -> str:
        return "\n".join([*map(str, self), *filter(None, [self.disagreement])])


class StackRequest:
    """Asks the ranks of a run for their stacks, in any thread, and waits for the answer from the engine's thread.

    ``sources`` are those of the notebook's functions, by the file name in their code.
    """

    def __init__(self, world_size: int, sources: Mapping[str, Source]) -> None:
        self._world_size = world_size
        self._sources = sources
        self._asked = Latch()  # set at the next answer, or at the end
        self._answer: Stacks | None = None
        self.is_over = False  # whether the run has ended, so that no answer will come

    def ask(self, send: Callable[[], None], timeout_s: float) -> Stacks | None:
        """Call ``send`` and wait for the answer; return ``None`` if it isn't there in time or the run ends."""
        asked = self._asked
        if self.is_over:
            return None
        send()
        is_answered = asked.wait(timeout_s)
        return self._answer if is_answered and not self.is_over else None

    def answer(self, dumps: Sequence[RankDump], first_rank: int = 0) -> Stacks:
        """Return the stacks of this node's ranks from their answers, and wake the callers of ``ask``.

        ``first_rank`` is the number of the node's first rank among all.
        """
        stacks = {rank: RankStack(rank, None, "not_ready") for rank in range(self._world_size)}
        stacks |= {dump.rank: read_dump(dump, self._sources) for dump in dumps}
        self._answer = Stacks(dataclasses.replace(stack, rank=first_rank + rank) for rank, stack in stacks.items())
        asked, self._asked = self._asked, Latch()
        asked.set()
        return self._answer

    def end(self) -> None:
        """Release all waiting callers, since the run has ended."""
        self.is_over = True
        self._asked.set()


def read_dump(dump: RankDump, sources: Mapping[str, Source]) -> RankStack:
    """Return the stack that a rank's fault handler has written. ``sources`` are as for ``StackRequest``."""
    threads: list[list[Frame]] = []
    collective = None
    for line in dump.text.splitlines():
        if line.startswith(COLLECTIVE_MARK):
            number, name, group = line.removeprefix(COLLECTIVE_MARK).split(" ", 2)
            collective = Collective(int(number), name, group)
        frame = _FRAME.match(line)
        if frame and threads:
            threads[-1].append(_frame(frame[1], int(frame[2]), frame[3], sources))
        elif _THREAD.match(line):
            threads.append([])
    main = threads.pop() if threads else []  # the oldest thread comes last
    others = tuple(tuple(thread) for thread in threads if thread and not _is_ours(thread))
    return RankStack(dump.rank, dump.pid, dump.condition, tuple(_without_ours(main)), others, collective)


def _frame(file: str, line: int, function: str, sources: Mapping[str, Source]) -> Frame:
    source = sources.get(file)
    if source is not None:
        lines = source.text.splitlines()
        text = lines[line - 1].strip() if line <= len(lines) else ""
        return Frame(source.label, line, function, text, is_user=True)
    is_user = code_places.is_the_users(file)
    return Frame(file, line, function, linecache.getline(file, line).strip() if is_user else "", is_user)


def _without_ours(frames: Sequence[Frame]) -> list[Frame]:
    """Return the frames without the outermost ones, which called the user's code, and those of replaced functions."""
    kept = [frame for frame in frames if not frame.file.startswith(_REPLACEMENTS)]
    while kept and not kept[-1].is_user:
        kept.pop()
    return kept or list(frames)


def _is_ours(thread: Sequence[Frame]) -> bool:
    has_ours = any(frame.file.startswith(code_places.OURS) for frame in thread)
    return has_ours and not any(frame.is_user for frame in thread)


def _short(frame: Frame) -> str:
    for folder in sorted(code_places.LIBRARIES, key=len, reverse=True):
        if frame.file.startswith(folder):
            return f"{frame.file.removeprefix(folder)}, line {frame.line} in {frame.function}"
    return str(frame)


_SHORTEST_S = 10.0
_LONGEST_PERIOD_S = 60.0
_PERIOD_GROWTH = 1.5
_WITHOUT_STACK = {"stopped": "the process is stopped", "unresponsive": "it doesn't answer"}


class Silence:
    """Decides when to ask the ranks for their stacks, and finds in the answers which rank waits for which.

    A rank that does no step for a while may evaluate, save or compile. Users want to know when and where it makes
    other ranks wait. So no rank is marked as long as all of them are at the same place; before the first step, only if
    all of them hang in different collectives.

    The caller passes the time, in seconds of ``time.monotonic()``.

    Args:
        shortest_s: Shortest time without a step that counts as silence.
    """

    def __init__(self, shortest_s: float = _SHORTEST_S) -> None:
        self._shortest_s = shortest_s
        self._period_s = shortest_s
        self._ask_s = 0.0
        self._deadlock: tuple[Any, ...] = ()  # by the last answer

    def silent(self, state: RunState, now_s: float) -> list[int]:
        """Return the ranks that have done no step for long; none before all of them have started."""
        begun_s = state.started_s if state.first_step_s is None else state.first_step_s
        if begun_s is None or len(state.ranks) < 2:
            return []
        since_s = max(begun_s, state.working_since_s)
        return [
            rank.rank
            for rank in state.ranks
            if rank.rank in state.working
            and not rank.has_ended
            and rank.last_steps.is_stalled(now_s, since_s, self._shortest_s)
        ]

    def is_due(self, state: RunState, now_s: float) -> bool:
        """Return whether to ask now: at the beginning of a silence, and then less and less often."""
        if not self.silent(state, now_s):
            self._period_s, self._ask_s = self._shortest_s, 0.0
            return False
        if now_s < self._ask_s:
            return False
        self._ask_s = now_s + self._period_s
        self._period_s = min(_PERIOD_GROWTH * self._period_s, max(_LONGEST_PERIOD_S, self._shortest_s))
        return True

    def judge(self, state: RunState, stacks: Stacks, now_s: float) -> list[tuple[int, Silent]]:
        """Return an event for each rank that waits, or that others wait for, as far as the stacks show it."""
        at = {rank: stacks[rank] for rank in self.silent(state, now_s) if rank < len(stacks)}
        running = [rank for rank in state.working if not state.ranks[rank].has_ended]
        are_all_silent = len(at) == len(running)
        does_wait_for_idle = len(state.working) < len(state.ranks) and any(stack.waits_in for stack in at.values())
        are_together = (
            are_all_silent
            and len(running) == len(state.working)
            and not does_wait_for_idle
            and len({stack.user_line for stack in at.values()}) == 1
            and len({state.ranks[rank].steps for rank in at}) == 1
        )
        # A rank that waits for its device, which in turn waits for other ranks, shows no collective in its stack.
        does_somebody_wait = are_all_silent or any(stack.waits_in for stack in at.values())
        # Before any step, a rank may take its time, as for a download. Those found twice in the same collectives hang.
        before, self._deadlock = self._deadlock, stacks.deadlock
        do_all_hang = are_all_silent and before == self._deadlock != ()
        if are_together or not does_somebody_wait or not (do_all_hang or state.first_step_s is not None):
            return []
        return [(rank, _silent(state, rank, stack, now_s)) for rank, stack in at.items()]


def _silent(state: RunState, rank: int, stack: RankStack, now_s: float) -> Silent:
    since_s = state.ranks[rank].last_steps.stepped_s or state.first_step_s or state.started_s or now_s
    since_s = max(since_s, state.working_since_s)
    at = stack.user_line or _WITHOUT_STACK.get(stack.condition, "")
    return Silent(time_s=now_s, since_s=since_s, at=at, waits_in=stack.waits_in)

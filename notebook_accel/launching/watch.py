"""What is known about a run's ranks while it goes on: what they have said, where they stand, who waits for whom."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

from notebook_accel.events import Event, Silent
from notebook_accel.latch import Latch
from notebook_accel.launching.messages import RankDump
from notebook_accel.launching.rank_info import RankInfo
from notebook_accel.launching.silence import SilenceWatch
from notebook_accel.launching.spec import Source
from notebook_accel.launching.stacks import RankStack, Stacks, read_dump

__all__ = ["Watch"]


class Watch:
    """Kept by a job. Events and answers come in the engine's thread, questions in any other.

    Args:
        world_size: Number of ranks.
        sources: Sources of the notebook's functions, by the file name in their code.
    """

    def __init__(self, world_size: int, sources: Mapping[str, Source]) -> None:
        self._infos = [RankInfo(rank) for rank in range(world_size)]
        self._sources = sources
        self._silence = SilenceWatch(world_size)
        self._asked = Latch()  # until the next answer, or the end
        self._stacks: Stacks | None = None  # the latest answer
        self._is_over = False
        self._expected_s = 0.0  # since when it is known which ranks have something to do

    @property
    def ranks(self) -> list[RankInfo]:
        """What is known about each rank now."""
        return [copy.copy(info) for info in self._infos]

    def start_over(self) -> None:
        """All ranks are started again."""
        self._infos = [RankInfo(info.rank) for info in self._infos]
        self._silence = SilenceWatch(len(self._infos))

    def add(self, rank: int, event: Event) -> None:
        """Takes what a rank has said."""
        self._infos[rank].add(event)
        if isinstance(event, Silent) and event.time_s < self._expected_s:
            self._infos[rank].silent = None  # that was about what has ended meanwhile
        self._silence.add(rank, event)

    def is_silence_due(self, now_s: float) -> bool:
        """Whether a rank has been silent for so long that all should be asked where they stand."""
        return self._silence.is_due(now_s)

    def expect_steps(self, ranks: Sequence[int], now_s: float) -> None:
        """Which ranks have something to do from now on. The others wait for that, and are not silent."""
        self._expected_s = now_s  # before the marks are taken away: who has just been judged is marked after that
        self._silence.expect_steps(ranks, now_s)
        for info in self._infos:
            info.silent = None

    def ask(self, ask: Callable[[], None], timeout_s: float) -> Stacks | None:
        """Has the ranks asked where they stand and waits for the answer; ``None`` if none comes in time."""
        asked = self._asked
        if not self._is_over:
            ask()
        is_answered = self._is_over or asked.wait(timeout_s)
        if self._is_over:
            return Stacks([RankStack(info.rank, info.pid, "ended") for info in self._infos])
        return self._stacks if is_answered else None

    def answer(self, dumps: Sequence[RankDump], now_s: float) -> list[tuple[int, Silent]]:
        """Takes the ranks' answers; which of them wait, and for whom, if ranks have been silent for long."""
        answered = {dump.rank: read_dump(dump, self._sources) for dump in dumps}
        stacks = Stacks([answered.get(info.rank, RankStack(info.rank, None, "unarmed")) for info in self._infos])
        self._stacks = stacks
        asked, self._asked = self._asked, Latch()
        asked.set()
        return self._silence.judge(stacks, now_s)

    def end(self) -> None:
        """The run is over: nobody will answer any more."""
        self._is_over = True
        self._asked.set()

"""Which ranks keep the others waiting.

A rank that does no step for a while is not wrong: it may evaluate, save, compile. What one wants to see is that the
others stand still because of it, and where it is. So nobody is marked as long as all ranks are at the same place.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterable

from notebook_accel.events import Ended, Event, Failed, Finished, Progress, Silent
from notebook_accel.launching.stacks import RankStack, Stacks

__all__ = ["SilenceWatch"]

_SHORTEST_S = 10.0
_USUAL_STEPS = 10  # so many times a rank's usual step
_REMEMBERED_STEPS = 20
_LONGEST_PERIOD_S = 60.0
_WITHOUT_STACK = {"stopped": "the process is stopped", "mute": "it doesn't answer"}


@dataclasses.dataclass
class _Rank:
    steps: int = 0
    stepped_s: float | None = None
    has_ended: bool = False
    step_times_s: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_REMEMBERED_STEPS)
    )

    def count(self, event: Progress) -> None:
        if event.steps == self.steps and self.stepped_s is not None:
            return
        if self.stepped_s is not None and event.steps > self.steps:
            self.step_times_s.append((event.time_s - self.stepped_s) / (event.steps - self.steps))
        self.steps, self.stepped_s = event.steps, event.time_s

    def is_silent(self, now_s: float, since_s: float, shortest_s: float) -> bool:
        usual_s = sorted(self.step_times_s)[len(self.step_times_s) // 2] if self.step_times_s else 0.0
        since_s = max(since_s, self.stepped_s or 0.0)
        return not self.has_ended and now_s - since_s > max(shortest_s, _USUAL_STEPS * usual_s)


class SilenceWatch:
    """Says when to ask the ranks where they stand, and what their answers come to. It has no clock of its own.

    Events come in one thread and questions in another; both may call at any time.

    Times are seconds of ``time.monotonic()``.

    Args:
        world_size: Number of ranks.
        shortest_s: How long a rank has to be silent at least.
    """

    def __init__(self, world_size: int, shortest_s: float = _SHORTEST_S) -> None:
        self._ranks = [_Rank() for _ in range(world_size)]
        self._shortest_s = shortest_s
        self._first_step_s: float | None = None
        self._period_s = shortest_s
        self._ask_s = 0.0
        self._working = frozenset(range(world_size))  # the ranks that have something to do, and since when
        self._begun_s = 0.0
        self._lock = threading.Lock()

    def add(self, rank: int, event: Event) -> None:
        """Takes what a rank has said."""
        if isinstance(event, Progress):
            with self._lock:
                self._ranks[rank].count(event)
                if self._first_step_s is None:
                    self._first_step_s = event.time_s
        elif isinstance(event, (Failed, Finished, Ended)):
            self._ranks[rank].has_ended = True

    def expect_steps(self, ranks: Iterable[int], now_s: float) -> None:
        """Which ranks have something to do from now on. Unless this is said, all have."""
        self._working, self._begun_s = frozenset(ranks), now_s

    def silent(self, now_s: float) -> list[int]:
        """The ranks that have done no step for long. None as long as no rank has counted any."""
        if self._first_step_s is None or len(self._ranks) < 2:
            return []
        since_s = max(self._first_step_s, self._begun_s)
        with self._lock:
            return [
                rank for rank in sorted(self._working) if self._ranks[rank].is_silent(now_s, since_s, self._shortest_s)
            ]

    def is_due(self, now_s: float) -> bool:
        """Whether to ask now: when silence begins, and then more and more rarely."""
        if not self.silent(now_s):
            self._period_s, self._ask_s = self._shortest_s, 0.0
            return False
        if now_s < self._ask_s:
            return False
        self._ask_s = now_s + self._period_s
        self._period_s = min(1.5 * self._period_s, max(_LONGEST_PERIOD_S, self._shortest_s))
        return True

    def judge(self, stacks: Stacks, now_s: float) -> list[tuple[int, Silent]]:
        """Who waits, and for whom, if that can be seen."""
        at = {rank: stacks[rank] for rank in self.silent(now_s) if rank < len(stacks)}
        running = [rank for rank in self._working if not self._ranks[rank].has_ended]
        are_all_silent = len(at) == len(running)
        does_wait_for_idle = len(self._working) < len(self._ranks) and any(stack.waits_in for stack in at.values())
        are_together = (
            are_all_silent
            and len(running) == len(self._working)
            and not does_wait_for_idle
            and len({stack.user_line for stack in at.values()}) == 1
            and len({self._ranks[rank].steps for rank in at}) == 1
        )
        # Where a rank waits for a device, which in turn waits for other ranks, no collective can be seen in its stack.
        does_somebody_wait = are_all_silent or any(stack.waits_in for stack in at.values())
        if are_together or not does_somebody_wait:
            return []
        return [(rank, self._silent(rank, stack, now_s)) for rank, stack in at.items()]

    def _silent(self, rank: int, stack: RankStack, now_s: float) -> Silent:
        since_s = max(self._ranks[rank].stepped_s or self._first_step_s or now_s, self._begun_s)
        at = stack.user_line or _WITHOUT_STACK.get(stack.condition, "")
        return Silent(time_s=now_s, since_s=since_s, at=at, waits_in=stack.waits_in)

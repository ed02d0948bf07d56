"""Detection of ranks that keep the others waiting.

A rank that does no step for a while may evaluate, save or compile. Users want to know when other ranks stand still
because of it, and where it is. So no rank is marked as long as all of them are at the same place.
"""

from __future__ import annotations

from notebook_accel.launching.state.run import RunState
from notebook_accel.launching.state.stacks import RankStack, Stacks
from notebook_accel.protocol.events import Silent

_SHORTEST_S = 10.0
_LONGEST_PERIOD_S = 60.0
_PERIOD_GROWTH = 1.5
_WITHOUT_STACK = {"stopped": "the process is stopped", "mute": "it doesn't answer"}


class Silence:
    """Decides when to ask the ranks for their stacks, and finds in the answers which rank waits for which.

    The caller passes the time, in seconds of ``time.monotonic()``.

    Args:
        shortest_s: Shortest time without a step that counts as silence.
    """

    def __init__(self, shortest_s: float = _SHORTEST_S) -> None:
        self._shortest_s = shortest_s
        self._period_s = shortest_s
        self._ask_s = 0.0

    def silent(self, state: RunState, now_s: float) -> list[int]:
        """Return the ranks that have done no step for long; none before the first step of any rank."""
        if state.first_step_s is None or len(state.ranks) < 2:
            return []
        since_s = max(state.first_step_s, state.working_since_s)
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
        if are_together or not does_somebody_wait:
            return []
        return [(rank, _silent(state, rank, stack, now_s)) for rank, stack in at.items()]


def _silent(state: RunState, rank: int, stack: RankStack, now_s: float) -> Silent:
    since_s = max(state.ranks[rank].last_steps.stepped_s or state.first_step_s or now_s, state.working_since_s)
    at = stack.user_line or _WITHOUT_STACK.get(stack.condition, "")
    return Silent(time_s=now_s, since_s=since_s, at=at, waits_in=stack.waits_in)

"""After a cell that did not end well: whether the ranks' process group can be trusted, and if not, another one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from notebook_accel.protocol import session_messages as messages
from notebook_accel.sessions.kernel.rank_connections import RankAnswer

__all__ = ["GroupRecovery"]


class Ask(Protocol):
    """Asks ranks something that runs nothing of the user's."""

    def __call__(
        self, make: Callable[..., messages.ToRank], ranks: Sequence[int], **what: Any
    ) -> Mapping[int, RankAnswer]:
        """Their answers, of those that are still there."""


class GroupRecovery:
    """Keeps count of the groups, and makes a new one where that is needed.

    Args:
        world_size: Number of ranks.
        ask: Asks ranks.

    Attributes:
        renewals: How often a group was given up.
    """

    def __init__(self, world_size: int, ask: Ask) -> None:
        self._world_size = world_size
        self._ask = ask
        self.renewals = 0

    def after(self, alive: Sequence[int], *, is_broken: bool) -> None:
        """Looks where the ranks stand, and makes a new group if that isn't together. Says what is lost by that.

        Args:
            alive: The ranks that are there.
            is_broken: Whether it is known already that the group can't be trusted, or one that was about to be made.
        """
        if not alive:
            return
        answers = self._ask(messages.InspectGroup, alive)
        standings = [answer.reply.group_calls for answer in answers.values()]
        if is_broken or len(alive) < self._world_size or any(standing != standings[0] for standing in standings):
            # Whether this package has made it comes first, and ranks that differ in that can't make one together.
            origins = {None if standing is None else standing[0] for standing in standings}
            had_one = origins != {None}
            rejoins = had_one and len(origins) == 1 and len(alive) == self._world_size
            # Twice, since the end of the old one may have come in between.
            rejoins = rejoins and (self._renew(alive, rejoins=True) or self._renew(alive, rejoins=True))
            if not rejoins:
                self.leave(alive)
            if had_one and not rejoins:
                sys.stderr.write(
                    "[the ranks have no process group any more: make a new Accelerator() on all of them]\n"
                )

    def leave(self, alive: Sequence[int]) -> None:
        """Has these ranks leave their group."""
        # An interrupt that leaves one in there would have it wait for ranks that are in another one.
        _ = self._renew(alive, rejoins=False) or self._renew(alive, rejoins=False)

    def _renew(self, alive: Sequence[int], *, rejoins: bool) -> bool:
        """Has these ranks leave their group and, if it ``rejoins``, make another; returns whether all have."""
        self.renewals += 1
        answers = self._ask(messages.Renew, alive, renewals=self.renewals, rejoins=rejoins)
        for rank, answer in answers.items():
            if answer.reply.failed is not None:
                why = f"{answer.reply.failed.kind}: {answer.reply.failed.message}"
                sys.stderr.write(f"[rank {rank} could not go on in a new process group: {why}]\n")
        lost = list(dict.fromkeys(line for answer in answers.values() for line in answer.reply.lines))
        if lost:
            sys.stderr.write(f"[lost with the ranks' process group, which had broken: {'; '.join(lost)}]\n")
        return len(answers) == len(alive) and not any(answer.reply.failed for answer in answers.values())

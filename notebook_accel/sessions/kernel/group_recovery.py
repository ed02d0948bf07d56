"""Group recovery: after a cell that didn't end well, check the ranks' process group and replace a broken one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from notebook_accel.protocol import session_messages as messages
from notebook_accel.protocol.session_messages import Reply


class GroupRecovery:
    """Checks the ranks' process group after a failure, and replaces a broken one.

    Args:
        world_size: Number of ranks.
        ask: Sends ranks a request that runs no user code, given its type, the ranks and its fields. Returns the answers
            of the ranks that are still alive.

    Attributes:
        renewals: Number of groups given up.
    """

    def __init__(self, world_size: int, ask: Callable[..., Mapping[int, Reply]]) -> None:
        self._world_size = world_size
        self._ask = ask
        self.renewals = 0

    def after(self, alive: Sequence[int], *, is_broken: bool) -> None:
        """Make a new group if the ranks have entered different collectives. Report the losses.

        ``is_broken`` means that the group, or one about to be made, is already known to be unusable.
        """
        if not alive:
            return
        calls = [reply.group_calls for reply in self._ask(messages.InspectGroup, alive).values()]
        if is_broken or len(alive) < self._world_size or any(of_rank != calls[0] for of_rank in calls):
            # The first number tells whether this package made the group. Ranks that differ there can't share one.
            origins = {None if of_rank is None else of_rank[0] for of_rank in calls}
            had_one = origins != {None}
            rejoins = had_one and len(origins) == 1 and len(alive) == self._world_size
            # Twice, since the old group's end may have disturbed the first attempt.
            rejoins = rejoins and (self._renew(alive, rejoins=True) or self._renew(alive, rejoins=True))
            if not rejoins:
                self.leave(alive)
            if had_one and not rejoins:
                sys.stderr.write(
                    "[the ranks have no process group any more: make a new Accelerator() on all of them]\n"
                )

    def leave(self, alive: Sequence[int]) -> None:
        # Twice: a rank that an interrupt leaves in the old group would wait there for ranks that are in another.
        _ = self._renew(alive, rejoins=False) or self._renew(alive, rejoins=False)

    def _renew(self, alive: Sequence[int], *, rejoins: bool) -> bool:
        """Make these ranks leave their group and, if ``rejoins``, form a new one. Return whether all have."""
        self.renewals += 1
        replies = self._ask(messages.RenewGroup, alive, renewals=self.renewals, rejoins=rejoins)
        for rank, reply in replies.items():
            if reply.failed is not None:
                why = f"{reply.failed.kind}: {reply.failed.message}"
                sys.stderr.write(f"[rank {rank} could not go on in a new process group: {why}]\n")
        lost = list(dict.fromkeys(line for reply in replies.values() for line in reply.lines))
        if lost:
            sys.stderr.write(f"[lost with the ranks' process group, which had broken: {'; '.join(lost)}]\n")
        return len(replies) == len(alive) and not any(reply.failed for reply in replies.values())

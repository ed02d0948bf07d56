"""A run whose ranks may be started again, and may be those of one node among several, as its handle knows it."""

from __future__ import annotations

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import NodeLostError, RankFailedError, RunError
from notebook_accel.events import Restarting
from notebook_accel.launching.messages import Failure, Starting
from notebook_accel.launching.record import Record

__all__ = ["Attempts"]


class Attempts:
    """How often the ranks were started, at which places, and why again.

    Args:
        config: The run's options.
        ranks: Number of ranks here.
        record: What they say; gets to know their numbers here.

    Attributes:
        restarts: Why all ranks were started again, for each time.
    """

    def __init__(self, config: LaunchConfig, ranks: int, record: Record) -> None:
        self.restarts: tuple[str, ...] = ()
        self._allowed = config.max_restarts
        self._count: int | None = None
        # As it is where nodes are numbered; where they aren't, the elastic process will say it.
        record.first_rank = config.node_rank * ranks
        record.world_size = ranks * int(config.num_nodes.partition(":")[0])

    def begin(self, starting: Starting, record: Record) -> tuple[int, Restarting] | None:
        """The ranks are started.

        Returns:
            The rank because of which they are started again, or the first, and what to tell those who watch; ``None``
            if they weren't there before.
        """
        before, self._count = self._count, starting.restarts
        rank, why = record.first_failed, record.in_a_line
        record.first_rank, record.world_size = starting.first_rank, starting.world_size
        if before is None:
            return None
        record.start_over()
        if before == starting.restarts:
            why = f"the nodes are others now, with {starting.world_size} ranks in all"
            return 0, Restarting(number=0, of=self._allowed, why=why)
        if starting.cause is not None:
            rank, why = None, starting.cause.in_a_line
        why = why or "a rank on another node has failed"
        self.restarts = (*self.restarts, why)
        return rank or 0, Restarting(number=starting.restarts, of=self._allowed, why=why)

    def error_of(self, elsewhere: Failure, record: Record) -> RunError:
        """The error of a run that has ended by what has happened on another node."""
        if elsewhere.rank is None:
            line = elsewhere.in_a_line
            return NodeLostError(
                line[:1].upper() + line[1:],
                why="A run needs all of its nodes; the ranks here were stopped.",
                fix="launch it again on all nodes; with max_restarts this one waits for the other to come back",
            )
        error = RankFailedError(
            f"rank {elsewhere.rank} of {record.world_size} on {elsewhere.where} failed: {elsewhere.what}",
            rank=elsewhere.rank,
            world_size=record.world_size,
            remote_traceback=elsewhere.traceback.rstrip("\n"),
            others=record.others,
        )
        error.restarts = self.restarts
        return error

"""The seam between a run's handle and the engine that has started it."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Control"]


class Control(Protocol):
    """What an engine lets one do with a run that it has started."""

    def interrupt(self, *, escalate: bool) -> None:
        """Raises KeyboardInterrupt in the ranks; to ``escalate`` is to end them after the grace."""

    def stop(self) -> None:
        """Ends the ranks: SIGTERM, and SIGKILL after the grace."""

    def kill(self) -> None:
        """Ends the ranks at once."""

    def inspect(self) -> None:
        """Asks the ranks where they stand, without waiting; the answer comes through ``Job.take_dumps``."""

    def respawn(self, rank: int) -> None:
        """Starts a rank that is gone once more."""

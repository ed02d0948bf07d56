"""The seam between a run's handle and the engine that has started it."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Protocol

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import NotebookAccelError
from notebook_accel.protocol.agent_messages import Failure, OnDeath, RankDump, Reason, Starting
from notebook_accel.protocol.events import Event

__all__ = ["Control", "Fed"]


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

    def release(self) -> None:
        """Lets go the ranks of a part of a run: every rank of it has finished, on all nodes."""

    def respawn(self, rank: int) -> None:
        """Starts a rank that is gone once more."""


class Fed(Protocol):
    """What an engine feeds: a run's handle, or what passes it on to one that is elsewhere."""

    @property
    def id(self) -> str:
        """Unique among the kernel's runs."""

    @property
    def world_size(self) -> int:
        """Number of ranks that feed it."""

    @property
    def config(self) -> LaunchConfig:
        """Its options."""

    @property
    def on_death(self) -> OnDeath:
        """What becomes of the other ranks when one has died."""

    @property
    def log_folder(self) -> pathlib.Path | None:
        """Where the ranks' logs are to be."""

    def attach(self, control: Control) -> None:
        """Takes the engine's handle."""

    def deliver(self, rank: int, event: Event) -> None:
        """Takes one event of a rank."""

    def take_dumps(self, dumps: Sequence[RankDump]) -> None:
        """Takes where the ranks stand."""

    def start(self, starting: Starting) -> None:
        """The ranks are started, or started again."""

    def end(self, reason: Reason, error: NotebookAccelError | None = None, elsewhere: Failure | None = None) -> None:
        """It is over: every rank is gone. ``elsewhere`` is what has ended it, if that was on another node."""

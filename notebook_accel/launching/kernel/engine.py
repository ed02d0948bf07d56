"""The seams between the launcher, a run's handle and whatever runs ranks."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import NotebookAccelError
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.spec import JobSpec
from notebook_accel.protocol.agent_messages import Failure, OnDeath, RankDump, Reason, Starting
from notebook_accel.protocol.events import Event

if TYPE_CHECKING:
    from notebook_accel.launching.kernel.job import Job

__all__ = ["Engine", "LaunchRequest", "RunControl", "RunHandle"]


class RunControl(Protocol):
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


class RunHandle(Protocol):
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

    def attach(self, control: RunControl) -> None:
        """Takes the engine's handle."""

    def deliver(self, rank: int, event: Event) -> None:
        """Takes one event of a rank."""

    def take_dumps(self, dumps: Sequence[RankDump]) -> None:
        """Takes where the ranks stand."""

    def start(self, starting: Starting) -> None:
        """The ranks are started, or started again."""

    def end(self, reason: Reason, error: NotebookAccelError | None = None, elsewhere: Failure | None = None) -> None:
        """It is over: every rank is gone. ``elsewhere`` is what has ended it, if that was on another node."""


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
    """A launch that nothing speaks against, before anything of it is on its way.

    Attributes:
        target: What the ranks run.
        roots: What the user knows in it, by the words that a message uses for it, such as ``argument 1``.
        spec: What a rank must know, but for the sources of the functions that are sent.
        config: The options.
        devices: What the ranks run on, such as ``2 CPUs``.
        variables: Those of the ranks' environment variables that are the launch's own.
        may_stay: Those of the target's names that are sent if they can be, and stay behind if not.
        attended: Held as long as the cell that starts it waits for it, which it doesn't survive: an engine that starts
            processes ends them when it is free. ``None`` for a run in the background.
        bind: Takes the pulled names and their values.
        on_death: What becomes of the other ranks when one has died.
    """

    target: Target
    roots: Mapping[str, Any]
    spec: JobSpec
    config: LaunchConfig
    devices: str
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    may_stay: Sequence[str] = ()
    attended: threading.Lock | None = None
    bind: Callable[[dict[str, Any]], object] | None = None
    on_death: OnDeath = "stop"


class Engine(Protocol):
    """Something that can run ranks."""

    def launch(self, request: LaunchRequest) -> Job:
        """Starts the ranks and returns the run's job, with a control attached; delivers its events and ends it.

        Raises:
            LaunchError: The ranks can't be started.
        """

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
        """Raise KeyboardInterrupt in the ranks; to ``escalate`` is to end them after the grace."""

    def stop(self) -> None:
        """End the ranks: SIGTERM, and SIGKILL after the grace."""

    def kill(self) -> None:
        """End the ranks at once."""

    def inspect(self) -> None:
        """Ask the ranks where they stand, without waiting; the answer comes through ``Job.take_dumps``."""

    def release(self) -> None:
        """Let go the ranks of a part of a run: every rank of it has finished, on all nodes."""

    def respawn(self, rank: int) -> None:
        """Start a rank that is gone once more."""


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
        """Take the engine's handle."""

    def deliver(self, rank: int, event: Event) -> None:
        """Take one event of a rank."""

    def take_dumps(self, dumps: Sequence[RankDump]) -> None:
        """Take where the ranks stand."""

    def start(self, starting: Starting) -> None:
        """The ranks are started, or started again."""

    def end(self, reason: Reason, error: NotebookAccelError | None = None, elsewhere: Failure | None = None) -> None:
        """It is over: every rank is gone. ``elsewhere`` is what has ended it, if that was on another node."""


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
    """A launch that nothing speaks against, before anything of it is on its way.

    Attributes:
        target: The function or cell that the ranks run.
        roots: The target's objects by the words that an error uses for them, such as ``argument 1``.
        spec: The ranks' ``JobSpec``, without the sources of functions that are pickled.
        config: The options.
        devices: The ranks' devices in words, such as ``2 CPUs``.
        variables: Environment variables that the launch itself sets for the ranks.
        optional_names: Names of the target that are left out if they can't be pickled.
        foreground_lock: Held while the cell that started the run waits for it. An engine ends the run's processes once
            the lock is free. ``None`` for a run in the background.
        set_variables: Takes the pulled variables by name.
        on_death: Whether the other ranks stop or stay when one dies.
    """

    target: Target
    roots: Mapping[str, Any]
    spec: JobSpec
    config: LaunchConfig
    devices: str
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional_names: Sequence[str] = ()
    foreground_lock: threading.Lock | None = None
    set_variables: Callable[[dict[str, Any]], object] | None = None
    on_death: OnDeath = "stop"


class Engine(Protocol):
    """Something that can run ranks."""

    def launch(self, request: LaunchRequest) -> Job:
        """Start the ranks and returns the run's job, with a control attached; delivers its events and ends it.

        Raises:
            LaunchError: The ranks can't be started.
        """

"""The seam between the launcher and whatever runs ranks."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from notebook_accel.config import LaunchConfig
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.spec import JobSpec
from notebook_accel.protocol.agent_messages import OnDeath

__all__ = ["Engine", "Request"]

_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class Request:
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

    def make_job(
        self,
        spec: JobSpec,
        *,
        shipped: Sequence[Any] = (),
        result_files: Sequence[int] = (),
        log_folder: pathlib.Path | None = None,
    ) -> Job:
        """The handle on the run, for an engine to start."""
        return Job(
            f"{os.getpid()}-{next(_numbers)}",
            spec,
            self.config,
            devices=self.devices,
            is_background=self.attended is None,
            shipped=shipped,
            result_files=result_files,
            log_folder=log_folder,
            bind=self.bind,
            on_death=self.on_death,
        )


class Engine(Protocol):
    """Something that can run ranks."""

    def launch(self, request: Request) -> Job:
        """Starts the ranks and returns the run's job, with a control attached; delivers its events and ends it.

        Raises:
            LaunchError: The ranks can't be started.
        """

"""What is known about one rank of a run, for who asks the job and not the panel."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from notebook_accel import events

__all__ = ["RankInfo"]


@dataclasses.dataclass
class RankInfo:
    """One rank, as of when it was asked for.

    Attributes:
        rank: Its number.
        state: One word for how it is.
        pid: Its process, ``None`` before it has started.
        device: What it computes on, such as ``cuda:0``; empty if that isn't known.
        step: Steps that it has done, over all epochs; ``None`` if it counts none.
        progress: What it last counted, ``None`` before.
        metrics: The latest value of each metric that it has reported.
        memory_used_bytes: Memory in use, of its device where it has one; ``None`` if that isn't known.
        memory_total_bytes: What the device, or the host, has.
        silent: What was found out when it had done no step for long, ``None`` after its next one.
    """

    rank: int
    state: Literal["starting", "running", "finished", "failed", "ended"] = "starting"
    pid: int | None = None
    device: str = ""
    step: int | None = None
    progress: events.Progress | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    memory_used_bytes: int | None = None
    memory_total_bytes: int = 0
    silent: events.Silent | None = None

    def add(self, event: events.Event) -> None:
        """Takes in what the rank has said."""
        if isinstance(event, events.Started):
            self.state, self.pid = "running", event.pid
        elif isinstance(event, events.Progress):
            self.silent = self.silent if event.steps == self.step else None
            self.step, self.progress, self.device = event.steps, event, event.device or self.device
        elif isinstance(event, events.Metrics):
            self.metrics = {**self.metrics, **event.values}
        elif isinstance(event, events.Memory):
            self.memory_used_bytes, self.memory_total_bytes = event.used_bytes, event.total_bytes
        elif isinstance(event, events.Silent):
            self.silent = event
        elif isinstance(event, (events.Finished, events.Failed)):
            self.state = "finished" if isinstance(event, events.Finished) else "failed"
            self.silent = None
        elif isinstance(event, events.Ended):
            self.state = self.state if self.state in ("finished", "failed") else "ended"
            self.silent = None

"""The seam between the launcher and whatever runs ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from notebook_accel.launching.job import Job

__all__ = ["Engine"]


class Engine(Protocol):
    """Something that can run a job's ranks."""

    def start(self, job: Job, payload: int, result_files: Sequence[int]) -> None:
        """Starts the ranks and returns; attaches a control to the job, delivers its events and ends it.

        Args:
            job: The run.
            payload: Descriptor of the sealed payload, whose head is the ``JobSpec``. The caller closes it.
            result_files: One empty memory file a rank, for its result.

        Raises:
            LaunchError: The ranks can't be started.
        """

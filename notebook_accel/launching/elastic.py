"""The engine for runs that may restart: as on one machine otherwise, with torch elastic in a process of the run's own.

Nothing of torch elastic is in the kernel, where it would install signal handlers and never take them away.
"""

from __future__ import annotations

from notebook_accel.config import LaunchConfig
from notebook_accel.launching import local, messages
from notebook_accel.launching.engine import Request
from notebook_accel.launching.job import Job

__all__ = ["ElasticEngine", "is_wanted"]


def is_wanted(config: LaunchConfig) -> bool:
    """Whether a launch needs it."""
    return config.max_restarts > 0


class ElasticEngine:
    """Runs ranks that are started again when one has failed."""

    def launch(self, request: Request) -> Job:
        """Starts the run's elastic process, which has the ranks started. See ``Engine``."""
        config = request.config
        options = messages.Elastic(
            max_restarts=config.max_restarts,
            monitor_interval_s=config.monitor_interval,
            run_id=config.rdzv_id,
        )
        return local.engine().launch_elastic(request, options)

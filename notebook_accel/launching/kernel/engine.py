"""The engines for other machines: their interface, and the one that the options name."""

from __future__ import annotations

import importlib
from typing import Protocol

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import Finding
from notebook_accel.launching.kernel.devices import Devices
from notebook_accel.launching.kernel.job import Job, LaunchRequest


class ClusterEngine(Protocol):
    """An engine for other machines, which finds and checks their devices itself."""

    def launch(self, request: LaunchRequest) -> Job:
        """Start the ranks, deliver events and the end to the run's job, and let it send orders. Return the job.

        Raises:
            LaunchError: The ranks can't be started.
        """

    def devices(self, config: LaunchConfig) -> Devices:
        """Return the ranks' devices."""

    def check(self, config: LaunchConfig) -> tuple[Finding, ...]:
        """Return findings about resources that the ranks need and the machines lack."""


# Each module has ``connect(config)``, which returns its engine, and ``check_options(pairs)`` for ``engine_options``.
# The modules are imported by name, since they themselves import this package.
_CLUSTERS = {"ray": "notebook_accel.launching.ray.engine"}


def connect_cluster(config: LaunchConfig) -> ClusterEngine | None:
    """Connect to the cluster that the option ``engine`` names; return ``None`` for this machine.

    Raises:
        ConfigError: An option can't be used on that cluster, its library isn't installed, or there is no cluster.
    """
    if config.engine not in _CLUSTERS:
        return None
    engine: ClusterEngine = importlib.import_module(_CLUSTERS[config.engine]).connect(config)
    return engine


def check_engine_options(config: LaunchConfig) -> None:
    """Check ``engine_options``, even if no cluster engine is chosen yet, as in an unfinished form.

    Raises:
        ConfigError: An option doesn't exist, or can't have this value.
    """
    if config.engine_options:
        module = _CLUSTERS.get(config.engine, _CLUSTERS["ray"])  # no other engine has options
        importlib.import_module(module).check_options(config.engine_options)

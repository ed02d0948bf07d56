"""The engine for Ray clusters: Ray places the ranks, and all else is as on one machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec

from notebook_accel import uninterruptible
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, Finding
from notebook_accel.launching.kernel import run_payload
from notebook_accel.launching.kernel.devices import Devices
from notebook_accel.launching.kernel.engine import LaunchRequest
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.ray import cluster, connection, options
from notebook_accel.launching.ray.run import RayRun


class RayEngine:
    """Runs ranks on a cluster that this process is connected to."""

    def __init__(self, connected_cluster: cluster.Cluster) -> None:
        self._cluster = connected_cluster

    def devices(self, config: LaunchConfig) -> Devices:
        """Return the ranks' devices: the cluster's GPUs if it has any."""
        gpus = 0 if config.use_cpu else self._cluster.gpus
        return Devices("GPU", gpus) if gpus else Devices("CPU", 1)

    def check(self, config: LaunchConfig) -> tuple[Finding, ...]:
        world_size = config.num_processes or self.devices(config).available
        return self._cluster.check(world_size, self._cluster.resources_of_a_rank(use_cpu=config.use_cpu))

    def launch(self, request: LaunchRequest) -> Job:
        """Start the run, which first waits for the cluster's reservation. See ``Engine``."""
        if request.on_death == "keep":
            raise ConfigError(
                "A session's ranks stay on this machine.", fix="leave out engine, or --fresh for the cell"
            )
        # The nodes have an environment, folders and an import path of their own.
        there = msgspec.structs.replace(request.spec, environment={}, working_directory="", sys_path=[])
        pickled, unsent = run_payload.pickle_target(request.target, request.roots, request.optional_names)
        resources = self._cluster.resources_of_a_rank(use_cpu=request.config.use_cpu)

        def start() -> Job:
            with run_payload.prepared_run(dataclasses.replace(request, spec=there), pickled, unsent) as prepared:
                run = RayRun(
                    prepared.job, self._cluster, prepared.payload, prepared.result_files, resources, request.variables
                )
                prepared.job.attach(run)
                run.start()
            return prepared.job

        return uninterruptible.call(start, Job.discard, request.foreground_lock)


def connect(config: LaunchConfig) -> RayEngine:
    """Connect to a cluster, and return the engine for a launch with these options.

    Raises:
        ConfigError: An option has no meaning on a cluster, Ray isn't installed, or there is no cluster.
    """
    wanted = options.read(config.engine_options)
    if config.start_method not in ("auto", "spawn"):
        raise ConfigError(
            f"start_method={config.start_method!r} can't be used with engine='ray'.",
            why="Its ranks are in this kernel, or forks of it.",
            fix="leave out start_method, or engine",
        )
    return RayEngine(cluster.Cluster(uninterruptible.call(lambda: connection.connect(wanted.address)), wanted))


def check_options(pairs: Sequence[str]) -> None:
    """Check engine options. Raises as ``options.read`` does."""
    options.read(pairs)

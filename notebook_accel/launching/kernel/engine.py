"""The interfaces between the launcher, a run's handle and the engines that run ranks."""

from __future__ import annotations

import dataclasses
import importlib
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
    from notebook_accel.errors import Finding
    from notebook_accel.launching.kernel.devices import Devices
    from notebook_accel.launching.kernel.job import Job


class RunReceiver(Protocol):
    """The receiver of an agent's events: a ``Job``, which documents these members, or a run's part on another node.

    ``saves`` is about the first rank of each node. ``end`` gets the failure on another node that has ended the run.
    """

    @property
    def id(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def config(self) -> LaunchConfig: ...
    @property
    def on_death(self) -> OnDeath: ...
    @property
    def saves(self) -> bool: ...
    @property
    def log_folder(self) -> pathlib.Path | None: ...

    def deliver(self, rank: int, event: Event) -> None: ...
    def take_dumps(self, dumps: Sequence[RankDump]) -> None: ...
    def start(self, starting: Starting) -> None: ...
    def end(
        self, reason: Reason, error: NotebookAccelError | None = None, elsewhere: Failure | None = None
    ) -> None: ...


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
    """A launch that has passed all checks, before any process is started for it.

    Attributes:
        target: The function or cell that the ranks run.
        roots: The target's objects by the labels that messages use for them, such as ``argument 1``.
        spec: The ranks' ``JobSpec``, without the sources of functions that are pickled.
        config: The options.
        devices: The ranks' devices in words, such as ``2 CPUs``.
        variables: Environment variables that the launch sets for the ranks.
        optional_names: Names of the target that are left out if they can't be pickled.
        foreground_lock: Lock that is held while the cell waits for the run. An engine ends the run's processes once
            the lock is free. ``None`` for a background run.
        set_variables: Function that takes the pulled variables when the results are read. After a failure or an
            interrupt, they have their values at that time.
        on_death: What happens to the other ranks when one dies: ``stop`` or ``keep``.
        detach: True if the run goes on when the kernel ends.
        detached_id: The id of a detached run; empty for a new one.
    """

    target: Target
    roots: Mapping[str, Any]
    spec: JobSpec
    config: LaunchConfig
    devices: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    optional_names: Sequence[str] = ()
    foreground_lock: threading.Lock | None = None
    set_variables: Callable[[dict[str, Any]], object] | None = None
    on_death: OnDeath = "stop"
    detach: bool = False
    detached_id: str = ""


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

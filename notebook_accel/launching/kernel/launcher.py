"""The kernel's launcher: finds devices, checks, chooses the engine and starts a function or a cell on the ranks."""

from __future__ import annotations

import dataclasses
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from notebook_accel import config as configuration
from notebook_accel import environment
from notebook_accel.config import LaunchConfig, training_variables
from notebook_accel.errors import ConfigError, Finding, LaunchError, NotebookAccelError, PreflightError, RunError
from notebook_accel.interrupts import allowed
from notebook_accel.launching import loggers, torch_settings
from notebook_accel.launching.kernel import (
    detached,
    detached_runs,
    elastic,
    foreground,
    fork,
    inline,
    local,
    preflight,
    registry,
    run_payload,
)
from notebook_accel.launching.kernel.cell import Cell
from notebook_accel.launching.kernel.devices import Devices
from notebook_accel.launching.kernel.engine import ClusterEngine, connect_cluster
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.ranks import warning_filters
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.spec import JobSpec, Source
from notebook_accel.protocol.agent_messages import OnDeath

_MOST_RANKS = 200  # one message carries the descriptors of all ranks, and Linux allows 253 in one


def launch_function(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: LaunchConfig,
    *,
    name: str = "",
    is_background: bool = True,
    on_death: OnDeath = "stop",
    detach: bool = False,
    detached_id: str = "",
    show: Callable[[Job], None] = foreground.draw_in_background,
) -> Job:
    """Start a function on all ranks and return its job. Raises as ``notebook_launcher`` does, up to the start.

    ``name`` is the run's name if the options have none, by default the function's.
    For ``is_background``, ``on_death`` and ``detach`` see ``LaunchRequest``. ``detached_id`` is the id of a detached
    run whose function must know it, and implies ``detach``. ``show`` shows a background run.
    """
    request = LaunchRequest(
        Target(names={}, function=function, args=args, kwargs=kwargs),
        run_payload.call_roots(function, args, kwargs),
        JobSpec(name=config.name or name or getattr(function, "__name__", type(function).__name__)),
        config,
        is_background=is_background,
        on_death=on_death,
        detach=detach or bool(detached_id),
        detached_id=detached_id,
    )
    return _launch(request, show)


def launch_cell(
    cell: Cell,
    config: LaunchConfig,
    *,
    namespace: Mapping[str, Any],
    args: tuple[Any, ...] = (),
    push: Sequence[str] = (),
    pull: Sequence[str] = (),
    set_variables: Callable[[dict[str, Any]], object] | None = None,
    is_background: bool = True,
    detach: bool = False,
) -> Job:
    """Start a cell on all ranks and return its job.

    The ranks get those variables of ``namespace``, the notebook's, that the cell uses, and those of ``push``. The
    values of ``pull`` on rank 0 come back. ``args`` are for the function that the cell defines at its end. For the
    other arguments see ``LaunchRequest``.
    """
    cell.refuse_async_end()
    cell.refuse_arguments(args)
    cell.refuse_unknown(pull, push)
    names = cell.captured(namespace, push)
    if config.num_processes != 1:
        preflight.warn(preflight.check_prepared(names, cell.source))
    roots = {run_payload.variable_label(name): value for name, value in names.items()}
    roots |= {f"argument {index}": value for index, value in enumerate(args)}
    spec = JobSpec(
        name=config.name or cell.calls or cell.label,
        sources={cell.label: Source(cell.label, cell.source)},
        cell=cell.source,
        cell_filename=cell.label,
        calls=cell.calls,
        pull=tuple(pull),
    )
    request = LaunchRequest(
        Target(names=names, args=args, submodules=cell.submodules(names)),
        roots,
        spec,
        config,
        optional_names=cell.optional_names(names, push),
        set_variables=set_variables,
        is_background=is_background,
        detach=detach,
    )
    return _launch(request)


def _launch(request: LaunchRequest, show: Callable[[Job], None] = foreground.draw_in_background) -> Job:
    config = request.config
    cluster, devices, findings = _checked(config, request.roots)
    if any(finding.refuses for finding in findings):
        raise PreflightError(findings)
    preflight.warn(findings)
    if environment.is_debugging():
        print(f"The trial run went well, in {try_out(config):.1f} s.")
    if not request.is_background:  # the foreground shows it
        return _start(request, devices, cluster)
    return foreground.start_and_show(lambda: _start(request, devices, cluster), show)


@dataclasses.dataclass(frozen=True)
class Examination:
    """The result of ``doctor``, which prints it as text: what the checks have found, and other remarks as sentences."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_refused(self) -> bool:
        """True if a launch would be refused."""
        return any(finding.refuses for finding in self.findings)

    def __str__(self) -> str:
        said = [f"{'refused' if finding.refuses else 'warning'}: {finding}" for finding in self.findings]
        return "\n".join([*(said or ["Nothing speaks against a launch."]), *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON."""
        return {"is_refused": self.is_refused, **dataclasses.asdict(self)}


def examine(given: Mapping[str, Any]) -> Examination:
    """Check a launch, here or on its cluster, without starting it. ``given`` has options that were given as flags."""
    findings: tuple[Finding, ...] = ()
    notes = []
    try:
        config = configuration.resolve(given, file=configuration.default_path())
        _, _, findings = _checked(config, {})
    except NotebookAccelError as error:  # an error that a launch would raise before it starts anything
        return Examination((Finding(error.what, error.why, error.fix),))
    if going := detached_runs.going_in_words():
        notes.append(f"note: {going} It takes a part of the devices and of the memory.")
    return Examination(findings + preflight.check_detached(), tuple(notes))


def _checked(
    config: LaunchConfig, roots: Mapping[str, Any]
) -> tuple[ClusterEngine | None, Devices, tuple[Finding, ...]]:
    """Return the cluster (``None`` for a launch on this machine), the devices, and the findings.

    Raises:
        NotebookAccelError: An option can't be honoured, there is no such cluster, or the working directory is gone.
    """
    _working_directory()
    cluster = connect_cluster(config)
    if cluster is not None:
        return cluster, cluster.devices(config), (*preflight.check_environment(), *cluster.check(config))
    elastic.check(config)
    devices = Devices.find(config)
    if (world_size := config.num_processes or devices.available) > _MOST_RANKS:
        what = f"num_processes={world_size} is too many for one machine."
        raise ConfigError(what, fix=f"num_processes={_MOST_RANKS} or fewer")
    return None, devices, preflight.check(config, devices, roots)


def _start(request: LaunchRequest, devices: Devices, cluster: ClusterEngine | None) -> Job:
    config = request.config
    world_size = config.num_processes or devices.available
    if request.on_death == "keep" and (config.max_restarts or elastic.is_wanted(config)):
        raise ConfigError(
            "A session can't have restarts (max_restarts) or several nodes (num_nodes).",
            why="A restart would lose the ranks' variables, and a session takes its cells from one notebook.",
            fix="max_restarts=0 and num_nodes=1; %distributed restart is for a rank that has died",
        )
    variables = _variables(config, devices)
    spec = msgspec.structs.replace(
        request.spec,
        world_size=world_size,
        environment={**environment.sendable(), **variables},
        working_directory=_working_directory(),
        sys_path=environment.import_path(),
        loggers=loggers.settings(),
        torch_settings=torch_settings.settings(),
        warning_filters=warning_filters.settings(),
        is_detached=request.detach,
        authkey=b"" if request.detach or cluster is not None else bytes(multiprocessing.current_process().authkey),
    )
    request = dataclasses.replace(
        request,
        spec=spec,
        config=config.replace(start_method=devices.start_method(config)),
        devices=devices.describe(world_size),
        variables=variables,
    )
    job = _engine(request, cluster)(request)
    registry.add(job)
    return job


def _engine(request: LaunchRequest, cluster: ClusterEngine | None) -> Callable[[LaunchRequest], Job]:
    """Return the function that starts the ranks, delivers events and the end to the job, and returns the job."""
    if request.detach:
        return detached.launch
    if cluster is not None:
        return cluster.launch
    if elastic.is_wanted(request.config):
        return elastic.launch
    if request.config.start_method == "fork":
        return fork.launch
    return inline.launch if request.config.start_method == "inline" else local.engine().launch


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise LaunchError(
            "The kernel's working directory has been deleted, and ranks start in it.", fix="os.chdir to another folder"
        ) from None


def _variables(config: LaunchConfig, devices: Devices) -> dict[str, str]:
    is_on_cpu = devices.kind == "CPU"
    shares = devices.kind == "GPU" and (config.num_processes or 0) > devices.available
    # All but those of the training have a value in every launch, if only the default: otherwise ranks would read a
    # variable of that name in the kernel's environment, where it states the default of %%distributed.
    variables = {
        **training_variables(config),
        environment.PROFILE: config.profile,
        environment.OVERSUBSCRIBE: "true" if shares else "false",
        # Variables that torchrun sets besides a rank's place; elastic runs replace them. TORCHELASTIC_RUN_ID tells
        # Lightning that its processes exist already, so that it asks neither Slurm nor MPI.
        "TORCHELASTIC_RUN_ID": config.rdzv_id,
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default_role",
    }
    if is_on_cpu:
        # Without USE_CPU, Accelerate inside a rank on the CPU ignores the other ranks.
        variables |= {environment.USE_CPU: "true", **devices.hiding()}
    elif devices.platform is not None:
        variables |= devices.platform.variables()
    return variables


_TRIAL_DEADLINE_S = 120.0  # eight GPUs connect slowly


def try_out(config: LaunchConfig) -> float:
    """Do a trial run, in which ranks meet and use their devices, and return its duration in seconds.

    Raises:
        PreflightError: The trial run has failed, or took too long.
    """
    started_s = time.monotonic()
    cluster = connect_cluster(config)
    devices = Devices.find(config) if cluster is None else cluster.devices(config)
    options = config.replace(timeout_s=_TRIAL_DEADLINE_S, name="trial run", end_at="", max_restarts=0)
    # On several nodes, each tries this machine alone.
    options = options.replace(
        num_nodes=1,
        node_rank=0,
        rdzv_backend="static",
        rdzv_endpoint="",
        master_addr="127.0.0.1",
        main_process_port=None,
    )
    target = Target(names={}, function=_use_device)
    request = LaunchRequest(target, {}, JobSpec(name=options.name), options, is_background=False)
    try:
        foreground.start_and_show(lambda: _start(request, devices, cluster), _wait_for_results)
    except RunError as error:
        finding = Finding(
            "The trial run before the launch has failed: its ranks met, used their devices and summed a number, "
            "or tried to.",
            str(error),
            "mend that first; notebook-accel doctor --trial tries again. Without the debug mode there is no trial run",
        )
        raise PreflightError((finding,)) from error
    return time.monotonic() - started_s


@allowed()
def _wait_for_results(job: Job) -> None:
    if job.run_here is not None:
        job.run_here()
    job.results()


def _use_device() -> str:
    """Join the group, use the device and return its name. Runs in each rank."""
    torch = importlib.import_module("torch")
    backend = importlib.import_module("notebook_accel.training.process_group").join()
    try:
        ones = torch.ones(64, 64, device=backend.device)
        backend.all_reduce(ones)
        total = float((ones @ ones).mean())
        expected = 64 * backend.place.world_size**2
        if total != expected:
            raise RuntimeError(f"{backend.device} computes {total} where {expected} is right")
    finally:
        backend.leave()
    return str(backend.device)

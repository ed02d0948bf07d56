"""``notebook_launcher``: a function, or a cell, on every device, and its results back in the notebook."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from notebook_accel import config as configuration
from notebook_accel import environment
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, Finding, LaunchError, PreflightError
from notebook_accel.launching import elastic, following, fork, inline, local, registry, trial
from notebook_accel.launching.cell import Cell
from notebook_accel.launching.checks import preflight
from notebook_accel.launching.checks.devices import Devices
from notebook_accel.launching.engine import Engine, Request
from notebook_accel.launching.job import Job
from notebook_accel.launching.messages import OnDeath
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.ray.engine import RayEngine
from notebook_accel.launching.results import Results
from notebook_accel.launching.spec import JobSpec, Source

__all__ = ["check", "debug_launcher", "launch_cell", "launch_function", "notebook_launcher", "try_out"]


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int | str = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    background: bool = False,
    start_method: str = "auto",
    preload: Sequence[str] = (),
    idle_timeout_s: float | None = None,
    gradient_accumulation_steps: int | None = None,
    use_cpu: bool = False,
    allow_initialized_cuda: bool = False,
    oversubscribe: bool = False,
    timeout_s: float | None = None,
    grace_s: float | None = None,
    log_dir: str = "",
    name: str = "",
    view: str = "auto",
    engine: str = "local",
    engine_options: Mapping[str, Any] | None = None,
) -> Results | Job:
    """Runs a function in several processes, each a rank with a device of its own, and returns what they return.

    The ranks start clean: they have the function, its arguments and the notebook's names that it uses, by value, and
    the kernel's environment variables, working directory and import path; nothing else of the kernel.

    Configuration files are not read here; ``%%distributed`` and the command line read them.

    Args:
        function: What each rank calls.
        args: Its positional arguments.
        num_processes: Number of ranks. Default: one for each visible device, one on a machine with only a CPU.
        mixed_precision: ``no``, ``fp16`` or ``bf16``, for the ``Accelerator`` in the ranks.
        use_port: TCP port of the ranks' store. Default: a free one. Where several nodes meet; default then: 29500.
        master_addr: Address of node 0, where several nodes meet.
        node_rank: This node's number among several, from 0.
        num_nodes: Number of nodes, each with ``num_processes`` ranks; ``"1:4"`` if it may change, with ``c10d``.
        rdzv_backend: How several nodes meet: ``static`` or ``c10d``.
        rdzv_endpoint: ``HOST:PORT`` where several nodes meet. Default: ``master_addr`` and ``use_port``.
        rdzv_conf: How long several nodes wait for each other, such as ``{"timeout": 60}``, in seconds.
        rdzv_id: What ranks have as ``TORCHELASTIC_RUN_ID``, if they may be started again.
        max_restarts: How often all ranks are started again after one has failed, until the failure ends the run.
        monitor_interval: Seconds between two looks at what changes around a run that may restart.
        log_line_prefix_template: What stands before a rank's lines in the notebook, as torch has it: ``${role_name}``,
            ``${rank}`` and ``${local_rank}`` in it are replaced.
        kwargs: The function's keyword arguments.
        background: Return a ``Job`` at once instead of waiting for the results.
        start_method: How ranks come into being: ``auto``, ``spawn``, ``fork`` or ``inline``. With ``inline`` the
            function runs here, as the one rank, where a debugger works.
        preload: Names of modules that ranks find imported already.
        idle_timeout_s: Seconds after the last run until the processes that are kept ready for the next one end.
        gradient_accumulation_steps: Micro-batches that make one optimizer step, for Accelerators that aren't told
            themselves.
        use_cpu: Train on the CPU also where there are GPUs.
        allow_initialized_cuda: Go on although CUDA is in use in the kernel.
        oversubscribe: Let more ranks than there are GPUs share them, over gloo.
        timeout_s: Stop the run after so many seconds.
        grace_s: Seconds that a rank has to end by itself before it is killed.
        log_dir: Folder for the ranks' logs. Default: a temporary one.
        name: Name of the run in the panel. Default: the function's name.
        view: What shows the run: ``auto``, ``panel``, ``lines`` or ``none``.
        engine: Where ranks run: ``local``, on this machine, or ``ray``, on a Ray cluster.
        engine_options: What the engine is told besides; see ``RayOptions``.

    Returns:
        ``Results``, one value a rank; or, with ``background=True``, the ``Job``.

    Raises:
        ConfigError: An option has a value that it can't have, or that isn't there yet.
        PreflightError: This machine or this kernel can't do it.
        PayloadError: Something that the function uses can't be sent.
        RankFailedError: A rank failed; the first in time, of the last attempt. Its own exception is the cause, unless
            it is a rank of another node.
        NodeLostError: Another node has gone, or the run was ended there.
        RunTimeoutError: ``timeout_s`` ran out.
        KeyboardInterrupt: The kernel was interrupted; every rank is gone.
    """
    _refuse_what_cannot_be_called(function, args)
    options = configuration.resolve(
        {
            "num_processes": num_processes,
            "mixed_precision": mixed_precision,
            "main_process_port": None if use_port is None else _port(use_port),
            "num_nodes": num_nodes,
            "node_rank": node_rank,
            "master_addr": master_addr,
            "rdzv_backend": rdzv_backend,
            "rdzv_endpoint": rdzv_endpoint,
            "rdzv_conf": tuple(f"{name}={value}" for name, value in (rdzv_conf or {}).items()),
            "max_restarts": max_restarts,
            "monitor_interval": monitor_interval,
            "rdzv_id": rdzv_id,
            "start_method": start_method,
            "preload": preload,
            "idle_timeout_s": idle_timeout_s,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "use_cpu": use_cpu,
            "allow_initialized_cuda": allow_initialized_cuda,
            "oversubscribe": oversubscribe,
            "timeout_s": timeout_s,
            "grace_s": grace_s,
            "log_dir": log_dir,
            "log_line_prefix_template": log_line_prefix_template,
            "name": name,
            "view": view,
            "engine": engine,
            "engine_options": tuple(f"{name}={json.dumps(value)}" for name, value in (engine_options or {}).items()),
        },
        environ={},
    )
    job = launch_function(function, tuple(args), dict(kwargs or {}), options, background=background)
    return job if background else following.follow(job)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> Results:
    """Runs a function in ranks on the CPU, also where there are GPUs, to try it out.

    Args:
        function: What each rank calls.
        args: Its positional arguments.
        num_processes: Number of ranks.

    Raises:
        NotebookAccelError: As ``notebook_launcher`` does.
    """
    results = notebook_launcher(function, args, num_processes, use_cpu=True)
    assert isinstance(results, Results)  # it wasn't told to run in the background
    return results


def _refuse_what_cannot_be_called(function: object, args: object) -> None:
    if not callable(function):
        raise ConfigError(
            f"notebook_launcher takes a function, not {type(function).__name__}.",
            fix="notebook_launcher(train, args=(...)): the function itself, without calling it",
        )
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise ConfigError(
            f"args={args!r} is {type(args).__name__}, not a list of arguments.",
            fix=f"args=({args!r},): the comma makes it a tuple of one",
        )


def _port(use_port: str | int) -> Any:
    return int(use_port) if isinstance(use_port, str) and use_port.isdigit() else use_port


def launch_function(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: LaunchConfig,
    *,
    background: bool = False,
    on_death: OnDeath = "stop",
    show: Callable[[Job], None] = following.draw_in_background,
) -> Job:
    """Starts a function on all ranks and returns its job. Raises as ``notebook_launcher`` does, up to the start.

    Args:
        function: What each rank calls.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        config: The options.
        background: Whether nobody will wait for it in the cell.
        on_death: What becomes of the other ranks when one has died.
        show: Shows a run in the background.
    """
    label = getattr(function, "__name__", type(function).__name__)
    roots = {f'function "{label}"': function}
    roots |= {f"argument {index}": value for index, value in enumerate(args)}
    roots |= {f'argument "{key}"': value for key, value in kwargs.items()}
    target = Target(names={}, function=function, args=args, kwargs=kwargs)
    return _launch(
        target, roots, config, background=background, show=show, name=config.name or label, on_death=on_death
    )


def launch_cell(
    cell: Cell,
    config: LaunchConfig,
    *,
    namespace: Mapping[str, Any],
    args: tuple[Any, ...] = (),
    push: Sequence[str] = (),
    pull: Sequence[str] = (),
    bind: Callable[[dict[str, Any]], object] | None = None,
    background: bool = False,
) -> Job:
    """Starts a cell on all ranks and returns its job.

    Args:
        cell: The cell.
        config: The options.
        namespace: The notebook's names, of which the ranks get those that the cell uses.
        args: Arguments for the function that the cell ends by defining.
        push: Further names to send.
        pull: Names whose values on rank 0 come back.
        bind: Takes them when the results are read; also after a failure or an interrupt, as they were then.
        background: Whether nobody will wait for it in the cell.
    """
    cell.refuse_unknown(pull, push)
    names = cell.captured(namespace, push)
    roots = {f'global "{name}"': value for name, value in names.items()}
    roots |= {f"argument {index}": value for index, value in enumerate(args)}
    return _launch(
        Target(names=names, args=args, submodules=cell.submodules(names)),
        roots,
        config,
        background=background,
        name=config.name or cell.calls or cell.label,
        sources={cell.label: Source(cell.label, cell.source)},
        may_stay=cell.may_stay(names, push),
        cell=cell.source,
        cell_filename=cell.label,
        calls=cell.calls,
        pull=tuple(pull),
        bind=bind,
    )


def _launch(
    target: Target,
    roots: Mapping[str, Any],
    config: LaunchConfig,
    *,
    background: bool,
    show: Callable[[Job], None] = following.draw_in_background,
    **how: Any,
) -> Job:
    cluster = _cluster(config)
    if cluster is None:
        elastic.options(config)  # raises what speaks against it
    devices = Devices.find(config) if cluster is None else cluster.devices(config)
    findings = preflight.check(config, devices, roots) if cluster is None else cluster.check(config)
    if any(finding.refuses for finding in findings):
        raise PreflightError(findings)
    preflight.warn(findings)
    if environment.is_debugging():
        print(f"The trial run went well, in {try_out(config):.1f} s.")
    job = _start(target, roots, config, devices, cluster, is_background=background, **how)
    if background:
        show(job)
    return job


def try_out(config: LaunchConfig) -> float:
    """Holds a trial run, in which ranks meet and use their devices; the seconds that it took.

    Raises:
        PreflightError: It has failed.
    """
    cluster = _cluster(config)
    devices = Devices.find(config) if cluster is None else cluster.devices(config)
    return trial.run(lambda target, options: _start(target, {}, options, devices, cluster, name=options.name), config)


def check(config: LaunchConfig) -> tuple[Finding, ...]:
    """What speaks against a launch with these options, here or on the cluster that they name.

    Raises:
        ConfigError: There is no such cluster.
    """
    cluster = _cluster(config)
    return preflight.check(config) if cluster is None else cluster.check(config)


def _cluster(config: LaunchConfig) -> RayEngine | None:
    """Where ranks run, if not on this machine."""
    return RayEngine.connected(config) if config.engine == "ray" else None


def _start(
    target: Target,
    roots: Mapping[str, Any],
    config: LaunchConfig,
    devices: Devices,
    cluster: RayEngine | None,
    *,
    name: str,
    is_background: bool = False,
    may_stay: Sequence[str] = (),
    bind: Callable[[dict[str, Any]], object] | None = None,
    on_death: OnDeath = "stop",
    **of_cell: Any,
) -> Job:
    world_size = config.num_processes or devices.available
    if cluster is None:
        local.check_size(world_size)
    if on_death == "keep" and elastic.is_wanted(config):
        raise ConfigError(
            "Restarts (max_restarts) and several nodes (num_nodes) are not for ranks that stay.",
            why="They have what cells have left in them, which a restart would lose, and hear one notebook only.",
            fix="max_restarts=0 and num_nodes=1; %distributed restart is for a rank that has died",
        )
    variables = _variables(config, devices)
    spec = JobSpec(
        name=name,
        world_size=world_size,
        environment={**environment.sendable(), **variables},
        working_directory=_working_directory(),
        sys_path=environment.import_path(),
        **of_cell,
    )
    request = Request(
        target,
        roots,
        spec,
        config.replace(start_method=devices.start_method(config)),
        devices=devices.describe(world_size),
        variables=variables,
        is_background=is_background,
        may_stay=may_stay,
        bind=bind,
        on_death=on_death,
    )
    job = (cluster or _engine(request.config)).launch(request)
    registry.add(job)
    return job


_ENGINES: dict[str, Callable[[], Engine]] = {
    "auto": local.engine,
    "spawn": local.engine,
    "fork": fork.ForkEngine,
    "inline": inline.InlineEngine,
}


def _engine(config: LaunchConfig) -> Engine:
    return elastic.ElasticEngine() if elastic.is_wanted(config) else _ENGINES[config.start_method]()


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise LaunchError(
            "The kernel's working directory has been deleted, and ranks start in it.", fix="os.chdir to another folder"
        ) from None


def _variables(config: LaunchConfig, devices: Devices) -> dict[str, str]:
    variables: dict[str, str] = {environment.MIXED_PRECISION: config.mixed_precision}
    if config.gradient_accumulation_steps is not None:
        variables[environment.GRADIENT_ACCUMULATION_STEPS] = str(config.gradient_accumulation_steps)
    if devices.kind == "CPU":
        # Without the first, Accelerate inside a rank trains alone; the second hides GPUs from whatever looks for them.
        variables |= {environment.USE_CPU: "true", "CUDA_VISIBLE_DEVICES": ""}
    elif devices.platform is not None:
        variables |= devices.platform.variables()
    elif (config.num_processes or 0) > devices.available:
        variables[environment.OVERSUBSCRIBE] = "true"
    return variables


local.engine().warm_in_kernel()

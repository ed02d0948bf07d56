"""``notebook_launcher``: run a function on every device and return its results to the notebook."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from notebook_accel import config as configuration
from notebook_accel.errors import ConfigError
from notebook_accel.launching.kernel import foreground, launcher
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.results import Results

__all__ = ["debug_launcher", "notebook_launcher"]


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
    """Run a function in several processes, each a rank with a device of its own, and returns what they return.

    The ranks start clean: they have the function, its arguments and the notebook's names that it uses, by value, and
    the kernel's environment variables, working directory and import path; nothing else of the kernel.

    Configuration files are not read here; ``%%distributed`` and the command line read them.

    Args:
        function: The function that each rank calls.
        args: Its positional arguments.
        num_processes: Number of ranks. Default: one for each visible device, one on a machine with only a CPU.
        mixed_precision: ``no``, ``fp16`` or ``bf16``, for the ``Accelerator`` in the ranks.
        use_port: TCP port of the ranks' store. Default: a free one. Where several nodes meet; default then: 29500.
        master_addr: Address of node 0, where several nodes meet.
        node_rank: This node's number among several, from 0.
        num_nodes: Number of nodes, each with ``num_processes`` ranks; ``"1:4"`` if it may change, with ``c10d``.
        rdzv_backend: Rendezvous backend for several nodes: ``static`` or ``c10d``.
        rdzv_endpoint: ``HOST:PORT`` where several nodes meet. Default: ``master_addr`` and ``use_port``.
        rdzv_conf: Settings of the rendezvous, such as ``{"timeout": 60}``, in seconds.
        rdzv_id: The ranks' ``TORCHELASTIC_RUN_ID``.
        max_restarts: Number of times that a failed rank restarts all ranks before a failure ends the run.
        monitor_interval: Seconds between two looks at what changes around a run that may restart.
        log_line_prefix_template: Prefix of a rank's lines in the notebook, in torch's format: ``${role_name}``,
            ``${rank}`` and ``${local_rank}`` in it are replaced.
        kwargs: The function's keyword arguments.
        background: Return a ``Job`` at once instead of waiting for the results.
        start_method: Way of starting ranks: ``auto``, ``spawn``, ``fork`` or ``inline``. With ``inline`` the
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
        view: View of the run: ``auto``, ``panel``, ``lines`` or ``none``.
        engine: Place of the ranks: ``local``, this machine, or ``ray``, a Ray cluster.
        engine_options: Options of the engine; see ``RayOptions``.

    Returns:
        ``Results``, one value a rank; or, with ``background=True``, the ``Job``.

    Raises:
        ConfigError: An option has a value that it can't have, or that isn't there yet.
        PreflightError: This machine or this kernel can't do it.
        PayloadError: Something that the function uses can't be sent.
        RankFailedError: A rank failed; the first in time, of the last attempt. Its own exception is the cause, unless
            it is a rank of another node.
        ResultError: A rank's value can't be sent or not be made again here. The other ranks' values are in the error.
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

    def launch(foreground_lock: threading.Lock | None = None) -> Job:
        return launcher.launch_function(
            function, tuple(args), dict(kwargs or {}), options, foreground_lock=foreground_lock
        )

    return launch() if background else foreground.run_in_foreground(launch)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> Results:
    """Run a function in ranks on the CPU, also where there are GPUs, to try it out.

    Args:
        function: The function that each rank calls.
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

"""``notebook_launcher``: run a function on every device and return its results to the notebook."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from notebook_accel import config as configuration
from notebook_accel.config import LaunchConfig, closest_name
from notebook_accel.config_file import plain_text
from notebook_accel.errors import ConfigError
from notebook_accel.launching.kernel import foreground, launcher
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.results import Results

_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")


def _suggesting(function: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Make the error about an unknown keyword argument suggest a known one, which Python does only from 3.13 on."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Returned:
        for name in kwargs.keys() - known.keys():
            advice = ""
            if close := closest_name(name, known):
                advice = f" Did you mean {close!r}?"
            elif "kwargs" in known:
                advice = f" The function's own arguments go into kwargs={{{name!r}: ...}}."
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}.{advice}")
        return function(*args, **kwargs)

    return call


@_suggesting
def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    use_port: str | int | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
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
    detach: bool = False,
    keep_days: float | None = None,
    start_method: str = "auto",
    preload: Sequence[str] = (),
    gradient_accumulation_steps: int | None = None,
    dynamo_backend: str | None = None,
    fsdp: bool | None = None,
    fsdp_options: Mapping[str, Any] | None = None,
    parallelism_config_dp_replicate_size: int | None = None,
    parallelism_config_dp_shard_size: int | None = None,
    parallelism_config_tp_size: int | None = None,
    use_cpu: bool | None = None,
    allow_initialized_cuda: bool = False,
    oversubscribe: bool = False,
    timeout_s: float | None = None,
    end_at: str = "",
    end_margin_s: float | None = None,
    grace_s: float | None = None,
    log_dir: str = "",
    name: str = "",
    profile: str = "on",
    view: str = "auto",
    engine: str = "local",
    engine_options: Mapping[str, Any] | None = None,
) -> Results | Job:
    """Run a function in several processes, each a rank with its own device, and return their results.

    Each rank gets copies of the function, its arguments and the notebook's variables that it uses, and the kernel's
    environment variables, working directory and import path; nothing else of the kernel.

    Configuration files are read by ``%%distributed`` and the command line, not here.

    Args:
        function: The function that each rank calls.
        args: Its positional arguments.
        num_processes: Number of ranks. Default: one for each visible device, one on a machine with only a CPU.
        mixed_precision: ``no``, ``fp16`` or ``bf16``, for the ``Accelerator`` in the ranks. The default of this and
            of some other options is the value of Accelerate's variable, such as ``ACCELERATE_MIXED_PRECISION``.
        use_port: TCP port of the ranks' store. Default: a free one; with several nodes, 29500.
        master_addr: Address of node 0, where several nodes meet.
        node_rank: This node's number among several, from 0.
        num_nodes: Number of nodes, each with ``num_processes`` ranks.
        rdzv_backend: Rendezvous backend for several nodes: ``static`` or ``c10d``.
        rdzv_endpoint: ``HOST:PORT`` where several nodes meet. Default: ``master_addr`` and ``use_port``.
        rdzv_conf: Settings of the rendezvous, such as ``{"timeout": 60}``, in seconds.
        rdzv_id: The ranks' ``TORCHELASTIC_RUN_ID``.
        max_restarts: Number of times that a failed rank restarts all ranks before a failure ends the run.
        monitor_interval: Seconds between two checks of the nodes of a run that may restart.
        log_line_prefix_template: Prefix of a rank's lines in the notebook, in torch's format: ``${role_name}``,
            ``${rank}`` and ``${local_rank}`` in it are replaced.
        kwargs: The function's keyword arguments.
        background: Return a ``Job`` at once instead of waiting for the results.
        detach: Return a ``Job`` at once, and let the run go on when the kernel ends; ``attach`` connects to it again.
        keep_days: Days that the folder of a detached run stays after its end.
        start_method: Way of starting ranks: ``auto``, ``spawn``, ``fork`` or ``inline``. With ``inline`` the
            function runs in the kernel's process, as the only rank, where a debugger works.
        preload: Names of modules to import before ranks are forked.
        gradient_accumulation_steps: Micro-batches per optimizer step, for Accelerators without their own value.
        dynamo_backend: Backend by which the ranks' Accelerators compile models, such as ``inductor``.
        fsdp: Shard the models that the ranks' Accelerators prepare over the ranks.
        fsdp_options: Settings of ``fsdp`` by the names of Accelerate's flags without ``fsdp_``, such as
            ``{"state_dict_type": "full_state_dict"}``.
        parallelism_config_dp_replicate_size: Number of copies of a model, for Accelerators without a
            ``ParallelismConfig``.
        parallelism_config_dp_shard_size: Number of ranks over which each copy is sharded.
        parallelism_config_tp_size: Number of ranks that compute the parts of each layer, on the same samples.
        use_cpu: Train on the CPU even where there are GPUs.
        allow_initialized_cuda: Launch although CUDA is in use in the kernel.
        oversubscribe: Let more ranks than there are GPUs share them, over gloo.
        timeout_s: Seconds after which the run is stopped.
        end_at: The time limit, before which training stops and saves: ``23:30``, ``11.5h`` from now, or a date
            with a time. Default: the limit of a Slurm job.
        end_margin_s: Seconds before ``end_at`` at which ``Accelerator.should_stop`` becomes true.
        grace_s: Seconds that a rank has to end by itself before it is killed.
        log_dir: Folder for the ranks' logs. Default: a temporary one.
        name: Name of the run in the panel. Default: the function's name.
        profile: ``on`` to measure how the ranks' steps spend their time, or ``off``.
        view: View of the run: ``auto``, ``panel``, ``lines`` or ``none``.
        engine: Place of the ranks: ``local``, this machine, or ``ray``, a Ray cluster.
        engine_options: Options of the engine; see ``RayOptions``.

    Returns:
        ``Results``, one value a rank; or, with ``background=True`` or ``detach=True``, the ``Job``.

    Raises:
        ConfigError: An option has a value that isn't allowed.
        PreflightError: This machine or this kernel can't run the launch.
        PayloadError: An object that the function uses can't be sent.
        RankFailedError: A rank failed. The error reports the first failure of the last attempt, with the rank's
            exception as its cause, unless the rank was on another node.
        ResultError: A rank's value can't be pickled, or can't be unpickled here. The error carries the others.
        NodeLostError: Another node has gone, or the run was ended there.
        RunTimeoutError: ``timeout_s`` ran out.
        KeyboardInterrupt: The kernel was interrupted; every rank is gone.
    """
    options = _options(dict(locals()))
    _check_call(function, args)

    is_background = background or detach

    def launch() -> Job:
        return launcher.launch_function(
            function, tuple(args), dict(kwargs or {}), options, is_background=is_background, detach=detach
        )

    return launch() if is_background else foreground.run_in_foreground(launch)


@_suggesting
def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> Results:
    """Run a function in ranks on the CPU, even where there are GPUs, to try it out.

    Args:
        function: The function that each rank calls.
        args: Its positional arguments.
        num_processes: Number of ranks.

    Raises:
        NotebookAccelError: See ``notebook_launcher``.
    """
    results = notebook_launcher(function, args, num_processes, use_cpu=True)
    assert isinstance(results, Results)  # a ``Job`` comes only with ``background=True``
    return results


def _options(given: Mapping[str, Any]) -> LaunchConfig:
    """Resolve the options among the launcher's arguments."""
    named = {option.name: given[option.name] for option in configuration.fields() if option.name in given}
    port = given["use_port"]
    named["main_process_port"] = int(port) if isinstance(port, str) and port.isdecimal() else port
    for name, as_text in (("rdzv_conf", str), ("fsdp_options", plain_text), ("engine_options", json.dumps)):
        settings = given[name] or {}
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"{name}={settings!r} is {type(settings).__name__}, not a dictionary.", fix=f"{name}={{...: ...}}"
            )
        try:
            named[name] = tuple(f"{key}={as_text(value)}" for key, value in settings.items() if value is not None)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name} can't be written as text: {error}.", fix="numbers, texts and lists") from None
    return configuration.resolve_call(named)


def _check_call(function: object, args: object) -> None:
    if not callable(function):
        raise ConfigError(
            f"notebook_launcher takes a function, not {type(function).__name__}.",
            fix="notebook_launcher(train, args=(...)): the function itself, without calling it",
        )
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            "notebook_launcher takes no `async def`: a call alone runs nothing of it, and a rank has no event loop.",
            fix="a function that calls asyncio.run(...)",
        )
    if inspect.isgeneratorfunction(function):
        raise ConfigError(
            "notebook_launcher takes no function with a `yield`: a call alone runs nothing of it.",
            fix="return the values, in a list",
        )
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise ConfigError(
            f"args={args!r} is {type(args).__name__}, not a list of arguments.",
            fix=f"args=({args!r},): the comma makes it a tuple of one",
        )

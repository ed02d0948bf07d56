"""Checks before a launch, in the kernel, without importing torch or initialising a device.

A launch refuses with all findings at once, and ``doctor`` prints the same list. Every launch runs all checks, so each
must be quick and open as little as possible.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from notebook_accel import environment, host_memory, refusals, time_limit
from notebook_accel.config import LaunchConfig, closest_flag, fields, mesh_sizes
from notebook_accel.errors import ConfigError, Finding
from notebook_accel.formatting import format_size
from notebook_accel.launching import device_state, processes
from notebook_accel.launching.kernel.devices import Devices

_RANK_BYTES = 64 << 20  # any rank that computes something takes more
_SHARED_MEMORY = "/dev/shm"
_SHARED_BYTES = 64 << 20  # what Docker gives a container
# The longest path in sun_path (linux/un.h), less the names that multiprocessing gives to a folder and a socket.
_LONGEST_TEMPORARY = 107 - len("/pymp-12345678/listener-12345678")
# Options that need a template unless they have these values.
_NEEDS_TEMPLATE = (("max_restarts", 0), ("num_nodes", 1))
_GROUPS = pathlib.Path("/proc/self/cgroup")
_LINGERING = pathlib.Path("/var/lib/systemd/linger")  # a file for each user whose manager outlives the last login
_LOGIN = re.compile(r"/user\.slice/.*/session-[^/]+\.scope")
_SERVICE = re.compile(r"/([^/\n]+\.service)$", re.MULTILINE)
_LOGIND = "org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager"

_warned: set[str] = set()


def check(
    config: LaunchConfig, devices: Devices | None = None, captured: Mapping[str, Any] = {}
) -> tuple[Finding, ...]:
    """Return all findings against a launch from this process.

    Args:
        config: The options.
        devices: The ranks' devices. Default: those of this machine.
        captured: The objects that are sent to the ranks, by the labels that messages use for them.
    """
    devices = devices or Devices.find(config)
    findings = [devices.finding, *_options(config, devices), *_time_limit(config), _port(config)]
    findings += [_mesh(config, devices), *check_environment()]
    if config.start_method == "inline":
        findings += _inline(config)
    else:
        findings += [*_system(), _too_many_ranks(config, devices)]
        if sys.platform == "linux":
            findings += [_no_memory(config, devices), _no_shared_memory(), _long_temporary_folder()]
        if devices.platform is not None:
            findings += devices.platform.findings(config.num_processes or devices.available)
        if devices.start_method(config) == "fork":
            findings += check_fork(on_gpus=devices.kind == "GPU")
        elif devices.kind == "GPU":
            findings.append(device_state.cuda_in_use(is_allowed=config.allow_initialized_cuda))
        elif devices.kind == "TPU":
            findings.append(device_state.xla_in_use())
        findings.append(device_state.captured_on_gpu(captured))
    return tuple(finding for finding in findings if finding is not None)


def warn(findings: tuple[Finding, ...]) -> None:
    """Print the findings that don't refuse the launch, each once in the life of this process."""
    for finding in findings:
        if not finding.refuses and finding.what not in _warned:
            _warned.add(finding.what)
            print(f"Warning: {finding}", file=sys.stderr)


def _options(config: LaunchConfig, devices: Devices) -> Iterator[Finding]:
    """Yield findings about options that don't fit the devices, the start method or each other."""
    if config.mixed_precision == "fp16" and devices.kind != "GPU":
        where = "the CPU" if devices.kind == "CPU" else devices.describe(devices.available)
        yield Finding(
            f"mixed_precision='fp16' was asked for, and the ranks run on {where}.",
            "fp16 needs gradient scaling, which works on GPUs; elsewhere most operations have no fp16 version.",
            "--mixed_precision bf16, or no",
        )
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank and world_size.isdecimal() and int(world_size) > 1:
        yield Finding(
            f"This process is rank {rank} of {world_size} already.",
            "If each rank launches ranks of its own, all of them share the devices.",
            "call the function itself; or, if this process is no rank, unset RANK and WORLD_SIZE",
            refuses=False,
        )
    asked = [f"{name}={getattr(config, name)}" for name, usual in _NEEDS_TEMPLATE if getattr(config, name) != usual]
    method = devices.start_method(config)
    if asked and method in ("inline", "fork"):
        yield Finding(
            f"{' and '.join(asked)} was asked for, and the start method is {method}.",
            "Restarts and several nodes need ranks that are forked from a clean process, and that method has none.",
            "--max_restarts 0 and --num_nodes 1, or --start_method spawn",
        )
    if config.engine_options and config.engine == "local":
        yield Finding(
            f"engine_options={', '.join(config.engine_options)!r} would do nothing.",
            "These options are for a cluster, and engine='local' runs ranks on this machine.",
            "--engine ray (engine='ray'), or leave them out",
        )
    if config.fsdp_options and not config.fsdp:
        yield Finding(
            f"fsdp_options={', '.join(config.fsdp_options)!r} would do nothing.",
            "They are settings of sharded models, and without fsdp each rank holds whole ones.",
            "--fsdp (fsdp=True), or leave them out",
        )
    if config.fsdp and devices.platform is not None:
        why = "torch's fully_shard is for GPUs and CPUs."
        yield Finding("fsdp was asked for, and the ranks run on TPUs.", why, "leave out --fsdp")


def check_environment() -> Iterator[Finding]:
    """Yield findings about environment variables that ask for something and don't get it."""
    flags = [name for name in (environment.USE_PARALLELISM, *environment.SWITCHES) if name in os.environ]
    reads: list[Callable[[], object]] = [environment.follows_accelerate, environment.is_debugging]
    reads += [functools.partial(environment.flag, name) for name in flags]
    for read in reads:
        try:
            read()
        except ConfigError as error:
            yield Finding(error.what, error.why, error.fix)
    named = [name for name in os.environ if name.startswith("NOTEBOOK_ACCEL_")]
    known = [*environment.OWN, *(f"NOTEBOOK_ACCEL_{option.name.upper()}" for option in fields())] if named else []
    for name in named:
        if name not in known:
            by_flag = {_as_flag(each): each for each in known}
            close = by_flag.get(closest_flag(_as_flag(name), by_flag))
            yield Finding(
                f"The environment variable {name} has no effect.",
                "There is no option of that name.",
                (f"is it {close}? Otherwise " if close else "") + f"unset {name}",
                refuses=False,
            )
    for name, row in refusals.rows(refusals.VARIABLE).items():
        if name in os.environ and environment.is_true(os.environ[name]):
            yield Finding(
                f"The environment variable {name} asks for {row.feature}, which isn't supported here.",
                "The ranks would train without it.",
                f"unset {name} (del os.environ[{name!r}]){row.advice}",
            )


def _as_flag(variable: str) -> str:
    return f"--{variable.removeprefix('NOTEBOOK_ACCEL_').lower()}"


def _mesh(config: LaunchConfig, devices: Devices) -> Finding | None:
    sizes = mesh_sizes(config)
    if not sizes:
        return None
    ranks = (config.num_processes or devices.available) * config.num_nodes
    if math.prod(sizes.values()) == ranks:
        return None
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    return Finding(
        f"The mesh ({shown}) has {math.prod(sizes.values())} ranks, and the launch has {ranks}.",
        "Each rank has one place in the mesh, so the sizes multiply to the number of ranks.",
        f"sizes whose product is {ranks}, or another --num_processes",
    )


def _time_limit(config: LaunchConfig) -> Iterator[Finding]:
    end_s, now_s = time_limit.end_of(config.end_at), time.time()
    if end_s is not None and end_s - config.end_margin_s <= now_s:
        source = f"end_at={config.end_at}" if config.end_at else "The time limit of the Slurm job"
        yield Finding(
            f"{source} is {'past' if end_s <= now_s else 'near'}: {time_limit.in_words(end_s)}.",
            f"Accelerator.should_stop is true from {config.end_margin_s:g} s before it, and so from the first step.",
            "a later --end_at, or an --end_margin_s that is less than the time that is left",
            refuses=bool(config.end_at),
        )
    if config.num_nodes > 1 and time_limit.is_duration(config.end_at):
        yield Finding(
            f"end_at={config.end_at} is a duration, and the run has several nodes.",
            "Each node would count it from its own launch, and all have to stop at the same step.",
            "--end_at with a time of day such as 23:30, on every node",
        )


def _inline(config: LaunchConfig) -> Iterator[Finding]:
    if config.num_processes not in (None, 1):
        yield Finding(
            f"{config.num_processes} processes were asked for, and start_method='inline' runs in the kernel's own.",
            "One process is one rank.",
            "--num_processes 1 to debug it here, or --start_method spawn for several ranks",
        )
    if config.timeout_s is not None:
        yield Finding(
            f"timeout_s={config.timeout_s:g} was given, and start_method='inline' runs in the kernel's own process.",
            "It couldn't be ended there without ending the kernel.",
            "leave out timeout_s, and interrupt the kernel when it takes too long",
        )


def _system() -> Iterator[Finding]:
    inline = "--start_method inline runs one rank in this process, anywhere"
    if sys.platform != "linux":
        yield Finding(
            f"Launching needs Linux 5.3 or later; this is {sys.platform}.",
            "Ranks are started and ended with process descriptors and anonymous memory files, which only Linux has.",
            f"use Linux, or WSL 2 on Windows; {inline}",
        )
    elif not processes.are_supported():
        yield Finding(
            f"Launching needs a system call that this system refuses: {processes.missing_call()}.",
            "Ranks are started and cleaned up with it. Linux has it since 5.3; a container's sandbox may forbid it.",
            f"use a newer kernel, or a container whose sandbox (seccomp profile) allows it; {inline}",
        )


def _too_many_ranks(config: LaunchConfig, devices: Devices) -> Finding | None:
    is_enough = config.num_processes is None or config.num_processes <= devices.available
    if devices.kind != "GPU" or is_enough or config.oversubscribe:
        return None
    return Finding(
        f"{config.num_processes} processes were asked for, and there {'is' if devices.available == 1 else 'are'} "
        f"{devices.describe(devices.available)}.",
        "Each rank needs a GPU of its own: NCCL refuses two ranks on one.",
        f"--num_processes {devices.available}, or --use_cpu to train on the CPU; or, to see whether it runs at all, "
        "--oversubscribe (oversubscribe=True), which shares GPUs over gloo",
    )


def _port(config: LaunchConfig) -> Finding | None:
    port = config.main_process_port
    if not port or config.num_nodes > 1:  # with several nodes the elastic process checks the port
        return None
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        return Finding(
            f"The port {port} for the ranks' store can't be used: {os.strerror(error.errno or 0)}.",
            _holder_of(port) or "One process listens on a port, and the ranks meet at this one.",
            "leave out main_process_port (use_port) to use a free one",
        )
    return None


def _holder_of(port: int) -> str:
    """Return a sentence about the process that listens on a port; empty if this user may not see it."""
    if sys.platform != "linux":
        return ""
    fields = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{line[9]}]" for line in fields if line[1].endswith(f":{port:04X}") and line[3] == "0A"}
    for link in pathlib.Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # another user's file, or closed meanwhile
            if os.readlink(link) in sockets:
                process = link.parts[2]
                name = pathlib.Path("/proc", process, "comm").read_text().strip()
                return f"Process {process} ({name}) listens there."
    return ""


def _no_memory(config: LaunchConfig, devices: Devices) -> Finding | None:
    ranks = config.num_processes or devices.available
    available_bytes = host_memory.available_bytes()
    if available_bytes >= ranks * _RANK_BYTES:
        return None
    return Finding(
        f"There is too little memory for {ranks} {'process' if ranks == 1 else 'processes'}: "
        f"{format_size(available_bytes)} are available.",
        "The system would kill some process, perhaps the kernel.",
        "delete variables that you no longer need, end other processes, or ask for fewer ranks",
    )


def _no_shared_memory() -> Finding | None:
    """Check /dev/shm, which DataLoader workers and NCCL use."""
    try:
        status = os.statvfs(_SHARED_MEMORY)
        free_bytes = status.f_bavail * status.f_frsize
    except OSError:
        free_bytes = 0
    is_writable = os.access(_SHARED_MEMORY, os.W_OK)
    if free_bytes > _SHARED_BYTES and is_writable:
        return None
    how = f"has {format_size(free_bytes)} left" if is_writable else "can't be written to"
    return Finding(
        f"{_SHARED_MEMORY} {how}.",
        "DataLoader workers pass batches through it, and NCCL its messages; without space they die of bus errors.",
        "start the container with --shm-size=8g or --ipc=host; or DataLoader(num_workers=0)",
        refuses=False,
    )


def _long_temporary_folder() -> Finding | None:
    """Check the path of the temporary folder, where multiprocessing puts the sockets that pass tensors."""
    folder = ""
    with contextlib.suppress(OSError):  # without such a folder, ranks work too
        folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) <= _LONGEST_TEMPORARY:
        return None
    return Finding(
        f"The folder for temporary files has a path of {len(os.fsencode(folder))} bytes: {folder}",
        "DataLoader workers pass batches through a socket there, and hang if its path is longer than Linux allows. "
        f"With {_LONGEST_TEMPORARY} bytes it fits.",
        "os.environ['TMPDIR'] = '/tmp' before anything uses the folder; or DataLoader(num_workers=0)",
        refuses=False,
    )


# Packages whose threads are harmless in forks, since they hold no lock that a rank takes.
_HARMLESS = {"IPython", "ipykernel", "ipywidgets", "kernel_ext", "notebook_accel", "tornado", "tqdm", "zmq"}
# Libraries that start to use a device, or start threads, when they are imported or first used.
_BREAK_FORKING = {
    "bitsandbytes": "it uses CUDA as soon as it is imported",
    "cupy": "it uses CUDA without torch's knowledge",
    "jax": "its threads hold locks",
    "tensorflow": "its threads hold locks",
}


def check_fork(*, on_gpus: bool = False) -> list[Finding]:
    """Return all findings against forking this process. With ``on_gpus``, the forks compute on GPUs."""
    xla = device_state.xla_in_use()
    return [*_cuda(on_gpus=on_gpus), *([] if xla is None else [xla]), *_state_of_the_kernel()]


def _cuda(*, on_gpus: bool) -> Iterator[Finding]:
    if device_state.is_cuda_initialized():
        yield Finding(
            "CUDA is initialised in this kernel, and start_method='fork' was asked for.",
            "CUDA doesn't work in a fork of a process that has initialised it; allow_initialized_cuda can't change "
            "that.",
            "--start_method spawn; or restart the kernel and use the GPU only inside the cell or function",
        )
    elif on_gpus and device_state.forks_lose_cuda():
        yield Finding(
            "This kernel has woken CUDA's driver, as torch.cuda.is_available() does; start_method='fork' was asked "
            "for.",
            "CUDA doesn't work in a fork of such a process, although torch.cuda.is_initialized() is still False in it.",
            "--start_method spawn; or set PYTORCH_NVML_BASED_CUDA_CHECK=1 before the kernel starts, with which "
            "torch.cuda.is_available() leaves the driver asleep",
        )


def _state_of_the_kernel() -> Iterator[Finding]:
    """Yield findings about state that a fork wrongly inherits from this process, or loses."""
    if names := [thread.name for thread in threading.enumerate() if not _is_harmless(thread)]:
        yield Finding(
            f"Threads run in this kernel: {', '.join(names)}.",
            "Forks of it don't have them. A lock that a thread holds at that moment stays locked in the ranks, and a "
            "rank that takes it waits for ever.",
            "end them before the launch, or --start_method spawn",
            refuses=False,
        )
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        yield Finding(
            "The kernel itself is in a process group of torch.distributed.",
            "Ranks that are forked from it would use it as theirs.",
            "torch.distributed.destroy_process_group(), or --start_method spawn",
        )
    state: Any = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    if getattr(state, "_shared_state", None):
        yield Finding(
            "There is an Accelerator of the accelerate library in this kernel.",
            "Ranks that are forked from it would inherit its state, in which there is only one process.",
            "AcceleratorState._reset_state(True) (from accelerate.state), or --start_method spawn",
        )
    if found := {name: why for name, why in _BREAK_FORKING.items() if name in sys.modules}:
        yield Finding(
            f"This kernel has imported {', '.join(found)}.",
            "; ".join(f"{name}: {why}" for name, why in found.items()) + ". A fork may crash or wait for ever.",
            "import it only inside the cell or function, or --start_method spawn",
            refuses=False,
        )


def _is_harmless(thread: threading.Thread) -> bool:
    # Find the package by the thread's target function or, for a subclass of Thread, by its class.
    runs = getattr(thread, "_target", None) or type(thread)
    package = (getattr(runs, "__module__", None) or "").partition(".")[0]
    return thread is threading.main_thread() or package in _HARMLESS or isinstance(thread, threading._DummyThread)


def check_detached() -> tuple[Finding, ...]:
    """Return a warning if systemd ends even a detached run of this process, with its service or the user's login."""
    groups, user = "", "$USER"
    with contextlib.suppress(OSError, KeyError):  # there are no control groups, or the user has no name
        groups = _GROUPS.read_text()
        user = _GROUPS.owner()
    service, is_of_manager, lingers = _SERVICE.search(groups), "/user@" in groups, (_LINGERING / user).is_file()
    ask = f"systemctl {'--user ' if is_of_manager else ''}show --property=KillMode --value"
    if service and _answer(f"{ask} {service[1]}") not in ("process", "none"):
        when = f"the service {service[1]} is stopped or restarted"
    elif (is_of_manager and not lingers) or (
        _LOGIN.search(groups) and _answer(f"busctl get-property {_LOGIND} KillUserProcesses") == "b true"
    ):
        when = "you log out of this machine"
    else:
        return ()
    fixes = [] if lingers else [f"loginctl enable-linger {user}, once"]
    if service or not is_of_manager:
        folder = "" if "XDG_RUNTIME_DIR" in os.environ else f"XDG_RUNTIME_DIR=/run/user/{os.getuid()} "
        fixes.append(f"{folder}systemd-run --user --scope jupyter lab (or tmux, or notebook-accel), to start it anew")
    why = "This process belongs to that service or login, and so does all that it starts."
    return (Finding(f"systemd ends a detached run when {when}.", why, "; then ".join(fixes), refuses=False),)


def _answer(command: str) -> str:
    """Return what a command prints; empty if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            command.split(), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, timeout=2.0
        ).strip()
    return ""


def check_prepared(variables: Mapping[str, Any], source: str) -> tuple[Finding, ...]:
    """Return a warning about optimizers and loaders that the notebook has prepared, and the cell doesn't prepare."""
    prepared = [name for name, value in variables.items() if _is_prepared(value)]
    if not prepared or "prepare" in source:
        return ()
    names = ", ".join(f"`{name}`" for name in prepared)
    return (
        Finding(
            f"Prepared in the notebook: {names}. The ranks get the unprepared objects.",
            "The cell prepares nothing, so each rank would train by itself on all of the data.",
            "call accelerator.prepare in the cell",
            refuses=False,
        ),
    )


def _is_prepared(value: object) -> bool:
    return any(
        kind.__name__ in ("AcceleratedOptimizer", "DataLoaderShard")
        and kind.__module__.startswith("notebook_accel.training.")
        for kind in type(value).__mro__
    )

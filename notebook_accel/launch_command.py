"""``notebook-accel launch``: run a script on every device, with the options of a notebook's launches.

Command lines that were written for ``accelerate launch`` work where the same feature exists here. All other flags of
Accelerate are parsed too, so that one error names all flags that can't be honoured. None is silently ignored.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import pathlib
import select
import shlex
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any

from notebook_accel import config, environment, interrupts, refusals
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, RankFailedError
from notebook_accel.launching.kernel import foreground, launcher
from notebook_accel.launching.kernel.devices import Devices
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.ranks.script import Script

_INTERRUPT = "KeyboardInterrupt"
_SHORT = {"quiet": ["-q"], "tee": ["-t"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``launch``."""
    config.add_flags(parser)
    parser.add_argument("--config_file", type=pathlib.Path, metavar="FILE", help="Default: the one that launches read.")
    parser.add_argument("--cpu", action="store_true", help="The same as --use_cpu.")
    parser.add_argument("--multi_gpu", action="store_true", help="Refuse to run where there is no GPU.")
    parser.add_argument("--tpu", action="store_true", help="Refuse to run where there is no TPU.")
    parser.add_argument(
        "--gpu_ids", metavar="INT,...", help="The GPUs that ranks may use. Default: all that are visible."
    )
    parser.add_argument(
        "--num_machines",
        type=int,
        metavar="INT",
        help="As --num_nodes, but num_processes, from the flag or elsewhere, counts those of all nodes.",
    )
    parser.add_argument("--machine_rank", type=int, metavar="INT", help="The same as --node_rank.")
    parser.add_argument("--main_process_ip", metavar="STR", help="The same as --master_addr.")
    parser.add_argument(
        "--num_cpu_threads_per_process", type=int, metavar="INT", help="Threads that a rank computes with on the CPU."
    )
    parser.add_argument("--debug", action="store_true", help="Debug mode: a trial run, and collectives are compared.")
    parser.add_argument(
        "--detach",
        action="store_true",
        help="Don't wait: the run continues when the terminal closes. notebook-accel attach NAME shows it.",
    )
    parser.add_argument("-m", "--module", action="store_true", help="The script is a module's name, as for python -m.")
    for name in environment.FSDP_OPTIONS:
        parser.add_argument(f"--fsdp_{name}", dest=f"fsdp_{name}", action="append", help=argparse.SUPPRESS)
    for kind, options in (
        (refusals.FLAG, {"action": "append"}),
        (refusals.SWITCH, {"action": "append_const", "const": True}),
    ):
        for name in refusals.rows(kind):
            spelt = [f"--{name}", *_SHORT.get(name, [])]
            parser.add_argument(*spelt, dest=f"accelerate_{name}", help=argparse.SUPPRESS, **options)
    parser.add_argument("script", help="The script, or with -m the module.")
    arguments = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="The script's arguments.")
    arguments.required = False  # in the error about a missing script


def _refuse_foreign_flags(parsed: argparse.Namespace) -> None:
    """Raise one error about all given flags of Accelerate that can't be honoured."""
    by_row: dict[refusals.Row, list[str]] = {}
    for name, row in refusals.rows(refusals.FLAG, refusals.SWITCH).items():
        for value in getattr(parsed, f"accelerate_{name}", None) or ():
            if not row.allows(value):
                by_row.setdefault(row, []).append(f"--{name}" if value is True else f"--{name} {value}")
    if by_row:
        found = "\n".join(f"  {', '.join(flags)}: {row.feature}{row.advice}" for row, flags in by_row.items())
        raise ConfigError(
            f"This line has flags for what isn't supported here:\n{found}",
            fix="leave these flags out, and follow the advice about each",
        )


def run(parsed: argparse.Namespace) -> int:
    """Run the script on every rank, or with ``--detach`` only start it.

    SIGTERM, a closed terminal and a closed pipe end the run as Ctrl-C does.

    Returns:
        0 if all ranks have succeeded; the status of the rank that failed first, as a shell reports it; or that of the
        signal that has ended the run.

    Raises:
        NotebookAccelError: The script could not be launched.
    """
    _refuse_foreign_flags(parsed)
    script = Script(parsed.script, tuple(parsed.arguments), parsed.module)
    script.check()
    _set_variables(parsed)
    chosen = _options(parsed)
    _check_devices(parsed, chosen)
    with end_signals_as_interrupts() as received:
        try:
            printable = "".join(character if character.isprintable() else "?" for character in script.name[:80])
            launch = functools.partial(launcher.launch_function, script.run, (), {}, chosen, name=printable)
            if parsed.detach:
                launch(detach=True, show=_say_how_to_find)
                return 0
            foreground.run_in_foreground(functools.partial(launch, is_background=False))
        except RankFailedError as error:
            sys.stderr.write(f"{error}\n")
            return _status(error)
        except KeyboardInterrupt as interrupt:
            text = _described(interrupt)
            if received.number != signal.SIGINT:
                text = text.replace(_INTERRUPT, received.number.name, 1)
            sys.stderr.write(f"\n{text}\n")
            return 128 + received.number  # as in shells
    return 0


def _say_how_to_find(job: Job) -> None:
    name = shlex.quote(job.name)
    print(f"{job.name!r} is launched on {job.devices}, and continues when this terminal closes.")
    print(f"To see it: notebook-accel attach {name}. To stop it: notebook-accel stop {name}.")


def _described(interrupt: KeyboardInterrupt) -> str:
    if hasattr(interrupt, "_render_traceback_"):
        return "\n".join(interrupt._render_traceback_())
    return f"{_INTERRUPT}: nothing was launched."


def _set_variables(parsed: argparse.Namespace) -> None:
    """Set the environment variables for the ranks."""
    if parsed.num_cpu_threads_per_process is not None:
        os.environ["OMP_NUM_THREADS"] = str(parsed.num_cpu_threads_per_process)
    if parsed.gpu_ids not in (None, "all"):
        os.environ["CUDA_VISIBLE_DEVICES"] = parsed.gpu_ids
    if parsed.debug:
        os.environ[environment.DEBUG[0]] = "1"
    # An exported script has settings of its own, which count where no variable is set. So a default that was asked for
    # needs its variable.
    given = _given(parsed)
    chosen = config.of_environment(without=given) | given
    for option in config.fields():
        variable, value = config.OF_ACCELERATE.get(option.name), chosen.get(option.name)
        if variable and value is not None and value == option.default:
            os.environ[variable] = str(value).lower()


def _given(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the flags set."""
    given: dict[str, Any] = config.given_flags(parsed)
    if parsed.cpu:
        given["use_cpu"] = True
    asked = {"num_nodes": parsed.num_machines, "node_rank": parsed.machine_rank, "master_addr": parsed.main_process_ip}
    given |= {name: value for name, value in asked.items() if value is not None}
    settings = [
        f"{name}={value}" for name in environment.FSDP_OPTIONS for value in getattr(parsed, f"fsdp_{name}") or ()
    ]
    if settings:
        given["fsdp_options"] = (*given.get("fsdp_options", ()), *settings)
    return given


def _options(parsed: argparse.Namespace) -> LaunchConfig:
    file = parsed.config_file or config.default_path()
    if parsed.config_file is not None and not file.exists():
        raise ConfigError(f"There is no configuration file {file}.", fix="notebook-accel config writes one")
    return _shared_out(config.resolve(_given(parsed), file=file), parsed.num_machines or 1)


def _check_devices(parsed: argparse.Namespace, chosen: LaunchConfig) -> None:
    """Refuse flags that ask for devices which aren't there."""
    devices = Devices.find(chosen)
    for flag, is_asked, is_there, kind in (
        ("--multi_gpu", parsed.multi_gpu, devices.kind == "GPU", "GPU"),
        ("--gpu_ids", parsed.gpu_ids is not None, devices.kind == "GPU", "GPU"),
        ("--tpu", parsed.tpu, devices.platform is not None, "TPU"),
    ):
        if is_asked and not is_there:
            raise ConfigError(
                f"{flag} was asked for, and there is no {kind} that ranks could use.", fix=f"leave out {flag}"
            )


def _shared_out(chosen: LaunchConfig, machines: int) -> LaunchConfig:
    """Return the options with the number of processes on each machine instead of on all together."""
    if machines == 1 or chosen.num_processes is None:
        return chosen
    if chosen.num_processes % machines:
        raise ConfigError(
            f"{chosen.num_processes} processes can't be shared out evenly among {machines} machines.",
            why="With --num_machines, num_processes counts those of all machines, as with Accelerate.",
            fix="a multiple, or --num_nodes, with which it counts those of each",
        )
    return chosen.replace(num_processes=chosen.num_processes // machines)


def _status(error: RankFailedError) -> int:
    """Return the exit status of the rank that failed first."""
    if error.signal is not None:
        return 128 + error.signal
    code = error.__cause__.code if isinstance(error.__cause__, SystemExit) else error.exit_code
    return (code % 256 or 1) if isinstance(code, int) else 1  # a status has eight bits


class EndSignal:
    """The first signal that came. SIGINT only counts if no other one came."""

    number = signal.SIGINT

    def _take(self, number: int, _: types.FrameType | None) -> None:
        has_closed = silence_closed_streams()
        if number == signal.SIGPIPE and not has_closed:  # from a socket, whose writer gets an error too
            return
        if self.number != signal.SIGINT:  # systemd and closed terminals send several, which mustn't shorten the grace
            return
        self.number = signal.Signals(number)
        interrupts.interrupt()


@contextlib.contextmanager
def end_signals_as_interrupts() -> Iterator[EndSignal]:
    """Make SIGTERM, SIGHUP and SIGPIPE raise KeyboardInterrupt in the block, unless they are ignored."""
    received = EndSignal()
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, received._take) for number in (*numbers, signal.SIGPIPE)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def silence_closed_streams() -> bool:
    """Redirect closed standard streams to /dev/null. Return whether there was one."""
    closed = [stream for stream in (1, 2) if _has_closed(stream)]
    for stream in closed:
        silence(stream)
    return bool(closed)


def silence(descriptor: int) -> None:
    """Redirect a descriptor to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _has_closed(descriptor: int) -> bool:
    """Return whether nobody can read the stream any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))

"""``notebook-accel launch``: run a script on every device, with the options of a notebook's launches.

A line that was written for ``accelerate launch`` is understood as far as there is the same here; a flag for something
that isn't there is refused, and never passed over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import select
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any

from notebook_accel import accelerate_flags, config, environment
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, RankFailedError
from notebook_accel.launching.kernel import foreground, launcher
from notebook_accel.launching.kernel.devices import Devices
from notebook_accel.launching.ranks.script import Script

__all__ = ["EndSignal", "add_arguments", "end_signals_as_interrupts", "run", "silence_closed_streams"]

_INTERRUPT = "KeyboardInterrupt"


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
        "--num_machines", type=int, metavar="INT", help="As --num_nodes, with --num_processes for all of them together."
    )
    parser.add_argument("--machine_rank", type=int, metavar="INT", help="The same as --node_rank.")
    parser.add_argument("--main_process_ip", metavar="STR", help="The same as --master_addr.")
    parser.add_argument(
        "--num_cpu_threads_per_process", type=int, metavar="INT", help="Threads that a rank computes with on the CPU."
    )
    parser.add_argument("--debug", action="store_true", help="Debug mode: a trial run, and collectives are compared.")
    parser.add_argument("-m", "--module", action="store_true", help="The script is a module's name, as for python -m.")
    accelerate_flags.add_arguments(parser)
    parser.add_argument("script", help="The script, or with -m the module.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="What it finds in sys.argv.")


def run(parsed: argparse.Namespace) -> int:
    """Run the script on every rank.

    SIGTERM, a terminal that closes and a closed pipe end it as Ctrl-C does.

    Returns:
        0 if all ranks have ended well; the status of the rank that failed first, as a shell gives it; or that of the
        signal that has ended it.

    Raises:
        NotebookAccelError: It could not be launched.
    """
    accelerate_flags.refuse(parsed)
    script = Script(parsed.script, tuple(parsed.arguments), parsed.module)
    script.check()
    _set_variables(parsed)
    chosen = _options(parsed)
    with end_signals_as_interrupts() as received:
        try:
            named = chosen.replace(name=chosen.name or script.name[:80])
            foreground.run_in_foreground(
                lambda foreground_lock: launcher.launch_function(
                    script.run, (), {}, named, foreground_lock=foreground_lock
                )
            )
        except RankFailedError as error:
            sys.stderr.write(f"{error}\n")
            return _status(error)
        except KeyboardInterrupt as interrupt:
            said = getattr(interrupt, "_render_traceback_", lambda: [f"{_INTERRUPT}: nothing was launched."])()
            text = "\n".join(said)
            if received.number != signal.SIGINT:
                text = text.replace(_INTERRUPT, received.number.name, 1)
            sys.stderr.write(f"\n{text}\n")
            return 128 + received.number  # what shells make of it
    return 0


def _set_variables(parsed: argparse.Namespace) -> None:
    """Set the environment variables for the ranks."""
    if parsed.num_cpu_threads_per_process is not None:
        os.environ["OMP_NUM_THREADS"] = str(parsed.num_cpu_threads_per_process)
    if parsed.gpu_ids not in (None, "all"):
        os.environ["CUDA_VISIBLE_DEVICES"] = parsed.gpu_ids
    if parsed.debug:
        os.environ[environment.DEBUG[0]] = "1"


def _options(parsed: argparse.Namespace) -> LaunchConfig:
    given: dict[str, Any] = config.given_flags(parsed)
    if parsed.cpu:
        given["use_cpu"] = True
    given |= _of_machines(parsed)
    file = parsed.config_file or config.default_path()
    if parsed.config_file is not None and not file.exists():
        raise ConfigError(f"There is no configuration file {file}.", fix="notebook-accel config writes one")
    chosen = config.resolve(given, file=file)
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
    return chosen


def _of_machines(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return Accelerate's flags about several machines, as options."""
    asked = {"num_nodes": parsed.num_machines, "node_rank": parsed.machine_rank, "master_addr": parsed.main_process_ip}
    given = {name: value for name, value in asked.items() if value is not None}
    if (parsed.num_machines or 1) > 1 and isinstance(parsed.num_processes, int):
        if parsed.num_processes % parsed.num_machines:
            raise ConfigError(
                f"{parsed.num_processes} processes can't be shared out evenly among {parsed.num_machines} machines.",
                why="With --num_machines, --num_processes counts those of all machines, as with Accelerate.",
                fix="a multiple, or --num_nodes, with which it counts those of each",
            )
        given["num_processes"] = parsed.num_processes // parsed.num_machines
    return given


def _status(error: RankFailedError) -> int:
    """Return the exit status of the rank that failed first."""
    if error.signal is not None:
        return 128 + error.signal
    code = error.__cause__.code if isinstance(error.__cause__, SystemExit) else error.exit_code
    return code if isinstance(code, int) and 0 < code < 256 else 1


_STREAMS = (1, 2)


class EndSignal:
    """The first signal that came, SIGINT if none of the others did."""

    number = signal.SIGINT

    def _take(self, number: int, _: types.FrameType | None) -> None:
        has_closed = silence_closed_streams()
        if number == signal.SIGPIPE and not has_closed:  # a socket of somebody's, who gets an error for it
            return
        if self.number == signal.SIGINT:
            self.number = signal.Signals(number)
        raise KeyboardInterrupt


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
    closed = [stream for stream in _STREAMS if _has_closed(stream)]
    for stream in closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
        os.close(nowhere)
    return bool(closed)


def _has_closed(descriptor: int) -> bool:
    """Return whether nobody can read the stream any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))

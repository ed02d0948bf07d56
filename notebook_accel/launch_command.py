"""``notebook-accel launch``: a script on every device, with the options and the file that a notebook's launches have.

A line that was written for ``accelerate launch`` is understood as far as there is the same here; a flag for something
that isn't there is refused, and never passed over.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import sys
from typing import Any

from notebook_accel import config, options
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, RankFailedError
from notebook_accel.launching import following, launcher
from notebook_accel.launching.devices import Devices
from notebook_accel.launching.script import Script

__all__ = ["add_arguments", "run"]

_INTERRUPTED = 128 + signal.SIGINT  # what shells make of it
_NOT_THERE = "Several machines come in a later version; this one runs on one machine."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be said after ``launch``."""
    options.add_flags(parser)
    parser.add_argument("--config_file", type=pathlib.Path, metavar="FILE", help="Default: the one that launches read.")
    parser.add_argument("--cpu", action="store_true", help="The same as --use_cpu.")
    parser.add_argument("--multi_gpu", action="store_true", help="Refuse to run where there is no GPU.")
    parser.add_argument("--tpu", action="store_true", help="TPUs are not there yet: refused.")
    parser.add_argument("--num_machines", type=int, metavar="INT", help="Several machines are not there yet: 1.")
    parser.add_argument("--machine_rank", type=int, metavar="INT", help="Several machines are not there yet: 0.")
    parser.add_argument("--main_process_ip", metavar="STR", help="Several machines are not there yet: this one.")
    parser.add_argument(
        "--num_cpu_threads_per_process", type=int, metavar="INT", help="Threads that a rank computes with on the CPU."
    )
    parser.add_argument("-m", "--module", action="store_true", help="The script is a module's name, as for python -m.")
    parser.add_argument("script", help="The script, or with -m the module.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="What it finds in sys.argv.")


def run(parsed: argparse.Namespace) -> int:
    """Runs the script on every rank.

    Returns:
        0 if all ranks have ended well; else the status of the rank that failed first, as a shell gives it.

    Raises:
        NotebookAccelError: It could not be launched.
    """
    _refuse_what_is_not_there(parsed)
    script = Script(parsed.script, tuple(parsed.arguments), parsed.module)
    script.check()
    chosen = _options(parsed)
    if parsed.num_cpu_threads_per_process is not None:
        os.environ["OMP_NUM_THREADS"] = str(parsed.num_cpu_threads_per_process)
    job = launcher.launch_function(script.run, (), {}, chosen.replace(name=chosen.name or script.name[:80]))
    try:
        following.follow(job)
    except RankFailedError as error:
        sys.stderr.write(f"{error}\n")
        return _status(error)
    except KeyboardInterrupt as interrupt:
        said = getattr(interrupt, "_render_traceback_", lambda: ["KeyboardInterrupt"])()
        sys.stderr.write("\n".join(["", *said, ""]))
        return _INTERRUPTED
    return 0


def _options(parsed: argparse.Namespace) -> LaunchConfig:
    given: dict[str, Any] = options.given(parsed)
    if parsed.cpu:
        given["use_cpu"] = True
    file = parsed.config_file or config.default_path()
    if parsed.config_file is not None and not file.exists():
        raise ConfigError(f"There is no configuration file {file}.", fix="notebook-accel config writes one")
    chosen = config.resolve(given, file=file)
    if parsed.multi_gpu and Devices.find(chosen).kind != "GPU":
        raise ConfigError(
            "--multi_gpu was asked for, and there is no GPU that ranks could use.", fix="leave it out, or --cpu"
        )
    return chosen


def _refuse_what_is_not_there(parsed: argparse.Namespace) -> None:
    for flag, is_fine in (
        ("tpu", not parsed.tpu),
        ("num_machines", parsed.num_machines in (None, 1)),
        ("machine_rank", parsed.machine_rank in (None, 0)),
        ("main_process_ip", parsed.main_process_ip in (None, "127.0.0.1", "localhost")),
    ):
        if not is_fine:
            value = getattr(parsed, flag)
            shown = f"--{flag}" if value is True else f"--{flag} {value}"
            raise ConfigError(f"{shown} is not there yet.", why=_NOT_THERE, fix=f"leave out --{flag}")


def _status(error: RankFailedError) -> int:
    """The exit status of the rank that failed first."""
    if error.signal is not None:
        return 128 + error.signal
    code = error.__cause__.code if isinstance(error.__cause__, SystemExit) else error.exit_code
    return code if isinstance(code, int) and 0 < code < 256 else 1

"""The command line: parses and calls, no logic of its own.

``notebook-accel env`` prints what a bug report needs, ``notebook-accel doctor`` what speaks against a launch here;
``notebook-accel config`` asks what the configuration file shall say, and writes it; ``notebook-accel launch`` runs a
script on every device.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from notebook_accel import __version__, config, end_signals, launch_command, options, questions
from notebook_accel.errors import NotebookAccelError
from notebook_accel.launching.kernel import configuring, launcher
from notebook_accel.launching.kernel.checks.devices import Devices
from notebook_accel.launching.kernel.checks.machine import Machine

__all__ = ["main"]

_OF_ACCELERATE = (
    "Other flags of `accelerate launch` are understood; those for what isn't done here are refused by name."
)
_REPORTED = (
    *("torch", "torch-xla", "ipython", "ipykernel", "ipywidgets", "jupyterlab", "cloudpickle", "msgspec"),
    *("nvidia-ml-py", "numpy", "accelerate"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: The command line after the program's name; by default this process's.

    Returns:
        The exit status: 0 if all is well, 1 if not, 2 for a command line that can't be understood.
    """
    parsed, unknown = _parser().parse_known_args(arguments)
    if unknown:
        parsed.parser.refuse(unknown[0])
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        status = run(parsed)
        sys.stdout.flush()
    except NotebookAccelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # as of `notebook-accel env | head -1`
        end_signals.silence_closed()
        return 128 + signal.SIGPIPE
    return status


class _Parser(argparse.ArgumentParser):
    """Takes flags with dashes inside too, ``--num-processes`` as ``--num_processes``, as Accelerate does."""

    def add_argument(self, *names: Any, **how: Any) -> argparse.Action:
        action = super().add_argument(*names, **how)
        dashed = [name.replace("_", "-") for name in names if name.startswith("--") and "_" in name]
        if dashed:
            super().add_argument(*dashed, **{**how, "dest": action.dest, "help": argparse.SUPPRESS})
        return action

    def refuse(self, word: str) -> NoReturn:
        """Ends with the error that there is no such option."""
        close = options.closest(word, self._option_string_actions)
        known = f"is it {close}? " if close else ""
        self.exit(2, f"{self.prog}: there is no option {word}; {known}{self.prog} --help shows every option\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="notebook-accel", description="Train on every accelerator of this machine, from a notebook cell."
    )
    parser.add_argument("--version", action="version", version=f"notebook-accel {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    env = commands.add_parser("env", help="print what to paste into a bug report")
    env.set_defaults(run=_env, parser=env)
    doctor = commands.add_parser(
        "doctor", help="print what speaks against a launch here; exit 1 if it would be refused"
    )
    doctor.add_argument("--trial", action="store_true", help="also start ranks that meet and use their devices")
    options.add_flags(doctor)
    doctor.set_defaults(run=_doctor, parser=doctor)
    asking = commands.add_parser("config", help="ask what the configuration file shall say, and write it")
    options.add_flags(asking)
    asking.add_argument("--config_file", type=pathlib.Path, metavar="FILE", help="Where to. Default: where it is read.")
    asking.add_argument("--default", action="store_true", help="Ask nothing: what was found, and the flags.")
    asking.add_argument("--overwrite", action="store_true", help="With --default, replace a file that is there.")
    asking.set_defaults(run=_config, parser=asking)
    launch = commands.add_parser(
        "launch", help="run a script on every device of this machine", allow_abbrev=False, epilog=_OF_ACCELERATE
    )
    launch_command.add_arguments(launch)
    launch.set_defaults(run=launch_command.run, parser=launch)
    return parser


def _env(_: argparse.Namespace) -> int:
    lines = {"notebook-accel": __version__, "python": platform.python_version(), "platform": platform.platform()}
    lines |= {name: _version(name) for name in _REPORTED}
    devices = Devices.find(config.LaunchConfig())
    lines |= {**dict(Machine.find().facts()), "devices": devices.describe(devices.available)}
    width = max(map(len, lines))
    for name, value in lines.items():
        sys.stdout.write(f"{name:<{width}}  {value}\n")
    return 0


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _config(parsed: argparse.Namespace) -> int:
    draft = configuring.Draft(parsed.config_file)
    given = options.given(parsed)
    draft.values.update(given)
    questions.tell(draft)
    if parsed.default:
        questions.show(draft)
    elif not questions.ask(draft, given):
        sys.stdout.write("Nothing was written.\n")
        return 1
    path = draft.write(overwrite=parsed.overwrite or not parsed.default)
    sys.stdout.write(f"Written: {path}\n")
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    asked = config.resolve(options.given(parsed), file=config.default_path())
    text, is_refused = launcher.diagnosis(asked, tries=parsed.trial)
    sys.stdout.write(f"{text}\n")
    return int(is_refused)

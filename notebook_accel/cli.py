"""The command line.

``notebook-accel env`` prints the facts for a bug report, ``notebook-accel doctor`` the obstacles to a launch here;
``notebook-accel config`` asks for options and writes the configuration file; ``notebook-accel launch`` runs a script on
every device; ``notebook-accel demo`` opens the first example notebook; ``notebook-accel runs | attach | logs | stop``
are for detached runs.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from notebook_accel import VERSION, config, demo_command, launch_command, runs_command, trial
from notebook_accel.config import Option
from notebook_accel.errors import ConfigError, NotebookAccelError, documentation_of
from notebook_accel.formatting import aligned
from notebook_accel.launching.kernel.config_draft import BASIC, Draft
from notebook_accel.launching.kernel.devices import Devices, Machine

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of writing to a file or a terminal
_EPILOG = "Other flags of `accelerate launch` are understood; those that are not supported here are refused by name."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default this process's command line.

    Return the exit status: 0 for success, 1 for failure, 2 for a command line that can't be parsed.
    """
    _prepare_streams()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # as in `notebook-accel env | head -1`
        launch_command.silence_closed_streams()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        launch_command.silence(1)  # where Python writes the rest as it exits
        with contextlib.suppress(OSError):
            sys.stderr.write(f"The output can't be written: {error.strerror}.\n")
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    parsed, unknown = make_parser().parse_known_args(arguments)
    if unknown:
        parsed.parser.refuse(unknown[0])
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return run(parsed)
    except NotebookAccelError as error:
        sys.stderr.write("\n".join(filter(None, [str(error), documentation_of(error)])) + "\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return 128 + signal.SIGINT


def _prepare_streams() -> None:
    """Open /dev/null in place of closed standard streams, and print ``?`` for characters that the output lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - it stays open
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class _DashParser(argparse.ArgumentParser):
    """A parser that accepts dashes too, ``--num-processes`` for ``--num_processes``, as Accelerate does."""

    def add_argument(self, *names: Any, **kwargs: Any) -> argparse.Action:
        action = super().add_argument(*names, **kwargs)
        dashed = [name.replace("_", "-") for name in names if name.startswith("--") and "_" in name]
        if dashed:
            super().add_argument(*dashed, **{**kwargs, "dest": action.dest, "help": argparse.SUPPRESS})
        return action

    def refuse(self, word: str) -> NoReturn:
        """Exit with an error about an unknown option."""
        close = config.closest_flag(word, self._option_string_actions)
        known = f"is it {close}? " if close else ""
        self.exit(2, f"{self.prog}: there is no option {word}; {known}{self.prog} --help shows every option\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _DashParser(
        prog="notebook-accel", description="Train on every accelerator of this machine, from a notebook cell."
    )
    parser.add_argument("--version", action="version", version=f"notebook-accel {VERSION}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    env = commands.add_parser("env", help="print the facts for a bug report")
    env.set_defaults(run=_env, parser=env)
    doctor = commands.add_parser("doctor", help="print the obstacles to a launch here; exit 1 if it would be refused")
    trial.add_arguments(doctor)
    config.add_flags(doctor)
    doctor.set_defaults(run=_doctor, parser=doctor)
    asking = commands.add_parser("config", help="ask for options and write the configuration file")
    config.add_flags(asking)
    asking.add_argument("--config_file", type=pathlib.Path, metavar="FILE", help="Default: the one that launches read.")
    asking.add_argument("--default", action="store_true", help="Ask nothing: write the found values and the flags.")
    asking.add_argument("--overwrite", action="store_true", help="With --default, replace an existing file.")
    asking.set_defaults(run=_config, parser=asking)
    demo = commands.add_parser("demo", help="open an example notebook in JupyterLab, or run it here without one")
    demo.set_defaults(run=demo_command.run, parser=demo)
    runs_command.add_commands(commands.add_parser)
    launch = commands.add_parser(
        "launch", help="run a script on every device of this machine", allow_abbrev=False, epilog=_EPILOG
    )
    launch_command.add_arguments(launch)
    launch.set_defaults(run=launch_command.run, parser=launch)
    return parser


def _env(_: argparse.Namespace) -> int:
    devices = Devices.find(config.LaunchConfig())
    lines = {**trial.facts_of(Machine.find()), "devices": devices.describe(devices.available)}
    print("\n".join(aligned(list(lines.items()))))
    return 0


def _config(parsed: argparse.Namespace) -> int:
    draft = Draft(parsed.config_file)
    given = config.given_flags(parsed)
    draft.values.update(given)
    _print_draft(draft)
    if parsed.default:
        _print_file(draft)
    elif not _ask(draft, given):
        print("Nothing was written.")
        return 1
    path = draft.write(overwrite=parsed.overwrite or not parsed.default)
    print(f"Written: {path}")
    return 0


def _doctor(parsed: argparse.Namespace) -> int:
    return int(not trial.doctor(config.given_flags(parsed), parsed))


_USUAL = (*BASIC, "gradient_accumulation_steps", "num_nodes")
_NODE_OPTIONS = ("node_rank", "master_addr")


def _print_draft(draft: Draft) -> None:
    """Print the machine, the source of the draft, and the options that can't be taken over from it."""
    for name, text in draft.machine.facts():
        print(f"{name}: {text}")
    print(f"starting from: {draft.source.label}")
    for problem in draft.source.problems:
        print(f"  not taken over: {problem}")
    for name in draft.overriding():
        print(f"note: the variable {name} is set, and wins over the file")


def _ask(draft: Draft, given: Collection[str] = ()) -> bool:
    """Ask for the usual options that weren't given, offer the others, and return whether to write the file.

    Enter leaves an option as it is. If there is a file already, the question is whether to replace it.

    Raises:
        ConfigError: Nobody answers.
    """
    try:
        _choose_source(draft, given)
        done = {*given}
        _ask_options(draft, _USUAL, done)
        if draft.values["num_nodes"] != config.LaunchConfig().num_nodes:
            _ask_options(draft, _NODE_OPTIONS, done)
        _offer_others(draft, done)
        _print_file(draft)
        question = "Replace the file? [y/N] " if draft.file_exists else "Write the file? [Y/n] "
        answer = input(question).strip().lower()
    except EOFError:
        raise ConfigError(
            "Nobody is here to answer, so nothing was written.",
            fix="notebook-accel config --default, with options as flags",
        ) from None
    return answer.startswith("y") if draft.file_exists else not answer.startswith("n")


def _print_file(draft: Draft) -> None:
    """Print the findings of a launch with this draft, and the file's diff."""
    for finding in draft.findings():
        print(f"\n{finding}")
    print(f"\n{draft.path}")
    for line in draft.lines():
        print(f"  {line}")


def _choose_source(draft: Draft, given: Collection[str]) -> None:
    """Offer the sources other than the one that the draft has started from."""
    kept = {name: draft.values[name] for name in given}
    for source in draft.sources():
        if source.label == draft.source.label:
            continue
        where = f": {source.path}" if source.path else ""
        if input(f"Start from {source.label} instead{where}? [y/N] ").strip().lower().startswith("y"):
            draft.fill(source)
            draft.values.update(kept)
            _print_draft(draft)
            return


def _ask_options(draft: Draft, names: Collection[str], done: set[str]) -> None:
    """Ask for the named options that aren't done, in their usual order."""
    for option in config.fields():
        if option.name in names and option.name not in done:
            _ask_option(draft, option)
            done.add(option.name)


def _offer_others(draft: Draft, done: set[str]) -> None:
    """Offer all other options with one question."""
    others = {option.name: option.default for option in config.fields() if option.name not in done}
    changed = [f"{name}: {config.to_text(draft.values[name])}" for name, default in others.items()
               if draft.values[name] != default]  # fmt: skip
    print(f"\nThere are {len(others)} more options, which are rarely needed: {', '.join(others)}.")
    if changed:
        print(f"Changed from the defaults: {', '.join(changed)}.")
    if input("Ask for them too? [y/N] ").strip().lower().startswith("y"):
        _ask_options(draft, others, done)


def _ask_option(draft: Draft, option: Option) -> None:
    print(f"\n{option.help}")
    unfit = draft.unfit(option.name)
    for choice, reason in unfit.items():
        print(f"{choice} {reason}.")
    choices = [choice for choice in option.choices if choice not in unfit]
    if option.kind is bool:
        choices = ["yes", "no"]
    offered = f" ({', '.join(choices)})" if choices else " (or none)" if option.optional else ""
    while True:
        now = draft.values[option.name]
        shown = ("yes" if now else "no") if option.kind is bool else config.to_text(now)
        answer = input(f"{option.name}{offered} [{shown}]: ").strip()
        if not answer:
            return
        draft.values[option.name] = config.from_text(option, answer)
        error = draft.error(option.name)
        if error is None:
            return
        print(str(error))
        draft.values[option.name] = now


if __name__ == "__main__":
    sys.exit(main())

"""The form's questions in a terminal: ``notebook-accel config``."""

from __future__ import annotations

import sys
from collections.abc import Collection

from notebook_accel import config
from notebook_accel.config import Option
from notebook_accel.errors import ConfigError
from notebook_accel.launching.kernel.configuring import BASIC, Draft

__all__ = ["ask", "show", "tell"]

_USUAL = (*BASIC, "gradient_accumulation_steps", "num_nodes")
_OF_SEVERAL_NODES = ("node_rank", "master_addr")


def tell(draft: Draft) -> None:
    """Prints what was found: the machine, files, and what can't be taken over from them."""
    for name, text in draft.machine.facts():
        _print(f"{name}: {text}")
    _print(f"starting from: {draft.source.label}")
    for problem in draft.source.problems:
        _print(f"  not taken over: {problem}")
    for name in draft.overriding():
        _print(f"note: the variable {name} is set, and wins over the file")


def ask(draft: Draft, given: Collection[str] = ()) -> bool:
    """Asks for the usual options that weren't given, offers the others, and asks whether to write.

    Enter leaves an option as it is.

    Returns:
        Whether the file shall be written, over the one that is there if there is one.

    Raises:
        ConfigError: Nobody answers.
    """
    try:
        _choose_source(draft, given)
        done = {*given}
        _ask_options(draft, _USUAL, done)
        if draft.values["num_nodes"] != config.LaunchConfig().num_nodes:
            _ask_options(draft, _OF_SEVERAL_NODES, done)
        _offer_others(draft, done)
        show(draft)
        question = "Replace the file? [y/N] " if draft.file_exists else "Write the file? [Y/n] "
        answer = input(question).strip().lower()
    except EOFError:
        raise ConfigError(
            "Nobody answers here, so nothing was written.", fix="notebook-accel config --default, with options as flags"
        ) from None
    return answer.startswith("y") if draft.file_exists else not answer.startswith("n")


def show(draft: Draft) -> None:
    """Prints the file as it would be, against what it says now, and what speaks against a launch with it."""
    for finding in draft.findings():
        _print(f"\n{finding}")
    _print(f"\n{draft.path}")
    for line in draft.lines():
        _print(f"  {line}")


def _choose_source(draft: Draft, given: Collection[str]) -> None:
    """Offers the sources besides the one that the draft has started from."""
    kept = {name: draft.values[name] for name in given}
    for source in draft.sources():
        if source.label == draft.source.label:
            continue
        where = f": {source.path}" if source.path else ""
        if input(f"Start from {source.label} instead{where}? [y/N] ").strip().lower().startswith("y"):
            draft.fill(source)
            draft.values.update(kept)
            tell(draft)
            return


def _ask_options(draft: Draft, names: Collection[str], done: set[str]) -> None:
    """Asks for the options of these names that aren't done, in their usual order."""
    for option in config.fields():
        if option.name in names and option.name not in done:
            _ask_option(draft, option)
            done.add(option.name)


def _offer_others(draft: Draft, done: set[str]) -> None:
    """Offers the options that weren't asked for, once for all."""
    others = {option.name: option.default for option in config.fields() if option.name not in done}
    changed = [f"{name}: {config.to_text(draft.values[name])}" for name, default in others.items()
               if draft.values[name] != default]  # fmt: skip
    _print(f"\nThere are {len(others)} more options, which are rarely needed: {', '.join(others)}.")
    if changed:
        _print(f"Not as by default: {', '.join(changed)}.")
    if input("Ask for them too? [y/N] ").strip().lower().startswith("y"):
        _ask_options(draft, others, done)


def _ask_option(draft: Draft, option: Option) -> None:
    _print(f"\n{option.help}")
    unfit = draft.unfit(option.name)
    for choice, reason in unfit.items():
        _print(f"{choice} {reason}.")
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
        _print(str(error))
        draft.values[option.name] = now


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")

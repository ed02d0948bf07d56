"""Tab completion after the magics: flags, the values of those that have a few, and subcommands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace

from IPython.core.interactiveshell import InteractiveShell

from notebook_accel import config

__all__ = ["register", "unregister"]


def register(
    shell: InteractiveShell,
    magic: str,
    *,
    flags: Iterable[str] = (),
    commands: Iterable[str] = (),
    options_of: Callable[[str], Mapping[str, list[str]]] = lambda _: {},
) -> None:
    """Completes a magic's line.

    Args:
        shell: Where.
        magic: The magic, with its percent signs.
        flags: Its flags.
        commands: What may stand first in its line.
        options_of: The flags that a command takes, each with what may come after it.
    """

    # IPython binds it to the shell, as it would a method.
    def complete(_: InteractiveShell, event: SimpleNamespace) -> list[str]:
        before = _words(event.text_until_cursor, event.symbol)
        options = {f"--{option.name}": list(option.choices) for option in config.fields()} if flags else {}
        options |= options_of(before[0]) if before and commands else {}
        offered = sorted(flags) if flags else list(options)
        return _completions(before, event.symbol, options, offered, list(commands))

    unregister(shell, magic)
    shell.set_hook("complete_command", complete, str_key=magic)


def unregister(shell: InteractiveShell, magic: str) -> None:
    """Takes that away. IPython can add completers and has no way to remove one."""
    dispatcher = shell.strdispatchers.get("complete_command")
    if dispatcher is not None:
        dispatcher.strs.pop(magic, None)


def _words(line: str, symbol: str) -> list[str]:
    """The words between the magic and ``symbol``, the last word of a line up to the cursor.

    IPython splits words at ``=`` too.
    """
    return line[: len(line) - len(symbol)].replace("=", " ").split()[1:]


def _completions(
    before: list[str], symbol: str, choices: Mapping[str, list[str]], flags: list[str], commands: list[str]
) -> list[str]:
    """What could stand where ``symbol`` does. IPython leaves out what doesn't begin as the symbol does."""
    if before and choices.get(before[-1]):
        return choices[before[-1]]
    first = [] if before else commands
    return [*first, *flags] if not symbol or symbol.startswith("-") else first

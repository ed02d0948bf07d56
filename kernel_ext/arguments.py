"""Parses and completes the line of a magic."""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from notebook_accel import config
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of ending the process. ``magic`` includes the percent signs."""

    def __init__(self, magic: str, description: str = "", epilog: str = "") -> None:
        super().__init__(prog=magic, description=description, epilog=epilog, add_help=False, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        self._magic = magic

    def error(self, message: str) -> NoReturn:
        shown_by = f"{self._magic.split()[0]}?"
        raise UsageError(
            f"{self._magic}: {message}{'' if message.endswith('?') else '.'} {shown_by} shows every option."
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse these words.

        Raises:
            UsageError: A word can't be understood.
        """
        given, rest = self.parse_known_intermixed_args(words)
        for word in rest:
            if word.startswith("-"):
                close = config.closest_flag(word, self._option_string_actions)
                self.error(f"there is no option {word}" + (f"; is it {close}?" if close else ""))
            hint = f"; a run is named with --run {shlex.quote(word)}" if "--run" in self.flags else ""
            if word.isidentifier() and (pulled := getattr(given, "pull", ())):
                hint = f"; names have commas between them: --pull {','.join([*pulled, word])}"
            self.error(f"unexpected argument {word!r}{hint}")
        return given

    @property
    def flags(self) -> list[str]:
        """All flags of the magic."""
        return list(self._option_string_actions)


def options(given: argparse.Namespace, namespace: Mapping[str, Any]) -> LaunchConfig:
    """Merge the options of a magic's line with those of the environment and the configuration file.

    Raises:
        ConfigError: A value isn't allowed. If it is an expression of the notebook's, the error says how to give it.
    """
    flags = config.given_flags(given)
    try:
        return config.resolve(flags, file=config.default_path())
    except ConfigError as error:
        for option, text in flags.items():
            if error.what.startswith(f"{option}={text!r}") and _is_expression(text, namespace):
                flag = "-n" if option == "num_processes" else f"--{option}"
                fix = f"{flag} {{{text}}}, with braces, which give the value in the notebook"
                raise ConfigError(error.what, fix=fix) from None
        raise


def _is_expression(text: object, namespace: Mapping[str, Any]) -> bool:
    """Return whether a text is a Python expression with names of the notebook."""
    names: list[str] = []
    with contextlib.suppress(SyntaxError, ValueError):
        names = [node.id for node in ast.walk(ast.parse(str(text), mode="eval")) if isinstance(node, ast.Name)]
    return not namespace.keys().isdisjoint(names) and (namespace.keys() | vars(builtins).keys()).issuperset(names)


def name(text: str) -> str:
    """Return a word, after checking that it is a Python identifier."""
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid name")
    return text


def names(text: str) -> tuple[str, ...]:
    """Parse names such as ``model,history``, with or without spaces around the commas."""
    return tuple(name(part.strip()) for part in text.split(",") if part.strip())


def split(line: str, magic: str) -> list[str]:
    """Split a line as a shell would, but with fewer quotes needed: ``--args (x, 1)``, ``--pull model, history``.

    Blanks inside brackets and after commas don't split. Quotes outside brackets are removed. ``#`` starts a comment.

    Raises:
        UsageError: A quote or a bracket isn't closed.
    """
    words, word, depth, quote = [""], "", 0, ""
    for character in line.rstrip():
        if quote:
            quote = "" if character == quote else quote
            word += character if quote or depth else ""
        elif character in "'\"":
            quote = character
            word += character if depth else ""
        elif character == "#" and not word:
            break
        elif character.isspace() and not depth and not word.rstrip().endswith(","):
            words.append(word)
            word = ""
        else:
            depth += (character in "([{") - (character in ")]}")
            word += character
    if quote or depth:
        raise UsageError(f"{magic}: a quote or a bracket is not closed in: {line}")
    return [word for word in [*words, word] if word]


def add_completion(
    shell: InteractiveShell,
    magic: str,
    options_of: Callable[[str], Mapping[str, Sequence[str]]],
    commands: Sequence[str] = (),
) -> None:
    """Complete a magic's line.

    ``options_of`` takes the line's first word and returns the flags that may follow, each with its possible values.
    ``commands`` are the words that may come first.
    """

    # IPython binds this to the shell like a method, and drops matches that don't begin with the last word.
    def complete(_: InteractiveShell, event: SimpleNamespace) -> list[str]:
        line, last = event.text_until_cursor, event.symbol
        before = line[: len(line) - len(last)].replace("=", " ").split()[1:]  # IPython splits words at "=" too
        options = options_of(before[0] if before else "")
        if before and options.get(before[-1]):
            return list(options[before[-1]])
        first = [] if before else list(commands)
        return [*first, *options] if not last or last.startswith("-") else first

    remove_completion(shell, magic)
    shell.set_hook("complete_command", complete, str_key=magic)


def remove_completion(shell: InteractiveShell, magic: str) -> None:
    """Remove a magic's completion, for which IPython has no function."""
    dispatcher = shell.strdispatchers.get("complete_command")
    if dispatcher is not None:
        dispatcher.strs.pop(magic, None)

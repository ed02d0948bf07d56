"""Parse the line of a magic: split it into words, read its flags, and raise errors that fit on one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from IPython.core.error import UsageError

from notebook_accel import config


class Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of ending the process.

    Args:
        magic: The magic's name, with its percent signs.
        description: Its help before the options.
        epilog: Its help after the options.
    """

    def __init__(self, magic: str, description: str = "", epilog: str = "") -> None:
        super().__init__(prog=magic, description=description, epilog=epilog, add_help=False, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        self._magic = magic

    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"{self._magic}: {message}{'' if message.endswith('?') else '.'} {self._magic}? shows every option."
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse these words.

        Raises:
            UsageError: A word can't be understood.
        """
        given, rest = self.parse_known_args(words)
        if rest:
            close = config.closest_flag(rest[0], self._option_string_actions)
            self.error(f"there is no option {rest[0]}" + (f"; is it {close}?" if close else ""))
        return given

    @property
    def flags(self) -> list[str]:
        """All flags of the magic."""
        return list(self._option_string_actions)


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

    Args:
        line: The line after the magic.
        magic: The magic's name, for an error.

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

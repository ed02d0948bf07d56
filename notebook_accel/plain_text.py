"""Text that a rank wrote, made harmless: no control sequence, and no line longer than a screen or two."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["clipped", "first_line", "plain_lines", "plain_text"]

_MOST_CHARACTERS = 2000

# ECMA-48 control sequences (colours, cursor movements) and operating system commands (titles, links).
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def plain_lines(text: str) -> Iterator[str]:
    """The lines of a text as ``plain_text`` leaves them, none longer than a screen or two."""
    return (clipped(plain_text(line)) for line in text.split("\n"))


def first_line(text: str) -> str:
    """The first line of a text, as ``plain_text`` leaves it."""
    return next(plain_lines(text.strip()))


def plain_text(line: str) -> str:
    """A line as a terminal would leave it, without colours: what a carriage return overwrites is left out."""
    line = _ESCAPE_SEQUENCE.sub("", line).rstrip("\r")
    return _CONTROL_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", line.rpartition("\r")[2])


def clipped(line: str) -> str:
    """The beginning of a line that is too long to be read, with how much is missing."""
    if len(line) <= _MOST_CHARACTERS:
        return line
    return f"{line[:_MOST_CHARACTERS]} … and {len(line) - _MOST_CHARACTERS:,} more characters"

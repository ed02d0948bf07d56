"""Text for people: sizes, durations, counts, sanitized and bounded output, and coloured errors; JSON for programs."""

from __future__ import annotations

import collections
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

_Line = TypeVar("_Line")
_SHORT_S = 10.0


def format_clock(seconds: float) -> str:
    """Return ``02:05``, or ``1:02:05`` with hours, for a running or approximate duration."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def format_duration(seconds: float) -> str:
    """Return a finished duration: ``0.04 s``, ``3.2 s``, ``02:05``."""
    if seconds >= _SHORT_S:
        return format_clock(seconds)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"


def format_milliseconds(seconds: float) -> str:
    """Return a duration in milliseconds, with a digit after the point below ten: ``9.5 ms``, ``1,200 ms``."""
    return f"{seconds * 1000:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"


_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20))


def format_count(number: int, noun: str) -> str:
    """Return ``1 rank``, ``2,000 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_number(number: int) -> str:
    """Return a number in words, such as ``7.2 B``."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return str(number)


def format_size(size_bytes: int) -> str:
    """Return ``1.5 GiB``, ``24 GiB``, ``240 MiB``, ``3 KiB``."""
    for unit, factor in _UNITS:
        if size_bytes >= factor:
            decimals = 1 if size_bytes < 10 * factor else 0
            return f"{size_bytes / factor:.{decimals}f} {unit}"
    return f"{size_bytes / 1024:.0f} KiB"


def json_text(data: Any, *, indent: int | None = None, default: Callable[[Any], Any] | None = None) -> str:
    """Return data as JSON, with null for nan and the infinities, which JSON lacks. ``default``: see ``json.dumps``."""
    text = json.dumps(data, default=default)
    return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=indent)


_RED, _GREEN, _CYAN, _BOLD, _PLAIN = "\x1b[31m", "\x1b[32m", "\x1b[36m", "\x1b[1m", "\x1b[0m"
_FRAME = re.compile(r'^([ |]*)File "(.+)", line (\d+)(?:(,? in )(.+))?$')
_CARETS = re.compile(r"^[ |]*[~^]+$")
_EXCEPTION = re.compile(r"^([ |]*)([A-Za-z_][\w.]*)(:.*)?$")
_INDENTED = re.compile(r"^ {2}")  # source lines, and the last output
_HEADING = re.compile(r"^(Fix|Next|Its whole output|The others|(?:Traceback|Last output) of rank \d+):")


def wants_colours() -> bool:
    """Return whether this process is an IPython that shows colours."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and str(shell.colors).lower() != "nocolor" and "NO_COLOR" not in os.environ


def coloured(text: str) -> str:
    """Return an error's text with coloured exception names, places and headings."""
    return "\n".join(map(_coloured_line, text.split("\n")))


def _coloured_line(line: str) -> str:
    frame = _FRAME.match(line)
    if frame is not None:
        before, file, number, of, function = frame.groups()
        where = f"{of}{_CYAN}{function}{_PLAIN}" if function else ""
        return f'{before}File {_GREEN}"{file}"{_PLAIN}, line {_GREEN}{number}{_PLAIN}{where}'
    if _CARETS.match(line):
        return f"{_RED}{line}{_PLAIN}"
    heading = _HEADING.match(line)
    if heading is not None:
        return f"{_BOLD}{heading[0]}{_PLAIN}{line[heading.end() :]}"
    exception = None if _INDENTED.match(line) and "|" not in line else _EXCEPTION.match(line)
    if exception is not None:
        return f"{exception[1]}{_RED}{exception[2]}{_PLAIN}{exception[3] or ''}"
    return line


_MOST_CHARACTERS = 2000

# ECMA-48 control sequences (colours, cursor movements) and operating system commands (titles, links).
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def plain_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, each cleaned by ``plain_text`` and ``clipped``."""
    return (clipped(plain_text(line)) for line in text.split("\n"))


def first_line(text: str) -> str:
    """Return the first line of a text, through ``plain_text``, and the second one if the first ends with a colon."""
    lines = plain_lines(text.strip())
    first = next(lines)
    return f"{first} {next(lines, '').strip()}".rstrip() if first.endswith(":") else first


def plain_text(line: str) -> str:
    """Return a line as a terminal finally shows it, without colours and overwritten text."""
    if line.isprintable():  # as most lines are, of which a log may have millions
        return line
    line = _ESCAPE_SEQUENCE.sub("", line).rstrip("\r").rpartition("\r")[2]
    if "\b" in line:
        line = _overtyped(line)
    return _CONTROL_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", line)


def _overtyped(line: str) -> str:
    """Return a line in which each backspace moves the cursor back, and what comes next replaces what is there."""
    shown: list[str] = []
    cursor = 0
    for character in line:
        if character == "\b":
            cursor = max(cursor - 1, 0)
        else:
            shown[cursor : cursor + 1] = [character]
            cursor += 1
    return "".join(shown)


def clipped(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a readable beginning of a long text, with the number of missing characters."""
    return text if len(text) <= most else f"{text[:most]} … and {len(text) - most:,} more characters"


def rank_spans(ranks: Iterable[int]) -> list[str]:
    """Return the ranks as spans, such as ``["0-2", "5"]``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ["-".join(map(str, span)) for span in spans]


def ranks_in_words(ranks: Collection[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(rank_spans(ranks))}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines, with the cells of a column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


class OutputWindow(Generic[_Line]):
    """The first lines of long output, ``first`` of them, and its ``last`` ones. Those in the gap between are counted.

    Attributes:
        tail: The last lines that aren't among the first.
        left_out: Number of lines in the gap.
    """

    def __init__(self, first: int, last: int) -> None:
        self._free = first
        self.tail = collections.deque[_Line](maxlen=last)
        self.left_out = 0

    def add(self, lines: Sequence[_Line]) -> Sequence[_Line]:
        """Add lines, and return those that are among the first, which the window doesn't keep."""
        head, others = lines[: self._free], lines[self._free :]
        self._free -= len(head)
        self.left_out += max(len(self.tail) + len(others) - (self.tail.maxlen or 0), 0)
        self.tail.extend(others)
        return head

    def pass_over(self, count: int) -> None:
        """Count lines that are only in a log. There is one gap: lines before it that aren't among the first go too."""
        if count:
            self.left_out += count + len(self.tail)
            self.tail.clear()
            self._free = 0

    def gap(self, log: str = "") -> list[str]:
        """Return a line about the gap; empty list if there is none.

        ``log`` is the file or folder with the whole output, empty if there is none.
        """
        where = f"; the whole output is in {log}" if log else ""
        return [f"[{format_count(self.left_out, 'line')} left out here{where}]"] if self.left_out else []

"""Colours for an error in a notebook or a terminal: the ones in which IPython shows a traceback."""

from __future__ import annotations

import os
import re
import sys

__all__ = ["are_wanted", "coloured"]

_RED, _GREEN, _CYAN, _BOLD, _PLAIN = "\x1b[31m", "\x1b[32m", "\x1b[36m", "\x1b[1m", "\x1b[0m"
_FRAME = re.compile(r'^([ |]*)File "(.+)", line (\d+)(?:(,? in )(.+))?$')
_CARETS = re.compile(r"^[ |]*[~^]+$")
_EXCEPTION = re.compile(r"^([ |]*)([A-Za-z_][\w.]*)(:.*)?$")
_INDENTED = re.compile(r"^ {2}")  # source lines, and the last output
_HEADING = re.compile(r"^(Fix|Next|Its whole output|The others|(?:Traceback|Last output) of rank \d+):")


def are_wanted() -> bool:
    """Return whether this is an IPython that shows colours."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and str(shell.colors).lower() != "nocolor" and "NO_COLOR" not in os.environ


def coloured(text: str) -> str:
    """An error's text with colours for the exceptions' names, the places and the headings."""
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

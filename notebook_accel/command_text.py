"""The variables in the text of shell commands and line magics, by IPython's rules."""

from __future__ import annotations

import ast
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any

# A quoted text stays as it is; ``$$`` stands for one ``$``; ``$name.attribute`` is a variable.
_DOLLAR = re.compile(r"'[^']*'|\$(\$|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")


def fields(line: str) -> Iterator[tuple[str, str | None, str | None]]:
    """Split a shell command or a magic's line at ``$name`` and ``{expression}``, as IPython does.

    Yields:
        Text, the expression after it, and the letter of its conversion (``!r``). The last expression may be ``None``.

    Raises:
        ValueError: The braces don't match.
    """
    for literal, field, spec, conversion in string.Formatter().parse(line):
        text, end = "", 0
        for found in _DOLLAR.finditer(literal):
            text += literal[end : found.start()]
            end = found.end()
            if found[1] in (None, "$"):
                text += found[1] or found[0]
            else:
                yield text, found[1], None
                text = ""
        # What follows a colon is part of the expression, so that it can have slices.
        yield text + literal[end:], f"{field}:{spec}" if spec else field, conversion


def variables_in(line: str) -> list[str]:
    """Return the names that the expressions in a shell command or a magic's line read."""
    try:
        trees = [ast.parse(expression.strip(), mode="eval") for _, expression, _ in fields(line) if expression]
    except (SyntaxError, ValueError):  # braces of another language, such as awk's: IPython fills in nothing then
        return []
    return [node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)]


def filled_in(line: str, variables: Mapping[str, Any]) -> str:
    """Fill in ``$name`` and ``{expression}`` as IPython does: all of them, or none if one has no value."""
    filled = ""
    try:
        for text, expression, conversion in fields(line):
            filled += text
            if expression is not None:
                filled += str(string.Formatter().convert_field(eval(expression.strip(), dict(variables)), conversion))
    except Exception:  # noqa: BLE001 - evaluating the user's expression may raise anything
        return line
    return filled

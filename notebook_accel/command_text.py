"""Shell commands of notebook code, and the variables in their text and in that of line magics, by IPython's rules."""

from __future__ import annotations

import ast
import re
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any


class ShellCommands:
    """The ``get_ipython()`` of code in which IPython has translated ``!command`` and ``x = !command``.

    An exported script has a copy of this class, so that it needs nothing but the imports above.
    """

    def system(self, command: str) -> None:
        """Run ``!command``."""
        frame = sys._getframe(1)
        command = self.filled_in(command, {**frame.f_globals, **frame.f_locals})
        self._flush()
        frame.f_globals["_exit_code"] = subprocess.run(["/bin/sh", "-c", command], check=False).returncode

    def getoutput(self, command: str, split: bool = True, depth: int = 0) -> Any:
        """Return a command's output as lines or as one text, for ``x = !command``.

        ``depth`` is the number of frames between this call and the code whose variables are filled in.
        """
        frame = sys._getframe(1 + depth)
        command = self.filled_in(command, {**frame.f_globals, **frame.f_locals})
        output = subprocess.run(
            ["/bin/sh", "-c", command], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ).stdout
        return output.splitlines() if split else output

    def _flush(self) -> None:
        sys.stdout.flush()

    @staticmethod
    def fields(line: str) -> Iterator[tuple[str, str | None, str | None]]:
        """Split a shell command or a magic's line at ``$name`` and ``{expression}``, as IPython does.

        Yields:
            Text, the expression after it, and the letter of its conversion (``!r``). The last expression may be
            ``None``.

        Raises:
            ValueError: The braces don't match.
        """
        # A quoted text stays as it is; ``$$`` stands for one ``$``; ``$name.attribute`` is a variable.
        dollars = re.compile(r"'[^']*'|\$(\$|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
        for literal, field, spec, conversion in string.Formatter().parse(line):
            text, end = "", 0
            for found in dollars.finditer(literal):
                text += literal[end : found.start()]
                end = found.end()
                if found[1] in (None, "$"):
                    text += found[1] or found[0]
                else:
                    yield text, found[1], None
                    text = ""
            # What follows a colon is part of the expression, so that it can have slices.
            yield text + literal[end:], f"{field}:{spec}" if spec else field, conversion

    @classmethod
    def filled_in(cls, line: str, variables: Mapping[str, Any]) -> str:
        """Fill in ``$name`` and ``{expression}`` as IPython does: all of them, or none if one has no value."""
        filled = ""
        try:
            for text, expression, conversion in cls.fields(line):
                filled += text
                if expression is not None:
                    filled += str(
                        string.Formatter().convert_field(eval(expression.strip(), dict(variables)), conversion)
                    )
        except Exception:  # noqa: BLE001 - evaluating the user's expression may raise anything
            return line
        return filled


def variables_in(line: str) -> list[str]:
    """Return the names that the expressions in a shell command or a magic's line read."""
    try:
        trees = [
            ast.parse(expression.strip(), mode="eval") for _, expression, _ in ShellCommands.fields(line) if expression
        ]
    except (SyntaxError, ValueError):  # braces of another language, such as awk's: IPython fills in nothing then
        return []
    return [node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)]

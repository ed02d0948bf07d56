"""The line of a magic: parse and complete it. Also completion and ``?`` in a session's cells, by rank 0's variables."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from notebook_accel import config

if TYPE_CHECKING:
    from notebook_accel.sessions.kernel.session import Session


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


_CELL = re.compile(r"%%(distributed(?!.*--fresh)|rank)\b[^\n]*\n")
_BEFORE = re.compile(r"(?:[^\W\d]\w*\.)*(?:[^\W\d]\w*)?$")
_AFTER = re.compile(r"\w*")
_ASKED = re.compile(r"\s*(?:\?\s*([\w.]+)|([\w.]+)\s*\?)\s*")


def register(
    shell: InteractiveShell,
    magic: str,
    options_of: Callable[[str], Mapping[str, Sequence[str]]],
    commands: Sequence[str] = (),
) -> None:
    """Complete a magic's line.

    ``options_of`` takes the line's first word and returns the flags that may follow, each with its possible values.
    ``commands`` are the words that may come first.
    """

    # IPython binds it to the shell like a method, and drops what doesn't begin as the last word does.
    def complete(_: InteractiveShell, event: SimpleNamespace) -> list[str]:
        line, last = event.text_until_cursor, event.symbol
        before = line[: len(line) - len(last)].replace("=", " ").split()[1:]  # IPython splits words at "=" too
        options = options_of(before[0] if before else "")
        if before and options.get(before[-1]):
            return list(options[before[-1]])
        first = [] if before else list(commands)
        return [*first, *options] if not last or last.startswith("-") else first

    unregister(shell, magic)
    shell.set_hook("complete_command", complete, str_key=magic)


def unregister(shell: InteractiveShell, magic: str) -> None:
    """Remove the completion again. IPython has no function for that."""
    dispatcher = shell.strdispatchers.get("complete_command")
    if dispatcher is not None:
        dispatcher.strs.pop(magic, None)


class SessionHelp:
    """Answers a kernel's completion and inspection requests in cells of a session.

    It wraps the kernel's two methods, since IPython's own completers aren't told which cell they complete. In a shell
    without a kernel, such as a terminal's, it does nothing.
    """

    def __init__(self, shell: InteractiveShell, session: Callable[[], Session | None]) -> None:
        self._kernel = getattr(shell, "kernel", None)
        self._session = session

    def start(self) -> None:
        if self._kernel is not None:
            self._complete, self._inspect = self._kernel.do_complete, self._kernel.do_inspect
            self._kernel.do_complete, self._kernel.do_inspect = self.complete, self.inspect

    def stop(self) -> None:
        if self._kernel is not None:
            del self._kernel.do_complete, self._kernel.do_inspect

    def complete(self, code: str, cursor_pos: int) -> Any:
        """Answer a completion request, with rank 0's names first."""
        reply = self._complete(code, cursor_pos)
        session = self._session_of(code, cursor_pos)
        found = _BEFORE.search(code[:cursor_pos])
        matches = [] if session is None or found is None else session.complete(found[0])
        if not matches or found is None or not isinstance(reply, dict):
            return reply
        start = cursor_pos - len(found[0])
        others = reply["matches"] if reply.get("cursor_start") == start else []
        shown = {"matches": list(dict.fromkeys([*matches, *others])), "cursor_start": start, "cursor_end": cursor_pos}
        return {**shown, "metadata": {}, "status": "ok"}

    def inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        """Answer an inspection request, from rank 0 if it knows the name."""
        session = self._session_of(code, cursor_pos)
        before, after = _BEFORE.search(code[:cursor_pos]), _AFTER.match(code, cursor_pos)
        name = (before[0] if before else "") + (after[0] if after else "")
        lines = None if session is None or not name else session.describe(name)
        if lines:
            return {"status": "ok", "found": True, "data": {"text/plain": "\n".join(lines)}, "metadata": {}}
        return self._inspect(code, cursor_pos, detail_level, omit_sections)

    def _session_of(self, code: str, cursor_pos: int) -> Session | None:
        """Return the session, if the cursor is in the body of a cell that runs in it."""
        cell = _CELL.match(code)
        return self._session() if cell is not None and cursor_pos >= cell.end() else None


def asked_about(cell: str) -> str:
    """Return the name in a cell that is nothing but ``name?`` or ``?name``; empty for any other cell."""
    found = _ASKED.fullmatch(cell)
    return "" if found is None else found[1] or found[2]

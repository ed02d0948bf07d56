"""Completion of the magics' lines, and completion and ``?`` in a session's cells, which know rank 0's variables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from IPython.core.interactiveshell import InteractiveShell

if TYPE_CHECKING:
    from notebook_accel.sessions.kernel.session import Session

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

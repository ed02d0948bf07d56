"""A debugger at a rank's last error. It runs in the rank and talks to the user over the session's connection."""

from __future__ import annotations

import builtins
import contextlib
import io
import linecache
import pdb  # noqa: T100 - this is the debugger that users ask for
import types
from collections.abc import Callable, Iterator
from typing import Any

from notebook_accel import code_places

Converse = Callable[[str], str]
"""Sends the user a text. Returns the line that they type, with its newline; empty when there will be no more."""


def post_mortem(traceback: types.TracebackType, rank: int, converse: Converse) -> None:
    """Let the user inspect the frames of an error, until the debugger ends."""
    debugger = _Debugger(rank, converse)
    debugger.reset()
    with _forwarding_input(converse):
        debugger.interaction(None, traceback)


class _Debugger(pdb.Pdb):
    """A pdb that collects its output and sends it with its next prompt."""

    def __init__(self, rank: int, converse: Converse) -> None:
        self._output = io.StringIO()
        self._converse = converse
        super().__init__(stdin=_UserInput(self._ask), stdout=self._output, nosigint=True, readrc=False)
        self.prompt = f"rank {rank} (Pdb) "

    def canonic(self, filename: str) -> str:
        """Return a cell's label such as ``In[7]`` unchanged; pdb would take it for a file in the working directory."""
        return filename if filename in linecache.cache else super().canonic(filename)

    def get_stack(self, f: types.FrameType | None, t: types.TracebackType | None) -> tuple[list[Any], int]:
        """Start at the last frame of user code if the error was raised in this package. ``down`` leads further."""
        stack, index = super().get_stack(f, t)
        users = [at for at, (frame, _) in enumerate(stack) if not frame.f_code.co_filename.startswith(code_places.OURS)]
        is_ours = bool(users) and users[-1] < index
        return stack, users[-1] if is_ours else index

    def _ask(self) -> str:
        text = self._output.getvalue()
        self._output.seek(0)
        self._output.truncate()
        return self._converse(text)


class _UserInput(io.StringIO):
    def __init__(self, ask: Callable[[], str]) -> None:
        super().__init__()
        self._ask = ask

    def readline(self, _size: int | None = -1, /) -> str:  # type: ignore[override]  # of bytes, as typeshed has it
        return self._ask()


@contextlib.contextmanager
def _forwarding_input(converse: Converse) -> Iterator[None]:
    """Forward ``input()`` to the user during the body, for commands of the debugger such as ``interact``."""

    def ask(prompt: object = "", /) -> str:
        line = converse(str(prompt))
        if not line:
            raise EOFError
        return line.rstrip("\n")

    before = builtins.input
    builtins.input = ask
    try:
        yield
    finally:
        builtins.input = before

"""A debugger at a rank's last error, which talks over the session's line. Runs in the rank."""

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

__all__ = ["post_mortem"]

Converse = Callable[[str], str]
"""Says something to the user and gives the line that is typed, with its end; an empty one when there are no more."""


def post_mortem(traceback: types.TracebackType, rank: int, converse: Converse) -> None:
    """Lets the user look around where an error was raised, until that ends.

    Args:
        traceback: The error's.
        rank: Of this process, for the prompt.
        converse: How to talk to the user.
    """
    debugger = _Debugger(rank, converse)
    debugger.reset()
    with _asked_by(converse):
        debugger.interaction(None, traceback)


class _Debugger(pdb.Pdb):
    """Writes into a buffer, and hands that on when it wants a line."""

    def __init__(self, rank: int, converse: Converse) -> None:
        self._said = io.StringIO()
        self._converse = converse
        super().__init__(stdin=_Lines(self._ask), stdout=self._said, nosigint=True, readrc=False)
        self.prompt = f"rank {rank} (Pdb) "

    def canonic(self, filename: str) -> str:
        """Without this, ``In[7]`` would be taken for a file in the working directory, which has no such lines."""
        return filename if filename in linecache.cache else super().canonic(filename)

    def get_stack(self, f: types.FrameType | None, t: types.TracebackType | None) -> tuple[list[Any], int]:
        """Begins where the user's code left for this package's, if the error was raised in here; ``down`` goes on."""
        stack, index = super().get_stack(f, t)
        users = [at for at, (frame, _) in enumerate(stack) if not frame.f_code.co_filename.startswith(code_places.OURS)]
        is_ours = bool(users) and users[-1] < index
        return stack, users[-1] if is_ours else index

    def _ask(self) -> str:
        said = self._said.getvalue()
        self._said.seek(0)
        self._said.truncate()
        return self._converse(said)


class _Lines(io.StringIO):
    def __init__(self, ask: Callable[[], str]) -> None:
        super().__init__()
        self._ask = ask

    def readline(self, _size: int | None = -1, /) -> str:  # type: ignore[override]  # of bytes, as typeshed has it
        return self._ask()


@contextlib.contextmanager
def _asked_by(converse: Converse) -> Iterator[None]:
    """What asks with ``input()`` in the debugger, such as its ``interact``, asks the user too."""

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

"""From what a rank writes to whole lines."""

from __future__ import annotations

import os
from collections.abc import Callable

from notebook_accel import events

__all__ = ["LineReader"]

_READ_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20


class LineReader:
    """Reads one pipe without blocking and says its whole lines.

    A carriage return starts a line over, as on a terminal, so that a progress bar is the one line that it ends as.

    Args:
        descriptor: The pipe's read end, which this owns.
        stream: Which stream it is.
        say: Takes the lines.
    """

    def __init__(self, descriptor: int, stream: events.Stream, say: Callable[[events.Output], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._stream: events.Stream = stream
        self._say = say
        self._rest = b""

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self._descriptor)

    def read(self) -> bool:
        """Reads once and says the lines that are complete; returns whether more can come."""
        data = self._pull()
        if data:
            self._feed(data)
        return data is None or bool(data)

    def finish(self) -> None:
        """Says all that is left in the pipe, a last line without its end too. For when the writers are gone."""
        while data := self._pull():
            self._feed(data)
        if self._rest:
            self._say_lines([self._rest])
            self._rest = b""

    def _pull(self) -> bytes | None:
        """What is there now: ``None`` if nothing is, empty if nothing will ever be."""
        try:
            return os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return None

    def _feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        self._say_lines(lines)

    def _say_lines(self, lines: list[bytes]) -> None:
        if lines:
            text = "\n".join(_as_terminal(line) for line in lines)
            self._say(events.Output(stream=self._stream, text=text))


def _as_terminal(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")

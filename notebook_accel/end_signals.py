"""What ends a command in a terminal besides Ctrl-C: somebody's SIGTERM, a terminal that closes, a pipe that closes.

Each is made an interrupt, so that ranks can clean up and save what they have, as they can after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import types
from collections.abc import Iterator

__all__ = ["Received", "as_interrupts", "silence_closed"]

_STREAMS = (1, 2)


class Received:
    """The signal that has come first; SIGINT as long as it was none of the others."""

    number = signal.SIGINT

    def _take(self, number: int, _: types.FrameType | None) -> None:
        has_closed = silence_closed()
        if number == signal.SIGPIPE and not has_closed:  # a socket of somebody's, who gets an error for it
            return
        if self.number == signal.SIGINT:
            self.number = signal.Signals(number)
        raise KeyboardInterrupt


@contextlib.contextmanager
def as_interrupts() -> Iterator[Received]:
    """In its block these signals raise ``KeyboardInterrupt`` in the main thread. What is ignored stays ignored."""
    received = Received()
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, received._take) for number in (*numbers, signal.SIGPIPE)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def silence_closed() -> bool:
    """Sends what would be written to a closed pipe or terminal nowhere; whether there was one."""
    closed = [stream for stream in _STREAMS if _has_closed(stream)]
    for stream in closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
        os.close(nowhere)
    return bool(closed)


def _has_closed(descriptor: int) -> bool:
    """Return whether nobody can read what is written there."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))

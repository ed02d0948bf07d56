"""The agent's event loop: which descriptors are watched, and what is called when one can be read."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable
from typing import Any

__all__ = ["Loop"]


class Loop:
    """Calls a handler for each watched descriptor that can be read."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def watch(self, descriptor: int, handler: Callable[[], Any]) -> None:
        """From now on ``handler`` is called when the descriptor can be read."""
        self._selector.register(descriptor, selectors.EVENT_READ, handler)

    def unwatch(self, descriptor: int) -> None:
        """Forgets a descriptor. One that isn't watched is fine: it may have ended by itself before."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def watch_writing(self, descriptor: int, wanted: bool) -> None:
        """Return whether the handler of a watched descriptor is also called when it can be written."""
        key = self._selector.get_key(descriptor)
        events = selectors.EVENT_READ | selectors.EVENT_WRITE if wanted else selectors.EVENT_READ
        if key.events != events:
            self._selector.modify(descriptor, events, key.data)

    def wait(self, timeout_s: float | None) -> None:
        """Waits until something can be read, at most so long, and calls the handlers of all that can."""
        for key, _ in self._selector.select(timeout_s):
            if key.fd in self._selector.get_map():  # a handler before this one may have closed it
                key.data()

"""Whether a click on a widget reaches the kernel while a cell is running, and what makes it.

A running cell keeps the kernel's main shell from reading messages. From ipykernel 7 on there are subshells, threads
that read messages beside it:

- 7.0 to 7.3 hand a message to the subshell that the front end has named in its header. JupyterLab does from 4.4 on,
  after it has had a subshell made for its widgets; VS Code names none.
- 7.4 hands what comes for a comm to whoever has last sent something over it, which for a panel is the running cell,
  and so nobody reads it. A comm decides that in ``_reply_subshell_for``. It is a private method, and an instance's own
  takes its place here: it names a subshell that was made on this side, so that front ends without any are served too.
- 6, which Colab has, knows no subshells.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from typing import Any

__all__ = ["LiveClicks"]

_ROUTE = "_reply_subshell_for"


class LiveClicks:
    """The way to the widgets of one panel.

    Args:
        kernel: The ipykernel that this process is.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._is_routed = False

    def attend(self, widget: Any) -> None:
        """Has what is done to a widget delivered while a cell runs, as far as this ipykernel can."""
        if self._subshells() is None or not hasattr(widget.comm, _ROUTE):
            return
        made = _own_subshell(self._kernel)
        setattr(widget.comm, _ROUTE, lambda _, named: _id_of(made) or named)
        self._is_routed = True

    @property
    def are_delivered(self) -> bool:
        """True if a click arrives while a cell is running. It may become true some time after a widget was shown."""
        there = self._subshells() or []
        if self._is_routed:
            made = _own_subshell(self._kernel)
            if not made.done() or made.exception() is None:
                return _id_of(made) in there
        # The front end chooses. It has made a subshell as soon as it knows of a widget, or does without.
        return bool(there)

    def _subshells(self) -> list[str] | None:
        """The subshells that there are, ``None`` in kernels that have no such thing."""
        with contextlib.suppress(AttributeError):
            return list(self._kernel.shell_channel_thread.manager.list_subshell())
        return None


_made: concurrent.futures.Future[str] | None = None


def _own_subshell(kernel: Any) -> concurrent.futures.Future[str]:
    """The id of this side's subshell: one for all panels, for as long as the kernel lives. Waits for nothing."""
    global _made
    if _made is None:
        _made = made = concurrent.futures.Future[str]()
        thread = kernel.shell_channel_thread

        def create() -> None:  # subshells are made in that thread only
            try:
                made.set_result(thread.manager._create_subshell())
            except Exception as error:  # noqa: BLE001 - private, and so it may be called otherwise one day
                made.set_exception(error)

        thread.io_loop.add_callback(create)
    return _made


def _id_of(made: concurrent.futures.Future[str]) -> str | None:
    return made.result() if made.done() and made.exception() is None else None

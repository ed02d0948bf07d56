"""Whether a person looks at this kernel through something that shows widgets, and how to hand it one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
from typing import Any

__all__ = ["LiveClicks", "is_watched", "kernel", "widget_view"]

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_ROUTE = "_reply_subshell_for"


def kernel() -> Any:
    """The ipykernel that this process is, or ``None``. Imports nothing, since plain scripts come through here too."""
    ipython = sys.modules.get("IPython") if "ipykernel" in sys.modules else None
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None)


def is_watched(running: Any) -> bool:
    """Return whether somebody looks at a kernel.

    Front ends with a person before them allow a cell to ask for input; nbclient, nbconvert and papermill don't, and
    that is the one difference that a kernel can see.
    """
    # _allow_stdin is what the running cell's execute request said. In a kernel without it, somebody may be looking.
    return running is not None and bool(getattr(running, "_allow_stdin", True))


def widget_view(widget: Any, text: str) -> dict[str, Any]:
    """The mime bundle that shows a widget, and text where none is shown."""
    view = {"model_id": widget.model_id, "version_major": 2, "version_minor": 0}
    return {_WIDGET_VIEW: view, "text/plain": text}


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

"""The front end: whether a user sees its widgets, how clicks on them arrive while a cell runs, and its style sheets.

A running cell keeps the kernel's main shell from reading messages. Since ipykernel 7 there are subshells, threads that
read messages beside it:

- 7.0 to 7.3 pass a message to the subshell that the front end names in its header. JupyterLab does so from 4.4 on,
  after it has asked for a subshell for its widgets; VS Code names none.
- 7.4 passes a comm's messages to whoever last sent something over the comm. For a panel that is the running cell, so
  nobody reads them. The comm decides this in its private method ``_reply_subshell_for``. We replace it on the instance
  to name a subshell of our own, which also serves front ends without subshells.
- 6, which Colab has, knows no subshells.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.resources
import sys
from typing import Any

_ROUTE = "_reply_subshell_for"

# A page that was opened before ipywidgets was installed doesn't have its extension, and shows the text of a widget.
_NO_WIDGETS = "Reload this page to see its widgets: ipywidgets was installed after the page was opened."


def kernel() -> Any:
    """Return this process's ipykernel, or ``None``. Imports nothing, since plain scripts call this too."""
    ipython = sys.modules.get("IPython") if "ipykernel" in sys.modules else None
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None)


def is_watched(running: Any) -> bool:
    """Return whether a user watches a kernel's front end.

    Interactive front ends allow a cell to ask for input; nbclient, nbconvert and papermill don't. The kernel sees no
    other difference.
    """
    # _allow_stdin is from the running cell's execute request. In a kernel without it, assume that there is a user.
    return running is not None and bool(getattr(running, "_allow_stdin", True))


def widget_view(widget: Any, text: str) -> dict[str, Any]:
    """Return the mime bundle that shows a widget, or text where widgets aren't shown, with what to do then."""
    view = {"model_id": widget.model_id, "version_major": 2, "version_minor": 0}
    return {"application/vnd.jupyter.widget-view+json": view, "text/plain": f"{text}\n{_NO_WIDGETS}"}


class LiveClicks:
    """Delivers clicks on one panel's widgets while a cell of this process's ``kernel`` runs."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._is_routed = False

    def attend(self, widget: Any) -> None:
        """Route a widget's messages so that they arrive while a cell runs, if this ipykernel can."""
        if self._subshells() is None or not hasattr(widget.comm, _ROUTE):
            return
        made = _own_subshell(self._kernel)
        setattr(widget.comm, _ROUTE, lambda _, named: (made.done() and made.result()) or named)
        self._is_routed = True

    @property
    def are_delivered(self) -> bool:
        """True if a click arrives while a cell runs. May become true some time after the widget is shown."""
        there = self._subshells() or []
        if self._is_routed:
            made = _own_subshell(self._kernel)
            if not made.done() or made.result():
                return made.done() and made.result() in there
        # The front end chooses: it makes a subshell as soon as it knows of a widget, or never.
        return bool(there)

    def _subshells(self) -> list[str] | None:
        """Return the ids of all subshells, ``None`` in kernels without subshells."""
        with contextlib.suppress(AttributeError):
            return list(self._kernel.shell_channel_thread.manager.list_subshell())
        return None


@functools.cache
def _own_subshell(kernel: Any) -> concurrent.futures.Future[str]:
    """Make a subshell for all panels of the kernel. Return its id as a future, empty if it can't be made."""
    made = concurrent.futures.Future[str]()
    thread = kernel.shell_channel_thread

    def create() -> None:  # subshells can only be made in that thread
        try:
            made.set_result(thread.manager._create_subshell())
        except Exception:  # noqa: BLE001 - the method is private and may change
            made.set_result("")

    thread.io_loop.add_callback(create)
    return made


_LIGHT = (
    "--nba-good:#1a7f4b;--nba-bad:#b3261e;--nba-busy:#1f5fc9;--nba-warn:#8a5a00;"
    "--nba-bar:#2563c9;--nba-memory:#636c78;"
    "--nba-c0:#1f5fc9;--nba-c1:#b5480f;--nba-c2:#1a7f4b;--nba-c3:#8a3fb0;"
    "--nba-c4:#8a6a00;--nba-c5:#0b7a86;--nba-c6:#b3266e;--nba-c7:#5d6672;"
    "--nba-own-page:#fff;--nba-own-text:#1b1f24;--nba-own-faint:#5d6672;--nba-own-line:#dfe2e7;"
)
_DARK = (
    "--nba-good:#57c794;--nba-bad:#f28b82;--nba-busy:#8ab4f8;--nba-warn:#e3a94a;"
    "--nba-bar:#79a9f7;--nba-memory:#9aa3b0;"
    "--nba-c0:#8ab4f8;--nba-c1:#f0a070;--nba-c2:#57c794;--nba-c3:#c79af0;"
    "--nba-c4:#d9b84a;--nba-c5:#5fc9d4;--nba-c6:#f28bbd;--nba-c7:#a9b2be;"
    "--nba-own-page:#16191f;--nba-own-text:#e8eaed;--nba-own-faint:#9aa3b0;--nba-own-line:#2c323b;"
)
_LIGHT_MARKS = '[data-jp-theme-light="true"] .nba-panel,.vscode-light .nba-panel,html[theme="light"] .nba-panel'
_DARK_MARKS = '[data-jp-theme-light="false"] .nba-panel,.vscode-dark .nba-panel,html[theme="dark"] .nba-panel'


def _rules(name: str) -> str:
    return importlib.resources.files("kernel_ext").joinpath(f"{name}.css").read_text(encoding="utf-8")


_CURVES = "".join(f".nba-panel .nba-chart .nba-c{n}{{color:var(--nba-c{n})}}" for n in range(8))

STYLE = (
    f".nba-panel{{{_LIGHT}}}@media (prefers-color-scheme:dark){{.nba-panel{{{_DARK}}}}}"
    f"{_LIGHT_MARKS}{{{_LIGHT}}}{_DARK_MARKS}{{{_DARK}}}{_rules('panel')}{_CURVES}"
)
"""The panel's style sheet. Nothing else on the page changes."""

FORM_STYLE = STYLE + _rules("config_form")
"""The panel's style sheet with rules for the fields of the configuration form."""

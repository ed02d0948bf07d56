"""Whether a person looks at this kernel through something that shows widgets, and how to hand it one."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["is_watched", "kernel", "widget_view"]

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


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

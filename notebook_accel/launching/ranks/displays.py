"""``display()``, IPython's own display functions and figures, in a rank: what rank 0 shows appears in the notebook.

What another rank shows is a line of its output. IPython isn't imported: when the user's code does, its functions are
replaced by these.
"""

from __future__ import annotations

import os
import sys
import traceback
import types
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from notebook_accel import reporting
from notebook_accel.launching.ranks import mime_bundles, streams
from notebook_accel.launching.ranks.import_hooks import when_imported
from notebook_accel.protocol import events

__all__ = ["DisplayHandle", "adopt", "at_end", "clear_output", "display", "end", "lead_to", "publish", "shown_figures"]

# What a kernel, or its user, has matplotlib draw with, and a rank can't: it has no kernel.
_KERNEL_BACKENDS = ("inline", "ipympl", "nbagg", "notebook", "widget", "module://")
_OUR_BACKEND = "module://notebook_accel.launching.ranks.figures"
_NOTHING = {"text/plain": "", "text/html": ""}

shown_figures: weakref.WeakSet[Any] = weakref.WeakSet()


class DisplayHandle:
    """What was displayed and can be changed: what ``display(..., display_id=...)`` returns."""

    def __init__(self, display_id: str) -> None:
        self.display_id = display_id

    def display(self, obj: object, **options: Any) -> None:
        """Displays once more, and changes what was displayed with this id before."""
        display(obj, display_id=self.display_id, **options)

    def update(self, obj: object, **options: Any) -> None:
        """Changes what was displayed."""
        display(obj, display_id=self.display_id, update=True, **options)


class _Screen:
    """What this rank has on display, by the ids of the places in the notebook.

    A notebook can change what a place shows but not take it away. So what is cleared becomes empty, and what comes next
    goes to the same places.
    """

    def __init__(self) -> None:
        self._used: list[str] = []
        self._named: list[str] = []  # by the user, who may change them: nothing else goes there
        self._free: list[str] = []
        self._is_clear_due = False

    def show(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str, *, is_update: bool) -> None:
        if self._is_clear_due:
            self._is_clear_due = False
            self._clear(kept=0 if display_id else 1)  # what comes now takes the first place at once
        if not display_id:
            is_update = bool(self._free)
            display_id = self._free.pop(0) if self._free else uuid.uuid4().hex
            self._used.append(display_id)
        elif not is_update:
            self._named.append(display_id)
        _send(data, metadata, display_id, is_update=is_update)

    def clear(self, *, waits: bool) -> None:
        self._is_clear_due = waits
        if not waits:
            self._clear(kept=0)

    def _clear(self, kept: int) -> None:
        for place in (*self._used[kept:], *self._named):
            _send(_NOTHING, {}, place, is_update=True)
        self._free, self._used, self._named = [*self._used, *self._free], [], []


_screen: _Screen | None = None  # of rank 0
_show: Callable[[events.Display], None] | None = None  # what takes the place of an event of the run
_at_end: list[Callable[[], None]] = []


def display(
    *objects: Any,
    include: Any = None,
    exclude: Any = None,
    metadata: Mapping[str, Any] | None = None,
    transient: Mapping[str, Any] | None = None,
    display_id: str | bool | None = None,
    raw: bool = False,
    clear: bool = False,
    update: bool = False,
    **_: Any,
) -> DisplayHandle | None:
    """Shows objects in the notebook, from rank 0; from another rank, their text in its output.

    Args:
        objects: What to show; with ``raw``, mime bundles.
        include: The only mime types to show, where given.
        exclude: Mime types not to show.
        metadata: Of the bundles.
        transient: May have a ``display_id``.
        display_id: A name under which it can be changed later; ``True`` for a new one.
        raw: Whether the objects are mime bundles.
        clear: Whether to clear what this rank has displayed.
        update: Whether to change what has the ``display_id``, instead of showing it once more.

    Returns:
        A handle to change it, if there is a ``display_id``.

    Raises:
        TypeError: There is nothing to update without a ``display_id``.
    """
    name = uuid.uuid4().hex if display_id is True else str(display_id or (transient or {}).get("display_id") or "")
    if update and not name:
        raise TypeError("an update needs the display_id of what is to change")
    if clear:
        clear_output(wait=True)
    if not objects and name:
        objects, raw = ({},), True  # a place for what comes later
    for obj in objects:
        if mime_bundles.is_figure(obj):
            shown_figures.add(obj)
        shows_itself = None if raw or isinstance(obj, type) else getattr(obj, "_ipython_display_", None)
        if callable(shows_itself):
            shows_itself()
            continue
        if not raw and _shown_screen() is None:  # no figure is drawn to show its name
            print(repr(obj))
            continue
        data, about = (dict(obj), {}) if raw else mime_bundles.bundle_of(obj)
        chosen = {kind: data[kind] for kind in data if kind in (include or data) and kind not in (exclude or ())}
        publish(chosen, {**about, **(metadata or {})}, transient={"display_id": name}, update=update)
    return DisplayHandle(name) if display_id else None


def publish(
    data: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    source: Any = None,  # noqa: ARG001 - IPython has it, without a use
    *,
    transient: Mapping[str, Any] | None = None,
    update: bool = False,
    **_: Any,
) -> None:
    """Shows one mime bundle: what IPython's displays come to."""
    screen = _shown_screen()
    if screen is None:
        print(data.get("text/plain", ""))
        return
    name = str((transient or {}).get("display_id") or "")
    screen.show(mime_bundles.sendable(data), mime_bundles.sendable(metadata or {}), name, is_update=update)


def clear_output(wait: bool = False) -> None:
    """Clears what this rank has displayed; with ``wait``, when it displays something new. What it printed stays."""
    screen = _shown_screen()
    if screen is not None:
        screen.clear(waits=wait)


def at_end(function: Callable[[], None]) -> None:
    """Has ``function`` called when the user's code has ended."""
    _at_end.append(function)


def end() -> None:
    """Shows figures that are left open. Before the results are pickled: such a figure would be shown with them."""
    for function in _at_end:
        try:
            function()
        except Exception:  # noqa: BLE001 - a figure that can't be drawn is no reason to lose the results
            traceback.print_exc()


def _shown_screen() -> _Screen | None:
    """Where this process displays: nowhere if it isn't rank 0 itself, but one that rank 0 has forked."""
    return _screen if reporting.reporter().is_connected else None


def _send(data: Mapping[str, Any], metadata: dict[str, Any], display_id: str, *, is_update: bool) -> None:
    said = events.Display(
        data=dict(data),
        metadata=metadata,
        display_id=display_id,
        is_update=is_update,
        log_bytes=streams.log_bytes(),
    )
    (_show or reporting.reporter().send)(said)  # before this returns, and so before anything that is printed later


def lead_to(show: Callable[[events.Display], None] | None) -> None:
    """From now on ``show`` takes what is displayed, on a new screen: that of a cell. ``None``: as it was before."""
    global _screen, _show
    _show = show
    if _screen is not None:
        _screen = _Screen()


def adopt(rank: int) -> None:
    """From now on IPython's display functions and matplotlib's figures lead here, imported already or not."""
    global _screen
    _screen = _Screen() if rank == 0 else None
    for name in ("IPython.core.display_functions", "IPython.core.display", "IPython.display"):
        when_imported(name, _adopt_functions)
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:  # in a fork of the kernel, whose own way out is closed
        shell.display_pub.publish, shell.display_pub.clear_output = publish, clear_output
        when_imported("matplotlib_inline.backend_inline", _adopt_open_figures)
    elif os.environ.get("MPLBACKEND", "").startswith(_KERNEL_BACKENDS):
        os.environ["MPLBACKEND"] = _OUR_BACKEND
        if "matplotlib" in sys.modules:  # it has read the variable already
            sys.modules["matplotlib"].use(_OUR_BACKEND)


def _adopt_functions(module: types.ModuleType) -> None:
    for name, function in (("display", display), ("publish_display_data", publish), ("clear_output", clear_output)):
        if hasattr(module, name):
            setattr(module, name, function)


def _adopt_open_figures(module: types.ModuleType) -> None:
    """IPython shows figures that are left open when a cell is done, and in the rank's shell no cell ever is."""
    at_end(module.flush_figures)

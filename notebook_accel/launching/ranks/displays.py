"""``display()``, IPython's own display functions and figures in a rank. Rank 0's displays appear in the notebook.

Displays of other ranks become a line of their output. IPython isn't imported: when the user's code imports it, these
functions replace IPython's. Objects offer richer forms than text through the methods of IPython's rich display protocol
(https://ipython.readthedocs.io, "Integrating your objects with IPython").
"""

from __future__ import annotations

import base64
import builtins
import inspect
import io
import json
import os
import sys
import traceback
import types
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from notebook_accel import reporting
from notebook_accel.formatting import format_size
from notebook_accel.launching.ranks import streams
from notebook_accel.launching.ranks.import_hooks import when_imported
from notebook_accel.protocol import events

# matplotlib backends that draw through a kernel, which a rank doesn't have.
_KERNEL_BACKENDS = ("inline", "ipympl", "nbagg", "notebook", "widget", "module://")
_OUR_BACKEND = "module://notebook_accel.launching.ranks.figures"
_EMPTY = {"text/plain": "", "text/html": ""}
_TEXT = "text/plain"
_METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "application/pdf": "_repr_pdf_",
    "application/json": "_repr_json_",
    "application/javascript": "_repr_javascript_",
}
_ANSWERS_EVERYTHING = "_ipython_canary_method_should_not_exist_"  # an object that has this makes up its attributes
_WIDGET = "application/vnd.jupyter.widget-view+json"  # its model is in the rank, where no front end reaches it
_MAX_BYTES = 100 << 20  # no browser opens a notebook with a larger output

shown_figures: weakref.WeakSet[Any] = weakref.WeakSet()


class DisplayHandle:
    """A handle to change a display, as returned by ``display(..., display_id=...)``."""

    def __init__(self, display_id: str) -> None:
        self.display_id = display_id

    def display(self, obj: object, **options: Any) -> None:
        """Display another object, here and where this id was displayed before."""
        display(obj, display_id=self.display_id, **options)

    def update(self, obj: object, **options: Any) -> None:
        """Replace the displayed object."""
        display(obj, display_id=self.display_id, update=True, **options)


class _Screen:
    """This rank's displays in the notebook, by their display ids.

    A notebook can change a display but not remove it. So clearing makes the displays empty, and later ones reuse them.
    """

    def __init__(self) -> None:
        self._used: list[str] = []
        self._named: list[str] = []  # by the user, who may change them, so they are never reused
        self._free: list[str] = []
        self._is_clear_due = False

    def show(self, data: dict[str, Any], metadata: dict[str, Any], display_id: str, *, is_update: bool) -> None:
        if self._is_clear_due:
            self._is_clear_due = False
            self._clear(kept=0 if display_id else 1)  # the new display takes the first place at once
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
            _send(_EMPTY, {}, place, is_update=True)
        self._free, self._used, self._named = [*self._used, *self._free], [], []


_screen: _Screen | None = None  # of rank 0
_show: Callable[[events.Display], None] | None = None  # receives displays instead of the run's reporter
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
    """Show objects in the notebook if this is rank 0; on another rank, print their text.

    Arguments and result are those of IPython's ``display``.

    Raises:
        TypeError: An update has no ``display_id``.
    """
    name = uuid.uuid4().hex if display_id is True else str(display_id or (transient or {}).get("display_id") or "")
    if update and not name:
        raise TypeError("an update needs the display_id of what is to change")
    if clear:
        clear_output(wait=True)
    if not objects and name:
        objects, raw = ({},), True  # an empty place for a later update
    for obj in objects:
        if _is_figure(obj):
            shown_figures.add(obj)
        shows_itself = None if raw or isinstance(obj, type) else getattr(obj, "_ipython_display_", None)
        if callable(shows_itself):
            shows_itself()
            continue
        if not raw and _shown_screen() is None:  # repr() alone, so that no figure is drawn for nothing
            print(repr(obj))
            continue
        data, about = (dict(obj), {}) if raw else bundle_of(obj)
        chosen = {kind: data[kind] for kind in data if kind in (include or data) and kind not in (exclude or ())}
        publish(chosen, {**about, **(metadata or {})}, transient={"display_id": name}, update=update)
    return DisplayHandle(name) if display_id else None


def publish(
    data: Mapping[str, Any],
    metadata: Mapping[str, Any] | None = None,
    source: Any = None,  # noqa: ARG001 - as in IPython's signature
    *,
    transient: Mapping[str, Any] | None = None,
    update: bool = False,
    **_: Any,
) -> None:
    """Show one mime bundle, as IPython's ``publish_display_data`` does."""
    screen = _shown_screen()
    if screen is None:
        print(data.get("text/plain", ""))
        return
    name = str((transient or {}).get("display_id") or "")
    screen.show(sendable(data), sendable(metadata or {}), name, is_update=update)


def clear_output(wait: bool = False) -> None:
    """Clear this rank's displays; with ``wait``, only when the next display comes. Printed text stays."""
    screen = _shown_screen()
    if screen is not None:
        screen.clear(waits=wait)


def at_end(function: Callable[[], None]) -> None:
    """Register ``function`` for the end of the user's code."""
    _at_end.append(function)


def end() -> None:
    """Call the functions of ``at_end``, which show and close open figures.

    Called before the results are pickled: a figure that is pickled open is shown again where it is unpickled.
    """
    for function in _at_end:
        try:
            function()
        except Exception:  # noqa: BLE001 - a figure that can't be drawn is no reason to lose the results
            traceback.print_exc()


def _shown_screen() -> _Screen | None:
    # A process that rank 0 has forked displays nothing.
    return _screen if reporting.reporter().is_connected else None


def _send(data: Mapping[str, Any], metadata: dict[str, Any], display_id: str, *, is_update: bool) -> None:
    event = events.Display(
        data=dict(data), metadata=metadata, display_id=display_id, is_update=is_update, log_bytes=streams.log_bytes()
    )
    (_show or reporting.reporter().send)(event)  # at once, and so before anything that is printed later


def redirect(show: Callable[[events.Display], None] | None) -> None:
    """Pass all displays to ``show``, on a new screen, as for a session's cell. ``None`` ends the redirection."""
    global _screen, _show
    _show = show
    if _screen is not None:
        _screen = _Screen()


def install(rank: int) -> None:
    """Replace IPython's display functions and the matplotlib backend, imported already or not."""
    global _screen
    _screen = _Screen() if rank == 0 else None
    builtins.display = display  # type: ignore[attr-defined]
    for name in ("IPython.core.display_functions", "IPython.core.display", "IPython.display"):
        when_imported(name, _replace_functions)
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:  # in a fork of the kernel, which can't publish through the kernel's sockets
        shell.display_pub.publish, shell.display_pub.clear_output = publish, clear_output
        # IPython shows open figures at the end of a cell, and in the rank's shell no cell ever ends.
        when_imported("matplotlib_inline.backend_inline", lambda module: at_end(module.flush_figures))
    elif os.environ.get("MPLBACKEND", "").startswith(_KERNEL_BACKENDS):
        os.environ["MPLBACKEND"] = _OUR_BACKEND
        if "matplotlib" in sys.modules:  # matplotlib has read the variable already
            sys.modules["matplotlib"].use(_OUR_BACKEND)


def _replace_functions(module: types.ModuleType) -> None:
    for name, function in (("display", display), ("publish_display_data", publish), ("clear_output", clear_output)):
        if name in vars(module):  # and not a deprecated name that IPython 8 imports from its new place, with a warning
            setattr(module, name, function)


def bundle_of(obj: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the forms that an object offers, by mime type, and their metadata.

    A method that raises is left out, with its traceback in the rank's output.
    """
    data: dict[str, Any] = {_TEXT: repr(obj)}
    metadata: dict[str, Any] = {}
    if inspect.isclass(obj) or hasattr(obj, _ANSWERS_EVERYTHING):
        return data, metadata
    for kind, name in _METHODS.items():
        found, about = _call(obj, name)
        if found is not None:
            data[kind] = found
            metadata.update({kind: about} if about else {})
    bundle, about = _call(obj, "_repr_mimebundle_", include=None, exclude=None)
    if isinstance(bundle, Mapping):
        data.update(bundle)
        metadata.update(about or {})
    if "image/png" not in data and _is_figure(obj):
        data["image/png"] = _png(obj)
    return data, metadata


def sendable(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a bundle as JSON, with bytes as base64 text. One that is too large for a notebook keeps only its text."""
    ready = {kind: _as_json(value) for kind, value in data.items() if kind != _WIDGET}
    size = sum(len(value) for value in ready.values() if isinstance(value, str))
    if size <= _MAX_BYTES:
        return ready
    return {_TEXT: f"{str(ready.get(_TEXT, ''))[:1000]} [not shown here: it has {format_size(size)}]"}


def _is_figure(obj: object) -> bool:
    """Return whether the object is a matplotlib figure, which has no method of the rich display protocol."""
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(obj, module.Figure)


def _call(obj: object, name: str, **arguments: Any) -> tuple[Any, Any]:
    """Return the data and the metadata that a method offers, ``None`` where there is none."""
    method = getattr(obj, name, None)
    if not callable(method):
        return None, None
    try:
        found = method(**arguments)
    except Exception:  # noqa: BLE001 - the user's method may raise anything, and the object has other forms
        traceback.print_exc()
        return None, None
    if isinstance(found, tuple):
        data, metadata = found
        return data, metadata
    return found, None


def _png(figure: Any) -> bytes:
    """Draw a figure as it is now, without the empty margin around it."""
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight", dpi="figure")
    return file.getvalue()


def _as_json(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    return value if isinstance(value, str) else json.loads(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    """Return numpy's numbers and arrays as Python's own, and anything else as its text."""
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) else str(value)

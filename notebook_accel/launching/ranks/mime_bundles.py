"""From an object to what Jupyter shows of it: text, and the richer forms that the object offers.

The methods that are asked for are IPython's protocol for rich display (https://ipython.readthedocs.io, "Integrating
your objects with IPython"). IPython itself isn't needed.
"""

from __future__ import annotations

import base64
import inspect
import io
import json
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from notebook_accel.formatting import format_size

__all__ = ["bundle_of", "is_figure", "sendable"]

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
_ANSWERS_EVERYTHING = "_ipython_canary_method_should_not_exist_"  # whether an object makes up attributes
_WIDGET = "application/vnd.jupyter.widget-view+json"  # its model is in the rank, where no front end reaches it
_MOST_BYTES = 100 << 20  # no browser opens a notebook with a larger output


def is_figure(obj: object) -> bool:
    """Return whether it is a figure of matplotlib's, which doesn't know by itself how Jupyter shows it."""
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(obj, module.Figure)


def bundle_of(obj: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an object offers, by mime type, and the metadata of it.

    A method that raises is left out, and said in the rank's output.
    """
    data: dict[str, Any] = {_TEXT: repr(obj)}
    metadata: dict[str, Any] = {}
    if inspect.isclass(obj) or hasattr(obj, _ANSWERS_EVERYTHING):
        return data, metadata
    for kind, name in _METHODS.items():
        found = _call(obj, name)
        found, about = found if isinstance(found, tuple) else (found, None)
        if found is not None:
            data[kind] = found
            metadata.update({kind: about} if about else {})
    whole = _call(obj, "_repr_mimebundle_", include=None, exclude=None)
    whole, about = whole if isinstance(whole, tuple) else (whole, None)
    if isinstance(whole, Mapping):
        data.update(whole)
        metadata.update(about or {})
    if "image/png" not in data and is_figure(obj):
        data["image/png"] = _png(obj)
    return data, metadata


def sendable(data: Mapping[str, Any]) -> dict[str, Any]:
    """A bundle as JSON has it, with bytes as base64 text; of one that no notebook could hold, only its text."""
    ready = {kind: _as_json(value) for kind, value in data.items() if kind != _WIDGET}
    size = sum(len(value) for value in ready.values() if isinstance(value, str))
    if size <= _MOST_BYTES:
        return ready
    return {_TEXT: f"{str(ready.get(_TEXT, ''))[:1000]} [not shown here: it has {format_size(size)}]"}


def _call(obj: object, name: str, **arguments: Any) -> Any:
    method = getattr(obj, name, None)
    if not callable(method):
        return None
    try:
        return method(**arguments)
    except Exception:  # noqa: BLE001 - the user's method may raise anything, and the object has other forms
        traceback.print_exc()
        return None


def _png(figure: Any) -> bytes:
    """A figure as it is now, without the empty margin around it."""
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight", dpi="figure")
    return file.getvalue()


def _as_json(value: Any) -> Any:
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    return value if isinstance(value, str) else json.loads(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    """What JSON doesn't know: numbers and arrays of numpy as Python's own, anything else as its text."""
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) else str(value)

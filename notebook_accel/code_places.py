"""Where the user's code is running, in the words of the notebook: ``In[3], line 7``."""

from __future__ import annotations

import os
import sysconfig
import types
from collections.abc import Iterator, Mapping

__all__ = ["OURS", "describe", "name_files"]

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
"""The folder of this package's code."""

# Code that the user hasn't written: ours, Python's and what was installed.
_PATHS = sysconfig.get_paths()
_NOT_THE_USERS = (
    OURS,
    *(_PATHS[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)
# What a call is called on its way into a library where its own name says little.
_CALLS = {
    "__iter__": "the loader",
    "__next__": "the loader",
    "_wrapped_call_impl": "the model's forward pass",
    "_call_impl": "the model's forward pass",
    "__call__": "the model's forward pass",
    "__enter__": "entering a context",
    "__exit__": "leaving a context",
    "__init__": "making an object",
}

_labels: dict[str, str] = {}


def name_files(labels: Mapping[str, str]) -> None:
    """Tells what the user knows files by: for the file name of a cell's code, ``In[3]``."""
    _labels.update(labels)


def describe(frame: types.FrameType | None) -> str:
    """What a thread whose innermost frame this is does: ``gather at In[3], line 7``.

    Named are the innermost line of the user's and the call that left the user's code there, if one did.
    """
    call = ""
    for current in _outwards(frame):
        filename = current.f_code.co_filename
        if filename in _labels or not filename.startswith(_NOT_THE_USERS):
            where = f"{_labels.get(filename, filename)}, line {current.f_lineno}"
            return f"{call} at {where}" if call else where
        call = _CALLS.get(current.f_code.co_name, current.f_code.co_name)
    return call


def _outwards(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back

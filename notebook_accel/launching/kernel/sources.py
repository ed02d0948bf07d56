"""Source text of functions that were typed into a notebook, so that tracebacks in ranks can show it."""

from __future__ import annotations

import linecache
import os
import sys
import types
from collections.abc import Iterable
from typing import Any

from notebook_accel.launching.spec import Source

__all__ = ["of_functions"]


def of_functions(shipped: Iterable[Any]) -> dict[str, Source]:
    """The sources that are in no file, by the file name in their functions' code."""
    filenames = {obj.__code__.co_filename for obj in shipped if isinstance(obj, types.FunctionType)}
    found: dict[str, Source] = {}
    for filename in filenames:
        lines = [] if os.path.exists(filename) else linecache.getlines(filename)
        if lines:
            found[filename] = Source(_label(filename), "".join(lines))
    return found


def _label(filename: str) -> str:
    """``In[7]`` where the kernel can say so: IPython's compiler knows which cell it compiled under which name."""
    shell = getattr(sys.modules.get("__main__"), "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    named = name_of(filename) if name_of is not None else None
    return str(named[1]) if named else filename

"""The file beside an exported script: what the notebook has and no source makes.

It is torch's own format. What the script defines is in it by name, so that what comes out of it is of the script's
classes; what nobody can name is in it by value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import pathlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle

from notebook_accel.errors import CellError
from notebook_accel.payload import unpicklable

__all__ = ["Written", "is_only_weights", "write"]

_ADVICE = "make it inside the cell, or leave it out of what the cell uses"


@dataclasses.dataclass
class Written:
    """What is in a file.

    Attributes:
        by_name: The functions and classes of the script's that it names.
        by_value: The notebook's functions and classes that are in it themselves.
    """

    by_name: dict[str, None] = dataclasses.field(default_factory=dict)
    by_value: dict[str, None] = dataclasses.field(default_factory=dict)


def write(path: pathlib.Path, values: Mapping[str, Any], name_of: Callable[[Any], str]) -> Written:
    """Writes values, as one dict, so that what belongs together stays together.

    Args:
        path: The file.
        values: By name.
        name_of: The name under which the script defines a function or a class of the notebook; empty if it doesn't.

    Raises:
        OSError: The file can't be written.
        CellError: What a class of it uses can't be exported.
        PayloadError: Something can't be pickled; the message leads to it.
    """
    torch: Any = importlib.import_module("torch")
    pickling = types.ModuleType("notebook_accel_export")  # torch takes its pickler from a module
    written = Written()
    pickling.Pickler = _pickler(name_of, written)  # type: ignore[attr-defined]
    try:
        with path.open("wb") as file:
            torch.save(dict(values), file, pickle_module=pickling)
    except (CellError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the user is told where it comes from
        roots = {f'global "{name}"': value for name, value in values.items()}
        raise unpicklable.explain(roots, error, lambda obj: _failure(obj, name_of), _ADVICE) from None
    return written


def is_only_weights(path: pathlib.Path) -> bool:
    """Return whether such a file can be read without running what it says."""
    torch: Any = importlib.import_module("torch")
    with contextlib.suppress(Exception):
        torch.load(path, map_location="meta", weights_only=True)
        return True
    return False


def _pickler(name_of: Callable[[Any], str], written: Written) -> type[Any]:
    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, (type, types.FunctionType)):
                return super().reducer_override(obj)
            if obj.__module__ == "__main__" and getattr(sys.modules["__main__"], obj.__name__, None) is obj:
                name = name_of(obj)
                if name:
                    written.by_name[name] = None
                    return name
            reduced = super().reducer_override(obj)
            if reduced is not NotImplemented and obj.__module__ == "__main__":
                written.by_value[obj.__qualname__] = None
            return reduced

    return Pickler


def _failure(obj: Any, name_of: Callable[[Any], str]) -> Exception | None:
    try:
        _pickler(name_of, Written())(io.BytesIO(), protocol=2).dump(obj)
    except Exception as error:  # noqa: BLE001 - whatever a user's __reduce__ raises is the reason we look for
        return error
    return None

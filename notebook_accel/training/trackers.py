"""Trackers, which write a run's metrics: their base classes, and one that needs no library.

A tracker's constructor starts nothing, so that every rank can call it. ``init_trackers`` starts it on rank 0; on the
other ranks each of its methods does nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

_METHODS = ("start", "store_init_configuration", "log", "log_images", "_write_table", "finish")
_Call = TypeVar("_Call", bound=Callable[..., Any])
Images = Mapping[str, Sequence[Any]]


class Idle:
    """Stands for a library's object where nothing is written: each attribute, call and item is another one."""

    def __getattr__(self, name: str) -> Idle:
        if name.startswith("__"):  # Python itself asks, such as to copy or pickle it
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Idle:
        return self

    def __getitem__(self, _: Any) -> Idle:
        return self

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def __bool__(self) -> bool:
        return False


def guarded(method: _Call) -> _Call:
    """Decorate a tracker's method, to warn once about an error in place of raising it: training goes on."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  whatever the library raises, it is no reason to end training
            warn_once(self, method.__name__.replace("_write", "log"), error)
            return None

    return wrapper  # type: ignore[return-value]


def warn_once(tracker: Any, action: str, error: Exception) -> None:
    """Warn that a tracker has failed, unless it has failed before."""
    if not getattr(tracker, "has_failed", False):
        with contextlib.suppress(AttributeError):  # an object with slots warns each time
            tracker.has_failed = True
        warnings.warn(
            f"The tracker {tracker.name!r} failed in {action}, and training goes on without what it doesn't write: "
            f"{type(error).__name__}: {error}",
            stacklevel=3,
        )


class GeneralTracker:
    """A tracker that writes nothing. Your own needs these attributes and methods, but needn't be a subclass.

    Attributes:
        name: The name for ``get_tracker``.
        requires_logging_directory: True if the tracker writes files.
    """

    name = "none"
    requires_logging_directory = False
    main_process_only = True  # programs that were written for Accelerate read it

    @property
    def tracker(self) -> Any:
        """The library's own object."""
        return self

    def start(self) -> None:
        """Begin the run; ``init_trackers`` calls it on rank 0."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's settings."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write the values of a step."""

    def finish(self) -> None:
        """Write all pending values, at the end of the run."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table for ``log_table``: names of columns and rows, or a data frame of pandas."""

    name: str
    columns: list[str] | None
    rows: list[list[Any]] | None
    dataframe: Any
    step: int | None


class LibraryTracker(GeneralTracker):
    """A tracker that writes through a library, which is imported when it starts. Its errors are warnings.

    Args:
        run_name: The project's or run's name.
        options: Arguments of the library's function that begins a run.

    Attributes:
        library: The library, idle until the tracker has started.
        run: The library's own object, idle until the tracker has started.
        module: The library's name.
    """

    module = ""

    def __init__(self, run_name: str = "", /, **options: Any) -> None:
        self.run_name = run_name
        self.options = options
        self.library: Any = Idle()
        self.run: Any = Idle()

    def __init_subclass__(cls) -> None:
        for name in _METHODS:
            if name in vars(cls):
                setattr(cls, name, guarded(vars(cls)[name]))

    @property
    def tracker(self) -> Any:
        return self.run

    @guarded
    def start(self) -> None:
        self.library = importlib.import_module(self.module)
        self.run = self._open()

    def _open(self) -> Any:
        """Begin the run and return the library's object."""
        raise NotImplementedError

    def log_images(self, values: Images, step: int | None = None, **kwargs: Any) -> None:  # noqa: ARG002
        """Write lists of images, as arrays of shape ``(height, width, channels)`` or as PIL's images.

        Args:
            values: The lists by name.
            step: The step.
            kwargs: Further arguments of the library's function.
        """
        self._lacks("images")

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a table.

        Args:
            table_name: The table's name.
            columns: The names of the columns.
            data: The rows.
            dataframe: A data frame of pandas in place of ``columns`` and ``data``.
            step: The step.
            kwargs: Further arguments of the library's function.
        """
        self._write_table(Table(table_name, columns, data, dataframe, step), **kwargs)

    def _write_table(self, table: Table, **kwargs: Any) -> None:  # noqa: ARG002
        self._lacks("tables")

    def _lacks(self, kind: str) -> None:
        if not isinstance(self.run, Idle):  # on the other ranks there is nothing to say
            warn_once(self, f"log_{kind}", NotImplementedError(f"it has no {kind}"))


class JSONLinesTracker(GeneralTracker):
    """A tracker that writes one line of JSON to ``metrics.jsonl`` for each ``log``. It needs no other package.

    Args:
        run_name: A folder below ``logging_dir``.
        logging_dir: The folder of all runs.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        self._folder = pathlib.Path(logging_dir) / run_name
        self.path = self._folder / "metrics.jsonl"

    @property
    def tracker(self) -> Any:
        return self.path

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        text = json.dumps(values, indent=2, default=plain)
        (self._folder / "hparams.json").write_text(text + "\n", encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        line = json.dumps({"time_s": time.time(), "step": step, **values, **kwargs}, default=plain)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def plain(value: Any) -> Any:
    """Return a tensor or array as numbers, and other objects as text."""
    if not hasattr(value, "tolist"):
        return value if isinstance(value, (int, float, bool)) else str(value)
    numbers = value.tolist()
    while isinstance(numbers, list) and len(numbers) == 1:
        numbers = numbers[0]
    return numbers

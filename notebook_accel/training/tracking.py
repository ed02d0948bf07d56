"""Trackers, which write a run's metrics on rank 0."""

from __future__ import annotations

import enum
import functools
import importlib.util
import json
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from notebook_accel.errors import ConfigError
from notebook_accel.training import process_group

_P = ParamSpec("_P")
_R = TypeVar("_R")


class LoggerType(str, enum.Enum):
    """The names of Accelerate's trackers. ``log_with`` refuses those that this package doesn't support."""

    ALL = "all"
    AIM = "aim"
    CLEARML = "clearml"
    COMETML = "comet_ml"
    DVCLIVE = "dvclive"
    MLFLOW = "mlflow"
    SWANLAB = "swanlab"
    TENSORBOARD = "tensorboard"
    TRACKIO = "trackio"
    WANDB = "wandb"


class GeneralTracker:
    """A tracker that writes nothing. Your own needs these attributes and methods, but needn't be a subclass.

    Attributes:
        name: The name for ``get_tracker``.
        requires_logging_directory: True if the tracker writes files.
    """

    name = "none"
    requires_logging_directory = False

    @property
    def tracker(self) -> Any:
        """The library's own object."""
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's settings."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write the values of a step."""

    def finish(self) -> None:
        """Write all pending values, at the end of the run."""


class TensorBoardTracker(GeneralTracker):
    """A tracker that writes numbers and text in TensorBoard's format.

    Args:
        run_name: A folder below ``logging_dir``.
        logging_dir: The folder that TensorBoard shows.
        options: Arguments of ``torch.utils.tensorboard.SummaryWriter``.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **options: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs tensorboard, which isn't a dependency

        self.writer: Any = SummaryWriter(pathlib.Path(logging_dir) / run_name, **options)

    @property
    def tracker(self) -> Any:
        return self.writer

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        plain = {name: value if isinstance(value, (int, float, bool)) else str(value) for name, value in values.items()}
        self.writer.add_hparams(plain, metric_dict={}, run_name=".")
        self.writer.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                self.writer.add_scalar(name, _plain(value), global_step=step, **kwargs)
        self.writer.flush()

    def finish(self) -> None:
        self.writer.close()


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
        self._folder.mkdir(parents=True, exist_ok=True)
        self.path = self._folder / "metrics.jsonl"

    @property
    def tracker(self) -> Any:
        return self.path

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        text = json.dumps(values, indent=2, default=_plain)
        (self._folder / "hparams.json").write_text(text + "\n", encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        line = json.dumps({"time_s": time.time(), "step": step, **values, **kwargs}, default=_plain)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


_KNOWN: dict[str, Any] = {"tensorboard": TensorBoardTracker, "jsonl": JSONLinesTracker}


def on_main_process(method: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Decorate a tracker's method, to run it on rank 0 only and return ``None`` on the others."""

    @functools.wraps(method)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        return method(*args, **kwargs) if process_group.rank_place().rank == 0 else None

    return wrapper


def register_tracker_class(tracker: type) -> None:
    """Register a class of trackers, so that ``log_with`` accepts its ``name``.

    ``init_trackers`` calls the class with the run's name and, if ``requires_logging_directory``, with the folder.

    Raises:
        ConfigError: The class has no ``name``, or no method ``log``.
    """
    name = getattr(tracker, "name", None)
    if not isinstance(name, str) or not callable(getattr(tracker, "log", None)):
        raise ConfigError(f"{tracker.__name__} isn't a tracker.", fix="a class with name and log(values, step)")
    _KNOWN[name] = tracker


def resolve(log_with: Any, logging_dir: str | os.PathLike[str] | None) -> list[Any]:
    """Check ``log_with``, and return the names of trackers and the user's own trackers, as ``start`` takes them.

    Raises:
        ConfigError: There is no such tracker, it isn't installed, or it needs a folder and there is none.
    """
    asked = [] if log_with is None else list(log_with) if isinstance(log_with, (list, tuple)) else [log_with]
    found: list[Any] = []
    for item in asked:
        name = getattr(item, "value", item)  # of an enumeration
        found += _usable_names(logging_dir) if name == "all" else [name]
    found = [item for number, item in enumerate(found) if item not in found[:number]]
    for item in found:
        _check(item, logging_dir)
    return found


def _usable_names(logging_dir: str | os.PathLike[str] | None) -> list[str]:
    """Return the names of all trackers that can be used here."""
    usable = [
        name
        for name, kind in _KNOWN.items()
        if (name != "tensorboard" or _has_tensorboard()) and (logging_dir is not None or not _needs_folder(kind))
    ]
    if not usable and process_group.rank_place().rank == 0:
        warnings.warn(
            "log_with='all' logs nothing: there is no folder. Fix: Accelerator(..., project_dir='runs/first')",
            stacklevel=5,
        )
    return usable


def _check(item: Any, logging_dir: str | os.PathLike[str] | None) -> None:
    if isinstance(item, str) and item not in _KNOWN:
        raise ConfigError(
            f"log_with has {item!r}, and there is no such tracker.",
            fix=f"one of {', '.join(map(repr, _KNOWN))}, or an object with name, store_init_configuration and log",
        )
    if not isinstance(item, str) and not (hasattr(item, "name") and callable(getattr(item, "log", None))):
        raise ConfigError(
            f"log_with has a {type(item).__name__}, which isn't a tracker.",
            fix="an object with name, store_init_configuration(values), log(values, step) and finish()",
        )
    if item == "tensorboard" and not _has_tensorboard():
        raise ConfigError("log_with='tensorboard' needs a package that isn't installed.", fix="pip install tensorboard")
    if _needs_folder(_KNOWN[item] if isinstance(item, str) else item) and logging_dir is None:
        raise ConfigError(
            f"The tracker {getattr(item, 'name', item)!r} writes files, and there is no folder for them.",
            fix='Accelerator(project_dir="runs/first", ...)',
        )


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


def _needs_folder(tracker: Any) -> bool:
    return bool(getattr(tracker, "requires_logging_directory", False))


def start(
    trackers: Sequence[Any],
    run_name: str,
    logging_dir: str | os.PathLike[str] | None,
    options: Mapping[str, Mapping[str, Any]],
) -> list[Any]:
    """Return the trackers of a run. Those given by name are created, with the ``options`` under that name."""

    def create(name: str) -> Any:
        folder = [logging_dir] if _needs_folder(_KNOWN[name]) else []
        return _KNOWN[name](run_name, *folder, **options.get(name, {}))

    return [create(item) if isinstance(item, str) else item for item in trackers]


def find(trackers: Sequence[Any], name: str, *, unwrap: bool) -> Any:
    """Return a tracker by its name.

    Raises:
        ConfigError: There is no tracker of that name.
    """
    for tracker in trackers:
        if tracker.name == name:
            return tracker.tracker if unwrap else tracker
    there = ", ".join(repr(tracker.name) for tracker in trackers) or "none: init_trackers wasn't called"
    raise ConfigError(f"There is no tracker {name!r}.", fix=f"one of the run's trackers: {there}")


def _plain(value: Any) -> Any:
    """Return a tensor or array as numbers, and other objects as text."""
    if not hasattr(value, "tolist"):
        return value if isinstance(value, (int, float, bool)) else str(value)
    plain = value.tolist()
    while isinstance(plain, list) and len(plain) == 1:
        plain = plain[0]
    return plain

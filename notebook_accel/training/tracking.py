"""An Accelerator's trackers: the known classes, the choice by ``log_with``, and calls to all of them on rank 0."""

from __future__ import annotations

import enum
import functools
import importlib.util
import operator
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from notebook_accel.errors import ConfigError
from notebook_accel.training import process_group
from notebook_accel.training.trackers import LIBRARIES, attempt

_P = ParamSpec("_P")
_R = TypeVar("_R")


class LoggerType(str, enum.Enum):
    """The names of trackers for ``log_with``."""

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


_KNOWN: dict[str, Any] = {kind.name: kind for kind in LIBRARIES}


def on_main_process(method: Callable[_P, _R]) -> Callable[_P, _R | None]:
    """Decorate a tracker's method to run on rank 0 only and return ``None`` on the others."""

    @functools.wraps(method)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        return method(*args, **kwargs) if process_group.rank_place().rank == 0 else None

    return wrapper


def register_tracker_class(tracker: type) -> None:
    """Register a tracker class, so that ``log_with`` accepts its ``name``.

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
        name = getattr(item, "value", item)  # of an enum member
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
        if _is_installed(kind) and (logging_dir is not None or not _needs_folder(kind))
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
    if isinstance(item, str) and not _is_installed(_KNOWN[item]):
        package = _KNOWN[item].module.replace("_", "-")
        raise ConfigError(f"log_with={item!r} needs a package that isn't installed.", fix=f"pip install {package}")
    if _needs_folder(_KNOWN[item] if isinstance(item, str) else item) and logging_dir is None:
        raise ConfigError(
            f"The tracker {getattr(item, 'name', item)!r} writes files, and there is no folder for them.",
            fix='Accelerator(project_dir="runs/first", ...)',
        )


def _is_installed(kind: Any) -> bool:
    """Return whether a tracker class's library is installed; true for a class of the user's."""
    return kind not in LIBRARIES or importlib.util.find_spec(kind.module) is not None


def _needs_folder(tracker: Any) -> bool:
    return bool(getattr(tracker, "requires_logging_directory", False))


def start(
    trackers: Sequence[Any],
    run_name: str,
    logging_dir: str | os.PathLike[str] | None,
    options: Mapping[str, Mapping[str, Any]],
    config: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Start the trackers of a run, store its ``config`` in them, and return them.

    Trackers given by name are created, with the ``options`` under that name.
    """

    def create(name: str) -> Any:
        folder = [logging_dir] if _needs_folder(_KNOWN[name]) else []
        return _KNOWN[name](run_name, *folder, **options.get(name, {}))

    created = [create(item) if isinstance(item, str) else item for item in trackers]
    call([tracker for tracker in created if hasattr(tracker, "start")], "start")
    if config is not None:
        call(created, "store_init_configuration", dict(config))
    return created


def call(trackers: Sequence[Any], method: str, *args: Any, **kwargs: Any) -> None:
    """Call a method of each tracker. A tracker that fails warns once, and the others and training go on."""
    for tracker in trackers:
        attempt(tracker, method, operator.methodcaller(method, *args, **kwargs), tracker)


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

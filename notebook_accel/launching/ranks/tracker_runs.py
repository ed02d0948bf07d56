"""Ranks that begin runs of their own in Weights & Biases or MLflow: their group, and a warning."""

from __future__ import annotations

import functools
import os
import types
from typing import Any

from notebook_accel import code_places
from notebook_accel.environment import RankPlace
from notebook_accel.launching.ranks.import_hooks import when_imported


def install(place: RankPlace, name: str) -> None:
    """Group the ranks' runs in Weights & Biases under the launch's name, unless the program has a group of its own.

    Rank 1 warns of its first new run, since the run of rank 0 alone is what most programs want.
    """
    group = os.environ.setdefault("WANDB_RUN_GROUP", name) if place.world_size > 1 else ""
    if place.rank == 1:
        when_imported("wandb", functools.partial(_warn_once, place, "init", group if group == name else ""))
        when_imported("mlflow", functools.partial(_warn_once, place, "start_run", ""))


def _warn_once(place: RankPlace, name: str, group: str, module: types.ModuleType) -> None:
    original, library = getattr(module, name), module.__name__

    def is_planned(run: Any) -> bool:
        """Return whether a run of wandb isn't recorded, is in another group, or is one that all ranks share."""
        return library == "wandb" and (run.disabled or run.group != group or run.settings.mode == "shared")

    @functools.wraps(original)
    def begin(*args: Any, **kwargs: Any) -> Any:
        run = original(*args, **kwargs)
        if getattr(module, name) is begin and not (args or kwargs.keys() & {"id", "run_id"} or is_planned(run)):
            setattr(module, name, original)
            code_places.warn(
                f"Each of the {place.world_size} ranks that calls {library}.{name} makes a run of its own"
                f"{group and f', in the group {group!r}'}. "
                f"Fix: Accelerator(log_with={library!r}), of which only rank 0 makes a run; or call it on rank 0 only"
            )
        return run

    setattr(module, name, begin)

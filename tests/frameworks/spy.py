"""Looks inside runs for the tests, from within: imported by the kernel and by ranks, not by the programs themselves."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import time
from typing import Any

from notebook_accel.launching.state.run import RunState
from notebook_accel.protocol import events

_calls = itertools.count(1)
_states: list[RunState] = []
_labels: list[str] = []
_rates: list[float] = []

# In the kernel ------------------------------------------------------------------------------------------------------


def watch() -> None:
    """Keep the state of every run from now on, and the labels and rates of what its rank 0 counts."""
    apply = RunState.apply

    def watched(self: RunState, rank: int, event: events.Event) -> None:
        if not _states or _states[-1] is not self:
            _states.append(self)
            _labels.clear()
            _rates.clear()
        apply(self, rank, event)
        if isinstance(event, events.Progress) and rank == 0:
            _labels.append(event.label)
            _rates.append(self.ranks[rank].steps_per_s(event.time_s) or 0.0)

    RunState.apply = watched  # type: ignore[method-assign]


def rows() -> str:
    """Return what the latest run's rows have shown, as JSON."""
    ranks = [
        {
            "step": rank.step,
            "total": rank.total,
            "steps": rank.steps,
            "metrics": sorted(rank.metrics),
        }
        for rank in _states[-1].ranks
    ]
    return json.dumps({"ranks": ranks, "labels": sorted(set(_labels)), "rate": max(_rates, default=0.0)})


# In a rank ----------------------------------------------------------------------------------------------------------


def call(folder: str, pause_s: float = 0.0) -> int:
    """Count a call of the user's code of this rank in a file, and make it as slow as a larger model would be."""
    number = next(_calls)
    with open(os.path.join(folder, f"calls.{os.environ['RANK']}"), "a") as file:
        file.write("x")
    time.sleep(pause_s)
    return number


def seed() -> None:
    """Make this rank compute the same numbers in each launch."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def write_end(folder: str, world_size: int, model: Any) -> None:
    """Write the number of ranks and the model's fingerprint to a file, since Accelerate's launcher returns nothing."""
    with open(os.path.join(folder, f"end.{os.environ['RANK']}"), "w") as file:
        file.write(f"{world_size} {fingerprint(model)}")


# In both ------------------------------------------------------------------------------------------------------------


def fingerprint(model: Any) -> str:
    """Return a hash of all of a model's parameters. If it is sharded, all ranks call it."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(whole.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()

"""The group of the runs that ranks begin themselves. ``training/test_tracker_libraries`` has the libraries."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from notebook_accel.launching.kernel.job import Job


@pytest.mark.parametrize(("own", "ranks", "group"), [(None, 2, "digits"), ("of the notebook", 1, "of the notebook")])
def test_ranks_have_the_launchs_name_as_their_group(
    launch: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, own: str | None, ranks: int, group: str | None
) -> None:
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    if own is not None:
        monkeypatch.setenv("WANDB_RUN_GROUP", own)
    job = launch(os.getenv, "WANDB_RUN_GROUP", num_processes=ranks, name="digits")
    assert job.results(timeout_s=60) == [group] * ranks

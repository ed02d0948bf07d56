"""A progress bar for one rank, as in ``accelerate.utils.tqdm``."""

from __future__ import annotations

from typing import Any

from notebook_accel.training.states import PartialState

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a progress bar of the package tqdm, shown on the first rank of each machine only.

    Args:
        args: Arguments of ``tqdm.auto.tqdm``.
        main_process_only: ``False`` shows a bar for each rank.
        kwargs: Keyword arguments of ``tqdm.auto.tqdm``.
    """
    from tqdm.auto import tqdm as bar  # not a dependency

    if main_process_only and not PartialState().is_local_main_process:
        kwargs["disable"] = True
    return bar(*args, **kwargs)

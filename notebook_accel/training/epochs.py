"""Which epoch it is, also in worker processes that outlive one."""

from __future__ import annotations

import multiprocessing
from typing import Any

__all__ = ["EpochClock"]


class EpochClock:
    """Counts the epochs of a loader, from 0.

    Args:
        is_shared: Keep the number where worker processes see it too.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self._following = 0
        self._running: Any = multiprocessing.RawValue("q", 0) if is_shared else _Value()

    @property
    def running(self) -> int:
        """The epoch that began last; 0 before the first."""
        epoch: int = self._running.value
        return epoch

    @property
    def following(self) -> int:
        """The epoch that begins next."""
        return self._following

    def set(self, epoch: int) -> None:
        """Makes ``epoch`` the one that begins next."""
        self._following = epoch

    def state_dict(self) -> dict[str, Any]:
        """Which epoch begins next."""
        return {"following": self._following}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begins with that one."""
        self._following = state["following"]

    def begin(self) -> int:
        """Begins an epoch and returns its number."""
        self._running.value = epoch = self._following
        self._following += 1
        return epoch


class _Value:
    value = 0

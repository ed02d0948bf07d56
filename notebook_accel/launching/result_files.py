"""The memory files in which the ranks of a run leave what comes back."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from notebook_accel import serialization
from notebook_accel.launching.results import Results

__all__ = ["ResultFiles"]


class ResultFiles:
    """One memory file a rank. They are closed when they have been read, or nobody can read them any more.

    Args:
        descriptors: The files, which this owns; after those of the ranks here those of other nodes' ranks, in order.
        shipped: What the payload holds by value, for what comes back by reference.
        bind: Takes the pulled names and their values.
    """

    def __init__(
        self, descriptors: Sequence[int], shipped: Sequence[Any], bind: Callable[[dict[str, Any]], object]
    ) -> None:
        self._descriptors = descriptors
        self._shipped = shipped
        self._bind = bind
        self._close = weakref.finalize(self, _close_all, tuple(descriptors))

    @property
    def are_open(self) -> bool:
        """Whether they can still be read."""
        return self._close.alive

    def read(self, first_rank: int, world_size: int) -> Results:
        """Every rank's result; the pulled names are bound.

        Args:
            first_rank: The number of the first rank here among all.
            world_size: Number of ranks here.
        """
        opened = [serialization.open_result(file, self._shipped) for file in self._descriptors]
        self._bind(opened[0][1])
        self.close()
        values = [value for value, _ in opened]
        here, others = values[:world_size], values[world_size:]
        return Results([*others[:first_rank], *here, *others[first_rank:]] if others else here)

    def bind_saved(self) -> tuple[str, ...]:
        """Binds the names to be pulled to what they were in rank 0 when it failed or was interrupted; their names."""
        if not os.fstat(self._descriptors[0]).st_size:  # it was lost on its way from another machine
            self.close()
            return ()
        _, pulled = serialization.open_sealed(self._descriptors[0], origins=self._shipped).value
        self.close()
        self._bind(pulled)
        return tuple(pulled)

    def close(self) -> None:
        """Closes them. Again, it does nothing."""
        self._close()


def _close_all(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

"""Where the ranks of a run stand, asked in the background so that whoever draws a panel waits for nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from notebook_accel.errors import NotebookAccelError
from notebook_accel.formatting import format_clock

if TYPE_CHECKING:
    from notebook_accel.launching.kernel.job import Job

__all__ = ["AskedStacks"]


class AskedStacks:
    """The last answer of a run's ranks.

    Args:
        job: The run.
        on_change: Called when there is an answer, in a thread of its own.

    Attributes:
        texts: Where each rank stands; empty before the first answer.
        said: What to say of them all: that they are being asked, when they were, or why they could not be.
    """

    def __init__(self, job: Job, on_change: Callable[[], None]) -> None:
        self._job = job
        self._on_change = on_change
        self._asking: threading.Thread | None = None
        self.texts: tuple[str, ...] = ()
        self.said = "not asked yet"

    def ask(self) -> None:
        """Asks, unless that is being done."""
        if self._asking is None or not self._asking.is_alive():
            self.said = "asking every rank …"
            self._asking = threading.Thread(target=self._ask, name="notebook-accel-stacks", daemon=True)
            self._asking.start()

    def _ask(self) -> None:
        try:
            self.texts = tuple(map(str, self._job.stacks()))
            self.said = f"as of {format_clock(time.monotonic() - self._job.started_s)}"
        except NotebookAccelError as error:
            self.said = str(error)
        self._on_change()

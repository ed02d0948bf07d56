"""Where ranks stand in a cell that takes a while, under the cell: what the panel of a launch would show."""

from __future__ import annotations

import html
import sys
import time
import uuid
from collections.abc import Mapping

from notebook_accel.formatting import format_clock
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.views import rank_lines
from notebook_accel.launching.views.rank_lines import KernelDisplay
from notebook_accel.protocol.events import Display

__all__ = ["CellProgress"]

_PERIOD_S = 1.0
_LINE_PERIOD_S = 5.0  # where nothing can be shown in the place of what was shown before
_PERIOD_GROWTH = 1.5
_LONGEST_PERIOD_S = 60.0
_LAST_DEADLINE_S = 5.0
_LOOK_PERIOD_S = 0.01


class CellProgress:
    """The steps and metrics of the cell that is running; nothing as long as it counts none.

    Args:
        job: The session's run.
        display: Shows it.
    """

    def __init__(self, job: Job, display: KernelDisplay) -> None:
        self._job = job
        self._display = display
        self.begin()

    def begin(self) -> None:
        """A cell begins. What was counted before is not its."""
        self._before = self._job.ranks
        self._place = ""
        self._shown: list[str] = []
        self._began_s = time.monotonic()
        self._period_s = _LINE_PERIOD_S
        self._due_s = self._began_s + _PERIOD_S

    def show(self) -> None:
        """Shows it, if that is due."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + _PERIOD_S
            self._show(is_end=False)

    def end(self, steps: Mapping[int, int]) -> None:
        """The cell has ended: shows where it has ended, if anything was shown before.

        Args:
            steps: How many steps ranks have counted, of which the last may still be on their way here.
        """
        if not self._shown:
            return
        deadline_s = time.monotonic() + _LAST_DEADLINE_S
        while any(self._job.ranks[rank].steps != count for rank, count in steps.items() if count):
            if time.monotonic() > deadline_s:
                break
            time.sleep(_LOOK_PERIOD_S)
        self._show(is_end=True)

    def _show(self, *, is_end: bool) -> None:
        if self._job.config.view == "none":
            return
        pairs = zip(self._before, self._job.ranks, strict=True)
        ranks = [now.since(before, self._began_s) for before, now in pairs]
        reported = [rank for rank in ranks if rank.steps is not None or rank.metrics]
        described = rank_lines.lines(reported, time.monotonic())
        if described in ([], self._shown):
            return
        text = "\n".join(described)
        shown = Display(
            data={"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"},
            display_id=self._place or uuid.uuid4().hex,
            is_update=bool(self._place),
        )
        if self._display.show(shown):
            self._shown, self._place = described, shown.display_id
        elif is_end or time.monotonic() >= self._began_s + self._period_s:
            self._shown = described
            self._period_s += min(self._period_s * _PERIOD_GROWTH, _LONGEST_PERIOD_S)
            taken = format_clock(time.monotonic() - self._began_s)
            sys.stdout.writelines(f"[{taken}] {line}\n" for line in described)

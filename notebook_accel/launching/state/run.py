"""The state of a run, reduced from the events of its ranks, without input, output or a clock.

``RunState.apply`` takes events in the order of arrival, so that stored events give the same state again. The state is
bounded, however long the run is and however much it prints: it keeps only the output that errors and the table need,
and views read the rest from the stream of events.

Times are the seconds of ``time.monotonic()`` that events carry; methods that need the present take it as ``now_s``.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping
from typing import Literal

from notebook_accel import time_limit
from notebook_accel.formatting import clipped, plain_text
from notebook_accel.launching.state.curves import Curves
from notebook_accel.launching.state.first_failure import first_failed
from notebook_accel.launching.state.rank import RankState, metric_names
from notebook_accel.protocol import events

_MOST_RESTARTS = 100
_SHOWN_RESTARTS = 3
# The distance from which on a rank counts as behind. Ranks report five times a second, each at its own time, and so
# seem apart even where they wait for each other.
_BEHIND_STEPS = 3
_BEHIND_S = 1.0
_BEHIND_SHARE = 0.02


class RunState:
    """The state of a run with ``world_size`` ranks on this node."""

    def __init__(self, world_size: int) -> None:
        self.ranks = [RankState(rank) for rank in range(world_size)]
        self.first_rank = 0  # the number of this node's first rank among all
        self.total_ranks = world_size  # on all nodes
        self.has_started = False  # whether any rank has begun the user's code
        # The curves of each metric over steps, or over reports as long as no rank counts steps.
        self.history: dict[str, Curves] = {}
        self.nodes: list[str] = []  # a line about each other node, or about the nodes that this one waits for
        self.restartings = collections.deque[events.Restarting](maxlen=_MOST_RESTARTS)  # the last ones of all ranks
        self.working = frozenset(range(world_size))  # ranks that have something to do; all, unless it is a session's
        self.working_since_s = 0.0  # time at which ``working`` was last set
        self.started_s: float | None = None  # time at which the last rank began the user's code, since a restart
        self.first_step_s: float | None = None  # time of the first step of any rank since the start or a restart
        self.checkpoint = ""  # the folder of the last complete checkpoint; empty before the first
        self._restarts = 0

    @property
    def is_deadlocked(self) -> bool:
        """True if no rank does a step and all are in collectives, at different places, as far as their stacks show it.

        False where there are ranks on other nodes, since one of them may be busy.
        """
        are_all_here = len(self.ranks) == self.total_ranks
        return are_all_here and all(rank.silent is not None and rank.silent.waits_in for rank in self.ranks)

    def apply(self, rank: int, event: events.Event) -> None:
        """Update the state from an event of a rank, or of the whole run, for which ``rank`` doesn't matter."""
        if isinstance(event, events.Restarting):
            self._start_over(event)
        elif isinstance(event, events.Numbered):
            self._number(event.first_rank, event.world_size)
        elif isinstance(event, events.Nodes):
            self.nodes = [clipped(plain_text(line)) for line in event.lines]
        elif isinstance(event, events.Working):
            self._set_working(event)
        elif isinstance(event, events.CheckpointSaved):
            self.checkpoint = event.folder
        elif not (isinstance(event, events.Silent) and event.time_s < self.working_since_s):  # about an earlier cell
            self.ranks[rank].apply(event)
            self._take(rank, event)

    def _take(self, rank: int, event: events.Event) -> None:
        if isinstance(event, events.Started):
            self.has_started = True
            if all(other.state != "starting" for other in self.ranks):
                self.started_s = event.time_s
        elif isinstance(event, events.Progress) and self.first_step_s is None:
            self.first_step_s = event.time_s
        elif isinstance(event, events.Metrics):
            for name in event.values:
                if name in self.ranks[rank].metrics:
                    self._extend_history(name, rank, event.step_of(name))

    def _start_over(self, event: events.Restarting) -> None:
        self.restartings.append(event)
        self._restarts = event.number or self._restarts
        self.ranks = [RankState(rank.rank, first=rank.first, is_idle=rank.is_idle) for rank in self.ranks]
        self.started_s = self.first_step_s = None

    def _number(self, first: int, total: int) -> None:
        self.first_rank, self.total_ranks = first, total
        for rank in self.ranks:
            rank.first = first

    def _set_working(self, event: events.Working) -> None:
        self.working, self.working_since_s = frozenset(event.ranks), event.time_s
        for rank in self.ranks:
            rank.silent, was_idle, rank.is_idle = None, rank.is_idle, rank.rank not in self.working
            if was_idle and not rank.is_idle:  # the time before the cell is no part of its rate
                rank.last_steps = rank.last_steps.since(event.time_s)

    def close(self, *, is_detached: bool = False) -> None:
        """End the run: mark the ranks whose end nobody has reported, or that go on unseen if it was detached."""
        for rank in self.ranks:
            if not rank.has_ended:
                rank.state = "detached" if is_detached else "stopped" if rank.state == "starting" else "lost"
                rank.silent = None

    def _extend_history(self, name: str, rank: int, step: int) -> None:
        has_steps = any(other.step is not None for other in self.ranks)
        unit: Literal["steps", "reports"] = "steps" if has_steps else "reports"
        curves = self.history.get(name)
        if curves is None and len(self.history) == events.MOST_METRICS * len(self.ranks):
            # At least one is from an earlier cell of a session, or from before a restart.
            del self.history[next(old for old in self.history if not any(old in rank.metrics for rank in self.ranks))]
        # A curve over reports from before the first step can't be continued over steps.
        if curves is None or (curves.unit, unit) == ("reports", "steps"):
            curves = self.history[name] = Curves(len(self.ranks), unit)
        curves.add(rank, step, self.ranks[rank].metrics[name])

    @property
    def metric_names(self) -> list[str]:
        """Names of the reported metrics, losses first, then in the order of arrival."""
        return metric_names(self.ranks)

    @property
    def chart_names(self) -> list[str]:
        """Names of the metrics that have a curve of two points or more, in the order of ``metric_names``."""
        curves = {name: curves.ranks.values() for name, curves in self.history.items()}
        return [name for name in self.metric_names if any(series.is_line for series in curves.get(name, ()))]

    @property
    def restarts_why(self) -> list[str]:
        """A line for each of the last restarts: its number and its reason."""
        return [clipped(event.in_words) for event in [*self.restartings][-_SHOWN_RESTARTS:]]

    @property
    def restarts(self) -> int:
        """Number of restarts of all ranks together, plus the most restarts of a single rank."""
        return self._restarts + max(0, *(rank.starts - 1 for rank in self.ranks))

    @property
    def serving(self) -> str:
        """The work of a detached session's ranks in words, such as ``busy with In[7]``; empty for another run."""
        serving = [rank for rank in self.ranks if rank.cell_since_s is not None and not rank.has_ended]
        cells = dict.fromkeys(rank.cell for rank in serving if rank.cell)
        return f"busy with {', '.join(cells)}" if cells else "idle" if serving else ""

    @property
    def have_all_results(self) -> bool:
        """True if the user's code has returned in every rank."""
        return all(rank.has_result for rank in self.ranks)

    @property
    def early_end(self) -> str:
        """The reason why the ranks were told to stop before the end of their training, in a line; empty if none was."""
        limits = [rank.time_limit for rank in self.ranks if rank.time_limit is not None]
        if not limits:
            return ""
        return f"stopped at its time limit ({time_limit.in_words(max(limits))}): launch it again to go on"

    @property
    def has_saved(self) -> bool:
        """True if rank 0 has sent the variables to pull, as it does when it returns and mostly when it fails."""
        first = self.ranks[0]
        return first.has_result or (first.failed is not None and first.failed.saved)

    @property
    def memory_shortage(self) -> events.MemoryShortage | None:
        """The shortage of host memory at a rank's end, ``None`` if there was none."""
        ends = (rank.ended for rank in self.ranks if rank.ended is not None)
        return next((end.shortage for end in ends if end.shortage is not None), None)

    @property
    def first_failed(self) -> RankState | None:
        """The rank that failed first, ``None`` if none has. Ranks that failed for lack of a peer come last."""
        raised = {rank.rank: rank.failed for rank in self.ranks if rank.failed is not None}
        died_s = {
            rank.rank: rank.ended.time_s
            for rank in self.ranks
            if rank.ended is not None and rank.failed is None and not rank.ended.stopped and not rank.has_result
        }
        first = first_failed(raised, died_s)
        return None if first is None else self.ranks[first]

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds until the slowest rank's last step, ``None`` if that can't be known."""
        if any(rank.is_stalled(now_s) for rank in self.ranks):
            return None
        return max((left for rank in self.ranks if (left := rank.left_s(now_s)) is not None), default=None)

    def behind(self, now_s: float) -> Mapping[int, int]:
        """Return the ranks that are behind the others, each with the number of missing steps."""
        counting = {rank.rank: rank.steps for rank in self.ranks if not rank.has_ended and rank.steps is not None}
        if len(counting) < 2:
            return {}
        middle = statistics.median_high(counting.values())
        rates = [rate for rank in counting if (rate := self.ranks[rank].steps_per_s(now_s)) is not None]
        apart = max(_BEHIND_STEPS, _BEHIND_SHARE * middle, _BEHIND_S * statistics.median_high(rates) if rates else 0.0)
        return {rank: middle - steps for rank, steps in counting.items() if middle - steps >= apart}

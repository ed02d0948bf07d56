"""The profile of a few steps of a run: the ranks' answers side by side, as plain data and as text."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from notebook_accel.errors import ConfigError
from notebook_accel.formatting import aligned, format_count, plain_text, ranks_in_words
from notebook_accel.interrupts import Latch
from notebook_accel.launching.state.rank import RankState
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events

DEFAULT_STEPS = 5
MOST_STEPS = 100
ADVICE = "profile while the run trains: steps are batches of a DataLoader, or else steps of an optimizer"
"""What to do where no step could be profiled."""
MEMORY_ADVICE = (
    "profile memory while a run trains on a GPU. On a CPU, put `with torch.profiler.profile(profile_memory=True) as "
    "profiler:` around some steps of the code, and print(profiler.key_averages()) after them"
)
"""What to do where the memory of no step could be profiled."""

_LEAD_S = 1.0  # until every rank has the request, so that all begin at the same step
_SHOWN = 10
_COLUMNS = 64  # of the timeline in text
_MOST_TEXT_RANKS = 16
_MOST_NAME = 60
_NO_ANSWER = "it has not answered"
_LETTERS = {"data": "d", "forward": "f", "backward": "b", "optimizer": "o", "evaluation": "e", "other": "."}


@dataclasses.dataclass(frozen=True)
class RankProfile:
    """The profile of one rank.

    Attributes:
        rank: The rank's number among all.
        steps: Number of profiled steps, 0 if there are none.
        begin_us: Start of the profile in microseconds, from the start of the first rank's.
        spans: Its spans, timed from its own start; of each kind only the longest.
        operators: The operators and the device's kernels that took most time.
        lines: The lines of the user's code sampled most often.
        trace: The trace file; ``None`` if there is none on this machine.
        snapshot: The snapshot of its memory, in a profile of memory; ``None`` if there is none on this machine.
        why: The reason why there are fewer steps than were asked for; empty if there is none.
    """

    rank: int
    steps: int = 0
    begin_us: float = 0.0
    spans: tuple[events.Span, ...] = ()
    operators: tuple[events.OperatorTime, ...] = ()
    lines: tuple[events.SampledLine, ...] = ()
    trace: pathlib.Path | None = None
    snapshot: pathlib.Path | None = None
    why: str = ""

    def of_kind(self, *kinds: events.SpanKind) -> list[events.Span]:
        """Return the spans of these kinds, in their order."""
        return [span for span in self.spans if span.kind in kinds]

    @property
    def took_us(self) -> float:
        """The duration of the profiled steps in microseconds."""
        return max((span.begin_us + span.took_us for span in self.of_kind("step")), default=0.0)


@dataclasses.dataclass(frozen=True)
class LineShare:
    """A line of the user's code in a profile, with its share of the time of all ranks, from 0 to 1."""

    place: str
    text: str
    share: float


@dataclasses.dataclass(frozen=True)
class Profile:
    """A profile of the same few steps on all ranks.

    Printed, it is text; in a notebook that has loaded the extension, it is a timeline. ``to_dict`` gives plain data.

    Attributes:
        name: The run's name.
        steps: Number of steps that were asked for.
        ranks: The profile of each rank that was asked.
        trace: The trace of all ranks in one file, for https://ui.perfetto.dev or chrome://tracing; ``None`` if there is
            none.
        problem: The reason why that file isn't there although ranks have traces; empty if there is none.
    """

    name: str
    steps: int
    ranks: tuple[RankProfile, ...]
    trace: pathlib.Path | None = None
    problem: str = ""

    @property
    def measured(self) -> list[RankProfile]:
        """The ranks with at least one step."""
        return [rank for rank in self.ranks if rank.steps]

    @property
    def title(self) -> str:
        """The steps and the ranks in words."""
        ranks, measured = format_count(len(self.ranks), "rank"), len(self.measured)
        of = "" if measured == len(self.ranks) else f"{measured} of "
        return f"{format_count(self.steps, 'step')} of {self.name!r} on {of}{ranks}"

    @property
    def end_us(self) -> float:
        """The end of the last rank's profile in microseconds, from the start of the first rank's."""
        return max((rank.begin_us + rank.took_us for rank in self.measured), default=0.0)

    @property
    def step_s(self) -> float:
        """The mean seconds of a step, 0 without one."""
        steps = sum(rank.steps for rank in self.measured)
        return sum(rank.took_us for rank in self.measured) / steps / 1e6 if steps else 0.0

    def costliest(self, *, kernels: bool = False) -> list[events.OperatorTime]:
        """Return the ten operators, or device kernels, that take most time: calls and time of a rank's mean step."""
        steps = sum(rank.steps for rank in self.measured)
        calls: collections.Counter[str] = collections.Counter()
        times: collections.defaultdict[str, float] = collections.defaultdict(float)
        for operator in itertools.chain.from_iterable(rank.operators for rank in self.measured):
            if operator.is_kernel == kernels:
                calls[operator.name] += operator.calls
                times[operator.name] += operator.self_us
        costliest = sorted(times, key=lambda name: -times[name])[:_SHOWN]
        return [
            events.OperatorTime(name, round(calls[name] / steps), times[name] / steps, kernels) for name in costliest
        ]

    @property
    def lines(self) -> list[LineShare]:
        """The ten lines of the user's code that take most time."""
        seen: collections.Counter[tuple[str, str]] = collections.Counter()
        for line in itertools.chain.from_iterable(rank.lines for rank in self.measured):
            seen[line.place, line.text] += line.samples
        total = seen.total()
        return [
            LineShare(place, text, count / total) for (place, text), count in seen.most_common(_SHOWN + 1) if place
        ][:_SHOWN]

    @property
    def snapshots(self) -> str:
        """The path of the first rank's memory snapshot, and how many others there are; empty without one."""
        paths = [rank.snapshot for rank in self.ranks if rank.snapshot is not None]
        more = f" and {len(paths) - 1} more beside it" if len(paths) > 1 else ""
        return f"{paths[0]}{more}" if paths else ""

    @property
    def notes(self) -> list[str]:
        """The reasons why ranks have fewer steps than were asked for, and why there is no merged trace."""
        ranks: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
        for rank in self.ranks:
            if rank.why:
                ranks[rank.why].append(rank.rank)
        notes = [f"{ranks_in_words(numbers)}: {plain_text(why)}" for why, numbers in ranks.items()]
        return [*notes, *filter(None, [self.problem])]

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain data, as JSON can hold it."""
        data: dict[str, Any] = msgspec.to_builtins(self, enc_hook=str)
        return data

    def __str__(self) -> str:
        lines = [
            self.title + (f", {_ms(self.step_s * 1e6)} each" if self.step_s else ""),
            *self.notes,
            *self._timeline(),
        ]
        for kernels in (False, True):
            costliest = self.costliest(kernels=kernels)
            rows = [("time a step", "calls", "kernel of the device" if kernels else "operator")]
            rows += [(_ms(each.self_us), f"{each.calls:,}", each.name[:_MOST_NAME]) for each in costliest]
            lines += ["", *aligned(rows)] if costliest else []
        rows = [("share", "line", "")]
        rows += [(f"{line.share:.0%}", line.place, line.text[:_MOST_NAME]) for line in self.lines]
        lines += ["", *aligned(rows)] if self.lines else []
        lines += ["", f"trace for https://ui.perfetto.dev: {self.trace}"] if self.trace is not None else []
        lines += [f"memory snapshots for https://pytorch.org/memory_viz: {self.snapshots}"] if self.snapshots else []
        return "\n".join(lines)

    __repr__ = __str__

    def _timeline(self) -> list[str]:
        """Return a line for each rank, with a letter for the longest phase in each part of the time."""
        rows = [(f"rank {rank.rank}", _letters(rank, self.end_us)) for rank in self.measured if rank.of_kind("phase")]
        meaning = ", ".join(f"{letter} {phase}" for phase, letter in _LETTERS.items())
        more = len(rows) - _MOST_TEXT_RANKS
        return [
            *aligned(rows[:_MOST_TEXT_RANKS]),
            *([f"… and {more} more ranks"] if more > 0 else []),
            *([f"({meaning}; from left to right {_ms(self.end_us)})"] if rows else []),
        ]


def _letters(rank: RankProfile, end_us: float) -> str:
    width_us = end_us / _COLUMNS
    columns: list[collections.Counter[str]] = [collections.Counter() for _ in range(_COLUMNS)]
    for span in rank.of_kind("phase"):
        begin_us = rank.begin_us + span.begin_us
        stop_us = begin_us + span.took_us
        for column in range(int(begin_us / width_us), min(_COLUMNS, int(stop_us / width_us) + 1)):
            covered_us = min(stop_us, (column + 1) * width_us) - max(begin_us, column * width_us)
            columns[column][span.name] += round(1000 * covered_us)
    return "".join(_LETTERS.get(column.most_common(1)[0][0], "?") if column else " " for column in columns)


def _ms(time_us: float) -> str:
    return f"{time_us / 1000:,.1f} ms" if time_us >= 1000 else f"{time_us / 1000:.3f} ms"


def check_steps(steps: int) -> None:
    """Raise for a number of steps that can't be profiled.

    Raises:
        ConfigError: The number isn't from 1 to 100.
    """
    if steps not in range(1, MOST_STEPS + 1):
        raise ConfigError(
            f"A profile of steps={steps!r} can't be made.",
            why="A trace of so many steps would be too large to look at." if steps > MOST_STEPS else "",
            fix=f"steps={DEFAULT_STEPS}, or another number from 1 to {MOST_STEPS}",
        )


class ProfileRequest:
    """A request for a profile of time or memory, and the answers of the ranks so far.

    The ``ranks`` of this node have ``deadline_s`` for the steps.
    """

    def __init__(self, steps: int, deadline_s: float, ranks: Sequence[RankState], *, memory: bool = False) -> None:
        self._memory = memory
        self.number = f"{time.strftime('%H%M%S')}_{time.monotonic_ns() // 1_000_000 % 1000:03d}"
        self._steps = steps
        self._deadline_s = deadline_s
        self._begin_s = time.monotonic() + _LEAD_S
        self._ranks = {rank.rank: rank for rank in ranks}
        self._answers: dict[int, events.Profiled] = {}
        self._gone: set[int] = set()
        self._is_answered = Latch()

    def message(self, job_id: str) -> messages.Profile:
        """Return the message to the agent."""
        return messages.Profile(
            job_id=job_id,
            number=self.number,
            steps=self._steps,
            begin_s=self._begin_s,
            deadline_s=self._deadline_s,
            memory=self._memory,
        )

    def wait(self, timeout_s: float) -> None:
        """Wait until each rank has answered or ended."""
        self._is_answered.wait(timeout_s)

    def take(self, rank: int, event: events.Event) -> None:
        """Handle an event of a rank."""
        if isinstance(event, events.Profiled) and event.number == self.number:
            self._answers[rank] = event
        elif isinstance(event, events.Ended | events.Started):
            self._gone.add(rank)
        elif isinstance(event, events.Restarting):
            self.end()
        if self._ranks.keys() <= self._answers.keys() | self._gone:
            self.end()

    def end(self) -> None:
        """Release all waiting callers, since no more answers will come."""
        self._is_answered.set()

    def profile(self, name: str) -> Profile:
        """Return the profile that the answers so far make, for the run of this name."""
        begins_s = self._begins_s()
        first_s = min(begins_s.values(), default=0.0)
        return Profile(
            name,
            self._steps,
            tuple(
                self._of_rank(self._ranks[rank], self._answers.get(rank), begins_s.get(rank, first_s) - first_s)
                for rank in sorted(self._ranks)
            ),
        )

    def _begins_s(self) -> Mapping[int, float]:
        """Return the start of each rank's profile on one clock. Other nodes' clocks are set by their first steps."""
        begins_s = {rank: said.time_s - said.age_s for rank, said in self._answers.items() if said.steps}
        by_node: collections.defaultdict[int, list[float]] = collections.defaultdict(list)
        for rank, begin_s in begins_s.items():
            by_node[self._ranks[rank].node].append(begin_s)
        medians_s = {node: statistics.median(begins) for node, begins in by_node.items()}
        reference_s = medians_s[min(medians_s)] if medians_s else 0.0
        return {rank: begin_s + reference_s - medians_s[self._ranks[rank].node] for rank, begin_s in begins_s.items()}

    def _of_rank(self, rank: RankState, said: events.Profiled | None, begin_s: float) -> RankProfile:
        if said is None:
            return RankProfile(rank.number, why="it ended meanwhile" if rank.rank in self._gone else _NO_ANSWER)
        file = pathlib.Path(said.file) if said.file else None
        found = file if file is not None and file.is_file() else None
        return RankProfile(
            rank.number,
            said.steps,
            begin_s * 1e6,
            tuple(said.spans),
            tuple(said.operators),
            tuple(said.lines),
            None if self._memory else found,
            found if self._memory else None,
            said.why,
        )

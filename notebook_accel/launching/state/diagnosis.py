"""Finds in a run's state the reasons why its steps are slow, with figures and advice.

Causes that take less than a tenth of the time aren't reported, neither is a single pause in the last steps, unless it
takes a tenth of the whole run. The state has the times of each rank's last steps. A comparison of the ranks tells
waiting in a collective from communicating: the last rank to arrive waits least.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from notebook_accel.formatting import format_count, format_duration, format_milliseconds, format_size
from notebook_accel.launching.state.rank import RankState
from notebook_accel.launching.state.run import RunState
from notebook_accel.launching.state.step_times import (
    Moment,
    Phases,
    mean_of,
    over_time,
    shown_ranks,
    split_waiting,
    steps_between,
)
from notebook_accel.protocol import events

_WORTH = 0.1  # least share of the time for a verdict
_FEWEST_STEPS, _SHORTEST_S = 10, 2.0  # that are measured of a rank before it is judged
_PLAIN = 0.3  # share of the time that the others wait for a rank whose lateness is judged by the last steps alone
_EARLIER_MS = (30_000, 10_000)  # begin and end, before now, of an interval in which any other rank was late, too
_LONGEST_LEAD_S = 8.0  # measured of one rank before it is judged without those that have fewer steps
_FEWEST_SAMPLES = 20  # of a rank's main thread, for shares of its lines
_COMPUTING = ("forward", "backward", "optimizer")
_STEPS_PER_EVALUATION = 10  # with more, an evaluation isn't too frequent
_LARGE_BYTES = 1 << 20
_SLOW_S = 0.05  # for fewer than _LARGE_BYTES
_FULL_CLOCK = 90.0  # per cent of a device's highest
_MOST_WORKERS = 4  # in the advice
_SHORT_WAIT_S = 0.002  # for a batch; a worker takes up to this to pass one
_MOST_TEXT = 60
_SAVE_LESS = "Save less often, or in the background: accelerator.save_state(async_=True)."
# Calls that wait for the device.
_WAITS_FOR_DEVICE = (".item()", ".cpu()", ".tolist()", ".numpy()", "print(", "empty_cache()", "synchronize()")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A reason why steps are slow.

    Attributes:
        cause: The cause in one or two words, such as ``data`` or ``device wait``.
        share: Its share of the step, from 0 to 1.
        what: The reason in a sentence, with its figures.
        fix: What to do.
        ranks: The ranks that cause it, by their number among all.
        place: The user's line, such as ``In[7], line 12``; empty if none stands out.
    """

    cause: str
    share: float
    what: str
    fix: str
    ranks: tuple[int, ...] = ()
    place: str = ""

    def is_same(self, other: Verdict) -> bool:
        """Return whether another verdict has this cause and, where the others wait for one rank, names the same."""
        return self.cause == other.cause and (self.cause != "straggler" or self.ranks == other.ranks)

    def __str__(self) -> str:
        return f"{self.what} {self.fix}"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Where the time of a run's steps goes, and why they are slow.

    Attributes:
        verdicts: The reasons, the costliest first; empty if nothing stands out.
        steps: The mean seconds of a step on each rank, by the rank's number and the phase.
        over_time: The phases of a step in the course of the run, without its first second; empty for some seconds.
        wasted_s: Time of the whole run that the first reason has cost, 0 if it has cost less than a tenth of it.
        run_s: Time of all steps of the run.
    """

    verdicts: tuple[Verdict, ...] = ()
    steps: Mapping[int, Phases] = dataclasses.field(default_factory=dict)
    over_time: tuple[Moment, ...] = ()
    wasted_s: float = 0.0
    run_s: float = 0.0

    @property
    def sentence(self) -> str:
        """The first reason and what to do; empty if nothing stands out."""
        return str(self.verdicts[0]) if self.verdicts else ""

    @property
    def cost(self) -> str:
        """The cost of the first reason over the whole run; empty if nothing stands out."""
        if not self.verdicts or self.wasted_s < 1:
            return ""
        return f"Cost so far: {format_duration(self.wasted_s)} of {format_duration(self.run_s)}."

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data, as JSON can hold it."""
        return {
            "verdicts": [dataclasses.asdict(verdict) for verdict in self.verdicts],
            "steps": {str(rank): dict(phases) for rank, phases in self.steps.items()},
            "over_time": [
                {"begin_s": moment.begin_s, "end_s": moment.end_s, "steps": moment.mean} for moment in self.over_time
            ],
            "wasted_s": self.wasted_s,
            "run_s": self.run_s,
        }

    def __str__(self) -> str:
        if not self.steps:
            return "Too few steps have been measured yet."
        lines = [str(verdict) for verdict in self.verdicts] or [self.nothing]
        if self.cost:
            lines.append(self.cost)
        for rank, phases in self.steps.items():
            parts = ", ".join(
                f"{name} {format_milliseconds(seconds)}" for name, seconds in phases.items() if seconds >= 5e-5
            )
            lines.append(f"rank {rank}: {format_milliseconds(sum(phases.values()))} a step: {parts}")
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def nothing(self) -> str:
        """The answer without a verdict, with the phase that takes longest."""
        mean = mean_of(self.steps.values()) or {}
        phase = max(mean, key=lambda name: mean[name])
        share = mean[phase] / sum(mean.values())
        return f"Nothing stands out. The longest phase is {phase}, {_percent(share)} of a step."


def diagnose(state: RunState) -> Diagnosis:
    """Return where the time of the last steps went, and the reasons why they are slow."""
    stepping = [rank for rank in state.ranks if rank.steps is not None]
    known = [_Rank(rank, times) for rank in stepping if (times := rank.step_history.recent) is not None]
    measured = [rank for rank in known if rank.times.steps >= _FEWEST_STEPS and rank.wall_s >= _SHORTEST_S]
    longest_s = max((rank.wall_s for rank in measured), default=0.0)
    if len(measured) < len(stepping) and longest_s < _LONGEST_LEAD_S:  # the others will follow in a moment
        measured = []
    if not measured:
        return Diagnosis()
    in_run = [_Rank(rank.state, times) for rank in measured if (times := rank.state.step_history.total) is not None]
    run_s = max(rank.wall_s for rank in in_run)
    whole = _costliest(_Run(in_run))
    found = _recurring(measured, in_run, whole)
    if "compilation" in whole and all(verdict.cause != "compilation" for verdict in found):
        found.append(whole["compilation"])  # it is over, and has cost much
    costs = [each.share * run_s for each in whole.values() if found and each.is_same(found[0])]
    phases = split_waiting({rank.number: rank.phases for rank in measured})
    points = {rank.number: rank.state.step_history.sums.points for rank in measured}
    moments = over_time(points, shown_ranks(phases))
    return Diagnosis(tuple(found), phases, moments, sum(costs), run_s)


def _recurring(ranks: Sequence[_Rank], in_run: Sequence[_Rank], whole: Mapping[str, Verdict]) -> list[Verdict]:
    """Return the verdicts on the last steps, the costliest first, without those on a single pause.

    Args:
        ranks: The ranks with the times of their last steps.
        in_run: The ranks with the times of the whole run.
        whole: The verdicts on the whole run by their causes.
    """
    found, is_one_late = _costliest(_Run(ranks)), True
    if "straggler" in found and not _is_always_late(found["straggler"], ranks):
        is_one_late = False
        found, whole = _costliest(_Run(ranks), is_one_late), _costliest(_Run(in_run), is_one_late)
    if not found:
        return []
    steady = [
        _Rank(rank.state, times) for rank in ranks if (times := rank.state.step_history.without_longest) is not None
    ]
    causes = set(whole)
    if len(steady) == len(ranks):
        causes.update(_costliest(_Run(steady), is_one_late))
    return [verdict for cause, verdict in found.items() if cause in causes]


def _is_always_late(straggler: Verdict, ranks: Sequence[_Rank]) -> bool:
    """Return whether a rank was late in the earlier and the later half of the last steps.

    Where other programs use the cores, now one rank is a little late and now another one, for some ten seconds each.
    """
    if straggler.share < _PLAIN and not _was_late_before(straggler, ranks):
        return False
    halves = [rank.state.step_history.halves for rank in ranks]
    if None in halves:  # of a long run that was detached, events of many seconds each are left
        return _was_late_before(straggler, ranks)
    for half in zip(*halves, strict=True):
        found = _straggler(_Run([_Rank(rank.state, times) for rank, times in zip(ranks, half, strict=True)]))
        if found is None or found.ranks != straggler.ranks or found.share < _WORTH:
            return False
    return True


def _was_late_before(straggler: Verdict, ranks: Sequence[_Rank]) -> bool:
    """Return whether the others waited for a rank before the last steps, too."""
    points = {rank.number: rank.state.step_history.sums.points for rank in ranks}
    now_ms = max(of_rank[-1][0] for of_rank in points.values())
    steps = steps_between(points, *(now_ms - earlier_ms for earlier_ms in _EARLIER_MS))
    if len(steps) < len(ranks):
        return False
    late_s = steps.pop(straggler.ranks[0])[events.WAITING]
    others = mean_of(steps.values()) or {}
    return max(_WORTH * sum(others.values()), 2 * late_s) <= others[events.WAITING]


def _costliest(run: _Run, is_one_late: bool = True) -> dict[str, Verdict]:
    """Return the verdicts by their causes, the costliest first.

    Args:
        run: The ranks.
        is_one_late: False if it is known that no single rank is late.
    """
    finders = [find for find in _FINDERS if is_one_late or find is not _straggler]
    found = [verdict for find in finders if (verdict := find(run)) is not None and verdict.share >= _WORTH]
    by_cause: dict[str, Verdict] = {}
    for verdict in sorted(found, key=lambda verdict: -verdict.share):
        by_cause.setdefault(verdict.cause, verdict)  # a late rank and the time of all ranks may have one cause
    return by_cause


@dataclasses.dataclass(frozen=True)
class _Rank:
    """A rank with the times of its last steps."""

    state: RankState
    times: events.StepTimes

    @property
    def number(self) -> int:
        return self.state.number

    @property
    def wall_s(self) -> float:
        """The wall time of the steps."""
        return sum(self.times.seconds.values())

    @property
    def step_s(self) -> float:
        """The mean time of a step."""
        return self.wall_s / self.times.steps

    def per_step_s(self, phase: str) -> float:
        """Return the mean time of a phase in a step."""
        return self.times.seconds.get(phase, 0.0) / self.times.steps

    def share(self, phase: str) -> float:
        """Return a phase's share of the wall time, from 0 to 1."""
        return self.times.seconds.get(phase, 0.0) / self.wall_s

    @property
    def phases(self) -> Phases:
        """Seconds of a step by phase in ``events.PHASES``."""
        return {name: self.per_step_s(name) for name in events.PHASES}

    @property
    def exposed_s(self) -> float:
        """Seconds of a step in which the rank only communicates, or waits for another one to do so."""
        return self.per_step_s("communication") + self.per_step_s(events.WAITING)

    @property
    def own_s(self) -> float:
        """Seconds of a step in which the rank neither communicates nor waits for another one."""
        return self.step_s - self.exposed_s

    @property
    def compiling_share(self) -> float:
        """The share of the time, from 0 to 1, that compiling takes."""
        return self.times.compiling_s / self.wall_s

    @property
    def queued_share(self) -> float:
        """The share of the time, from 0 to 1, in which a thread of the rank waits for a core."""
        return self.times.queued_s / self.wall_s

    def line(self, *phases: str, activity: str | None = None) -> tuple[str, str]:
        """Return place and text of the line sampled most in these phases, or in all; empty if there is none."""
        for line in self.times.lines:  # those with most samples come first
            if line.place and (not phases or line.phase in phases) and activity in (None, line.activity):
                return line.place, line.text
        return "", ""

    def is_saving_in(self, phase: str) -> bool:
        """Return whether the rank saves checkpoints for most of a phase."""
        samples: collections.Counter[bool] = collections.Counter()
        for line in self.times.lines:
            samples[line.activity == "saving"] += line.samples if line.phase == phase else 0
        return samples[True] > samples[False]


class _Run:
    """The ranks of a run side by side."""

    def __init__(self, ranks: Sequence[_Rank]) -> None:
        self.ranks = ranks
        self.communication_s = min(rank.per_step_s("communication") for rank in ranks)
        self.step_s = statistics.fmean(rank.step_s for rank in ranks)
        self.is_on_device = ranks[0].times.is_on_device

    def cores_each(self, rank: _Rank) -> int:
        """Return the number of cores for each rank on a rank's machine, at least 1."""
        beside = [each for each in self.ranks if each.state.node == rank.state.node]
        return max(1, rank.times.cores // len(beside))

    def share(self, phase: str) -> float:
        """Return a phase's mean share of the step."""
        return statistics.fmean(rank.share(phase) for rank in self.ranks)

    def common_share(self, phase: str) -> float:
        """Return a phase's mean share of the step, 0 if some rank spends far less on it: then others are stragglers."""
        least, share = min(rank.share(phase) for rank in self.ranks), self.share(phase)
        return 0.0 if least < share / 2 else share

    @property
    def queued_share(self) -> float:
        """The share of the time in which even the rank that waits least for cores waits for one."""
        return min(rank.queued_share for rank in self.ranks)

    def longest_in(self, phase: str) -> _Rank:
        """Return the rank with the largest share of a phase."""
        return max(self.ranks, key=lambda rank: rank.share(phase))

    def sampled_share(self, is_meant: Callable[[events.SampledLine], bool]) -> tuple[float, _Rank]:
        """Return the largest share of a rank's samples for which ``is_meant`` is true, and that rank."""
        shares = []
        for rank in self.ranks:
            seen = sum(line.samples for line in rank.times.lines if is_meant(line))
            are_enough = rank.times.samples >= _FEWEST_SAMPLES
            shares.append(seen / rank.times.samples if are_enough else 0.0)
        share = max(shares)
        return share, self.ranks[shares.index(share)]

    @property
    def everyone(self) -> str:
        return "Every rank" if len(self.ranks) > 1 else "The rank"

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(rank.number for rank in self.ranks)


# The functions that find one cause each; ``_costliest`` leaves out causes with a small share --------------------------


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _at(place: str, text: str = "") -> str:
    if not place:
        return ""
    text = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
    return f" at {place}" + (f": `{text}`" if text else "")


def _straggler(run: _Run) -> Verdict | None:
    """Find a rank for which the others wait."""
    if len(run.ranks) < 2:
        return None
    slow = min(run.ranks, key=lambda rank: rank.exposed_s)
    others = [rank for rank in run.ranks if rank is not slow]
    share = statistics.fmean((rank.exposed_s - slow.exposed_s) / rank.step_s for rank in others)
    own_s = statistics.median(rank.own_s for rank in others)
    excess = {
        phase: slow.per_step_s(phase) - statistics.median(rank.per_step_s(phase) for rank in others)
        for phase in events.PHASES
        if phase not in ("communication", events.WAITING)
    }
    phase = max(excess, key=lambda name: excess[name])
    if share < _WORTH or slow.own_s <= own_s or excess[phase] <= 0:
        return None
    if run.queued_share >= share:
        return None  # all wait for cores, so now this rank is late, now another one
    if slow.is_saving_in(phase):
        place, text = slow.line(phase, activity="saving")
        wait = f"the others wait for it {_percent(share)} of the time"
        what = f"Rank {slow.number} saves checkpoints{_at(place, text)}; {wait}."
        return Verdict("checkpoint", share, what, _SAVE_LESS, (slow.number,), place)
    place, text = slow.line(phase)
    work = {"data": "waits for data", "evaluation": "evaluates"}.get(phase, "computes")
    return Verdict(
        cause="straggler",
        share=share,
        what=f"Rank {slow.number} {work} {slow.own_s / own_s:.1f} times as long as the others, most of it in {phase}"
        f"{_at(place, text)}; the others wait for it {_percent(share)} of the time.{_circumstances(slow)}",
        fix="Give this rank less work, or look for what else runs on its device or core.",
        ranks=(slow.number,),
        place=place,
    )


def _circumstances(slow: _Rank) -> str:
    """Return sentences on the device and the core of a rank that is late, as far as they are known."""
    memory, found = slow.state.memory, ""
    if memory is not None and memory.utilisation:
        found += f" Its device is busy {memory.utilisation:.0f} % of the time."
    if memory is not None and memory.clock and memory.clock < _FULL_CLOCK:
        found += f" Its device runs at {memory.clock:.0f} % of its highest clock."
    if slow.queued_share >= _WORTH:
        found += f" It waits for a core {_percent(slow.queued_share)} of the time, since other work uses it."
    return found


def _data(run: _Run) -> Verdict:
    """Find ranks that all wait for their loader."""
    share, slow = run.common_share("data"), run.longest_in("data")
    place, _ = slow.line("data")
    workers = f"`num_workers={slow.times.workers or 0}`"
    what = f"{run.everyone} waits {_percent(share)} of the time for data: {workers}{_at(place)}."
    return Verdict("data", share, what, _data_fix(run, slow), run.numbers, place)


def _data_fix(run: _Run, slow: _Rank) -> str:
    """Return what to do about a rank that waits for data."""
    workers = slow.times.workers or 0
    if slow.times.starting_s > slow.times.seconds.get("data", 0.0) / 2:
        return "Its workers start anew in each epoch. Try `persistent_workers=True`, or fewer and longer epochs."
    more = min(_MOST_WORKERS, run.cores_each(slow))
    fix = f"`num_workers={max(2 * workers, more)}`" if workers else f"`num_workers={more}, persistent_workers=True`"
    if slow.per_step_s("data") < _SHORT_WAIT_S:
        if workers:  # they are nearly fast enough
            return f"Try a larger batch, or {fix}."
        return (
            "Try a larger batch, or prepare the data once. Workers don't help: passing so little between processes "
            "takes about as long as making it."
        )
    if slow.times.is_stream:
        return (
            "Prepare the data once and store it. Every worker yields all of an IterableDataset, unless it takes its "
            f"part by torch.utils.data.get_worker_info(); if it does, try {fix}."
        )
    return f"Try {fix}" + (", or prepare the data once and store it." if workers else ".")


def _evaluation(run: _Run) -> Verdict | None:
    """Find evaluations after few steps each."""
    rank = run.longest_in("evaluation")
    times = rank.times
    if not times.evaluations or times.steps / times.evaluations > _STEPS_PER_EVALUATION:
        return None
    steps = max(1, round(times.steps / times.evaluations))
    place, text = rank.line("evaluation")
    often = "each step" if steps == 1 else f"every {steps} steps"
    share = rank.share("evaluation")
    what = f"An evaluation {often} takes {_percent(share)} of the time{_at(place, text)}."
    return Verdict("evaluation", share, what, "Evaluate less often, or on fewer batches.", run.numbers, place)


def _saving(run: _Run) -> Verdict | None:
    """Find checkpoints that take long."""
    share, rank = run.sampled_share(lambda line: line.activity == "saving")
    place, text = rank.line(activity="saving")
    what = f"Checkpoints take {_percent(share)} of the time{_at(place, text)}."
    return Verdict("checkpoint", share, what, _SAVE_LESS, (rank.number,), place)


def _compilation(run: _Run) -> Verdict | None:
    """Find compilations, which usually end with the first steps."""
    rank = max(run.ranks, key=lambda rank: rank.compiling_share)
    times, share = rank.times, rank.compiling_share
    if not times.compilations:
        return None
    place, text = rank.line(activity="compiling")
    compiler = "XLA" if rank.state.device.startswith("xla") else "torch.compile"
    took = f"took {_percent(share)} of the time{_at(place, text)}."
    graphs, steps = format_count(times.compilations, "graph"), format_count(times.steps, "step")
    what = f"{compiler} has compiled {graphs} in {steps}, which {took}"
    if not times.recompiled:
        fix = "A longer run loses less by it, unless its steps differ, such as in the shapes of batches."
        if compiler != "XLA":  # it would tell the reason of a recompilation
            what = f"The first compilation by {compiler} {took}"
        return Verdict("compilation", share, what, fix, run.numbers, place)
    what += f" The last one's reason: {times.recompiled}."
    fix = "Give batches one shape (pad them, drop_last=True)"
    fix += "." if compiler == "XLA" else ", or torch.compile(..., dynamic=True)."
    return Verdict("compilation", share, what, fix, run.numbers, place)


def _device_waits(run: _Run) -> Verdict | None:
    """Find lines that wait for the device in each step."""
    if not run.is_on_device:
        return None

    def is_wait(line: events.SampledLine) -> bool:
        is_plain = line.phase != "evaluation" and not line.activity
        return is_plain and any(call in line.text for call in _WAITS_FOR_DEVICE)

    share, rank = run.sampled_share(is_wait)
    lines: collections.Counter[tuple[str, str]] = collections.Counter()
    for line in filter(is_wait, rank.times.lines):
        lines[line.place, line.text] += line.samples
    if not lines:
        return None
    [((place, text), _)] = lines.most_common(1)
    what = f"`{text[:_MOST_TEXT]}` at {place} waits for the GPU ({_percent(share)} of the time)."
    fix = "Do it every 50 steps, or keep tensors on the device: notebook_accel.report(loss=loss) doesn't wait."
    return Verdict("device wait", share, what, fix, run.numbers, place)


def _communication(run: _Run) -> Verdict | None:
    """Find communication that takes long although no rank is late."""
    if len(run.ranks) < 2:
        return None
    least = min(run.ranks, key=lambda rank: rank.per_step_s("communication"))
    share, size = run.communication_s / run.step_s, run.ranks[0].times.gradient_bytes
    exposed_share = min(rank.exposed_s for rank in run.ranks) / run.step_s
    if run.queued_share >= exposed_share:
        return None  # the ranks wait for cores more than for each other, and so exchange slowly
    if size < _LARGE_BYTES and run.communication_s < _SLOW_S:
        return None  # latency, which a longer step hides
    others, _ = _Run([least]).sampled_share(
        lambda line: line.activity == "communication" and line.phase in events.SPLIT_PHASES
    )
    computing_s = statistics.fmean(sum(rank.per_step_s(name) for name in _COMPUTING) for rank in run.ranks)
    if size and others < share / 2:
        computing = format_milliseconds(computing_s)
        what = f"Gradients take {_percent(share)} of the time: {format_size(size)} for {computing} of computing."
        fix = "Try a larger gradient_accumulation_steps, gradients in bf16, or a larger batch."
        if size < _LARGE_BYTES:
            fix = "For so little the connection is slow, or other programs use the cores: look at them first."
        return Verdict("communication", share, what, fix, run.numbers)
    place, text = least.line(*events.SPLIT_PHASES, activity="communication")
    memory = least.state.model_memory
    if memory is not None and memory.is_sharded and (place, text) == least.line("forward", activity="communication"):
        what = f"The collectives of a sharded model take {_percent(share)} of the time{_at(place, text)}."
        fix = "Try a larger batch, or `reshard_after_forward=False`: FSDP then gathers less often, in more memory."
        return Verdict("communication", share, what, fix, run.numbers, place)
    what = f"Collectives take {_percent(share)} of the time{_at(place, text)}."
    return Verdict("communication", share, what, "Communicate less often, or less.", run.numbers, place)


def _other(run: _Run) -> Verdict | None:
    """Find a line between the steps that takes long."""
    share = run.common_share("other")
    place, text = run.longest_in("other").line("other", activity="")
    saving, _ = run.sampled_share(lambda line: line.phase == "other" and line.activity == "saving")
    if not place or saving >= _WORTH / 2:
        return None
    what = f"{_percent(share)} of the time goes into code around the training{_at(place, text)}."
    return Verdict("other code", share, what, "Do it less often.", run.numbers, place)


_FINDERS: tuple[Callable[[_Run], Verdict | None], ...] = (
    _straggler,
    _data,
    _evaluation,
    _saving,
    _compilation,
    _device_waits,
    _communication,
    _other,
)

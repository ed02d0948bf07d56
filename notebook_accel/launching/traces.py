"""Trace files of torch's profiler, in the format of Chrome and Perfetto: digesting one, and merging several.

A trace has a time base in nanoseconds since 1970 and times in microseconds after it, so traces of processes on one
machine share a clock.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from notebook_accel.formatting import clipped
from notebook_accel.protocol.events import OperatorTime, Span, SpanKind

_STEP = "ProfilerStep#"
_COLLECTIVES = ("gloo:", "nccl:", "mpi:", "ucc:", "xccl:")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_MOST_SPANS: dict[SpanKind, int] = {"step": 200, "phase": 400, "operator": 200, "collective": 200, "kernel": 200}
_MOST_OPERATORS = 20
_MOST_NAME = 100

Mark = tuple[float, str]
"""The time at which a phase begins, in microseconds since 1970, and its name; empty for none."""


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0

    @property
    def end(self) -> float:
        return self.ts + self.dur


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")
    base_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)


@dataclasses.dataclass(frozen=True)
class Digest:
    """A summary of a trace, for display.

    Attributes:
        begin_s: Begin of the first step, in seconds since 1970.
        steps: Number of steps.
        spans: The longest spans of each kind, in order of time.
        operators: The operators of the host, and the kernels of the device, that took the most time.
    """

    begin_s: float
    steps: int
    spans: list[Span]
    operators: list[OperatorTime]


def digest(path: pathlib.Path, marks: Sequence[Mark], count: int) -> Digest:
    """Summarise a rank's trace.

    Args:
        path: The trace file.
        marks: The phases of the main thread.
        count: Number of whole steps in the trace. A further step may have been cut short.

    Raises:
        OSError: The file can't be read.
        ValueError: The file is no trace, or has no step.
    """
    trace = msgspec.json.decode(path.read_bytes(), type=_Trace)
    whole = [event for event in trace.events if event.ph == "X"]
    steps = sorted((event for event in whole if event.name.startswith(_STEP)), key=lambda event: event.ts)
    if not steps:
        raise ValueError(f"there is no step in {path}")
    del steps[count:]
    base_us, begin, end = trace.base_ns / 1000, steps[0].ts, steps[-1].end
    whole = [event for event in whole if begin <= event.ts < end]
    host = [event for event in whole if event.cat == "cpu_op"]
    kernels = [event for event in whole if event.cat in _DEVICE]
    found: dict[SpanKind, list[_Event]] = {
        "step": steps,
        "phase": list(_phases([(time_us - base_us, name) for time_us, name in marks], begin, end)),
        "operator": _outermost(event for event in host if event.tid == steps[0].tid),
        "collective": _collectives(whole),
        "kernel": _outermost(kernels),
    }
    spans = [Span(kind, event.name, event.ts - begin, event.dur) for kind in found for event in _longest(kind, found)]
    times = [*_costliest(_self_times(host)), *_costliest([(event.name, event.dur) for event in kernels], True)]
    return Digest((base_us + begin) / 1e6, len(steps), spans, times)


def _longest(kind: SpanKind, found: Mapping[SpanKind, Sequence[_Event]]) -> list[_Event]:
    longest = sorted(found[kind], key=lambda event: -event.dur)[: _MOST_SPANS[kind]]
    for event in longest:
        event.name = clipped(event.name, _MOST_NAME)
    return sorted(longest, key=lambda event: event.ts)


def _phases(marks: Sequence[Mark], begin: float, end: float) -> Iterator[_Event]:
    """Yield the phases between two times."""
    for (mark, name), (next_mark, _) in zip(marks, [*marks[1:], (end, "")], strict=False):
        start, stop = max(mark, begin), min(next_mark, end)
        if name and stop > start:
            yield _Event(name=name, ts=start, dur=stop - start)


def _outermost(events: Iterable[_Event]) -> list[_Event]:
    """Return the events that no other event contains. All are of one thread or one device."""
    found: list[_Event] = []
    for event in sorted(events, key=lambda event: (event.ts, -event.dur)):
        if not found or event.ts >= found[-1].end:
            found.append(event)
    return found


def _collectives(events: Iterable[_Event]) -> list[_Event]:
    """Return the collectives. On CUDA their times are the device's, not those of their launch on the host."""
    found = [event for event in events if event.name.startswith(_COLLECTIVES)]
    on_device = [event for event in found if event.cat == "gpu_user_annotation"]
    return on_device or found


def _self_times(events: Iterable[_Event]) -> Iterator[tuple[str, float]]:
    """Yield each operator's name and its own microseconds, without the operators that it called."""
    running: dict[int | str, list[list[Any]]] = collections.defaultdict(list)  # by thread: event and its own time
    for event in sorted(events, key=lambda event: (event.ts, -event.dur)):
        stack = running[event.tid]
        while stack and stack[-1][0].end <= event.ts:
            ended, own_us = stack.pop()
            yield ended.name, own_us
        if stack:
            stack[-1][1] -= min(event.dur, stack[-1][0].end - event.ts)
        stack.append([event, event.dur])
    for stack in running.values():
        for ended, own_us in stack:
            yield ended.name, own_us


def _costliest(times: Iterable[tuple[str, float]], are_kernels: bool = False) -> list[OperatorTime]:
    of_name: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
    for name, took_us in times:
        of_name[name].append(took_us)
    costliest = sorted(of_name.items(), key=lambda item: -sum(item[1]))[:_MOST_OPERATORS]
    return [
        OperatorTime(clipped(name, _MOST_NAME), len(each), max(0.0, sum(each)), are_kernels) for name, each in costliest
    ]


def merge(traces: Mapping[int, pathlib.Path], into: pathlib.Path) -> None:
    """Merge the ranks' trace files into one, which names each process after its rank.

    Raises:
        OSError: A file can't be read, or the disk is full.
        ValueError: A file is no trace.
    """
    first_base_ns: int | None = None
    pids: dict[Any, int] = {}
    with into.open("wb") as file:
        for rank, path in sorted(traces.items()):
            trace = msgspec.json.decode(path.read_bytes())
            base_ns = int(trace.get("baseTimeNanoseconds", 0))
            if first_base_ns is None:
                first_base_ns = base_ns
                file.write(b'{"displayTimeUnit":"ms","baseTimeNanoseconds":%d,"traceEvents":[' % base_ns)
            else:
                file.write(b",\n")
            shift_us = (base_ns - first_base_ns) / 1000
            file.write(msgspec.json.encode(list(_of_rank(trace["traceEvents"], rank, shift_us, pids)))[1:-1])
        file.write(b"]}")


def _of_rank(events: Iterable[dict[str, Any]], rank: int, shift_us: float, pids: dict[Any, int]) -> Iterator[Any]:
    """Yield a rank's events, with process and flow ids that are unique among the ranks."""
    for event in events:
        if isinstance(event.get("pid"), str):  # the profiler's own metadata
            continue
        event["pid"] = pids.setdefault((rank, event.get("pid")), len(pids) + 1)
        if "ts" in event:
            event["ts"] = round(event["ts"] + shift_us, 3)
        if "id" in event:
            event["id"] = f"{rank}.{event['id']}"
        if event.get("name") == "process_name":
            event["args"] = {"name": f"rank {rank}"}
        elif event.get("name") == "process_sort_index":
            event["args"] = {"sort_index": event["pid"]}
        yield event

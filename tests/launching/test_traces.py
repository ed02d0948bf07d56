"""Reading trace files of torch's profiler, and merging them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from notebook_accel.launching import traces

_BASE_NS = 1_700_000_000_000_000_000


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int | str = 7, **others: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": {}, **others}


def written(path: pathlib.Path, *events: dict[str, Any], base_ns: int = _BASE_NS) -> pathlib.Path:
    path.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": base_ns, "traceEvents": list(events)}))
    return path


def step(number: int, ts: float, dur: float) -> dict[str, Any]:
    return event(f"ProfilerStep#{number}", ts, dur, "user_annotation")


def test_times_of_operators_are_their_own(tmp_path: pathlib.Path) -> None:
    path = written(
        tmp_path / "trace.json",
        step(1, 100, 100),
        event("outer", 110, 50),
        event("inner", 120, 20),
        event("innermost", 125, 5),
        event("inner", 145, 10),
        event("elsewhere", 115, 40, tid=8),
        event("before the first step", 10, 50),
    )
    found = traces.digest(path, [], 1)
    assert {operator.name: (operator.calls, operator.self_us) for operator in found.operators} == {
        "elsewhere": (1, 40.0),
        "inner": (2, 25.0),
        "outer": (1, 20.0),
        "innermost": (1, 5.0),
    }
    assert [span.name for span in found.spans if span.kind == "operator"] == ["outer"]  # the outermost of this thread
    assert found.begin_s == pytest.approx(_BASE_NS / 1e9 + 100e-6)


def test_phases_lie_between_the_first_step_and_the_last_whole_one(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path / "trace.json", step(1, 100, 100), step(2, 200, 100), step(3, 300, 5))
    base_us = _BASE_NS / 1000
    marks = [(base_us + 50, "data"), (base_us + 120, "forward"), (base_us + 180, ""), (base_us + 250, "other")]
    found = traces.digest(path, marks, 2)
    assert found.steps == 2
    assert [tuple(span.__getattribute__(name) for name in ("name", "begin_us", "took_us"))
            for span in found.spans if span.kind == "phase"] == [
        ("data", 0.0, 20.0), ("forward", 20.0, 60.0), ("other", 150.0, 50.0)
    ]  # fmt: skip


def test_on_cuda_collectives_and_kernels_have_the_times_of_the_device(tmp_path: pathlib.Path) -> None:
    path = written(
        tmp_path / "trace.json",
        step(1, 0, 100),
        event("nccl:all_reduce", 10, 2, "user_annotation"),
        event("nccl:all_reduce", 30, 40, "gpu_user_annotation", tid=20),
        event("gemm", 20, 10, "kernel", tid=7),
        event("ncclDevKernel_AllReduce", 30, 40, "kernel", tid=20),
    )
    found = traces.digest(path, [], 1)
    assert [(span.begin_us, span.took_us) for span in found.spans if span.kind == "collective"] == [(30, 40)]
    assert [(each.name, each.self_us) for each in found.operators if each.is_kernel] == [
        ("ncclDevKernel_AllReduce", 40.0),
        ("gemm", 10.0),
    ]


def test_only_the_longest_spans_are_kept(tmp_path: pathlib.Path) -> None:
    many = [event("short", 10 * number, 1 + number % 2) for number in range(1, 1000)]
    found = traces.digest(written(tmp_path / "trace.json", step(1, 0, 20_000), *many), [], 1)
    spans = [span for span in found.spans if span.kind == "operator"]
    assert len(spans) == 200
    assert {span.took_us for span in spans} == {2}
    assert spans == sorted(spans, key=lambda span: span.begin_us)


def test_file_without_a_step_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="there is no step"):
        traces.digest(written(tmp_path / "trace.json", event("aten::mm", 0, 1)), [], 1)


def test_merged_trace_names_ranks_and_mixes_up_nothing(tmp_path: pathlib.Path) -> None:
    name = {"ph": "M", "name": "process_name", "ts": 0.0, "pid": 1, "tid": 0, "args": {"name": "python"}}
    arrow = {"ph": "s", "id": 4, "pid": 1, "tid": 7, "ts": 10.0, "cat": "fwdbwd", "name": "fwdbwd"}
    note = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler", "pid": "Spans", "tid": "x", "ts": 0.0, "dur": 1.0}
    own = [name, arrow, note, event("aten::mm", 10, 5)]
    paths = {
        0: written(tmp_path / "0.json", *own),
        3: written(tmp_path / "3.json", *own, base_ns=_BASE_NS + 2_000_000),
    }
    traces.merge(paths, tmp_path / "merged.json")
    merged = json.loads((tmp_path / "merged.json").read_text())
    assert merged["baseTimeNanoseconds"] == _BASE_NS
    events = merged["traceEvents"]
    pids = {each["args"]["name"]: each["pid"] for each in events if each["name"] == "process_name"}
    assert set(pids) == {"rank 0", "rank 3"}
    assert len({*pids.values()}) == 2
    starts = {each["pid"]: each["ts"] for each in events if each["name"] == "aten::mm"}
    assert starts == {pids["rank 0"]: 10.0, pids["rank 3"]: 2010.0}
    assert len({each["id"] for each in events if each["ph"] == "s"}) == 2
    assert not any(each["pid"] == "Spans" for each in events)

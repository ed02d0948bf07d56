"""The panel's HTML and text, from synthetic runs."""

from __future__ import annotations

import html.parser
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kernel_ext.chart import chart_html, ticks
from kernel_ext.render import RunFacts, header_html, output_html, summary_html, summary_text, table_html
from kernel_ext.run_state import RunState
from notebook_accel import events
from tests.kernel_ext import strategies

_ATTACK = '<script>alert("1")</script><img src=x onerror=alert(1)>'
_VOID_ELEMENTS = {"line"}


class _Document(html.parser.HTMLParser):
    """The elements and the text of a piece of HTML; fails if elements aren't closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += data

    def having(self, **attributes: str) -> list[dict[str, str | None]]:
        return [found for _, found in self.elements if attributes.items() <= found.items()]


def _facts(**changes: Any) -> RunFacts:
    facts = {"name": "digits", "devices": "2 CPUs", "precision": "no", "status": "running", "elapsed_s": 62.5}
    return RunFacts(**{**facts, **changes})


def _training(world_size: int = 2, seconds: int = 6) -> RunState:
    """Ranks that do 10 steps a second, of 100 in epoch 2 of 3."""
    state = RunState(world_size)
    for rank in range(world_size):
        state.apply(rank, events.Started(time_s=0.0, pid=1))
        for second in range(seconds):
            progress = events.Progress(
                time_s=float(second), step=10 * second, total=100, epoch=2, epochs=3, steps=100 + 10 * second
            )
            state.apply(rank, progress)
            state.apply(
                rank, events.Metrics(time_s=float(second), step=10 * second, values={"loss": 2.0 / (second + 1)})
            )
        state.apply(rank, events.Memory(time_s=5.0, used_bytes=9 << 30, total_bytes=16 << 30, kind="device"))
    return state


def test_header_names_state_run_devices_precision_epoch_and_times() -> None:
    header = _Document(header_html(_facts(precision="bf16", hint="interrupt the kernel to stop"), _training(), 5.0))
    words = " ".join(header.text.split())
    assert words == (
        "running digits 2 CPUs · bf16 · epoch 2 of 3 interrupt the kernel to stop 01:02 elapsed 00:15 left"
    )


def test_header_of_an_ended_run_has_no_time_left() -> None:
    header = _Document(header_html(_facts(status="succeeded", elapsed_s=3725.0), _training(), 5.0))
    assert " ".join(header.text.split()) == "finished digits 2 CPUs · epoch 2 of 3 1:02:05 in all"


def test_time_left_says_when_it_is_only_the_epochs() -> None:
    state = RunState(1)
    for second in range(6):
        state.apply(0, events.Progress(time_s=float(second), step=second, total=10, epoch=1, steps=second))
    assert "left in this epoch" in _Document(header_html(_facts(), state, 5.0)).text


def test_table_has_a_row_a_rank_with_labelled_bars() -> None:
    table = _Document(table_html(_training(world_size=8), 5.0))
    assert len(table.having(scope="row")) == 8
    bars = table.having(role="progressbar")
    assert [bar["aria-label"] for bar in bars] == [f"Steps of rank {rank}" for rank in range(8)]
    assert {(bar["aria-valuemin"], bar["aria-valuenow"], bar["aria-valuemax"]) for bar in bars} == {("0", "50", "100")}
    meters = table.having(role="meter")
    assert meters[3]["aria-label"] == "Device memory of rank 3"
    assert (meters[3]["aria-valuenow"], meters[3]["aria-valuetext"]) == ("56", "9.0 / 16 GiB")
    assert "50 / 100" in table.text
    assert "9.0 / 16 GiB" in table.text


def test_table_of_ranks_that_have_said_nothing() -> None:
    table = _Document(table_html(RunState(2), 0.0))
    assert table.text.count("starting") == 2
    assert table.having(role="progressbar") == []


def test_a_total_that_is_not_known_has_no_bar() -> None:
    state = RunState(1)
    state.apply(0, events.Progress(step=1234, steps=1234))
    table = _Document(table_html(state, 0.0))
    assert table.having(role="progressbar") == []
    assert "1,234" in table.text


def test_more_steps_than_the_total_fill_the_bar_and_no_more() -> None:
    state = RunState(1)
    state.apply(0, events.Progress(step=15, total=10, steps=15))
    assert _Document(table_html(state, 0.0)).having(style="width:100.0%")


def test_a_failed_rank_says_why_below_its_row() -> None:
    state = _training()
    state.apply(1, events.Failed(kind="ValueError", message="boom", traceback="", line="In[7], line 12"))
    text = _Document(table_html(state, 5.0)).text
    assert "failed" in text
    assert "ValueError: boom (In[7], line 12)" in text


def test_many_metrics_share_a_column() -> None:
    state = RunState(1)
    state.apply(0, events.Metrics(step=1, values={f"m{index}": float(index) for index in range(7)}))
    table = _Document(table_html(state, 0.0))
    assert "other metrics" in table.text
    assert "m5 5, m6 6" in table.text


def test_metrics_that_one_rank_alone_reports_leave_the_others_cells_empty() -> None:
    state = RunState(2)
    state.apply(1, events.Metrics(step=1, values={"rank": 7.0, "memory": 8.0}))
    lines = summary_text(_facts(), state, 0.0).splitlines()
    assert lines[1].split() == ["rank", "state", "rank", "memory", "last", "output"]
    assert lines[3].split() == ["1", "running", "7", "8"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.284123, "0.2841"),
        (0.0013, "0.0013"),
        (12.5, "12.5"),
        (1234.56, "1,235"),
        (3e-5, "3e-05"),
        (1.23456e7 + 0.5, "1.235e+07"),
        (0.0, "0"),
        (2.0, "2"),
        (1234567.0, "1,234,567"),
        (float("nan"), "nan"),
    ],
)
def test_metrics_have_few_digits(value: float, text: str) -> None:
    state = RunState(1)
    state.apply(0, events.Metrics(step=1, values={"loss": value}))
    assert text in summary_text(_facts(), state, 0.0).split()


def test_live_output_shows_the_last_lines_with_their_ranks() -> None:
    state = RunState(12)
    for number in range(150):
        state.apply(number % 2 * 11, events.Output(text=f"line {number}"))
    text = _Document(output_html(state)).text
    assert "50 earlier lines" in text
    assert "line 49\n" not in text
    assert text.endswith(" 0 │ line 148\n11 │ line 149")


def test_live_output_says_when_there_is_none() -> None:
    assert _Document(output_html(RunState(2))).text == "no output yet"


def test_summary_has_everything_and_folds_the_earlier_lines() -> None:
    state = _training()
    state.apply(0, events.Output(text="\n".join(f"line {number}" for number in range(40))))
    state.apply(0, events.Finished(result_bytes=1))
    state.apply(1, events.Finished(result_bytes=1))
    summary = _Document(summary_html(_facts(status="succeeded"), state, 5.0))
    assert [number for number in range(40) if f"│ line {number}" not in summary.text] == []
    assert "28 earlier lines" in summary.text
    tags = [tag for tag, _ in summary.elements]
    assert tags.count("details") == 1
    assert tags.count("svg") == 1
    assert "script" not in tags


def test_summary_folds_nothing_of_a_screenful() -> None:
    state = _training()
    state.apply(0, events.Output(text="\n".join(f"line {number}" for number in range(30))))
    summary = _Document(summary_html(_facts(), state, 5.0))
    assert "line 0\n" in summary.text
    assert "details" not in {tag for tag, _ in summary.elements}


@pytest.mark.parametrize("is_background", [False, True])
def test_summary_of_a_failed_run_has_the_traceback(is_background: bool) -> None:
    traceback = f"\x1b[31mIn[7], line 12\x1b[0m\n{_ATTACK}\n"
    facts = _facts(status="failed", failed_rank=1, traceback=traceback, is_background=is_background)
    summary = _Document(summary_html(facts, _training(), 5.0))
    assert f"In[7], line 12\n{_ATTACK}" in summary.text
    assert "traceback of rank 1" in summary.text
    # Where a cell waits for the run, the cell raises it.
    assert ("job.results() raises it" in summary.text) == is_background
    (details,) = [attributes for tag, attributes in summary.elements if tag == "details"]
    assert ("open" in details) == is_background
    assert {"script", "img"}.isdisjoint(tag for tag, _ in summary.elements)


def test_summary_keeps_the_end_of_a_long_traceback() -> None:
    traceback = "\n".join(f"frame {number}" for number in range(1000))
    summary = _Document(summary_html(_facts(status="failed", failed_rank=0, traceback=traceback), _training(), 5.0))
    assert "… 800 lines left out …\nframe 800\n" in summary.text
    assert "frame 999" in summary.text
    assert "frame 799" not in summary.text


def test_summary_says_how_many_lines_were_left_out() -> None:
    state = _training()
    for number in range(1500):
        state.apply(0, events.Output(text=str(number)))
    for shown in (_Document(summary_html(_facts(), state, 5.0)).text, summary_text(_facts(), state, 5.0)):
        assert "… 500 lines left out …" in shown
        assert "0 │ 0\n" in shown
        assert "0 │ 1499" in shown
    assert "1,488 earlier lines, 500 of them left out" in _Document(summary_html(_facts(), state, 5.0)).text


def test_summary_of_a_silent_run_has_no_empty_panes() -> None:
    state = RunState(2)
    summary = _Document(summary_html(_facts(status="succeeded"), state, 5.0))
    assert "nba-bottom" not in {attributes.get("class") for _, attributes in summary.elements}


def test_summary_of_a_silent_run_with_a_chart_keeps_the_chart_in_its_place() -> None:
    summary = _Document(summary_html(_facts(status="succeeded"), _training(), 5.0))
    classes = [attributes.get("class") for _, attributes in summary.elements]
    assert classes.index("nba-output-pane") < classes.index("nba-chart-pane")
    assert "no output" in summary.text


def test_summary_in_text_is_an_aligned_table() -> None:
    state = _training()
    state.apply(0, events.Output(text="hello"))
    state.apply(1, events.Ended(signal=9))
    assert summary_text(_facts(status="failed"), state, 5.0).splitlines() == [
        "digits: failed, 2 CPUs, epoch 2 of 3, 01:02",
        "rank  state    step      steps/s  left   loss    memory        last output",
        "0     running  50 / 100  10.0     00:15  0.3333  9.0 / 16 GiB  hello",
        "1     killed   50 / 100  10.0     \N{EN DASH}      0.3333  9.0 / 16 GiB",
        "rank 1: killed by SIGKILL",
        "0 │ hello",
    ]


def test_nothing_from_a_rank_becomes_an_element() -> None:
    state = RunState(1)
    state.apply(0, events.Progress(step=1, total=2, steps=1, label=_ATTACK, device=_ATTACK))
    for step in (1, 2):
        state.apply(0, events.Metrics(step=step, values={_ATTACK: 1.0, **{f"{_ATTACK}{n}": 1.0 for n in range(5)}}))
    state.apply(0, events.Output(text="\n".join([_ATTACK] * 30)))
    state.apply(0, events.Failed(kind=_ATTACK, message=_ATTACK, traceback="", line=_ATTACK))
    facts = _facts(name=_ATTACK, devices=_ATTACK)
    for source in (summary_html(facts, state, 5.0), output_html(state)):
        document = _Document(source)
        assert _ATTACK in document.text
        assert {tag for tag, _ in document.elements} & {"script", "img"} == set()
        assert not any(name.startswith("on") for _, attributes in document.elements for name in attributes)


@given(st.text(max_size=200))
def test_any_text_is_well_formed_html(text: str) -> None:
    state = RunState(1)
    state.apply(0, events.Output(text=text))
    state.apply(0, events.Failed(kind="E", message=text, traceback=""))
    assert {tag for tag, _ in _Document(summary_html(_facts(), state, 0.0)).elements} <= {
        *("div", "style", "span", "table", "caption", "thead", "tbody", "tr", "th", "td", "pre", "details", "summary")
    }


@given(st.lists(st.tuples(st.integers(0, 2), strategies.any_event), max_size=60), strategies.times)
def test_whatever_ranks_say_can_be_shown(sequence: list[tuple[int, events.Event]], now_s: float) -> None:
    state = RunState(3)
    for rank, event in sequence:
        state.apply(rank, event)
    for source in (header_html(_facts(), state, now_s), summary_html(_facts(status="failed"), state, now_s)):
        assert "digits" in _Document(source).text
    assert summary_text(_facts(), state, now_s).startswith("digits: running")


def test_chart_needs_two_points_and_says_what_it_shows() -> None:
    state = RunState(1)
    state.apply(0, events.Progress(step=0, steps=0))
    state.apply(0, events.Metrics(step=0, values={"loss": 2.0}))
    assert chart_html(state) == ""
    state.apply(0, events.Metrics(step=50, values={"loss": 0.5}))
    chart = _Document(chart_html(state))
    assert chart.having(role="img")[0]["aria-label"] == "loss over 50 steps: from 2 to 0.5"
    assert "50 steps" in chart.text


def test_chart_of_a_run_without_steps_is_over_its_reports() -> None:
    state = RunState(1)
    for loss in (2.0, 1.0, 0.5):
        state.apply(0, events.Metrics(step=0, values={"loss": loss}))
    chart = _Document(chart_html(state))
    assert chart.having(role="img")[0]["aria-label"] == "loss over 3 reports: from 2 to 0.5"
    assert "3 reports" in chart.text


@given(st.lists(st.floats(), min_size=2, max_size=20))
@example([0.0, 5e-324])
@example([-1.7e308, 1.7e308])
@example([1.0, 1.0 + 1e-15])
def test_a_curve_stays_inside_its_drawing(values: list[float]) -> None:
    state = RunState(1)
    for step, value in enumerate(values):
        state.apply(0, events.Metrics(step=step, values={"loss": value}))
    path = re.search(r'class="nba-curve" d="M([^"]*)"', chart_html(state))
    if path is None:
        assert len(state.history["loss"].points) < 2
        return
    for point in path[1].split("L"):
        x, y = map(float, point.split())
        assert 0 <= x <= 280
        assert 0 <= y <= 132


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0.28, 2.4, [0, 1, 2]),
        (0.0, 1.0, [0, 0.5, 1.0]),
        (90.1, 97.5, [92, 94, 96]),
        (-3.0, 5.0, [-2, 0, 2, 4]),
    ],
)
def test_ticks_are_round_and_few(low: float, high: float, marks: list[float]) -> None:
    assert ticks(low, high) == marks


@given(st.floats(-1e90, 1e90), st.floats(-1e90, 1e90))
def test_ticks_of_any_range_are_few(one: float, other: float) -> None:
    assert 1 <= len(ticks(min(one, other), max(one, other))) <= 5


def test_rank_that_the_others_wait_for_is_marked_with_where_it_stands() -> None:
    state = _training(world_size=3)
    state.apply(0, events.Silent(time_s=40.0, since_s=5.0, at="In[7], line 20 in train", waits_in="all_reduce"))
    state.apply(1, events.Silent(time_s=40.0, since_s=5.0, at="In[7], line 12 in <lambda>"))
    table = _Document(table_html(state, 47.0))
    note = "no step for 00:42, at In[7], line 12 in <lambda>; others wait for it"
    assert table.having(**{"class": "nba-note nba-silent"})
    assert note in table.text
    assert [word for word in ("waiting", "silent", "running") if word in table.text] == ["waiting", "silent", "running"]
    assert table.having(title="waits in all_reduce")
    text = summary_text(_facts(), state, 47.0)
    assert f"rank 1: {note}" in text
    assert "rank 0:" not in text


def test_output_that_was_left_out_names_the_logs() -> None:
    state = RunState(2)
    state.apply(0, events.Output(text="first"))
    state.apply(0, events.Output(text="last", left_out=1234))
    facts = _facts(status="succeeded", log_folder="/tmp/logs")
    gap = "… 1,234 lines left out; the whole output is in /tmp/logs …"
    assert gap in summary_text(facts, state, 5.0)
    assert gap in _Document(summary_html(facts, state, 5.0)).text


def test_template_stands_before_lines_of_output() -> None:
    state = RunState(2, ["[a] ", "[b] "])
    state.apply(1, events.Output(text="hello"))
    assert "[b] hello" in _Document(output_html(state)).text

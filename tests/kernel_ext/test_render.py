"""Tests of the header, the summary, the table of ranks and the chart, as HTML and as text, from synthetic runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_ext.output import output_html
from kernel_ext.render import table_html
from notebook_accel.launching.state.run import RunState
from notebook_accel.protocol import events
from tests.kernel_ext import fake_runs
from tests.kernel_ext.fake_runs import ATTACK, Document, FakeRun, header_of, summary_of, text_of
from tests.launching.state import strategies


def test_header_names_state_run_devices_precision_epoch_and_times() -> None:
    header = header_of(fake_runs.training(), precision="bf16", hint="interrupt the kernel to stop")
    words = " ".join(header.text.split())
    assert words == (
        "running digits 2 CPUs · bf16 · epoch 2 of 3 interrupt the kernel to stop 01:02 elapsed 00:15 left"
    )


def test_header_of_an_ended_run_has_no_time_left() -> None:
    header = header_of(fake_runs.training(), status="succeeded", elapsed_s=3725.0)
    assert " ".join(header.text.split()) == "finished digits 2 CPUs · epoch 2 of 3 1:02:05 in all"


@pytest.mark.parametrize("status", ["succeeded", "running", "stopped"])
def test_run_that_has_stopped_at_its_time_limit_says_so_in_header_and_summary(status: str) -> None:
    run = fake_runs.training()
    run.apply(0, events.TimeLimitReached(limit=1e9))
    for text in (header_of(run, status=status).text, text_of(run, status=status)):
        assert (run.state.early_end in text) == (status == "succeeded")


def test_time_left_says_when_it_is_only_the_epochs() -> None:
    run = FakeRun(1)
    for second in range(6):
        run.apply(0, events.Progress(time_s=float(second), step=second, total=10, epoch=1, steps=second))
    assert "left in this epoch" in header_of(run).text


def test_metrics_that_one_rank_alone_reports_leave_the_others_cells_empty() -> None:
    run = FakeRun(2)
    run.apply(1, events.Metrics(step=1, values={"rank": 7.0, "memory": 8.0}))
    lines = text_of(run, 0.0).splitlines()
    assert lines[1].split() == ["rank", "state", "rank", "memory", "seen", "last", "output"]
    assert lines[3].split()[:4] == ["1", "running", "7", "8"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.284123, "0.2841"),
        (0.0013, "0.0013"),
        (12.5, "12.5"),
        (1234.56, "1,235"),
        (3e-5, "3e-05"),
        (1.23456e7 + 0.5, "1.2e+07"),
        (-6.1034e-5, "-6.1e-05"),
        (0.0, "0"),
        (2.0, "2"),
        (1234567.0, "1,234,567"),
        (float("nan"), "nan"),
    ],
)
def test_metrics_have_few_digits(value: float, text: str) -> None:
    run = FakeRun(1)
    run.apply(0, events.Metrics(step=1, values={"loss": value}))
    assert text in text_of(run, 0.0).split()


def test_summary_has_everything_and_folds_the_earlier_lines_unless_they_fit_the_screen() -> None:
    run = fake_runs.training()
    run.apply(0, events.Output(text="\n".join(f"line {number}" for number in range(40))))
    run.apply(0, events.Finished())
    run.apply(1, events.Finished())
    summary = summary_of(run, status="succeeded")
    assert [number for number in range(40) if f"│ line {number}" not in summary.text] == []
    assert "28 earlier lines" in summary.text
    tags = [tag for tag, _ in summary.elements]
    assert tags.count("details") == 1
    assert tags.count("svg") == 1
    assert "script" not in tags
    screenful = fake_runs.training()
    screenful.apply(0, events.Output(text="\n".join(f"line {number}" for number in range(30))))
    summary = summary_of(screenful)
    assert "line 0\n" in summary.text
    assert "details" not in {tag for tag, _ in summary.elements}


@pytest.mark.parametrize("is_background", [False, True])
def test_summary_of_a_failed_run_has_the_traceback(is_background: bool) -> None:
    traceback = f"\x1b[31mIn[7], line 12\x1b[0m\n{ATTACK}\n"
    facts = {"status": "failed", "failed_rank": 1, "traceback": traceback, "is_background": is_background}
    summary = summary_of(fake_runs.training(), **facts)
    assert f"In[7], line 12\n{ATTACK}" in summary.text
    assert "traceback of rank 1" in summary.text
    # Where a cell waits for the run, the cell raises it.
    assert ("job.results() raises it" in summary.text) == is_background
    (details,) = [attributes for tag, attributes in summary.elements if tag == "details"]
    assert ("open" in details) == is_background
    assert {"script", "img"}.isdisjoint(tag for tag, _ in summary.elements)


def test_summary_keeps_the_end_of_a_long_traceback() -> None:
    traceback = "\n".join(f"frame {number}" for number in range(1000))
    summary = summary_of(fake_runs.training(), status="failed", failed_rank=0, traceback=traceback)
    assert "[800 lines left out here]\nframe 800\n" in summary.text
    assert "frame 999" in summary.text
    assert "frame 799" not in summary.text


def test_summary_says_how_many_lines_were_left_out() -> None:
    run = fake_runs.training()
    for number in range(2000):
        run.apply(0, events.Output(text=str(number)))
    for shown in (summary_of(run).text, text_of(run)):
        assert "[500 lines left out here]" in shown
        assert "0 │ 0\n" in shown
        assert "0 │ 1999" in shown
    assert "1,988 earlier lines, 500 of them left out" in summary_of(run).text


def test_summary_of_a_silent_run_has_no_empty_panes_and_keeps_a_chart_in_its_place() -> None:
    summary = summary_of(FakeRun(2), status="succeeded")
    assert "nba-bottom" not in {attributes.get("class") for _, attributes in summary.elements}
    summary = summary_of(fake_runs.training(), status="succeeded")
    classes = [attributes.get("class") for _, attributes in summary.elements]
    assert classes.index("nba-output-pane") < classes.index("nba-chart-pane")
    assert "no output" in summary.text


def test_summary_in_text_is_an_aligned_table() -> None:
    run = fake_runs.training()
    run.apply(0, events.Output(text="hello"))
    run.apply(1, events.Ended(signal=9))
    assert text_of(run, status="failed").splitlines() == [
        "digits: failed, 2 CPUs, epoch 2 of 3, 01:02",
        "rank  state    step      steps/s  loss    memory        seen  last output",
        "0     running  50 / 100  10.0     0.3333  9.0 / 16 GiB  now   hello",
        "1     killed   50 / 100  10.0     0.3333  9.0 / 16 GiB  \N{EN DASH}",
        "rank 1: killed by SIGKILL",
        "  0 │ hello",
    ]


def test_nothing_from_a_rank_becomes_an_element() -> None:
    run = FakeRun(1)
    run.apply(0, events.Progress(step=1, total=2, steps=1, label=ATTACK, device=ATTACK))
    for step in (1, 2):
        run.apply(0, events.Metrics(step=step, values={ATTACK: 1.0, **{f"{ATTACK}{n}": 1.0 for n in range(5)}}))
    run.apply(0, events.Output(text="\n".join([ATTACK] * 30)))
    run.apply(0, events.Failed(kind=ATTACK, message=ATTACK, traceback="", line=ATTACK))
    for document in (summary_of(run, name=ATTACK, devices=ATTACK), Document(output_html(run.output))):
        assert ATTACK in document.text
        assert {tag for tag, _ in document.elements} & {"script", "img"} == set()
        assert not any(name.startswith("on") for _, attributes in document.elements for name in attributes)


@given(st.text(max_size=40))
def test_any_text_is_well_formed_html(text: str) -> None:
    run = FakeRun(1)
    run.apply(0, events.Output(text=text))
    run.apply(0, events.Failed(kind="E", message=text, traceback=""))
    allowed = {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    allowed |= {"div", "style", "span", "pre", "details", "summary", "b"}
    assert {tag for tag, _ in summary_of(run, 0.0).elements} <= allowed


@given(st.lists(st.tuples(st.integers(0, 2), strategies.any_event), max_size=60), strategies.times)
def test_whatever_ranks_say_can_be_shown(sequence: list[tuple[int, events.Event]], now_s: float) -> None:
    run = FakeRun(3)
    for rank, event in sequence:
        run.apply(rank, event)
    for shown in (header_of(run, now_s), summary_of(run, now_s, status="failed")):
        assert "digits" in shown.text
    assert text_of(run, now_s).startswith("digits: running")


def test_rank_that_the_others_wait_for_is_marked_with_where_it_stands() -> None:
    run = fake_runs.training(world_size=3)
    run.apply(0, events.Silent(time_s=40.0, since_s=5.0, at="In[7], line 20 in train", waits_in="all_reduce"))
    run.apply(1, events.Silent(time_s=40.0, since_s=5.0, at="In[7], line 12 in <lambda>"))
    table = Document(table_html(run.state, 47.0))
    note = "no step for 00:42, at In[7], line 12 in <lambda>; others wait for it"
    assert table.having(**{"class": "nba-note nba-silent"})
    assert note in table.text
    assert [word for word in ("waiting", "silent", "running") if word in table.text] == ["waiting", "silent", "running"]
    assert table.having(title="waits in all_reduce")
    text = text_of(run, 47.0)
    assert f"rank 1: {note}" in text
    assert "rank 0:" not in text


def test_ranks_that_all_wait_are_marked_with_where_each_of_them_stands() -> None:
    run = fake_runs.training(world_size=2)
    run.apply(0, events.Silent(time_s=40.0, since_s=5.0, at="In[7], line 20 in train", waits_in="barrier"))
    assert "no step for" not in table_html(run.state, 47.0)  # rank 1 may be the one that rank 0 waits for
    run.apply(1, events.Silent(time_s=40.0, since_s=5.0, at="In[7], line 18 in train", waits_in="backward"))
    shown = Document(table_html(run.state, 47.0)).text
    assert "no step for 00:42, at In[7], line 20 in train; in barrier, and no other rank does a step" in shown
    assert "no step for 00:42, at In[7], line 18 in train; in backward, and no other rank does a step" in shown


def test_output_that_was_left_out_names_the_logs() -> None:
    run = FakeRun(2)
    run.apply(0, events.Output(text="first"))
    run.apply(0, events.Output(text="last", left_out=1234))
    gap = "[1,234 lines left out here; the whole output is in /tmp/logs]"
    assert gap in text_of(run, log_folder="/tmp/logs")
    assert gap in summary_of(run, log_folder="/tmp/logs").text


def test_restarts_are_counted_and_their_reason_is_shown_and_can_do_no_harm() -> None:
    run = fake_runs.training()
    assert "restart" not in header_of(run).text
    for pid in (2, 3):
        run.apply(1, events.Started(time_s=5.0, pid=pid))
    assert "2 restarts" in header_of(run).text
    run = fake_runs.training()
    run.apply(1, events.Restarting(number=1, of=3, why="rank 1: ValueError: <script>"))
    header = header_of(run)
    assert "1 restart" in header.text and "restart 1 of 3: rank 1: ValueError: <script>" in header.text
    assert header_of(run).source.endswith("</p></div>")  # in the header, which breaks lines
    assert "restart 1 of 3: rank 1: ValueError: <script>" in text_of(run).splitlines()


def test_summary_has_the_errors_before_the_output() -> None:
    run = fake_runs.training()
    run.apply(1, events.Output(text="ERROR <first>\n" + "\n".join(map(str, range(100)))))
    summary = summary_of(run, status="succeeded")
    assert summary.text.index("1 line that looks like an error") < summary.text.index("earlier lines")
    assert "1 │ ERROR <first>" in summary.text


def test_summary_of_many_ranks_has_a_row_for_each_folded_away() -> None:
    run = fake_runs.training(world_size=64)
    run.apply(9, events.Failed(kind="ValueError", message="boom", traceback=""))
    summary = summary_of(run, status="failed")
    assert "all 64 ranks" in summary.text
    assert summary.text.count("ValueError: boom") == 2
    assert len(summary.having(scope="row")) == 2 + 64
    assert len(text_of(run, status="failed").splitlines()) > 64


def test_table_has_a_row_a_rank_with_labelled_bars() -> None:
    table = Document(table_html(fake_runs.training(world_size=8).state, 5.0))
    assert len(table.having(scope="row")) == 8
    bars = table.having(role="progressbar")
    assert [bar["aria-label"] for bar in bars] == [f"Steps of rank {rank}" for rank in range(8)]
    assert {(bar["aria-valuemin"], bar["aria-valuenow"], bar["aria-valuemax"]) for bar in bars} == {("0", "50", "100")}
    meters = table.having(role="meter")
    assert meters[3]["aria-label"] == "Device memory of rank 3"
    assert (meters[3]["aria-valuenow"], meters[3]["aria-valuetext"]) == ("56", "9.0 / 16 GiB")
    assert "50 / 100" in table.text
    assert "9.0 / 16 GiB" in table.text


def test_bar_is_missing_without_a_total_and_full_beyond_it() -> None:
    state = RunState(2)
    state.apply(0, events.Progress(step=1234, steps=1234))
    table = Document(table_html(state, 0.0))
    assert table.having(role="progressbar") == []
    assert "1,234" in table.text and table.text.count("starting") == 1  # rank 1 has said nothing
    state.apply(1, events.Progress(step=15, total=10, steps=15))
    assert Document(table_html(state, 0.0)).having(style="width:100.0%")


def test_many_metrics_share_a_column() -> None:
    state = RunState(1)
    state.apply(0, events.Metrics(step=1, values={f"m{index}": float(index) for index in range(7)}))
    state.apply(0, events.Memory(used_bytes=1 << 30, total_bytes=0, kind="host"))
    table = Document(table_html(state, 0.0))
    assert "m0m1m2memoryseenother metrics" in table.text  # the last column is cut off where there is no room
    assert "m5 5, m6 6" in table.text


def test_a_rank_that_is_behind_is_marked_by_a_word() -> None:
    state = fake_runs.training(world_size=3).state
    state.apply(1, events.Progress(time_s=6.0, step=100, total=100, steps=200))
    for rank, steps in ((0, 900), (1, 1000), (2, 200)):
        for second in (7.0, 8.0):
            state.apply(rank, events.Progress(time_s=second, step=50, total=100, steps=steps + int(second)))
    table = Document(table_html(state, 8.0))
    assert len(table.having(**{"class": "nba-behind-row"})) == 1
    assert table.having(title="700 steps behind the others")
    assert table.text.count("behind") == 1


def test_ranks_of_one_state_share_a_row_where_they_are_many() -> None:
    state = fake_runs.training(world_size=64).state
    state.apply(9, events.Failed(kind="ValueError", message="boom", traceback=""))
    folded = Document(table_html(state, 5.0))
    assert len(folded.having(scope="row")) == 2
    assert "ValueError: boom" in folded.text
    assert "63 ranks" in folded.text
    assert folded.having(title="ranks 0\N{EN DASH}8, 10\N{EN DASH}63")
    cells = [cell for tag, cell in folded.elements if tag == "li"]
    assert len(cells) == 64
    assert cells[9]["aria-label"] == "rank 9: failed, 50 / 100"
    assert "9✗" in folded.text
    assert len(Document(table_html(state, 5.0, is_folded=False)).having(scope="row")) == 64


def test_ranks_of_one_node_share_a_row_where_there_are_several() -> None:
    state = fake_runs.training(world_size=64).state
    for rank in range(64):
        state.apply(rank, events.Started(time_s=0.1, pid=rank, node=rank // 16))
    folded = Document(table_html(state, 0.2))
    assert len(folded.having(scope="row")) == 4
    assert all(f"node {node}: 16 ranks" in folded.text for node in range(4))
    assert folded.having(title="ranks 16\N{EN DASH}31")


def test_ranks_that_share_a_row_show_what_they_have_in_common() -> None:
    state = RunState(20)
    for rank in range(20):
        for second in range(2):
            steps = 100 * second + rank
            state.apply(rank, events.Progress(time_s=float(second), step=steps, total=500, steps=steps))
        state.apply(rank, events.Metrics(time_s=1.0, step=1, values={"loss": float(rank)}))
        memory = events.Memory(time_s=1.0, used_bytes=rank << 30, total_bytes=40 << 30, kind="device", utilisation=rank)
        state.apply(rank, memory)
    words = Document(table_html(state, 1.0)).text
    for expected in ("20 ranks", "100\N{EN DASH}119 / 500", "9.5", "19 / 40 GiB", "10 %"):
        assert expected in words


def test_utilisation_has_a_column_only_where_it_is_known() -> None:
    state = fake_runs.training().state
    assert "busy" not in Document(table_html(state, 5.0)).text
    memory = events.Memory(time_s=5.0, used_bytes=1, total_bytes=2, kind="device", utilisation=87.4)
    state.apply(1, memory)
    assert "busy" in Document(table_html(state, 5.0)).text
    assert "87 %" in Document(table_html(state, 5.0)).text


def test_time_since_the_last_sign_of_life() -> None:
    state = fake_runs.training().state
    assert Document(table_html(state, 6.0)).text.count("now") == 2
    state.apply(0, events.Memory(time_s=64.0, used_bytes=1, total_bytes=2, kind="device"))
    assert "01:00 ago" in Document(table_html(state, 65.0)).text
    for rank in range(2):
        state.apply(rank, events.Finished(time_s=65.0))
    assert "seen" not in Document(table_html(state, 65.0)).text


def test_share_of_a_sharded_model_is_in_the_header_the_rows_and_the_summary() -> None:
    run = FakeRun(2)
    whole = events.ModelMemory(parameters=3000, held_parameters=3000, parameter_bytes=12 << 10)
    for rank in range(2):
        run.apply(rank, whole)
    assert "parameters" not in header_of(run, 0.0).text
    assert "holds at most" not in text_of(run, 0.0)
    assert 'title="3.0 k parameters: parameters 12 KiB"' in table_html(run.state, 0.0)
    sizes = {"parameter_bytes": 3 << 30, "gradient_bytes": 3 << 30, "optimizer_bytes": 6 << 30}
    for rank, held in enumerate([800_000_000, 799_999_000]):
        run.apply(rank, events.ModelMemory(parameters=1_600_000_000, held_parameters=held, **sizes))
    assert "800.0 M of 1.6 B parameters a rank" in header_of(run, 0.0).text
    words = "800.0 M of 1.6 B parameters: parameters 3.0 GiB, gradients 3.0 GiB, optimizer 6.0 GiB"
    assert f"Each rank holds at most {words}" in text_of(run, 0.0)
    assert f'title="{words}"' in table_html(run.state, 0.0)
    run.apply(0, events.ModelMemory(parameters=9, held_parameters=9, **sizes, peak_bytes=20 << 30))
    assert "activations and others at the peak 8.0 GiB" in table_html(run.state, 0.0)

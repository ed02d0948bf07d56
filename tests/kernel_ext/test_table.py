"""The table of ranks, from synthetic runs."""

from __future__ import annotations

from kernel_ext.table import table_html
from notebook_accel.launching.state.run import RunState
from notebook_accel.protocol import events
from tests.kernel_ext import documents as made
from tests.kernel_ext.documents import Document


def test_table_has_a_row_a_rank_with_labelled_bars() -> None:
    table = Document(table_html(made.training(world_size=8).state, 5.0))
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
    table = Document(table_html(RunState(2), 0.0))
    assert table.text.count("starting") == 2
    assert table.having(role="progressbar") == []


def test_a_total_that_is_not_known_has_no_bar() -> None:
    state = RunState(1)
    state.apply(0, events.Progress(step=1234, steps=1234))
    table = Document(table_html(state, 0.0))
    assert table.having(role="progressbar") == []
    assert "1,234" in table.text


def test_more_steps_than_the_total_fill_the_bar_and_no_more() -> None:
    state = RunState(1)
    state.apply(0, events.Progress(step=15, total=10, steps=15))
    assert Document(table_html(state, 0.0)).having(style="width:100.0%")


def test_a_failed_rank_says_why_below_its_row() -> None:
    state = made.training().state
    state.apply(1, events.Failed(kind="ValueError", message="boom", traceback="", line="In[7], line 12"))
    text = Document(table_html(state, 5.0)).text
    assert "failed" in text
    assert "ValueError: boom (In[7], line 12)" in text


def test_many_metrics_share_a_column() -> None:
    state = RunState(1)
    state.apply(0, events.Metrics(step=1, values={f"m{index}": float(index) for index in range(7)}))
    table = Document(table_html(state, 0.0))
    assert "other metrics" in table.text
    assert "m5 5, m6 6" in table.text


def test_a_rank_that_is_behind_is_marked_by_a_word() -> None:
    state = made.training(world_size=3).state
    state.apply(1, events.Progress(time_s=6.0, step=100, total=100, steps=200))
    for rank, steps in ((0, 900), (1, 1000), (2, 200)):
        for second in (7.0, 8.0):
            state.apply(rank, events.Progress(time_s=second, step=50, total=100, steps=steps + int(second)))
    table = Document(table_html(state, 8.0))
    assert len(table.having(**{"class": "nba-behind-row"})) == 1
    assert table.having(title="700 steps behind the others")
    assert table.text.count("behind") == 1


def test_ranks_of_one_state_share_a_row_where_they_are_many() -> None:
    state = made.training(world_size=64).state
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
    state = made.training(world_size=64).state
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
    state = made.training().state
    assert "busy" not in Document(table_html(state, 5.0)).text
    memory = events.Memory(time_s=5.0, used_bytes=1, total_bytes=2, kind="device", utilisation=87.4)
    state.apply(1, memory)
    assert "busy" in Document(table_html(state, 5.0)).text
    assert "87 %" in Document(table_html(state, 5.0)).text


def test_time_since_the_last_sign_of_life() -> None:
    state = made.training().state
    assert Document(table_html(state, 6.0)).text.count("now") == 2
    state.apply(0, events.Memory(time_s=64.0, used_bytes=1, total_bytes=2, kind="device"))
    assert "01:00 ago" in Document(table_html(state, 65.0)).text
    for rank in range(2):
        state.apply(rank, events.Finished(time_s=65.0, result_bytes=1))
    assert "seen" not in Document(table_html(state, 65.0)).text

"""Tests of the panel for fake runs: what its widgets show, and in a kernel the messages that reach a front end."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher

from kernel_ext import panel as panels
from kernel_ext.panel import PanelView
from notebook_accel.launching.views.view import KERNEL_INTERRUPT
from notebook_accel.protocol import events
from notebook_accel.protocol.agent_messages import RankDump
from tests import kernels
from tests.kernel_ext import fake_runs
from tests.kernel_ext.conftest import Shell

pytestmark = pytest.mark.front_end

# In a kernel --------------------------------------------------------------------------------------------------------

Send = Callable[[str], list[dict[str, Any]]]

# What a panel sends belongs to the cell that it stands under: here, to the running one.
_HERE = "view._cell_context = __import__('contextvars').copy_context()"
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_OPEN = "job = make_job(is_background=True); view = open_view(job); start(job); view.refresh()"


@pytest.fixture
def send(faking: kernels.Kernel) -> Send:
    """Run code that must not fail, and return the messages that reach the front end."""

    def run(code: str) -> list[dict[str, Any]]:
        cell = faking.start(code, allow_stdin=True)
        outcome = cell.finish()
        assert outcome.status == "ok", outcome.traceback
        return cell.messages

    return run


def _widget_values(messages: list[dict[str, Any]]) -> list[str]:
    """Return the new values of widgets, one for each message that changed one."""
    states = [message["content"]["data"]["state"] for message in messages if message["msg_type"] == "comm_msg"]
    return [state["value"] for state in states if "value" in state]


def test_nobody_looks_where_input_is_not_allowed(faking: kernels.Kernel) -> None:
    assert faking.run("print(open_view(make_job()))", allow_stdin=False).stdout == "None\n"


def test_the_option_overrides_that(faking: kernels.Kernel) -> None:
    code = "job = make_job(view='panel'); view = open_view(job); finish(job); view.close()"
    outcome = faking.run(code, allow_stdin=False)
    assert _WIDGET_VIEW in outcome.displays[0]["data"]


def test_the_view_is_displayed_and_replaced_by_a_summary_that_needs_no_kernel(send: Send) -> None:
    messages = send("""
        job = make_job()
        view = open_view(job)
        start(job)
        job.deliver(1, events.Output(text="<b>hello"))
        view.refresh()
        finish(job)
        view.close()
        """)
    shown = [message for message in messages if message["msg_type"] in ("display_data", "update_display_data")]
    assert [message["msg_type"] for message in shown] == ["display_data", "update_display_data"]
    first, last = (message["content"] for message in shown)
    assert first["transient"]["display_id"] == last["transient"]["display_id"]
    assert first["data"][_WIDGET_VIEW]["model_id"]
    assert "\nReload this page" in first["data"]["text/plain"]  # shown where the page lacks ipywidgets' extension
    assert "1 │ &lt;b&gt;hello" in last["data"]["text/html"].replace('<span class="nba-faint">', "").replace(
        "</span>", ""
    )
    assert last["data"]["text/plain"].startswith("digits: finished, 2 CPUs, ")
    assert _WIDGET_VIEW not in last["data"]


def test_a_run_that_has_ended_already_gets_a_summary_and_no_widgets(send: Send) -> None:
    messages = send("""
        job = make_job()
        start(job)
        job.deliver(1, events.Output(text="<b>hello"))
        finish(job)
        view = open_view(job)
        view.close()
        """)
    assert [message["msg_type"] for message in messages if message["msg_type"].startswith("comm")] == []
    (shown,) = (message for message in messages if message["msg_type"] == "display_data")
    assert shown["content"]["data"]["text/plain"].startswith("digits: finished, 2 CPUs, ")
    assert "1 │ <b>hello" in shown["content"]["data"]["text/plain"]


def test_only_the_root_and_the_summary_stay_open_for_a_page_that_was_reloaded(
    faking: kernels.Kernel, send: Send
) -> None:
    before = int(faking.value("len(get_ipython().kernel.comm_manager.comms)"))
    messages = send("job = make_job(is_background=True); view = open_view(job); finish(job); view.close()")
    models = {
        message["content"]["comm_id"]: message["content"]["data"]["state"]
        for message in messages
        if message["msg_type"] == "comm_open"
    }
    shown = next(message["content"]["data"] for message in messages if message["msg_type"] == "display_data")
    for message in messages:
        if message["msg_type"] == "comm_msg" and message["content"]["data"]["method"] == "update":
            models[message["content"]["comm_id"]].update(message["content"]["data"]["state"])
        elif message["msg_type"] == "comm_close":
            del models[message["content"]["comm_id"]]

    root = models.pop(shown[_WIDGET_VIEW]["model_id"])
    (child,) = root["children"]
    summary = models.pop(child.removeprefix("IPY_MODEL_"))
    assert "finished" in summary["value"]
    kept = {root["layout"], summary["layout"], summary["style"]}
    assert {f"IPY_MODEL_{model}" for model in models} == kept
    assert int(faking.value("len(get_ipython().kernel.comm_manager.comms)")) == before + 2 + len(kept)


def test_only_what_changed_is_sent(send: Send) -> None:
    clock = "import types, kernel_ext.panel as panel; now_s = time.monotonic(); "  # which stands still
    clock += "panel.time = types.SimpleNamespace(monotonic=lambda: now_s, thread_time=float); "
    send(f"{clock}job = make_job(); view = open_view(job); start(job); view.refresh()")
    later = f"{_HERE}; job.started_s = now_s - 7; view.refresh(); view.refresh(); view.refresh()"
    values = _widget_values(send(f"{later}; panel.time = time"))
    assert len(values) == 1 and "00:07" in values[0]  # the clock, once
    output = f"{_HERE}; job.deliver(0, events.Output(text='hello')); view.refresh()"
    values = _widget_values(send(output))
    assert any("nba-output" in value for value in values)
    assert not any("nba-chart" in value for value in values)
    progress = f"{_HERE}; job.deliver(0, events.Progress(step=2, total=10, steps=2)); view.refresh()"
    assert not any("nba-output" in value for value in _widget_values(send(progress)))
    send("finish(job); view.close()")


def test_a_flood_of_events_is_drawn_at_once(send: Send) -> None:
    send(_OPEN)
    flood = f"""
    {_HERE}
    for step in range(20_000):
        job.deliver(step % 2, events.Progress(step=step, total=20_000, steps=step))
        job.deliver(step % 2, events.Metrics(step=step, values={{"loss": 1 / (step + 1)}}))
    view.refresh()
    """
    assert len(_widget_values(send(flood))) <= 4  # header, table, chart, and the chart's metric
    send("finish(job); view.close()")


@pytest.mark.skipif(
    int(importlib.metadata.version("ipykernel").split(".")[0]) < 7,
    reason="before 7, ipykernel ties what a thread displays to the newest cell",
)
def test_displays_of_a_rank_appear_in_their_cell_even_when_a_later_cell_runs(
    faking: kernels.Kernel, send: Send
) -> None:
    cell = faking.start(
        """
        job = make_job(is_background=True)
        view = open_view(job)
        start(job)
        job.deliver(0, events.Display(data={"text/plain": "a figure"}))
        thread = threading.Thread(target=view.refresh)
        thread.start()
        thread.join()
        """,
        allow_stdin=True,
    )
    assert {"text/plain": "a figure"} in [content["data"] for content in cell.finish().displays]
    later = send("""
        job.deliver(0, events.Display(data={"text/plain": "another figure"}))
        finish(job)
        thread = threading.Thread(target=view.close)
        thread.start()
        thread.join()
        """)
    assert [message for message in later if message["msg_type"].endswith("display_data")] == []


def test_a_click_arrives_and_stops_the_run(faking: kernels.Kernel, send: Send) -> None:
    assert not any("interrupt the kernel" in value for value in _widget_values(send(_OPEN)))
    faking.click(faking.value("view._widgets.stop.comm.comm_id").strip("'"))
    assert faking.value("job.send_order.has_come.wait(60), job.send_order.names") == "(True, ['stop'])"
    send("finish(job); view.close()")


# In this process -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Panel:
    """The open panel of a fake run in the background.

    Attributes:
        job: The run.
        opened: The panel.
        displayed: What it has displayed so far, with its metadata.
    """

    job: Any
    opened: PanelView
    displayed: list[dict[str, Any]]

    def __getattr__(self, name: str) -> Any:
        """Return a widget of the panel."""
        return getattr(self.opened._widgets, name)

    def see(self, part: str) -> str:
        """Return a widget's value after the next drawing."""
        self.opened.refresh()
        return str(getattr(self, part).value)

    def close(self) -> str:
        """Return the HTML of the summary, when the run has ended."""
        self.opened.close()
        return str(self.displayed[-1]["data"]["text/html"])


Open = Callable[..., Panel]


@pytest.fixture
def open_panel(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Open the panel of a run in the background, which ends with the test. Orders have no effect on it."""
    publisher = CapturingDisplayPublisher()
    monkeypatch.setattr(shell.ipython, "display_pub", publisher)
    opened: list[Panel] = []

    def open_one(*, has_started: bool = True, **options: Any) -> Panel:
        job = fake_runs.make_job(is_background=True, **options)
        opened.append(Panel(job, PanelView(job), publisher.outputs))
        if has_started:
            fake_runs.start(job)
        return opened[-1]

    yield open_one
    for panel in opened:
        if not panel.job.done:
            fake_runs.finish(panel.job)
            panel.opened.close()


@pytest.fixture
def panel(open_panel: Open) -> Panel:
    return open_panel()


def test_a_failed_run_in_the_background_shows_its_traceback(panel: Panel) -> None:
    panel.job.deliver(1, events.Failed(kind="ValueError", message="<boom>", traceback="In[7], line 12\n<boom>"))
    panel.job.deliver(1, events.Ended(exit_code=1))
    panel.job.deliver(0, events.Ended(signal=15, stopped=True))
    panel.job.end("")
    summary = panel.close()
    assert "traceback of rank 1 · job.results() raises it" in summary
    assert "In[7], line 12\n&lt;boom&gt;" in summary


def test_diagnosis_and_chart_that_take_long_are_made_less_often(
    open_panel: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, used_s, made = [1000.0], [0.0], []
    clock = types.SimpleNamespace(monotonic=lambda: now_s[0], thread_time=lambda: used_s[0])
    monkeypatch.setattr(panels, "time", clock)
    panel = open_panel()

    def taking_long(what: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any, **options: Any) -> Any:
            used_s[0] += 0.1
            made.append(what)
            return make(*args, **options)

        return work

    panel.job.diagnosis = taking_long("diagnosis", panel.job.diagnosis)
    monkeypatch.setattr(panels.charts, "chart_html", taking_long("chart", panels.charts.chart_html))
    for second in range(30):
        now_s[0] += 1
        panel.job.deliver(0, events.Metrics(step=second, values={"loss": 1.0}))
        panel.opened.refresh()
    # A hundredth of 30 s, for a tenth of a second each; and a chart for the first name of a metric.
    assert (made.count("diagnosis"), made.count("chart")) == (3, 4)


def test_a_run_in_the_kernel_itself_is_stopped_by_the_kernels_interrupt_only(panel: Panel) -> None:
    panel.job.run_here = print
    assert "interrupt the kernel to stop" in panel.see("header")
    assert panel.stop.layout.display == "none"


def test_a_click_stops_a_run_and_the_panel_says_that_it_stops_and_then_who_has_stopped_it(panel: Panel) -> None:
    panel.stop.click()
    assert panel.job.send_order.names == ["stop"]
    assert "stopping …" in panel.see("header")
    assert (panel.stop.disabled, panel.interrupt.disabled) == (True, True)
    panel.job.end("stopped")
    assert "by the button Stop" in panel.close()


def test_the_panel_says_that_a_second_interrupt_of_the_kernel_kills(panel: Panel) -> None:
    panel.job.ended_by = KERNEL_INTERRUPT
    panel.opened._on_change()
    assert "ended after 2 s, or now by another interrupt" in panel.see("header")
    panel.job.end("interrupted")
    assert "by an interrupt of the kernel" in panel.close()


def test_the_panel_of_a_run_that_was_detached_says_how_it_is_found_again(panel: Panel) -> None:
    panel.job.end_detached("night")
    shown = panel.close()
    assert "it goes on without this notebook: %distributed attach night" in shown
    assert shown.count(">detached<") == 3  # the run and its ranks
    assert ">running<" not in shown
    assert "until then" in shown


def test_a_later_nodes_ranks_are_chosen_by_their_numbers_among_all(panel: Panel) -> None:
    panel.rank.value = 1
    panel.job.deliver(0, events.Numbered(first_rank=2, world_size=4))
    panel.opened.refresh()
    assert [label for label, _ in panel.rank.options] == ["all ranks", "rank 2", "rank 3"]
    assert panel.rank.value == 1


def test_a_click_interrupts_once(panel: Panel) -> None:
    panel.interrupt.click()
    panel.interrupt.click()
    assert "interrupting …; what goes on is ended after 2 s" in panel.see("header")
    assert not panel.stop.disabled  # for what goes on nevertheless
    assert panel.job.send_order.names == ["interrupt"]


def test_a_click_interrupts_what_a_session_does_and_no_more(panel: Panel) -> None:
    panel.job.on_death, panel.job.doing = "keep", lambda: "busy with In[3]"
    panel.interrupt.click()
    panel.interrupt.click()
    assert "busy with In[3]" in panel.see("header")
    assert not panel.interrupt.disabled
    assert panel.job.send_order.names == ["interrupt and keep", "interrupt and keep"]


def test_output_is_of_the_chosen_rank_and_has_what_is_searched_for(panel: Panel) -> None:
    panel.job.deliver(0, events.Output(text="Apple\npear"))
    panel.job.deliver(1, events.Output(text="apple pie"))
    shown = panel.see("body")
    assert [word in shown for word in ("Apple", "pear", "apple pie")] == [True, True, True]
    panel.rank.value = 0
    shown = panel.see("body")
    assert [word in shown for word in ("Apple", "pear", "apple pie")] == [True, True, False]
    panel.rank.value, panel.search.value = -1, "APPLE"
    shown = panel.see("body")
    assert "<mark>Apple</mark>" in shown
    assert "<mark>apple</mark> pie" in shown
    assert "2 of 3 lines" in shown


def test_stacks_are_asked_for_and_shown(panel: Panel) -> None:
    panel.view.value = "Stacks"
    assert panel.job.send_order.has_come.wait(60) and panel.job.send_order.names == ["inspect"]
    assert "asking every rank …" in panel.see("body")
    text = 'Current thread 0x1 (most recent call first):\n  File "<train>", line 7 in work'
    panel.job.take_dumps([RankDump(rank=rank, pid=rank + 5, condition="answered", text=text) for rank in range(2)])
    panel.opened._threads["stacks"].join(60)
    shown = panel.see("body")
    assert "rank 1 (pid 6), innermost call first:" in shown
    assert "&lt;train&gt;, line 7 in work" in shown
    assert "asking" not in shown


def test_phases_of_a_step_are_shown_in_their_tab_and_in_the_rows(panel: Panel) -> None:
    for rank in (0, 1) * 5:
        times = events.StepTimes(steps=20, seconds={"data": 0.9, "forward": 0.3}, workers=0, cores=2)
        panel.job.deliver(rank, times)
    panel.opened._diagnosis_due_s = 0.0
    panel.view.value = "Step"
    assert "45 ms" in panel.see("body")
    assert "waits 75 % of the time for data" in panel.see("header")
    assert "60 ms: data 75%, forward 25%" in panel.see("table")


def test_log_of_the_chosen_rank_is_shown_with_its_path(panel: Panel, tmp_path: pathlib.Path) -> None:
    panel.job.log_files = (tmp_path / "rank_0.log", tmp_path / "rank_1.log")
    panel.job.log_files[0].mkdir()
    panel.job.log_files[1].write_text("<first>\nsecond\n")
    panel.view.value = "Log file"
    shown = panel.see("body")
    assert "rank_0.log" in shown
    assert "rank_1.log" in shown
    panel.rank.value = 1
    assert "rank_1.log</span>\n&lt;first&gt;\nsecond" in panel.see("body")
    panel.rank.value = 0
    assert "can&#x27;t be read" in panel.see("body")


def test_chart_is_of_the_chosen_metric_and_ranks(panel: Panel) -> None:
    for step in range(1, 5):
        for rank in range(2):
            values = {"accuracy": step / 5, "loss": rank + 1 / step}
            panel.job.deliver(rank, events.Metrics(step=step, values=values))
    shown = panel.see("chart")
    assert 'aria-label="loss over 4 steps' in shown
    assert shown.count("<path") == 1
    assert panel.metric.options == ("loss", "accuracy")
    panel.metric.value, panel.curves.value = "accuracy", "Each rank"
    shown = panel.see("chart")
    assert 'aria-label="accuracy over 4 steps' in shown
    assert shown.count("<path") == 3


def test_many_ranks_share_rows_until_all_are_asked_for(open_panel: Open) -> None:
    panel = open_panel(world_size=64)
    assert panel.see("table").count('scope="row"') == 1
    assert (panel.fold.layout.display, panel.fold.description) == ("", "Show all 64 ranks")
    panel.fold.value = True
    assert panel.see("table").count('scope="row"') == 64


def test_displays_keep_their_metadata_and_are_updated_in_their_place(panel: Panel) -> None:
    one = events.Display(data={"text/html": "one"}, metadata={"isolated": True}, display_id="mine")
    panel.job.deliver(0, one)
    panel.job.deliver(0, events.Display(data={"text/html": "two"}, display_id="mine", is_update=True))
    panel.opened.refresh()
    mine = [shown for shown in panel.displayed if (shown["transient"] or {}).get("display_id") == "mine"]
    assert [(shown["data"]["text/html"], shown["metadata"], shown["update"]) for shown in mine] == [
        ("one", {"isolated": True}, False),
        ("two", {}, True),
    ]


def test_button_profiles_the_next_steps_and_the_summary_keeps_the_timeline(panel: Panel) -> None:
    panel.view.value = "Step"
    panel.profile.click()
    assert panel.job.send_order.has_come.wait(60)
    assert "profiling the next 5 steps" in panel.see("body")
    spans = [events.Span("step", "ProfilerStep#1", 0.0, 5000.0), events.Span("phase", "forward", 0.0, 4000.0)]
    for rank in range(2):
        panel.job.deliver(rank, events.Profiled(number=panel.job.send_order.profile_number, steps=1, spans=spans))
    panel.opened._threads["profile"].join(60)
    shown = panel.see("body")
    assert (shown.count("<svg"), "profiling" in shown) == (2, False)
    fake_runs.finish(panel.job)
    assert panel.close().count('class="nba-lane-label"') == 2


def test_button_says_why_there_is_no_profile(open_panel: Open) -> None:
    panel = open_panel(has_started=False)
    panel.view.value = "Step"
    panel.profile.click()
    panel.opened._threads["profile"].join(60)
    assert "can&#x27;t be profiled now.\nNo rank has started yet." in panel.see("body")

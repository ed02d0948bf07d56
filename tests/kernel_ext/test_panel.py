"""Tests of the panel in a real kernel: the messages that reach a front end, for fake runs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import kernels
from tests.kernel_ext import fake_runs

pytestmark = pytest.mark.front_end

Send = Callable[[str], list[dict[str, Any]]]

# What a panel sends belongs to the cell that it stands under: here, to the running one.
_HERE = "view._cell_context = __import__('contextvars').copy_context()"
_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_OPEN = "job = make_job(is_background=True); view = open_view(job); start(job); view.refresh()"


@pytest.fixture(scope="module")
def kernel(notebook: kernels.Kernel) -> kernels.Kernel:
    """The shared notebook, with what makes fake runs."""
    outcome = notebook.run(fake_runs.SETUP)
    assert outcome.status == "ok", outcome.traceback
    return notebook


@pytest.fixture
def send(kernel: kernels.Kernel) -> Send:
    """Run code that must not fail, and return the messages that reach the front end."""

    def run(code: str) -> list[dict[str, Any]]:
        cell = kernel.start(code, allow_stdin=True)
        outcome = cell.finish()
        assert outcome.status == "ok", outcome.traceback
        return cell.messages

    return run


@pytest.fixture
def panel(kernel: kernels.Kernel, send: Send) -> Iterator[kernels.Kernel]:
    """The kernel with the open panel of a fake run in the background."""
    send(_OPEN)
    yield kernel
    send("finish(job); view.close()")


def _widget_values(messages: list[dict[str, Any]]) -> list[str]:
    """Return the new values of widgets, one for each message that changed one."""
    states = [message["content"]["data"]["state"] for message in messages if message["msg_type"] == "comm_msg"]
    return [state["value"] for state in states if "value" in state]


def test_nobody_looks_where_input_is_not_allowed(kernel: kernels.Kernel) -> None:
    assert kernel.run("print(open_view(make_job()))", allow_stdin=False).stdout == "None\n"


def test_the_option_overrides_that(kernel: kernels.Kernel) -> None:
    code = "job = make_job(view='panel'); view = open_view(job); finish(job); view.close()"
    outcome = kernel.run(code, allow_stdin=False)
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
    kernel: kernels.Kernel, send: Send
) -> None:
    before = int(kernel.value("len(get_ipython().kernel.comm_manager.comms)"))
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
    assert int(kernel.value("len(get_ipython().kernel.comm_manager.comms)")) == before + 2 + len(kept)


def test_a_failed_run_in_the_background_shows_its_traceback(send: Send) -> None:
    messages = send("""
        job = make_job(is_background=True)
        view = open_view(job)
        start(job)
        job.deliver(1, events.Failed(kind="ValueError", message="<boom>", traceback="In[7], line 12\\n<boom>"))
        job.deliver(1, events.Ended(exit_code=1))
        job.deliver(0, events.Ended(signal=15, stopped=True))
        job.end("")
        view.close()
        """)
    (summary,) = (message["content"]["data"] for message in messages if message["msg_type"] == "update_display_data")
    assert "traceback of rank 1 · job.results() raises it" in summary["text/html"]
    assert "In[7], line 12\n&lt;boom&gt;" in summary["text/html"]


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


def test_diagnosis_and_chart_that_take_long_are_made_less_often(kernel: kernels.Kernel, send: Send) -> None:
    code = """
    import types, kernel_ext.panel as panel
    now_s, used_s, made = time.monotonic(), 0.0, []
    panel.time = types.SimpleNamespace(monotonic=lambda: now_s, thread_time=lambda: used_s)
    job = make_job()
    view = open_view(job)
    start(job)
    def work(what, found):
        global used_s
        used_s += 0.1
        made.append(what)
        return found
    diagnosis, chart_html = job.diagnosis, panel.charts.chart_html
    job.diagnosis = lambda: work("diagnosis", diagnosis())
    panel.charts.chart_html = lambda *args, **options: work("chart", chart_html(*args, **options))
    for second in range(30):
        now_s += 1
        job.deliver(0, events.Metrics(step=second, values={"loss": 1.0}))
        view.refresh()
    panel.charts.chart_html, panel.time = chart_html, time
    print(made.count("diagnosis"), made.count("chart"))
    """
    outcome = kernel.run(code, allow_stdin=True)
    # A hundredth of 30 s, for a tenth of a second each; and a chart for the first name of a metric.
    assert outcome.stdout.strip() == "3 4", outcome.traceback
    send("finish(job); view.close()")


@pytest.mark.skipif(
    int(importlib.metadata.version("ipykernel").split(".")[0]) < 7,
    reason="before 7, ipykernel ties what a thread displays to the newest cell",
)
def test_displays_of_a_rank_appear_in_their_cell_even_when_a_later_cell_runs(
    kernel: kernels.Kernel, send: Send
) -> None:
    cell = kernel.start(
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


def _comm(kernel: kernels.Kernel, widget: str) -> str:
    return kernel.value(f"view._widgets.{widget}.comm.comm_id").strip("'")


def test_a_run_in_the_kernel_itself_is_stopped_by_the_kernels_interrupt_only(
    kernel: kernels.Kernel, send: Send
) -> None:
    send("job = make_job(); job.run_here = print; view = open_view(job); start(job); view.refresh()")
    assert kernel.value("view._widgets.stop.layout.display") == "'none'"
    assert "interrupt the kernel to stop" in kernel.value("view._widgets.header.value")
    send("finish(job); view.close()")


def _see(kernel: kernels.Kernel, part: str) -> str:
    """Return a widget's value after the next drawing."""
    return kernel.run(f"view.refresh(); print(view._widgets.{part}.value)").stdout


def _summary(messages: list[dict[str, Any]]) -> str:
    """Return the HTML of the one summary that was shown."""
    (shown,) = (sent["content"]["data"] for sent in messages if "display_data" in sent["msg_type"])
    return str(shown["text/html"])


def test_a_click_stops_a_run_and_the_panel_says_that_it_stops_and_then_who_has_stopped_it(
    kernel: kernels.Kernel,
    send: Send,
) -> None:
    assert not any("interrupt the kernel" in value for value in _widget_values(send(_OPEN)))
    kernel.click(_comm(kernel, "stop"))
    assert kernel.value("Control.called.wait(60), Control.calls") == "(True, ['stop'])"
    assert "stopping …" in _see(kernel, "header")
    assert kernel.value("view._widgets.stop.disabled, view._widgets.interrupt.disabled") == "(True, True)"
    assert "by the button Stop" in _summary(send(f"{_HERE}; job.end('stopped'); view.close()"))


def test_the_panel_says_that_a_second_interrupt_of_the_kernel_kills(kernel: kernels.Kernel, send: Send) -> None:
    interrupt = "from notebook_accel.launching.views.view import KERNEL_INTERRUPT; job.ended_by = KERNEL_INTERRUPT"
    send(f"{_OPEN}; {interrupt}; view._on_change()")
    assert "ended after 2 s, or now by another interrupt" in _see(kernel, "header")
    assert "by an interrupt of the kernel" in _summary(send(f"{_HERE}; job.end('interrupted'); view.close()"))


def test_the_panel_of_a_run_that_was_detached_says_how_it_is_found_again(send: Send) -> None:
    send(_OPEN)
    shown = _summary(send(f"{_HERE}; job.end_detached('night'); view.close()"))
    assert "it goes on without this notebook: %distributed attach night" in shown
    assert shown.count(">detached<") == 3  # the run and its ranks
    assert ">running<" not in shown
    assert "until then" in shown


def test_a_later_nodes_ranks_are_chosen_by_their_numbers_among_all(panel: kernels.Kernel, send: Send) -> None:
    send("view._widgets.rank.value = 1")
    send("job.deliver(0, events.Numbered(first_rank=2, world_size=4)); view.refresh()")
    assert panel.value("[label for label, _ in view._widgets.rank.options], view._widgets.rank.value") == (
        "(['all ranks', 'rank 2', 'rank 3'], 1)"
    )


def test_a_click_interrupts_once(panel: kernels.Kernel) -> None:
    button = _comm(panel, "interrupt")
    panel.click(button)
    assert panel.value("Control.called.wait(60)") == "True"
    panel.click(button)
    assert "interrupting …; what goes on is ended after 2 s" in _see(panel, "header")
    assert panel.value("view._widgets.stop.disabled") == "False"  # for what goes on nevertheless
    assert panel.value("Control.calls") == "['interrupt']"


def test_a_click_interrupts_what_a_session_does_and_no_more(kernel: kernels.Kernel, send: Send) -> None:
    send(f"{_OPEN}; job.on_death = 'keep'; job.doing = lambda: 'busy with In[3]'")
    button = _comm(kernel, "interrupt")
    for _ in range(2):
        kernel.value("Control.called.clear()")
        kernel.click(button)
        assert kernel.value("Control.called.wait(60)") == "True"
    assert "busy with In[3]" in _see(kernel, "header")
    assert kernel.value("view._widgets.interrupt.disabled") == "False"
    assert kernel.value("Control.calls") == "['interrupt and keep', 'interrupt and keep']"
    send("finish(job); view.close()")


def test_output_is_of_the_chosen_rank_and_has_what_is_searched_for(panel: kernels.Kernel, send: Send) -> None:
    deliver = "job.deliver(0, events.Output(text='Apple\\npear')); job.deliver(1, events.Output(text='apple pie'))"
    send(deliver)
    shown = _see(panel, "body")
    assert [word in shown for word in ("Apple", "pear", "apple pie")] == [True, True, True]
    send("view._widgets.rank.value = 0")
    shown = _see(panel, "body")
    assert [word in shown for word in ("Apple", "pear", "apple pie")] == [True, True, False]
    send("view._widgets.rank.value = -1; view._widgets.search.value = 'APPLE'")
    shown = _see(panel, "body")
    assert "<mark>Apple</mark>" in shown
    assert "<mark>apple</mark> pie" in shown
    assert "2 of 3 lines" in shown


def test_stacks_are_asked_for_and_shown(panel: kernels.Kernel, send: Send) -> None:
    send("stacks = job.stacks; job.stacks = lambda: stacks(60)")  # two more cells may take that long
    send("view._widgets.view.value = 'Stacks'")
    assert panel.value("Control.called.wait(60), Control.calls") == "(True, ['inspect'])"
    assert "asking every rank …" in _see(panel, "body")
    dumps = """
    from notebook_accel.protocol.agent_messages import RankDump
    text = 'Current thread 0x1 (most recent call first):\\n  File "<train>", line 7 in work'
    job.take_dumps([RankDump(rank=rank, pid=rank + 5, condition="answered", text=text) for rank in range(2)])
    view._threads["stacks"].join(60)
    """
    send(dumps)
    shown = _see(panel, "body")
    assert "rank 1 (pid 6), innermost call first:" in shown
    assert "&lt;train&gt;, line 7 in work" in shown
    assert "asking" not in shown


def test_phases_of_a_step_are_shown_in_their_tab_and_in_the_rows(panel: kernels.Kernel, send: Send) -> None:
    measured = """
    for rank in range(2):
        for _ in range(5):
            job.deliver(rank, events.StepTimes(steps=20, seconds={'data': 0.9, 'forward': 0.3}, workers=0, cores=2))
    view._diagnosis_due_s = 0.0
    view._widgets.view.value = 'Step'
    """
    send(measured)
    assert "45 ms" in _see(panel, "body")
    assert "waits 75 % of the time for data" in _see(panel, "header")
    assert "60 ms: data 75%, forward 25%" in _see(panel, "table")


def test_log_of_the_chosen_rank_is_shown_with_its_path(panel: kernels.Kernel, send: Send) -> None:
    code = """
    import pathlib
    pathlib.Path("rank_0.log").mkdir()
    pathlib.Path("rank_1.log").write_text("<first>\\nsecond\\n")
    job.log_files = (pathlib.Path("rank_0.log"), pathlib.Path("rank_1.log"))
    view._widgets.view.value = 'Log file'
    """
    send(code)
    shown = _see(panel, "body")
    assert "rank_0.log" in shown
    assert "rank_1.log" in shown
    send("view._widgets.rank.value = 1")
    assert "rank_1.log</span>\n&lt;first&gt;\nsecond" in _see(panel, "body")
    send("view._widgets.rank.value = 0")
    assert "can&#x27;t be read" in _see(panel, "body")


def test_chart_is_of_the_chosen_metric_and_ranks(panel: kernels.Kernel, send: Send) -> None:
    metrics = """
    for step in range(1, 5):
        for rank in range(2):
            job.deliver(rank, events.Metrics(step=step, values={"accuracy": step / 5, "loss": rank + 1 / step}))
    """
    send(metrics)
    shown = _see(panel, "chart")
    assert 'aria-label="loss over 4 steps' in shown
    assert shown.count("<path") == 1
    assert panel.value("view._widgets.metric.options") == "('loss', 'accuracy')"
    send("view._widgets.metric.value = 'accuracy'; view._widgets.curves.value = 'Each rank'")
    shown = _see(panel, "chart")
    assert 'aria-label="accuracy over 4 steps' in shown
    assert shown.count("<path") == 3


def test_many_ranks_share_rows_until_all_are_asked_for(kernel: kernels.Kernel, send: Send) -> None:
    send(_OPEN.replace("is_background=True", "is_background=True, world_size=64"))
    assert _see(kernel, "table").count('scope="row"') == 1
    assert kernel.value("view._widgets.fold.layout.display, view._widgets.fold.description") == (
        "('', 'Show all 64 ranks')"
    )
    send("view._widgets.fold.value = True")
    assert _see(kernel, "table").count('scope="row"') == 64
    send("finish(job); view.close()")


def test_a_flood_of_events_is_drawn_at_once(panel: kernels.Kernel, send: Send) -> None:
    flood = f"""
    {_HERE}
    for step in range(20_000):
        job.deliver(step % 2, events.Progress(step=step, total=20_000, steps=step))
        job.deliver(step % 2, events.Metrics(step=step, values={{"loss": 1 / (step + 1)}}))
    view.refresh()
    """
    assert len(_widget_values(send(flood))) <= 4  # header, table, chart, and the chart's metric


def test_displays_keep_their_metadata_and_are_updated_in_their_place(kernel: kernels.Kernel) -> None:
    outcome = kernel.run(
        """
        job = make_job()
        view = open_view(job)
        start(job)
        job.deliver(0, events.Display(data={"text/html": "one"}, metadata={"isolated": True}, display_id="mine"))
        job.deliver(0, events.Display(data={"text/html": "two"}, display_id="mine", is_update=True))
        finish(job)
        view.close()
        """,
        allow_stdin=True,
    )
    assert outcome.status == "ok", outcome.traceback
    mine = [content for content in outcome.displays if content["transient"].get("display_id") == "mine"]
    assert [(content["data"]["text/html"], content["metadata"]) for content in mine] == [
        ("one", {"isolated": True}),
        ("two", {}),
    ]


def test_button_profiles_the_next_steps_and_the_summary_keeps_the_timeline(send: Send) -> None:
    messages = send("""
        job = make_job(is_background=True)
        view = open_view(job)
        start(job)
        view._widgets.view.value = "Step"
        view._widgets.profile.click()
        assert Control.called.wait(60)
        view.refresh()
        assert "profiling the next 5 steps" in view._widgets.body.value
        spans = [events.Span("step", "ProfilerStep#1", 0.0, 5000.0), events.Span("phase", "forward", 0.0, 4000.0)]
        for rank in range(2):
            job.deliver(rank, events.Profiled(number=Control.profile_number, steps=1, spans=spans))
        view._threads["profile"].join(60)
        view.refresh()
        print(view._widgets.body.value.count("<svg"), "profiling" in view._widgets.body.value)
        finish(job)
        view.close()
        """)
    printed = [message["content"]["text"] for message in messages if message["msg_type"] == "stream"]
    assert printed == ["2 False\n"]
    shown = [message["content"]["data"] for message in messages if message["msg_type"] == "update_display_data"]
    assert shown[-1]["text/html"].count('class="nba-lane-label"') == 2


def test_button_says_why_there_is_no_profile(send: Send) -> None:
    said = send("""
        job = make_job(is_background=True)
        view = open_view(job)
        view._widgets.view.value = "Step"
        view._widgets.profile.click()
        view._threads["profile"].join(60)
        view.refresh()
        print(view._widgets.body.value)
        finish(job)
        view.close()
        """)
    [printed] = [message["content"]["text"] for message in said if message["msg_type"] == "stream"]
    assert "can&#x27;t be profiled now.\nNo rank has started yet." in printed

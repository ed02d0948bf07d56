"""The panel inside a real kernel: the messages that reach a front end, for a run whose events are made up."""

from __future__ import annotations

import importlib.metadata
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests import kernels

pytestmark = pytest.mark.front_end

_WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_SETUP = """
import threading
import time
from kernel_ext.panel import open_view
from notebook_accel import events
from notebook_accel.config import LaunchConfig
from notebook_accel.launching.job import Job
from notebook_accel.launching.spec import JobSpec

class Stops:
    calls = 0
    def stop(self):
        Stops.calls += 1

def make_job(is_background=False, **options):
    spec = JobSpec(name="digits", world_size=2, environment={}, working_directory="", sys_path=[])
    job = Job(
        "1", spec, LaunchConfig(**options), devices="2 CPUs", is_background=is_background, shipped=(), result_files=()
    )
    job.attach(Stops())
    return job

def start(job):
    for rank in range(2):
        job.deliver(rank, events.Started(pid=rank + 1))
        job.deliver(rank, events.Progress(step=1, total=10, steps=1))

def finish(job):
    for rank in range(2):
        job.deliver(rank, events.Finished(result_bytes=1))
        job.deliver(rank, events.Ended(exit_code=0))
    job.end("")
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kernels.Kernel]:
    with kernels.running(tmp_path_factory.mktemp("kernel")) as running:
        outcome = running.run(_SETUP)
        assert outcome.status == "ok", outcome.traceback
        yield running


def _messages(kernel: kernels.Kernel, code: str) -> list[dict[str, Any]]:
    cell = kernel.start(code, allow_stdin=True)
    outcome = cell.finish()
    assert outcome.status == "ok", outcome.traceback
    return cell.messages


def _widget_values(messages: list[dict[str, Any]]) -> list[str]:
    """What the widgets were changed to, one for each message that changed one."""
    states = [message["content"]["data"]["state"] for message in messages if message["msg_type"] == "comm_msg"]
    return [state["value"] for state in states if "value" in state]


def test_nobody_looks_where_input_is_not_allowed(kernel: kernels.Kernel) -> None:
    assert kernel.run("print(open_view(make_job()))", allow_stdin=False).stdout == "None\n"


def test_the_option_overrides_that(kernel: kernels.Kernel) -> None:
    code = "job = make_job(view='panel'); view = open_view(job); finish(job); view.close()"
    outcome = kernel.run(code, allow_stdin=False)
    assert _WIDGET_VIEW in outcome.displays[0]["data"]


def test_outside_a_kernel_there_is_no_panel_and_nothing_is_imported_for_it() -> None:
    code = (
        "import sys; from kernel_ext.panel import open_view; assert open_view(None) is None;"
        "print([name for name in ('torch', 'ipywidgets', 'ipykernel') if name in sys.modules])"
    )
    root = pathlib.Path(__file__).parents[2]
    shown = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_the_view_is_displayed_and_replaced_by_a_summary_that_needs_no_kernel(kernel: kernels.Kernel) -> None:
    messages = _messages(
        kernel,
        """
        job = make_job()
        view = open_view(job)
        start(job)
        job.deliver(1, events.Output(text="<b>hello"))
        view.refresh()
        finish(job)
        view.close()
        """,
    )
    shown = [message for message in messages if message["msg_type"] in ("display_data", "update_display_data")]
    assert [message["msg_type"] for message in shown] == ["display_data", "update_display_data"]
    first, last = (message["content"] for message in shown)
    assert first["transient"]["display_id"] == last["transient"]["display_id"]
    assert first["data"][_WIDGET_VIEW]["model_id"]
    assert "1 │ &lt;b&gt;hello" in last["data"]["text/html"].replace('<span class="nba-faint">', "").replace(
        "</span>", ""
    )
    assert last["data"]["text/plain"].startswith("digits: finished, 2 CPUs, ")
    assert _WIDGET_VIEW not in last["data"]


def test_only_the_root_and_the_summary_stay_open_for_a_page_that_was_reloaded(kernel: kernels.Kernel) -> None:
    before = int(kernel.value("len(get_ipython().kernel.comm_manager.comms)"))
    messages = _messages(kernel, "job = make_job(is_background=True); view = open_view(job); finish(job); view.close()")
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


def test_a_failed_run_in_the_background_shows_its_traceback(kernel: kernels.Kernel) -> None:
    messages = _messages(
        kernel,
        """
        job = make_job(is_background=True)
        view = open_view(job)
        start(job)
        job.deliver(1, events.Failed(kind="ValueError", message="<boom>", traceback="In[7], line 12\\n<boom>"))
        job.deliver(1, events.Ended(exit_code=1))
        job.deliver(0, events.Ended(signal=15, stopped=True))
        job.end("")
        view.close()
        """,
    )
    (summary,) = (message["content"]["data"] for message in messages if message["msg_type"] == "update_display_data")
    assert "traceback of rank 1 · job.results() raises it" in summary["text/html"]
    assert "In[7], line 12\n&lt;boom&gt;" in summary["text/html"]


def test_only_what_changed_is_sent(kernel: kernels.Kernel) -> None:
    _messages(kernel, "job = make_job(); view = open_view(job); start(job); view.refresh()")
    later = "job.started_s = time.monotonic() - 7; view.refresh(); view.refresh(); view.refresh()"
    assert len(_widget_values(_messages(kernel, later))) == 1  # the clock, once
    output = "job.deliver(0, events.Output(text='hello')); view.refresh()"
    values = _widget_values(_messages(kernel, output))
    assert any("nba-output" in value for value in values)
    assert not any("nba-chart" in value for value in values)
    progress = "job.deliver(0, events.Progress(step=2, total=10, steps=2)); view.refresh()"
    assert not any("nba-output" in value for value in _widget_values(_messages(kernel, progress)))
    _messages(kernel, "finish(job); view.close()")


@pytest.mark.skipif(
    int(importlib.metadata.version("ipykernel").split(".")[0]) < 7,
    reason="before 7, ipykernel ties what a thread displays to the newest cell",
)
def test_displays_of_a_rank_appear_in_their_cell_even_when_a_later_cell_runs(kernel: kernels.Kernel) -> None:
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
    later = _messages(
        kernel,
        """
        job.deliver(0, events.Display(data={"text/plain": "another figure"}))
        finish(job)
        thread = threading.Thread(target=view.close)
        thread.start()
        thread.join()
        """,
    )
    assert [message for message in later if message["msg_type"].endswith("display_data")] == []


def test_only_a_run_in_the_background_has_a_stop_button_and_a_click_stops_it(kernel: kernels.Kernel) -> None:
    def models(messages: list[dict[str, Any]]) -> dict[str, str]:
        opened = [message["content"] for message in messages if message["msg_type"] == "comm_open"]
        return {content["data"]["state"]["_model_name"]: content["comm_id"] for content in opened}

    blocking = _messages(kernel, "job = make_job(); view = open_view(job); finish(job); view.close()")
    assert "ButtonModel" not in models(blocking)
    assert any("interrupt the kernel to stop" in value for value in _widget_values(blocking))

    background = _messages(
        kernel, "job = make_job(is_background=True); view = open_view(job); start(job); view.refresh()"
    )
    assert not any("interrupt the kernel" in value for value in _widget_values(background))
    button = models(background)["ButtonModel"]
    # What a front end sends when the button is clicked, through the kernel's own handler.
    _messages(
        kernel,
        f"get_ipython().kernel.comm_manager.get_comm({button!r}).handle_msg("
        "{'content': {'data': {'method': 'custom', 'content': {'event': 'click'}}}, 'buffers': []})",
    )
    assert kernel.value("Stops.calls") == "1"
    _messages(kernel, "finish(job); view.close()")


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

"""Detached runs in notebooks: a kernel that is killed, and another one that finds the run again."""

from __future__ import annotations

import contextlib
import pathlib
import re
import time
from collections.abc import Iterator

import pytest

from notebook_accel.launching import run_folders
from tests import kernels, processes
from tests.kernel_ext.conftest import Shell, error
from tests.loopback import Loopback

pytestmark = pytest.mark.usefixtures("state_home")

_LONG_S = 100.0
_CELL = """
%%distributed -n 2 --detach --name night --pull model,steps --view none
class Model:
    def __init__(self, size):
        self.size = size
    def double(self):
        return Model(factor * self.size)
model, steps = Model(21).double(), 0
while not pathlib.Path(mark).exists():
    report(loss=1 / (steps + 1))
    print("step", steps)
    steps += 1
    time.sleep(0.02)
model
"""
_TITLES = "[open(f'/proc/{rank.pid}/cmdline').read().rstrip(chr(0)) for rank in job.ranks]"  # as ps shows them


@contextlib.contextmanager
def notebook(folder: pathlib.Path) -> Iterator[kernels.Kernel]:
    """A kernel with the extension. Detached runs have templates of their own."""
    folder.mkdir()
    with kernels.running(folder) as kernel:
        load = (
            f"%load_ext notebook_accel\n{kernels.END_TEMPLATE}\nfrom notebook_accel import report\nimport pathlib, time"
        )
        loaded = kernel.run(load, _LONG_S)
        assert loaded.status == "ok", loaded.traceback
        yield kernel


def row_with_loss(kernel: kernels.Kernel) -> str:
    [row] = kernel.run("%distributed runs").stdout.splitlines()[1:]
    return row if "loss" in row else ""


# Two kernels and a run with a template of its own: no other test shows that a notebook finds a run of a dead one.
def test_run_outlives_its_kernel_and_another_one_has_all_of_it(tmp_path: pathlib.Path) -> None:
    mark = tmp_path / "mark"
    with notebook(tmp_path / "first") as first:
        first.run(f"mark, factor = {str(mark)!r}, 2")
        launched = first.run(_CELL.strip(), _LONG_S)
        assert re.fullmatch(r"<Job 'night': (starting|running), 2 ranks on 2 CPUs>", launched.result), launched
        first.run("while not all(rank.metrics for rank in _.ranks): time.sleep(0.01)", _LONG_S)
        first.kill()
    with notebook(tmp_path / "second") as second:
        # The list is that of the last second.
        listed = processes.wait_until(lambda: row_with_loss(second), "the run is listed with its metrics", _LONG_S)
        assert re.match(r"night +running +\d{4}-\d\d-\d\d \d\d:\d\d +loss ", listed), listed
        attached = second.run("job = %distributed attach night\njob.status")
        assert attached.result == "'running'", attached.traceback
        [folder] = run_folders.every()
        began = time.strftime("%H:%M:%S", time.localtime(folder.facts.began))
        assert second.run("%distributed status").stdout.startswith(f"1 (night): running, on 2 CPUs; began {began}")
        assert "rank 0 (pid " in second.run("%distributed stacks 0").stdout
        assert second.value(_TITLES) == "['notebook-accel rank 0 of night', 'notebook-accel rank 1 of night']"
        mark.touch()
        assert_results_come(second)
        assert second.value("len(job.state.history['loss'].mean) > 1") == "True"
        lines = second.value("[job.logs(0).splitlines() == [f'step {n}' for n in range(steps)]]")
        assert lines == "[True]"
        assert "keeps no variable loss" in second.run("job.pull('loss')").traceback
        processes.wait_until(lambda: not folder.is_held, "its agent has gone", _LONG_S)
        cleaned = second.run("%distributed runs --clean").stdout
        assert re.fullmatch(r"Removed: \S+-night-\S+\nYou have no detached run on this machine\.\n", cleaned)
        assert "no detached run of yours" in second.run("%distributed attach").traceback
    assert list(run_folders.root().iterdir()) == []


def assert_results_come(kernel: kernels.Kernel) -> None:
    ended = kernel.run("results = job.results()\n[type(model).__name__, model.size, steps > 0]", _LONG_S)
    assert ended.result == "['Model', 42, True]", ended.traceback
    assert kernel.value("results[1].double().size, job.pull('steps') == steps") == "(84, True)"


@pytest.mark.slow
def test_run_under_a_cell_is_detached_by_a_click_and_outlives_its_kernel(tmp_path: pathlib.Path) -> None:
    mark = tmp_path / "mark"
    with notebook(tmp_path / "first") as first:
        first.run(f"mark, factor = {str(mark)!r}, 2")
        cell = first.start(_CELL.strip().replace("--detach --name night", "--name day").replace("none", "panel"))
        cell.wait_for_display(_LONG_S)
        opened = [message["content"] for message in cell.messages if message["msg_type"] == "comm_open"]
        [button] = [comm for comm in opened if comm["data"]["state"].get("description") == "Detach"]
        first.click(button["comm_id"], first.make_subshell())  # as JupyterLab does for clicks while a cell runs
        outcome = cell.finish(_LONG_S)
        assert "The run 'day' was detached under the name 'day', and goes on without this" in outcome.traceback
        assert "Fix: %distributed attach day" in outcome.traceback
        assert "it goes on without this notebook" in outcome.displays[-1]["data"]["text/html"]
        assert first.run("%%distributed -n 2 --view none\n1", _LONG_S).result == "[1, 1]"
        first.kill()
    with notebook(tmp_path / "second") as second:
        attached = second.run("job = %distributed attach day\njob.status", _LONG_S)
        assert attached.result == "'running'", attached.traceback
        assert second.value(_TITLES) == "['notebook-accel rank 0 of day', 'notebook-accel rank 1 of day']"
        mark.touch()
        assert_results_come(second)
        [folder] = run_folders.every()
        processes.wait_until(lambda: not folder.is_held, "its agent has gone", _LONG_S)


def test_run_in_the_background_is_detached_by_name(shell: Shell, loopback: Loopback) -> None:
    loopback.launch(name="day")
    detached = shell.run("job = %distributed detach night --run day\njob")
    assert detached.result == "<Job 'night': running, 2 ranks on 2 CPUs>", detached.traceback
    status = shell.run("%distributed status").stdout
    assert re.search(r"\(day\): detached, .*\n  it goes on .* attach night, .*\n.*\(night\): running", status), status
    assert shell.run("%distributed detach").result == detached.result
    assert "The detached run 'night' keeps its name." in error(shell, "%distributed detach other")

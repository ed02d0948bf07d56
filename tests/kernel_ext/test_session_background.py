"""Tests of a session's background cells: they take turns, and their output appears under them."""

from __future__ import annotations

import pathlib

import pytest

from tests import kernels
from tests.kernel_ext.conftest import error, shown

pytestmark = pytest.mark.usefixtures("session")

# A cell that goes on until the notebook says so, by a file.
_UNTIL = "import os, time\nwhile not os.path.exists('{0}'): time.sleep(0.01)\n"


def test_cell_in_the_background_returns_at_once_and_shows_its_own_output(notebook: kernels.Kernel) -> None:
    background = notebook.start(
        f"%%distributed --background --out first\nprint('begun')\n{_UNTIL.format('go')}print('done')\nrank * 2"
    )
    assert background.finish().result.endswith("in the background: running>")
    assert "busy with In[" in notebook.run("%distributed status").stdout
    assert shown(notebook, "first.status, first.done") == "('running', False)"
    assert "RunTimeoutError" in error(notebook, "first.results(0)")
    notebook.run("open('go', 'w').close()")
    background.wait_for_output(" has ended, after ")
    background.wait_for_output("rank 0: 0\nrank 1: 2")
    said = kernels.unfolded(background.stream("stdout"))
    assert said.index("1 │ begun") < said.index("1 │ done")
    assert shown(notebook, "first.results(30), first.status") == "([0, 2], 'succeeded')"


def test_next_cell_waits_its_turn_and_says_so(notebook: kernels.Kernel) -> None:
    notebook.run(f"%%distributed --background\norder = ['first']\n{_UNTIL.format('on')}order.append('second')")
    waiting = notebook.start("%%distributed\norder + ['third']")
    waiting.wait_for_output("has ended; an interrupt ends only the waiting]")
    notebook.interrupt()
    assert waiting.finish().error_name == "KeyboardInterrupt"
    notebook.run("%%distributed --background --out queued\norder.append('fourth')\norder")
    assert shown(notebook, "queued.status") == "'waiting'"
    assert "; In[" in notebook.run("%distributed status").stdout
    assert notebook.run("%%distributed\norder?").stdout.startswith("The ranks can't be asked just now: busy with In[")
    notebook.run("open('on', 'w').close()")
    assert shown(notebook, "queued.results(30)[1]") == "['first', 'second', 'fourth']"
    assert shown(notebook, "%%distributed\norder") == "ranks 0-1: ['first', 'second', 'fourth']"


def test_interrupt_of_a_cell_in_the_background_keeps_the_state(notebook: kernels.Kernel) -> None:
    running = notebook.start("%%distributed --background --out running\nkept = rank\nprint('begun')\ntime.sleep(100)")
    for rank in range(2):
        running.wait_for_output(f"{rank} │ begun")
    notebook.run("%%distributed --background --out never\nnever_was = 1")
    notebook.run("never.interrupt()")
    assert "was interrupted" in error(notebook, "never.results(30)")
    notebook.run("running.interrupt()")
    assert "was interrupted" in error(notebook, "running.results(30)")
    assert shown(notebook, "running.status, never.status") == "('stopped', 'stopped')"
    running = notebook.start("%%distributed --background --out running\nprint('again')\ntime.sleep(100)")
    for rank in range(2):
        running.wait_for_output(f"{rank} │ again")
    notebook.run("%distributed interrupt")
    assert "was interrupted in the ranks" in error(notebook, "running.results(30)")
    assert shown(notebook, "running.status") == "'stopped'"
    assert shown(notebook, "%%distributed\nkept, 'never_was' in globals()") == "rank 0: (0, False)\nrank 1: (1, False)"


def test_error_of_a_cell_in_the_background_is_shown_when_it_happens_and_raised_when_asked(
    notebook: kernels.Kernel,
) -> None:
    failing = notebook.start("%%distributed --background --out failing\nif rank == 1: raise ValueError('mine')")
    failing.wait_for_output("ValueError: mine")
    assert "rank 1 of 2 failed" in error(notebook, "failing.results(30)")
    assert shown(notebook, "failing.status") == "'failed'"
    notebook.run("import threading\nlock = threading.Lock()")
    assert "it is a lock" in error(notebook, "%%distributed --background\nlock")


@pytest.mark.slow
def test_steps_of_a_cell_that_takes_a_while_are_shown_under_it(
    notebook: kernels.Kernel, tmp_path: pathlib.Path
) -> None:
    shown_file = tmp_path / "shown"
    last = f"while number == 7 and not os.path.exists('{shown_file}'): time.sleep(0.01)"
    cell = notebook.start(f"%%distributed\nfrom tqdm.auto import tqdm\nfor number in tqdm(range(8)):\n    {last}")
    cell.wait_for_display()
    shown_file.touch()
    outcome = cell.finish()
    assert outcome.status == "ok" and outcome.stdout == "", outcome
    places = {content["transient"]["display_id"] for content in outcome.displays}
    assert len(places) == 1 and outcome.displays[-1]["data"]["text/plain"].count("step 8/8") == 2
    # What a cell has counted is not the next one's.
    assert notebook.run("%%distributed\ntime.sleep(1.5)").displays == ()


@pytest.mark.slow
def test_cell_in_the_background_is_profiled_as_far_as_it_goes(notebook: kernels.Kernel) -> None:
    cell = """%%distributed --background --out trained
import os, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
profiled = 0
while profiled < 9:
    for x in torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=4):
        profiled += torch.autograd._profiler_enabled()
        model(x).sum().backward()
        optimizer.step()
"""
    assert notebook.run(cell).status == "ok"
    profile = notebook.run("%distributed profile --steps 100 --run session", 180)  # in which the cell ends
    assert profile.result.startswith("100 steps of 'session' on "), profile.traceback
    assert "the cell ended after " in profile.result
    assert shown(notebook, "trained.results(60).__len__()") == "2"

"""A detached run in a real browser: its JupyterLab is killed, and a second one shows it from its beginning."""

from __future__ import annotations

import pathlib
import re
from typing import TYPE_CHECKING

import pytest

from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import detached_runs
from tests import processes
from tests.browser import lab as labs
from tests.browser.lab import expect, open_notebook, open_with_extension, run_cell, wait_until_done

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator


pytestmark = [
    pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(240), pytest.mark.usefixtures("state_home")
]  # fmt: skip

_TIMEOUT_MS = 60_000
_EARLY, _LATER = 0.4, 0.2  # losses of a run that begins with 1
_TRAINING = """
%%distributed --detach --name night --num_processes 2
import time

from notebook_accel import report

for step in range(100_000):
    report(loss=1 / (1 + step / 100))
    if step == 0:
        print("the first line")
    time.sleep(0.01)
"""


def _panel(output: Locator) -> Locator:
    panel = output.locator(".nba-panel")
    panel.locator("path.nba-curve").first.wait_for(state="attached", timeout=_TIMEOUT_MS)
    return panel


def test_a_run_is_found_again_after_its_server_was_killed(browser: Browser, tmp_path: pathlib.Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with labs.running(folders[0]) as lab:
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        open_with_extension(page, lab, "night.ipynb", _TRAINING)
        _panel(run_cell(page, 1))
        lab.kill()
        page.close()
    [folder] = run_folders.every()
    processes.wait_until(lambda: detached_runs.summary(folder).metrics.get("loss", 1) < _LATER, "it goes on", 60)
    with labs.running(folders[1]) as lab:
        lab.write_notebook("morning.ipynb", ["%load_ext notebook_accel", "%distributed attach night"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        open_notebook(page, lab, "morning.ipynb")
        told = run_cell(page, 0)
        expect(told).to_contain_text("A detached run of yours goes on: night", timeout=_TIMEOUT_MS)
        wait_until_done(page, 0)
        panel = _panel(run_cell(page, 1))
        expect(panel).to_contain_text("the first line", timeout=_TIMEOUT_MS)
        curve = re.search(r"from (\S+) to (\S+)$", panel.get_by_role("img").first.get_attribute("aria-label") or "")
        assert curve is not None
        assert float(curve[1]) > _EARLY > _LATER > float(curve[2])
        panel.get_by_role("button", name="Stop").click()
        expect(panel.locator(".nba-header")).to_contain_text(re.compile("stopped"), timeout=_TIMEOUT_MS)
        page.close()
    processes.wait_until(lambda: not folder.is_held, "its agent has gone", 60)

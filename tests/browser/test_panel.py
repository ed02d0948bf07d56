"""Tests of the panel as a person uses it: a real JupyterLab, a real browser, a real training run."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from kernel_ext import charts, render
from kernel_ext.front_end import STYLE
from notebook_accel.protocol import events
from tests import processes
from tests.browser.lab import Lab, expect, open_notebook, open_with_extension, run_cell, save, wait_until_done
from tests.kernel_ext import fake_runs

if TYPE_CHECKING:
    from playwright.sync_api import Dialog, Locator, Page


pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(240)]

_EPOCHS = 8
_STEPS = 45  # 1,437 training images, in batches of 16 on each of two ranks
_HELD_AT = 20  # the step in the first epoch at which the ranks wait until the page has shown it
_DATA = """
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
training = TensorDataset(images[:1437], labels[:1437])
"""
_TRAINING = f"""
%%distributed --num_processes 2 --name digits
import pathlib
import time

from notebook_accel import Accelerator, report
from torch import nn
from tqdm.auto import tqdm

accelerator = Accelerator()
model = nn.Sequential(
    nn.Conv2d(1, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(training, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

def wait_for(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.1)

for epoch in tqdm(range({_EPOCHS})):
    for step, (x, y) in enumerate(loader):
        if (epoch, step) == (0, {_HELD_AT}):
            wait_for("held")
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report(loss=loss)
    accelerator.print(f"epoch {{epoch + 1}}: loss {{loss.item():.3f}}")
wait_for("seen")
"""
_ATTACK = """
%%distributed --num_processes 2
print("<script>alert(1)</script>")
"""
_SLEEPING = """
%%distributed --num_processes 2 --name sleepers {flag}
import os
import time
print("asleep", os.getpid())
time.sleep(600)
"""
_WAITING = """
%%distributed --num_processes 2 --name waiters {flag}
import pathlib
import time
print("asleep")
while not pathlib.Path("{file}").exists():
    time.sleep(0.1)
print("awake")
"""


def _steps(panel: Locator) -> list[int]:
    bars = panel.get_by_role("progressbar").all()
    return [int(bar.get_attribute("aria-valuenow") or 0) for bar in bars]


def test_a_run_is_seen_from_its_start_to_the_reopened_notebook(page: Page, lab: Lab) -> None:
    alerts: list[str] = []

    def note_dialog(dialog: Dialog) -> None:
        if dialog.type == "alert":
            alerts.append(dialog.message)
        dialog.accept()

    page.on("dialog", note_dialog)
    open_with_extension(page, lab, "training.ipynb", _DATA, _TRAINING, _ATTACK)
    run_cell(page, 1)
    wait_until_done(page, 1)

    output = run_cell(page, 2)
    panel = output.locator(".nba-panel")
    panel.get_by_role("progressbar").nth(1).wait_for()
    held = {_HELD_AT, _HELD_AT + 1}  # a step is counted with its batch or after it
    processes.wait_until(lambda: set(_steps(panel)) <= held, "both rows show the step at which the ranks wait")
    lab.put_file("held")
    processes.wait_until(lambda: held.isdisjoint(_steps(panel)), "both rows move")
    panel.get_by_text(f"epoch {_EPOCHS // 2}: loss").last.wait_for()
    expect(panel.locator("path.nba-curve")).to_have_count(1)
    expect(panel.locator(".nba-header")).to_contain_text("running")
    live = panel.bounding_box()
    _use_controls(panel)
    lab.put_file("seen")

    wait_until_done(page, 2)
    panel.locator(".nba-header").get_by_text("finished").wait_for()
    expect(panel.locator(".widget-html")).to_have_count(0)
    expect(panel).to_have_count(1)
    assert _steps(panel) == [_STEPS, _STEPS]
    ended = panel.bounding_box()
    assert live is not None
    assert ended is not None
    assert (ended["x"], ended["width"]) == (live["x"], live["width"])
    assert f"epoch {_EPOCHS}: loss" in panel.inner_text()

    attacked = run_cell(page, 3).locator(".nba-panel")
    attacked.locator(".nba-header").get_by_text("finished").wait_for()
    expect(attacked.locator(".widget-html")).to_have_count(0)  # the widgets, which may say so first, are not saved

    def attacks() -> int:
        return attacked.inner_text().count("<script>alert(1)</script>")

    # In the output it stands once, or twice if one rank printed it much later than the other.
    processes.wait_until(lambda: attacks() >= 3, "it is in each rank's row, and in the output")
    attacks_seen = attacks()

    save(page, lab, "training.ipynb", "&lt;script&gt;")
    lab.stop_kernels()
    open_notebook(page, lab, "training.ipynb")
    panel.wait_for()
    assert _steps(panel) == [_STEPS, _STEPS]
    assert "finished" in panel.locator(".nba-header").inner_text()
    assert panel.locator("path.nba-curve").count() == 1
    assert attacks() == attacks_seen
    assert alerts == []

    page.goto(lab.as_html("training.ipynb").as_uri())
    panel = page.locator(".nba-panel").first
    assert _steps(panel) == [_STEPS, _STEPS]
    assert panel.locator("path.nba-curve").is_visible()


def _use_controls(panel: Locator) -> None:
    """Use the panel's controls while the cell runs, with the keyboard where people would."""
    panel.get_by_label("Search").fill("EPOCH 1:")
    panel.locator("mark").first.wait_for()
    panel.get_by_label("Search").fill("")
    panel.get_by_label("Rank", exact=True).select_option("rank 1")
    panel.locator(".nba-output-pane").get_by_text("no output yet").wait_for()
    panel.get_by_role("button", name="Stacks").press("Enter")
    panel.locator("details").get_by_text("rank 1 (pid").wait_for()


def test_a_run_is_stopped_by_a_click_also_while_its_cell_waits_for_it(page: Page, lab: Lab) -> None:
    lab.use_theme("JupyterLab Dark")
    sleeping = [_SLEEPING.format(flag=flag) for flag in ("", "--background")]
    open_with_extension(page, lab, "stopped.ipynb", *sleeping, "1 + 1")

    panel = run_cell(page, 1).locator(".nba-panel")
    ranks = _processes_of(panel)
    red, green, blue = re.findall(r"\d+", panel.evaluate("panel => getComputedStyle(panel).backgroundColor"))[:3]
    assert max(int(red), int(green), int(blue)) < 80
    panel.get_by_role("button", name="Stop").click()
    panel.locator(".nba-header").get_by_text("stopped").wait_for()
    wait_until_done(page, 1)
    expect(page.locator(".jp-CodeCell").nth(1)).to_contain_text("RunStoppedError")
    assert [rank.pid for rank in ranks if rank.is_alive] == []

    panel = run_cell(page, 2).locator(".nba-panel")
    ranks = _processes_of(panel)
    run_cell(page, 3)  # the kernel is free, and what the panel shows then is still below its own cell
    wait_until_done(page, 3)
    panel.get_by_role("button", name="Stop").click()
    panel.locator(".nba-header").get_by_text("stopped").wait_for()
    assert [rank.pid for rank in ranks if rank.is_alive] == []
    expect(panel.get_by_role("button")).to_have_count(0)
    expect(page.locator(".nba-panel")).to_have_count(2)


def _processes_of(panel: Locator) -> list[processes.Process]:
    """Return the two ranks' processes, as soon as both have printed their pids."""
    panel.locator(".nba-output-pane").get_by_text(re.compile(r"asleep \d+[^$]*asleep \d+")).wait_for()
    pids = re.findall(r"asleep (\d+)", panel.locator(".nba-output-pane").inner_text())
    ranks = [processes.read(int(pid)) for pid in pids]
    assert len(ranks) == 2
    return [rank for rank in ranks if rank is not None and rank.is_alive]


def test_a_page_that_is_reloaded_while_its_cell_runs_shows_how_it_ended(page: Page, lab: Lab) -> None:
    page.on("dialog", lambda dialog: dialog.accept())
    open_with_extension(page, lab, "reloaded.ipynb", _WAITING.format(flag="", file="reloaded.go"))
    panel = run_cell(page, 1).locator(".nba-panel")
    panel.get_by_text("asleep").last.wait_for()
    save(page, lab, "reloaded.ipynb", "widget-view+json")

    page.reload()
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
    lab.put_file("reloaded.go")
    panel.locator(".nba-header").get_by_text("finished").wait_for()
    expect(panel.get_by_role("button")).to_have_count(0)
    expect(panel).to_have_count(1)
    expect(panel).to_contain_text("awake")


def test_a_panel_whose_kernel_was_restarted_says_so_once(page: Page, lab: Lab) -> None:
    open_with_extension(page, lab, "restarted.ipynb", _WAITING.format(flag="--background", file="never"))
    panel = run_cell(page, 1).locator(".nba-panel")
    panel.get_by_text("asleep").last.wait_for()
    page.get_by_role("menuitem", name="Kernel").click()
    page.get_by_text("Restart Kernel…", exact=True).click()
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    page.locator(".nba-panel.jupyter-widgets-disconnected").wait_for()

    def marks() -> list[str]:
        """Return the text before each disconnected widget."""
        return panel.evaluate(
            """panel => [panel, ...panel.querySelectorAll(".jupyter-widgets-disconnected")]
                .map(widget => getComputedStyle(widget, "::before").content)
                .filter(content => content !== "none")"""
        )

    processes.wait_until(lambda: marks() == ['"kernel gone"'], "one badge says that the kernel is gone")
    assert not panel.locator(".nba-header").get_by_text("running").is_visible()
    page.get_by_text("| Idle").wait_for()  # a kernel that is being restarted can't be shut down


def test_last_output_stays_readable_beside_the_time_of_a_step(page: Page) -> None:
    run = fake_runs.training(8)
    steps = {rank: {"data": 0.8e-3, "forward": 5e-3, "backward": 9e-3} for rank in range(8)}
    for rank in range(8):
        run.apply(rank, events.Output(text="epoch 3: accuracy 0.9123, loss 0.2311"))
        run.apply(rank, events.Metrics(step=60, time_s=5.0, values={"loss": 6.1034e-5}))
    table = f'<div class="nba-panel"><style>{STYLE}</style>{render.table_html(run.state, 6.0, steps)}</div>'
    for width in (1180, 980, 880, 640):
        page.set_content(f'<body style="margin: 0; width: {width}px">{table}</body>')
        assert page.locator("td.nba-last").first.evaluate("cell => cell.clientWidth") >= 110, width
        loss = page.locator("td.nba-metric").first  # whose exponent mustn't be cut off
        assert loss.evaluate("cell => [cell.innerText, cell.scrollWidth - cell.clientWidth]") == ["6.1e-05", 0], width


def test_memory_and_the_last_sign_of_life_stay_visible_in_a_narrow_panel(page: Page) -> None:
    run = fake_runs.training(2)
    steps = {rank: {"data": 0.8e-3, "forward": 5e-3, "backward": 9e-3} for rank in range(2)}
    names = ("loss", "accuracy", "learning_rate", "gradient_norm", "validation_loss", "samples_per_second")
    for rank in range(2):
        run.apply(rank, events.Memory(used_bytes=270 << 20, total_bytes=24 << 30, kind="host"))
        run.apply(rank, events.Metrics(step=60, time_s=5.0, values=dict.fromkeys(names, 0.1234)))
    table = f'<div class="nba-panel"><style>{STYLE}</style>{render.table_html(run.state, 6.0, steps)}</div>'
    page.set_content(f'<body style="margin: 0; width: 698px">{table}</body>')
    hidden_px = page.locator(".nba-scroll").evaluate("area => area.scrollWidth - area.clientWidth")
    heads = page.locator("thead th").all_inner_texts()
    assert ("memory" in heads, "seen" in heads, hidden_px) == (True, True, 0)


def test_times_beside_a_chart_are_whole(page: Page) -> None:
    chart = charts.stacked_html("rank 0", ["data"], [(0.0, 10.0, {"data": 0.8})], 0.8)
    page.set_content(f'<div class="nba-panel"><style>{STYLE}</style>{chart}</div>')
    left_of = "texts => texts.map(text => [text.textContent, text.getBBox().x])"
    times = dict(page.locator("svg text").evaluate_all(left_of))
    assert times["800 ms"] >= 0


def test_lines_of_the_output_break_between_words(page: Page) -> None:
    words = "rank 0 has finished its validation and goes on with the next epoch"
    output = (
        f'<div class="jp-OutputArea-output"><div class="nba-panel"><pre class="nba-output">{words}</pre></div></div>'
    )
    labs = ".jp-OutputArea-output pre { word-break: break-all }"
    page.set_content(f'<style>{labs}{STYLE}</style><body style="width: 170px">{output}</body>')
    lines_of_each_word = page.locator("pre").evaluate(
        """pre => [...pre.textContent.matchAll(/\\S+/g)].map(word => {
            const range = document.createRange();
            range.setStart(pre.firstChild, word.index);
            range.setEnd(pre.firstChild, word.index + word[0].length);
            return range.getClientRects().length;
        })"""
    )
    assert lines_of_each_word == [1] * len(words.split())

"""Make every picture of the README and of docs/ that shows a notebook, in the folder NOTEBOOK_ACCEL_SCREENSHOTS.

Run by hand. A real JupyterLab shows real runs: ranks on the CPU cores of this machine train on scikit-learn's digits.
"""

from __future__ import annotations

import io
import itertools
import os
import pathlib
import re
import time
from typing import TYPE_CHECKING

import pytest

from tests.browser.lab import Lab, expect, open_notebook, run_cell, wait_until_done

if TYPE_CHECKING:
    from PIL import Image
    from playwright.sync_api import Locator, Page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif("NOTEBOOK_ACCEL_SCREENSHOTS" not in os.environ, reason="no folder for pictures is named"),
]

_RUN_TIMEOUT_MS = 240_000
_DATA = """
%load_ext notebook_accel
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

digits = load_digits()
data = TensorDataset(torch.tensor(digits.images / 16).float().unsqueeze(1), torch.tensor(digits.target))
model = nn.Sequential(
    nn.Conv2d(1, 128, 3), nn.ReLU(), nn.Conv2d(128, 256, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4096, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
loader = DataLoader(data, batch_size={batch_size}, shuffle=True)

hard_examples = [data[:100]]  # for rank 0 alone
enlarge, blur, shrink = nn.Upsample(scale_factor=32), nn.AvgPool2d(5, stride=1, padding=2), nn.AvgPool2d(32)

def smooth(images, times):
    large = enlarge(images)
    for _ in range(times):
        large = blur(large)
    return shrink(large)
"""
_TRAINING = """
%%distributed --num_processes {ranks} --name digits{flags}
from notebook_accel import Accelerator, report

accelerator = Accelerator()
net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range({epochs}):{in_epoch}
    for x, y in loader:{in_step}
        loss = nn.functional.cross_entropy(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report(loss=loss)
    accelerator.print(f"epoch {{epoch + 1}}: loss {{loss:.2f}}")
"""
_HARD_EXAMPLES = """
    if epoch == 4:
        hard = hard_examples[accelerator.process_index]"""
_SMOOTH = """
        if accelerator.process_index == {rank} and epoch >= {epoch}:
            x = smooth(x, times={times})"""
_ONLY_THE_CELL = """
.jp-cell-toolbar, .jp-Collapser { visibility: hidden }
.jp-Cell { border-color: transparent !important; outline: none !important; box-shadow: none !important }
.jp-Cell::before, .jp-Cell::after { display: none !important }
"""
_MOST_COLOURS, _LEAST_APART = 256, 7  # the latter of red, green or blue, each from 0 to 255
_APART_MS = 400  # between two pictures of a film
_LAST_FRAME_S = 3.0  # how long a film shows its last picture before it begins again


def _training(
    ranks: int, *, epochs: int = 1000, flags: str = " --background", in_epoch: str = "", in_step: str = ""
) -> str:
    """Return the cell of a run, with lines that make a rank differ in an epoch or a step."""
    return _TRAINING.strip().format(ranks=ranks, epochs=epochs, flags=flags, in_epoch=in_epoch, in_step=in_step)


def _run(page: Page, lab: Lab, *cells: str, batch_size: int = 4, width: int = 1150, theme: str = "Light") -> Locator:
    """Open a notebook, make the data, and run the first of the cells. Return the place of its output."""
    lab.use_theme(f"JupyterLab {theme}")
    lab.write_notebook("pictures.ipynb", [_DATA.strip().format(batch_size=batch_size), *cells])
    page.set_viewport_size({"width": width, "height": 1600})
    open_notebook(page, lab, "pictures.ipynb")
    page.keyboard.press("Control+b")  # closes the file browser beside the notebook
    page.add_style_tag(content=_ONLY_THE_CELL)
    run_cell(page, 0)
    wait_until_done(page, 0)
    return run_cell(page, 1)


def _see(page: Page, shown: Locator) -> Image.Image:
    """Take a picture without a mouse pointer or a mark around the last control that was used."""
    from PIL import Image

    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    return Image.open(io.BytesIO(shown.screenshot())).convert("RGB")


def _path(name: str) -> pathlib.Path:
    folder = pathlib.Path(os.environ["NOTEBOOK_ACCEL_SCREENSHOTS"])
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


def _palette(picture: Image.Image) -> Image.Image:
    """Return the most frequent of a picture's colours that differ visibly. With few colours, files are small."""
    from PIL import Image

    chosen: list[tuple[int, ...]] = []
    for _, colour in sorted(picture.getcolors(2**24), reverse=True):
        if all(max(abs(a - b) for a, b in zip(colour, other, strict=True)) > _LEAST_APART for other in chosen):
            chosen.append(colour)
    palette = Image.new("P", (1, 1))
    palette.putpalette(list(itertools.chain(*chosen[:_MOST_COLOURS])))
    return palette


def _save(picture: Image.Image, name: str) -> None:
    picture.quantize(palette=_palette(picture), dither=0).save(_path(name), optimize=True)


def test_film_of_a_cell(page: Page, lab: Lab) -> None:
    output = _run(page, lab, _training(2, epochs=6, flags=""), batch_size=16, width=1020)
    output.locator("svg").first.wait_for(timeout=_RUN_TIMEOUT_MS)
    shown = page.locator(".jp-CodeCell").nth(1)
    frames = [(time.monotonic(), _see(page, shown))]
    while output.get_by_role("button", name="Stop").count():
        page.wait_for_timeout(_APART_MS)
        frames.append((time.monotonic(), _see(page, shown)))
    wait_until_done(page, 1)
    expect(output.locator(".nba-header")).to_contain_text("finished")
    frames.append((time.monotonic(), _see(page, shown)))
    assert len(frames) > 10
    _save(frames[-1][1], "panel_run.png")
    _save_film(frames, "panel_run.gif")


def _save_film(frames: list[tuple[float, Image.Image]], name: str) -> None:
    """Put pictures together, each shown for the time until the next one was taken."""
    from PIL import Image

    times, pictures = zip(*frames, strict=True)
    shown_ms = [
        int(1000 * s) for s in (*(later - earlier for earlier, later in itertools.pairwise(times)), _LAST_FRAME_S)
    ]
    width, height = pictures[-1].width, max(picture.height for picture in pictures)
    canvases = [Image.new("RGB", (width, height), "white") for _ in pictures]
    for canvas, picture in zip(canvases, pictures, strict=True):
        canvas.paste(picture)
    # A GIF has one palette. A picture of the run and the one of its end have every colour.
    both = Image.new("RGB", (width, 2 * height))
    both.paste(canvases[len(canvases) // 2])
    both.paste(canvases[-1], (0, height))
    palette = _palette(both)
    first, *others = (canvas.quantize(palette=palette, dither=0) for canvas in canvases)
    first.save(_path(name), save_all=True, append_images=others, duration=shown_ms, loop=0, optimize=True)


def test_rank_for_which_the_others_wait(page: Page, lab: Lab) -> None:
    slow = _SMOOTH.format(rank=5, epoch=2, times=12)
    panel = _run(page, lab, _training(8, in_step=slow), "%distributed profile").locator(".nba-panel")
    panel.get_by_text("epoch 5:").last.wait_for(timeout=_RUN_TIMEOUT_MS)
    panel.get_by_role("button", name="Step").click()
    panel.locator("table.nba-steps").wait_for()
    expect(panel.locator(".nba-why")).to_contain_text("Rank 5 computes")
    _save(_see(page, panel), "panel_8_step_light.png")
    profile = run_cell(page, 2).locator(".nba-panel")
    profile.wait_for(timeout=_RUN_TIMEOUT_MS)
    _save(_see(page, profile), "profile_8_light.png")


def test_rank_that_is_behind(page: Page, lab: Lab) -> None:
    """Each rank trains a network of its own, so none waits for another."""
    cell = _training(8, in_step=_SMOOTH.format(rank=5, epoch=0, times=1))
    cell = cell.replace("accelerator.prepare(model, optimizer, loader)", "model, optimizer, loader")
    cell = cell.replace("accelerator.backward(loss)", "loss.backward()")
    panel = _run(page, lab, cell, batch_size=16, theme="Dark").locator(".nba-panel")
    panel.get_by_role("button", name="Each rank").click()
    panel.get_by_text("epoch 1:").last.wait_for(timeout=_RUN_TIMEOUT_MS)
    near_the_end = re.compile("^(9.|10.)$")  # of 113 steps, so that the bars show who is behind
    expect(panel.get_by_role("progressbar").first).to_have_attribute("aria-valuenow", near_the_end)
    panel.locator("tr.nba-behind-row > th", has_text="5").wait_for()  # on a busy machine, others may be behind too
    _save(_see(page, panel), "panel_8_dark.png")


def test_rank_that_is_silent(page: Page, lab: Lab) -> None:
    endless = _SMOOTH.format(rank=42, epoch=5, times=10**9)
    panel = _run(page, lab, _training(64, in_step=endless)).locator(".nba-panel")
    panel.locator("tr.nba-silent-row").first.wait_for(timeout=_RUN_TIMEOUT_MS)
    _save(_see(page, panel), "panel_64_light.png")


def test_run_that_has_failed(page: Page, lab: Lab) -> None:
    failing = _training(2, in_epoch=_HARD_EXAMPLES)
    panel = _run(page, lab, failing, batch_size=16).locator(".nba-panel:not(:has(.widget-html))")
    panel.get_by_text("traceback of rank 1").wait_for(timeout=_RUN_TIMEOUT_MS)
    _save(_see(page, panel), "panel_2_failed_light.png")


def test_form(page: Page, lab: Lab) -> None:
    form = _run(page, lab, "%distributed config").locator(".nba-form")
    form.get_by_label("num_processes").fill("2")
    form.get_by_label("mixed_precision").select_option("bf16")
    form.get_by_text("+ mixed_precision: bf16").wait_for()
    _save(_see(page, form), "config_form.png")

"""Pictures of the panel, for the README and for inspection. Run by hand, with NOTEBOOK_ACCEL_SCREENSHOTS=folder.

The real panel in a real JupyterLab draws them. The moving picture shows a real run. The other runs are fake, since a
machine for 64 ranks is rarely at hand.
"""

from __future__ import annotations

import inspect
import io
import itertools
import os
import pathlib
import time
from typing import TYPE_CHECKING

import pytest

from tests.browser.lab import Lab, expect, open_notebook, run_cell, wait_until_done
from tests.kernel_ext import fake_runs

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.lab import Screenshot

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif("NOTEBOOK_ACCEL_SCREENSHOTS" not in os.environ, reason="no folder for pictures is named"),
]

_SCENES = """
import math
import pathlib
from notebook_accel.errors import RankFailedError

TOTAL, RATE_HZ = 2250, 53.0

def train(world_size, *, seconds=42.0, behind=(), silent=(), failed=(), restarts=0):
    "A run in its third epoch of five, as a background job, which has every control."
    job = make_job(is_background=True, world_size=world_size, mixed_precision="fp16")
    job.name, job.devices = "pets-resnet50d", f"{world_size} NVIDIA T4"
    now = time.monotonic()
    job.started_s = now - seconds
    for rank in range(world_size):
        for _ in range(1 + restarts):
            job.deliver(rank, events.Started(time_s=job.started_s, pid=1000 + rank))
    for number in range(int(2 * seconds)):
        at = job.started_s + number / 2
        for rank in range(world_size):
            rate = RATE_HZ * (0.6 if rank in behind else 1 - 0.004 * math.sin(rank))
            if rank in silent and at > now - 30:
                continue
            steps = int((at - job.started_s) * rate) + 2 * TOTAL
            step = steps - 2 * TOTAL
            job.deliver(rank, events.Progress(time_s=at, step=step % TOTAL, total=TOTAL, epoch=3, epochs=5, steps=steps,
                                              device=f"cuda:{rank % 8}", label="train"))
            noise = 0.12 * math.sin(7.1 * number + rank) * math.exp(-number / 60)
            loss = 0.25 + 2.1 * math.exp(-(steps - 2 * TOTAL) / 500) + noise + 0.012 * (rank % 8)
            job.deliver(rank, events.Metrics(time_s=at, step=steps, values={
                "loss": loss, "accuracy": 1 - loss / 3, "lr": 3e-4 * math.exp(-number / 200)}))
    for rank in range(world_size):
        job.deliver(rank, events.Memory(time_s=now - (12 if rank in silent else 0), kind="device",
                                        used_bytes=int((9.1 + 0.1 * (rank % 7)) * 2**30), total_bytes=16 * 2**30,
                                        utilisation=41.0 if rank in behind else 96.0 - rank % 5))
    for epoch, accuracy in ((1, 91.73), (2, 92.58)):
        job.deliver(0, events.Output(text=f"epoch {epoch}: accuracy {accuracy}"))
        job.deliver(1, events.Output(text=f"epoch {epoch}: accuracy {accuracy - 0.4:.2f}"))
    job.deliver(1, events.Output(text="WARNING corrupt EXIF in images/beagle_32.jpg, using the pixels as they are"))
    for rank in silent:
        job.deliver(rank, events.Silent(since_s=now - 30, at="In[7], line 12 in load_image"))
    for rank in failed:
        job.deliver(rank, events.Output(text="ERROR libjpeg: premature end of JPEG file"))
        traceback = (
            'Traceback (most recent call last):\\n  File "In[7]", line 31, in <module>\\n    image = load(path)\\n'
            '  File "In[7]", line 12, in load\\n    raise ValueError(f"{path} is no image")\\n'
            "ValueError: images/beagle_32.jpg is no image"
        )
        job.deliver(rank, events.Failed(kind="ValueError", message="images/beagle_32.jpg is no image",
                                        traceback=traceback, line="In[7], line 12"))
        job.deliver(rank, events.Ended(exit_code=1))
    return job

def measure(job, straggler=None):
    "The times of the steps of 42 seconds, in which one rank keeps the others waiting from some time on."
    for second in range(42):
        is_late = second > 15
        for rank in range(job.world_size):
            forward = (19.0 if rank == straggler and is_late else 5.0) + 0.4 * math.sin(second)
            waits = 0.0 if straggler in (None, rank) or not is_late else 14.0
            data = 6.0 if second in (24, 25, 26) else 0.8
            phases = {"data": data, "forward": forward, "backward": 9.0, "communication": 1.2 + waits,
                      "optimizer": 1.5, "other": 0.5}
            line = events.SampledLine("forward", "", "In[7], line 21", "x = self.blur(x)", 15)
            steps = int(1000 / sum(phases.values()))
            job.deliver(rank, events.StepTimes(
                time_s=job.started_s + second, steps=steps, samples=20, lines=[line], workers=4, cores=16, threads=1,
                seconds={name: steps * ms / 1000 for name, ms in phases.items()}, is_on_device=True,
                gradient_bytes=94 << 20))
    return job

def show(job):
    global view
    view = open_view(job)
    view.refresh()

def end(job, reason=""):
    for rank in job.state.ranks:
        if not rank.has_ended:
            job.deliver(rank.rank, events.Ended(signal=15, stopped=True))
    job.end(reason)
    view.close()
"""
_RUNNING = {
    "panel_2": "show(train(2))",
    "panel_8": "show(train(8, behind=(5,), restarts=1)); view._widgets.curves.value = 'Each rank'; view.refresh()",
    "panel_2_step": "show(measure(train(2))); view._widgets.view.value = 'Step'; view.refresh()",
    "panel_8_step": "show(measure(train(8), 5)); view._widgets.view.value = 'Step'; view.refresh()",
    "panel_64_step": "show(measure(train(64), 42)); view._widgets.view.value = 'Step'; view.refresh()",
    "panel_2_profile": "show(measure(train(2))); view._profile = fake_profile(2); view._widgets.view.value = 'Step'; "
    "view.refresh()",
    "profile_2": "fake_profile(2)",
    "profile_8": "fake_profile(8, 5)",
    "profile_64": "fake_profile(64, 42)",
    "panel_64": "show(train(64, behind=(17,), silent=(42,)))",
    "panel_64_failing": "show(train(64, failed=(9,)))",
}
_ENDED = {
    "panel_2_failed": "job = train(2, failed=(1,)); show(job); end(job)",
    "panel_8_stopped": "job = train(8); show(job); view._clicked = 'stop'; end(job, 'stopped')",
    "panel_64_failed": "job = train(64, failed=(9,)); show(job); end(job)",
}


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
loader = DataLoader(data, batch_size=16, shuffle=True)
"""
_TRAINING = """
%%distributed --num_processes 2 --name digits
from notebook_accel import Accelerator, report

accelerator = Accelerator()
net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(8):
    for x, y in loader:
        loss = nn.functional.cross_entropy(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report(loss=loss)
    accelerator.print(f"epoch {epoch + 1}: loss {loss:.3f}")
"""
_ONLY_THE_CELL = """
.jp-cell-toolbar, .jp-Collapser { visibility: hidden }
.jp-Cell { border-color: transparent !important; outline: none !important; box-shadow: none !important }
.jp-Cell::before, .jp-Cell::after { display: none !important }
"""
_LAST_FRAME_S = 3.0  # how long a film shows its last picture before it begins again


def test_moving_picture(page: Page, lab: Lab, screenshot: Screenshot) -> None:
    name = "film.ipynb"
    lab.write_notebook(name, [_DATA.strip(), _TRAINING.strip()])
    page.set_viewport_size({"width": 980, "height": 1000})
    open_notebook(page, lab, name)
    page.keyboard.press("Control+b")  # closes the file browser beside the notebook
    page.add_style_tag(content=_ONLY_THE_CELL)
    run_cell(page, 0)
    wait_until_done(page, 0)
    frames: list[tuple[float, bytes]] = []
    cell = page.locator(".jp-CodeCell").nth(1)
    output = run_cell(page, 1)
    output.locator(".nba-panel").get_by_role("progressbar").nth(1).wait_for()
    page.mouse.move(0, 0)
    while not frames or output.get_by_role("button", name="Stop").count():
        frames.append((time.monotonic(), cell.screenshot()))
    wait_until_done(page, 1)
    expect(output.locator(".nba-header")).to_contain_text("finished")
    frames.append((time.monotonic(), cell.screenshot()))
    assert len(frames) > 10
    screenshot(cell, "panel_run")
    _save_film(frames, pathlib.Path(os.environ["NOTEBOOK_ACCEL_SCREENSHOTS"]) / "panel_run.gif")


def _save_film(frames: list[tuple[float, bytes]], path: pathlib.Path) -> None:
    """Put pictures together, each shown for the time until the next one was taken."""
    from PIL import Image

    times = [taken_s for taken_s, _ in frames]
    shown_ms = [
        int(1000 * s) for s in (*(later - earlier for earlier, later in itertools.pairwise(times)), _LAST_FRAME_S)
    ]
    pictures = [Image.open(io.BytesIO(png)).convert("RGB") for _, png in frames]
    size = (pictures[-1].width, max(picture.height for picture in pictures))
    # A GIF has one palette: that of the last picture, which has every colour. Few colours without dithering are small.
    palette = pictures[-1].quantize(64)
    canvases = []
    for picture in pictures:
        canvas = Image.new("RGB", size, "white")
        canvas.paste(picture)
        canvases.append(canvas.quantize(palette=palette, dither=Image.Dither.NONE))
    first, *others = canvases
    first.save(path, save_all=True, append_images=others, duration=shown_ms, loop=0, optimize=True)


@pytest.mark.parametrize("theme", ["Light", "Dark"])
def test_pictures(page: Page, lab: Lab, screenshot: Screenshot, theme: str) -> None:
    lab.use_theme(f"JupyterLab {theme}")
    name = f"pictures_{theme.lower()}.ipynb"
    scenes = {**_RUNNING, **_ENDED}
    profile = inspect.getsource(fake_runs.fake_profile)
    setup = f"from __future__ import annotations\n%load_ext notebook_accel\n{fake_runs.SETUP}\n{profile}"
    lab.write_notebook(name, [setup, _SCENES, *scenes.values()])
    page.set_viewport_size({"width": 1400, "height": 1600})
    open_notebook(page, lab, name)
    for index in (0, 1):
        run_cell(page, index)
        wait_until_done(page, index)
    for index, picture in enumerate(scenes, start=2):
        panel = run_cell(page, index).locator(".nba-panel")
        wait_until_done(page, index)
        panel.locator("svg").first.wait_for()
        expect(panel.locator("table").first).to_be_visible()
        page.mouse.move(0, 0)
        screenshot(panel, f"{picture}_{theme.lower()}")
    page.set_viewport_size({"width": 900, "height": 1600})
    for index, picture in ((3, "panel_8_narrow"), (4, "panel_64_narrow")):
        screenshot(page.locator(".jp-CodeCell").nth(index).locator(".nba-panel"), f"{picture}_{theme.lower()}")

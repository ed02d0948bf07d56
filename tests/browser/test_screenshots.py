"""Pictures of the panel, for the README and for inspection. Run by hand, with NOTEBOOK_ACCEL_SCREENSHOTS=folder.

The runs are fake, since a machine for 64 ranks is rarely at hand. The real panel in a real JupyterLab draws them.
"""

from __future__ import annotations

import inspect
import os
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
    "The times of five seconds of steps, in which one rank keeps the others waiting."
    for rank in range(job.world_size):
        forward = 19.0 if rank == straggler else 5.0
        waits = 0.0 if straggler is None or rank == straggler else 14.0
        phases = {"data": 0.8, "forward": forward, "backward": 9.0, "communication": 1.2 + waits, "optimizer": 1.5,
                  "other": 0.5}
        line = events.SampledLine("forward", "", "In[7], line 21", "x = self.blur(x)", 15)
        for _ in range(5):
            job.deliver(rank, events.StepTimes(
                steps=31, seconds={name: 31 * ms / 1000 for name, ms in phases.items()}, samples=20, lines=[line],
                workers=4, cores=16, threads=1, is_on_device=True, gradient_bytes=94 << 20))
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

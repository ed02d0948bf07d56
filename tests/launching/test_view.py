"""Plain lines, and views that fail."""

from __future__ import annotations

import io

import pytest

from notebook_accel import events
from notebook_accel.config import LaunchConfig
from notebook_accel.launching import following, view
from notebook_accel.launching.job import Job
from notebook_accel.launching.spec import JobSpec


@pytest.fixture
def job() -> Job:
    spec = JobSpec(name="train", world_size=2, environment={}, working_directory="/", sys_path=[])
    return Job("1", spec, LaunchConfig(), devices="2 CPUs", is_background=False, shipped=(), result_files=())


def test_lines_say_what_ranks_print_and_where_they_stand(job: Job) -> None:
    out = io.StringIO()
    lines = view.LinesView(job, out, period_s=0.0)
    job.deliver(1, events.Output(text="hello\nworld"))
    job.deliver(0, events.Progress(time_s=10.0, step=10, total=50, epoch=2, epochs=5, steps=60))
    lines.refresh()
    job.deliver(0, events.Progress(time_s=12.0, step=30, total=50, epoch=2, epochs=5, steps=80))
    job.deliver(0, events.Metrics(step=80, values={"loss": 0.123456}))
    job.deliver(1, events.Metrics(step=1, values={"loss": 2.0}))
    lines.close()
    printed = out.getvalue().splitlines()
    assert printed[:2] == ["1 │ hello", "1 │ world"]
    assert printed[2].endswith("rank 0  epoch 2/5  step 10/50")
    assert printed[3].endswith("rank 0  epoch 2/5  step 30/50  10.0 steps/s  loss 0.1235 | rank 1  loss 2")


def test_too_many_lines_keep_the_first_and_the_last(job: Job) -> None:
    out = io.StringIO()
    lines = view.LinesView(job, out)
    for thousand in range(15):
        job.deliver(0, events.Output(text="\n".join(str(thousand * 1000 + n) for n in range(1000))))
    lines.refresh()
    lines.close()
    printed = out.getvalue().splitlines()
    assert printed[9_999:10_002] == ["0 │ 9999", "[4,000 lines left out]", "0 │ 14000"]
    assert (len(printed), printed[-1]) == (11_001, "0 │ 14999")


def test_unchanged_progress_is_not_printed_again(job: Job) -> None:
    out = io.StringIO()
    lines = view.LinesView(job, out, period_s=0.0)
    job.deliver(0, events.Progress(step=1, total=2))
    for _ in range(3):
        lines.refresh()
    assert len(out.getvalue().splitlines()) == 1


def test_option_chooses_the_view(job: Job) -> None:
    job.config = LaunchConfig(view="none")
    silent = view.open_view(job)
    job.deliver(0, events.Started(pid=1))
    silent.refresh()
    assert job.events() == []
    job.config = LaunchConfig(view="lines")
    assert isinstance(view.open_view(job), view.LinesView)


def test_view_that_fails_does_not_end_the_run(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        def refresh(self) -> None:
            job.end("stopped")
            raise ValueError("no such widget")

        def close(self) -> None:
            raise ValueError("closed already")

    following._draw_until_done(job, Broken())
    assert job.done
    assert capsys.readouterr().err.splitlines() == [
        "The view of 'train' has failed (ValueError: no such widget); the run goes on.",
        "The view of 'train' has failed (ValueError: closed already); the run goes on.",
    ]

"""Plain lines, and views that fail."""

from __future__ import annotations

import io
import pathlib
import signal

import pytest

from notebook_accel import events
from notebook_accel.config import LaunchConfig
from notebook_accel.launching import following, view
from notebook_accel.launching.job import Job
from notebook_accel.launching.spec import JobSpec


def make_job(*, log_folder: pathlib.Path | None = None, **options: object) -> Job:
    spec = JobSpec(name="train", world_size=2, environment={}, working_directory="/", sys_path=[])
    config = LaunchConfig().replace(**options)
    return Job(
        "1", spec, config, devices="2 CPUs", is_background=False, shipped=(), result_files=(), log_folder=log_folder
    )


@pytest.fixture
def job() -> Job:
    return make_job()


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


def test_too_many_lines_keep_the_first_and_the_last_of_each_rank(job: Job) -> None:
    out = io.StringIO()
    lines = view.LinesView(job, out)
    for thousand in range(8):
        job.deliver(0, events.Output(text="\n".join(str(thousand * 1000 + n) for n in range(1000))))
    job.deliver(1, events.Output(text="of the other one"))
    lines.refresh()
    lines.close()
    printed = out.getvalue().splitlines()
    assert printed[4_998:5_001] == ["0 │ 4998", "0 │ 4999", "1 │ of the other one"]
    assert printed[5_001:5_003] == ["0 │ [2,500 lines left out here]", "0 │ 7500"]
    assert (len(printed), printed[-1]) == (5_502, "0 │ 7999")


def test_what_the_agent_has_left_out_is_counted_and_the_log_named() -> None:
    job = make_job(log_folder=pathlib.Path("/tmp/logs"))
    out = io.StringIO()
    lines = view.LinesView(job, out)
    job.deliver(1, events.Output(text="first"))
    job.deliver(1, events.Output(text="middle", left_out=1_000_000))
    job.deliver(1, events.Output(text="last", left_out=5))
    lines.close()
    assert out.getvalue().splitlines() == [
        "1 │ first",
        "1 │ [1,000,006 lines left out here; the whole output is in /tmp/logs/rank_1.log]",
        "1 │ last",
    ]


def test_template_stands_before_the_lines() -> None:
    job = make_job(log_line_prefix_template="[${role_name} $rank/${local_rank}] $$ ")
    out = io.StringIO()
    lines = view.LinesView(job, out)
    job.deliver(1, events.Output(text="a\nb"))
    lines.close()
    assert out.getvalue() == "[default_role 1/1] $ a\n[default_role 1/1] $ b\n"


def test_rank_that_keeps_the_others_waiting_is_said_once(job: Job) -> None:
    out = io.StringIO()
    lines = view.LinesView(job, out)
    for now_s in (30.0, 45.0):
        job.deliver(0, events.Silent(time_s=now_s, since_s=10.0, at="In[7], line 9 in train", waits_in="barrier"))
        job.deliver(1, events.Silent(time_s=now_s, since_s=10.0, at="In[7], line 12 in evaluate"))
    lines.refresh()
    assert out.getvalue() == ("[rank 1 has done no step for 20 s, and others wait: In[7], line 12 in evaluate]\n")


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


def test_what_a_signal_handler_raises_is_not_taken_for_the_views(job: Job) -> None:
    class Shown:
        def refresh(self) -> None:
            signal.raise_signal(signal.SIGALRM)  # it may come at any moment, in here too

        def close(self) -> None:
            """Nothing."""

    def too_late(*_: object) -> None:
        raise TimeoutError("the user's own")

    before = signal.signal(signal.SIGALRM, too_late)
    try:
        with pytest.raises(TimeoutError, match="the user's own"):
            following._draw_until_done(job, Shown())
    finally:
        signal.signal(signal.SIGALRM, before)

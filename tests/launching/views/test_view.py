"""Plain lines, and views that fail."""

from __future__ import annotations

import fcntl
import io
import os
import pathlib
import re
import signal
import struct
import termios
import time

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.launching.kernel import foreground
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.spec import JobSpec
from notebook_accel.launching.views import view
from notebook_accel.protocol import events
from tests import processes


def make_job(*, world_size: int = 2, log_folder: pathlib.Path | None = None, **options: object) -> Job:
    spec = JobSpec(name="train", world_size=world_size, environment={}, working_directory="/", sys_path=[])
    request = LaunchRequest(Target({}), {}, spec, LaunchConfig().replace(**options), "2 CPUs")
    return Job(request, log_folder=log_folder)


@pytest.fixture
def job() -> Job:
    return make_job()


class Shown(view.LinesView):
    """Plain lines, kept as text."""

    def __init__(self, job: Job, **options: float) -> None:
        self._kept = io.StringIO()
        super().__init__(job, self._kept, **options)

    @property
    def text(self) -> str:
        return self._kept.getvalue()


def test_lines_say_what_ranks_print_and_where_they_stand(job: Job) -> None:
    lines = Shown(job, period_s=0.0)
    job.deliver(1, events.Output(text="hello\nworld"))
    now_s = time.monotonic() + 60.0  # a moment that doesn't pass while the test runs
    job.deliver(0, events.Progress(time_s=now_s - 2.0, step=10, total=50, epoch=2, epochs=5, steps=60))
    lines.refresh()
    job.deliver(0, events.Progress(time_s=now_s, step=30, total=50, epoch=2, epochs=5, steps=80))
    job.deliver(0, events.Metrics(step=80, values={"loss": 0.123456}))
    job.deliver(1, events.Metrics(step=1, values={"loss": 2.0}))
    lines.close()
    printed = lines.text.splitlines()
    assert printed[:2] == ["  1 │ hello", "  1 │ world"]
    assert printed[2].endswith("rank 0  epoch 2/5  step 10/50")
    assert [line.partition("] ")[2] for line in printed[4:]] == [
        "rank 0  epoch 2/5  step 30/50  10.0 steps/s  00:17 left  loss 0.1235",
        "rank 1                                                   loss 2",
    ]


@pytest.mark.parametrize("is_background", [True, False])
def test_error_is_printed_if_no_cell_waits_for_it(job: Job, is_background: bool) -> None:
    job.is_background = is_background
    lines = Shown(job)
    job.deliver(1, events.Failed(kind="ValueError", message="bg", traceback="", line="In[7], line 2"))
    job.deliver(1, events.Ended(exit_code=1))
    job.deliver(0, events.Ended(signal=15))
    job.end("failed")
    lines.close()
    printed = lines.text.splitlines()
    assert ("rank 1 of 2 failed at In[7], line 2: ValueError: bg" in printed) is is_background


def test_steps_that_compile_are_not_timed(job: Job) -> None:
    lines = Shown(job, period_s=0.0)
    now_s = time.monotonic() + 60.0  # a moment that doesn't pass while the test runs
    for ago_s, step, compiling in ((33.0, 0, True), (3.0, 2, True), (2.0, 3, False), (0.0, 13, False)):
        job.deliver(0, events.Progress(time_s=now_s - ago_s, step=step, steps=step, compiling=compiling))
        lines.refresh()
    lines.close()
    printed = lines.text
    assert printed.count("compiling") == 2
    assert set(re.findall(r"(\S+) steps/s", printed)) == {"5.0"}


def test_too_many_lines_keep_the_first_and_the_last_of_each_rank(job: Job) -> None:
    lines = Shown(job)
    for thousand in range(8):
        job.deliver(0, events.Output(text="\n".join(str(thousand * 1000 + n) for n in range(1000))))
    job.deliver(1, events.Output(text="of the other one"))
    lines.refresh()
    lines.close()
    printed = lines.text.splitlines()
    assert printed[4_998:5_001] == ["  0 │ 4998", "  0 │ 4999", "  1 │ of the other one"]
    assert printed[5_001:5_003] == ["  0 │ [2,500 lines left out here]", "  0 │ 7500"]
    assert (len(printed), printed[-1]) == (5_502, "  0 │ 7999")


def test_what_the_agent_has_left_out_is_counted_and_the_log_named() -> None:
    job = make_job(log_folder=pathlib.Path("/tmp/logs"))
    lines = Shown(job)
    job.deliver(1, events.Output(text="first"))
    job.deliver(1, events.Output(text="middle", left_out=1_000_000))
    job.deliver(1, events.Output(text="last", left_out=5))
    job.deliver(0, events.Output(text="last", left_out=1))
    lines.close()
    assert lines.text.splitlines() == [
        "  1 │ first",
        "  0 │ [1 line left out here; the whole output is in /tmp/logs/rank_0.log]",
        "  0 │ last",
        "  1 │ [1,000,006 lines left out here; the whole output is in /tmp/logs/rank_1.log]",
        "  1 │ last",
    ]


def test_line_is_held_for_a_moment_in_which_other_ranks_may_print_it_too(job: Job) -> None:
    lines = Shown(job)

    def say(rank: int, text: str) -> None:
        job.deliver(rank, events.Output(text=text))
        lines.refresh()

    say(0, "of both")
    assert lines.text == ""
    say(1, "of both")
    assert lines.text == "0-1 │ of both\n"  # nobody else can join it
    began_s = time.monotonic()
    say(0, "of rank 0")
    processes.wait_until(lambda: lines.refresh() or "of rank 0" in lines.text, "the line is printed")
    assert time.monotonic() - began_s >= 0.15
    say(0, "before")
    job.deliver(1, events.Nodes(lines=["node 1 is here"], is_news=True))
    lines.refresh()
    assert lines.text.endswith("  0 │ of rank 0\n  0 │ before\n[node 1 is here]\n")


@pytest.mark.parametrize(
    ("waits_in", "said"),
    [
        ("", ["[rank 1 has done no step for 20 s, and others wait: In[7], line 7 in train]"]),
        (
            "backward",
            [
                "[rank 0 has done no step for 20 s, nor has any other; it is in barrier: In[7], line 9 in train]",
                "[rank 1 has done no step for 20 s, nor has any other; it is in backward: In[7], line 7 in train]",
            ],
        ),
    ],
)
def test_ranks_that_stand_still_are_said_once(job: Job, waits_in: str, said: list[str]) -> None:
    lines = Shown(job)
    for now_s in (30.0, 45.0):
        job.deliver(0, events.Silent(time_s=now_s, since_s=10.0, at="In[7], line 9 in train", waits_in="barrier"))
        job.deliver(1, events.Silent(time_s=now_s, since_s=10.0, at="In[7], line 7 in train", waits_in=waits_in))
    lines.refresh()
    assert lines.text.splitlines() == said


def test_unchanged_progress_is_not_printed_again(job: Job) -> None:
    lines = Shown(job, period_s=0.0)
    job.deliver(0, events.Progress(step=1, total=2))
    for _ in range(3):
        lines.refresh()
    assert [line.partition("] ")[2] for line in lines.text.splitlines()] == ["rank 0  step 1/2", "rank 1"]


@pytest.mark.parametrize(
    ("progress", "last"),
    [
        (
            [events.Progress(step=9, total=10), events.Progress(step=10, total=10)],
            ["rank 0  finished  step 9/10   memory 300 MiB", "rank 1  finished  step 10/10  memory 301 MiB"],
        ),
        # One rank may write files, with a bar, while the others have only trained.
        (
            [events.Progress(step=1, total=2), events.Progress(step=8, total=8, epoch=1)],
            [
                "rank 0  finished           step 1/2  memory 300 MiB",
                "rank 1  finished  epoch 1  step 8/8  memory 301 MiB",
            ],
        ),
    ],
)
def test_last_lines_say_where_each_rank_ended(job: Job, progress: list[events.Progress], last: list[str]) -> None:
    lines = Shown(job)
    for rank, event in enumerate(progress):
        job.deliver(rank, event)
        job.deliver(rank, events.Memory(used_bytes=(300 + rank) << 20, total_bytes=1 << 34, kind="host"))
        job.deliver(rank, events.Finished())
        job.deliver(rank, events.Ended(exit_code=0))
    job.end("")
    lines.close()
    assert [line.partition("] ")[2] for line in lines.text.splitlines()] == last


def test_many_ranks_are_one_line_with_the_slowest_named() -> None:
    job = make_job(world_size=8)
    lines = Shown(job, period_s=0.0)
    for rank in range(8):
        job.deliver(rank, events.Progress(step=40 - 10 * (rank == 5), total=50, epoch=1))
        job.deliver(rank, events.Metrics(step=40, values={"loss": rank / 4}))
    lines.refresh()
    assert lines.text.partition("] ")[2] == "8 ranks  epoch 1  step 30..40/50  loss 0..1.75  slowest: rank 5\n"


def test_nobody_guesses_when_a_run_ends_that_waits_for_a_rank(job: Job) -> None:
    lines = Shown(job, period_s=0.0)
    now_s = time.monotonic() + 60.0  # a moment that doesn't pass while the test runs
    for ago_s, step in ((1.0, 1), (0.0, 2)):
        job.deliver(0, events.Progress(time_s=now_s - ago_s, step=step, total=50, steps=step))
    job.deliver(1, events.Silent(time_s=40.0, since_s=10.0))
    lines.refresh()
    assert "step 2/50  1.0 steps/s" in lines.text and "left" not in lines.text


def test_what_a_rank_prints_can_do_no_harm(job: Job) -> None:
    lines = Shown(job)
    job.deliver(0, events.Output(text="\x1b[2J\x1b[31mred\x1b[0m\x1b]0;title\x07 \x05<script>" + "x" * 1_000_000))
    lines.close()
    (printed,) = lines.text.splitlines()
    assert printed.startswith("  0 │ red \N{REPLACEMENT CHARACTER}<script>xxx")
    assert printed.endswith("more characters") and len(printed) < 2100


class Terminal(io.StringIO):
    """A terminal of 40 columns, as far as a view asks."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor


def test_terminal_has_one_line_below_the_output_that_is_written_over(job: Job) -> None:
    ours, theirs = os.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 40, 0, 0))
        out = Terminal(theirs)
        lines = view.LinesView(job, out)
        job.deliver(0, events.Progress(step=1, total=50, epoch=1, epochs=1000000))
        lines.refresh()
        job.deliver(0, events.Output(text="hello"))
        processes.wait_until(lambda: lines.refresh() or "hello" in out.getvalue(), "the line is printed")
        job.end("stopped")
        lines.close()
    finally:
        os.close(ours)
        os.close(theirs)
    status = "[00:00] 2 ranks  epoch 1/1000000  step 1"  # cut before the last column, where a terminal would wrap
    drawn = re.sub(r"\[00:\d\d\]", "[00:00]", out.getvalue()).split("\r\x1b[K")
    printed = drawn.index("  0 │ hello\n")
    assert set(drawn[1:printed]) == set(drawn[printed + 1 : -1]) == {status[:39]}  # again, if that was due
    assert drawn[-1].startswith("[00:00] rank 0  ") and drawn[-1].endswith("\n")


def test_option_chooses_the_view(job: Job) -> None:
    job.config = LaunchConfig(view="none")
    silent = view.open_view(job)
    job.deliver(0, events.Started(pid=1))
    silent.refresh()
    assert job.events() == []
    job.config = LaunchConfig(view="lines")
    assert isinstance(view.open_view(job), view.LinesView)


def test_view_that_fails_does_not_end_the_run(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    class BrokenView:
        def refresh(self) -> None:
            job.end("stopped")
            raise ValueError("no such widget")

        def close(self) -> None:
            raise ValueError("closed already")

    foreground._draw_until_done(job, BrokenView())
    assert job.done
    assert capsys.readouterr().err.splitlines() == [
        "The view of 'train' has failed (ValueError: no such widget); the run goes on.",
        "The view of 'train' has failed (ValueError: closed already); the run goes on.",
    ]


def test_view_that_is_expensive_to_draw_is_drawn_less_often(job: Job) -> None:
    class SlowView:
        def __init__(self) -> None:
            self.drawn: list[float] = []

        def refresh(self) -> None:
            began_s = time.thread_time()
            while time.thread_time() - began_s < 0.01:
                pass
            self.drawn.append(time.monotonic())
            if len(self.drawn) == 2:
                job.end("stopped")

        def close(self) -> None:
            """Nothing."""

    slow = SlowView()
    foreground._draw_until_done(job, slow)
    first_s, second_s = slow.drawn
    assert second_s - first_s >= 0.5  # 0.01 s are 2 % of it


def test_view_is_drawn_while_an_interrupted_run_ends(job: Job) -> None:
    orders: list[object] = []
    job.send_order = orders.append

    class InterruptedView:
        drawn_after = 0
        is_closed = False

        def refresh(self) -> None:
            if not orders:
                raise KeyboardInterrupt
            self.drawn_after += 1
            if self.drawn_after == 2:
                job.end("interrupted")

        def close(self) -> None:
            self.is_closed = True

    shown = InterruptedView()
    foreground._end_interrupted(job, shown)
    assert shown.drawn_after == 2 and shown.is_closed
    assert job.ending.why == "by an interrupt of the kernel"


def test_lines_say_once_that_a_second_interrupt_kills(job: Job) -> None:
    job.is_background = False
    lines = Shown(job)
    lines.refresh()
    job.ended_by = view.KERNEL_INTERRUPT
    lines.refresh()
    lines.refresh()
    job.end("interrupted")
    lines.close()
    assert lines.text == "[interrupting …; what goes on is ended after 2 s, or now by another interrupt]\n"


def test_what_a_signal_handler_raises_is_not_taken_for_the_views(job: Job) -> None:
    class InterruptedView:
        def refresh(self) -> None:
            signal.raise_signal(signal.SIGALRM)  # it may come at any moment, in here too

        def close(self) -> None:
            """Nothing."""

    def too_late(*_: object) -> None:
        raise TimeoutError("the user's own")

    before = signal.signal(signal.SIGALRM, too_late)
    try:
        with pytest.raises(TimeoutError, match="the user's own"):
            foreground._draw_until_done(job, InterruptedView())
    finally:
        signal.signal(signal.SIGALRM, before)

"""Tests of ``%distributed``. Those of stacks and tables are with the launcher, where ranks hang."""

from __future__ import annotations

import gc
import itertools
import json
import pathlib
import re
from typing import Any

import pytest

from kernel_ext import commands
from notebook_accel.errors import NotebookAccelError
from notebook_accel.launching.kernel import registry
from notebook_accel.launching.kernel.job import Job, Reason
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from tests import processes
from tests.kernel_ext.conftest import Shell, error
from tests.launching.kernel.test_job import make_job
from tests.loopback import Loopback

pytestmark = pytest.mark.usefixtures("no_runs")


def listed(**options: Any) -> Job:
    """Return a made-up job, which the commands find."""
    job = make_job(**options)
    registry.add(job)
    return job


def test_run_that_has_ended_is_listed_with_its_logs(shell: Shell) -> None:
    assert shell.run("%distributed").stdout == "No run has been started.\n"
    assert shell.run("%%distributed -n 2 --name first\nprint('hello')").status == "ok"
    shown = shell.run("%distributed").stdout
    assert re.fullmatch(
        r"1 \(first\): succeeded, on 2 CPUs; began \d\d:\d\d:\d\d, took ([\d.]+ s|\d\d:\d\d); logs in /.*-first-.*\n",
        shown,
    )
    shown = shell.run("%distributed logs").stdout
    assert re.fullmatch(r"(rank [01], last lines of /.*/rank_[01]\.log\nhello\n){2}", shown)
    shown = shell.run("%distributed logs 1 --run first").stdout
    assert re.fullmatch(r"rank 1, last lines of /.*/rank_1\.log\nhello\n", shown)
    assert "The run 'first' has ended." in error(shell, "%distributed stacks 0 --run first")


def test_run_that_has_failed_says_of_what_also_when_nobody_has_its_job(shell: Shell) -> None:
    raises = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('boom\\nat large')\ntime.sleep(60)"
    shell.run(f"%%distributed -n 2 --name bad --background --view none\n{raises};")

    def ended() -> str:
        shown = shell.run("%distributed status --run bad").stdout
        return shown if "took" in shown else ""

    first, second = processes.wait_until(ended, "its end is told").splitlines()
    assert re.match(r"\d \(bad\): failed, on 2 CPUs; began ", first)
    assert re.fullmatch(r"  rank 1: ValueError: boom at In\[\d+\], line 3", second)


def test_why_says_where_the_time_goes_also_after_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    job = listed()
    commands.run("why")
    assert capsys.readouterr().out == "Too few steps have been measured yet.\n"
    seconds = {"data": 0.9, "forward": 0.3}
    for rank, _ in itertools.product(range(job.world_size), range(5)):
        job.deliver(rank, events.Progress(step=20, steps=20))
        job.deliver(rank, events.StepTimes(steps=20, seconds=seconds, workers=0, cores=2))
    commands.run("why")
    assert "waits 75 % of the time for data: `num_workers=0`." in capsys.readouterr().out
    job.end("stopped")
    del job
    gc.collect()
    commands.run("why --json")
    said = json.loads(capsys.readouterr().out)
    assert said["verdicts"][0]["cause"] == "data"
    assert said["steps"]["0"]["data"] == pytest.approx(0.045)


def strict_json(text: str) -> Any:
    """Read JSON as other programs do: Python's reader also takes NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_status_is_data_too(capsys: pytest.CaptureFixture[str]) -> None:
    commands.run("status --json")
    assert json.loads(capsys.readouterr().out) == []
    job = listed()
    job.deliver(1, events.Progress(step=20, steps=20))
    job.deliver(1, events.Metrics(step=20, values={"loss": 0.5, "peak": float("inf")}))
    commands.run("status --json")
    [going] = strict_json(capsys.readouterr().out)
    assert (going["number"], going["name"], going["status"]) == (1, job.name, job.status)
    assert [rank["rank"] for rank in going["ranks"]] == [0, 1]
    commands.run("status")
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["rank", "state", "pid", "device", "step", "memory"],
        ["0", "starting"],
        ["1", "running", "20"],
    ]
    assert going["ranks"][1] | {"step": 20, "metrics": {"loss": 0.5, "peak": None}} == going["ranks"][1]
    job.end("stopped")
    del job
    gc.collect()
    commands.run("status --json")
    [ended] = json.loads(capsys.readouterr().out)
    assert ended["status"] == "stopped" and ended["took_s"] >= 0
    states = ("stopped", "lost")  # nobody has reported the end of rank 1, which had begun
    assert ended["ranks"] == [rank | {"state": state} for rank, state in zip(going["ranks"], states, strict=True)]


def test_ranks_that_are_still_to_come_have_printed_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    job = listed(log_folder=tmp_path)
    (tmp_path / "rank_0.log").write_text("hello\n")
    commands.run("logs")
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == ["hello", f"rank 1 has printed nothing yet: {tmp_path / 'rank_1.log'}"]
    job.end("stopped")
    for _ in range(2):  # the second time, nothing but the registry knows the run
        commands.run("logs 1")
        assert capsys.readouterr().out == f"rank 1 has printed nothing: {tmp_path / 'rank_1.log'}\n"
        job = None
        gc.collect()


def test_ranks_of_a_later_node_have_their_numbers_among_all(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    job = listed(log_folder=tmp_path, num_nodes=2, node_rank=1)
    (tmp_path / "rank_1.log").write_text("hello\n")
    commands.run("status --json")
    [going] = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in going["ranks"]] == [2, 3]
    commands.run("logs 3")
    job.end("stopped")
    stacks = job.stacks()
    assert [str(stack) for stack in stacks] == ["rank 2 has ended", "rank 3 has ended"]
    del job, stacks
    gc.collect()
    commands.run("logs 3")
    assert capsys.readouterr().out == 2 * f"rank 3, last lines of {tmp_path / 'rank_1.log'}\nhello\n"
    with pytest.raises(NotebookAccelError, match=r"has no rank 1: it has 2 to 3 on this node\."):
        commands.run("logs 1")


def test_run_that_was_detached_says_how_it_is_found_again(capsys: pytest.CaptureFixture[str]) -> None:
    job = listed()
    job.end_detached("a night")
    commands.run("status")
    assert "goes on without this notebook: %distributed attach 'a night'" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "reason"), [("stop", "stopped"), ("interrupt", "interrupted")])
def test_run_says_which_command_has_ended_it(command: str, reason: Reason, capsys: pytest.CaptureFixture[str]) -> None:
    job = listed()
    job.send_order = lambda order: job.end(reason)
    commands.run(command)
    commands.run("status")
    assert f"\n  by %distributed {command}\n" in capsys.readouterr().out


def test_interrupt_of_a_session_does_not_end_it() -> None:
    job = listed()
    job.on_death = "keep"
    commands.run("interrupt")
    assert job.ended_by == ""
    job.end("stopped")


@pytest.mark.front_end
def test_run_in_the_background_is_stopped_by_name(shell: Shell, loopback: Loopback) -> None:
    one, two = (loopback.launch(name=name) for name in ("one", "two"))
    assert "Several runs are in progress." in error(shell, "%distributed stop")
    assert shell.run("%distributed stop --run one").stdout == "<Job 'one': stopped, 2 ranks on 2 CPUs>\n"
    assert (one.done, two.done) == (True, False)
    assert shell.run("%distributed stop").stdout == "<Job 'two': stopped, 2 ranks on 2 CPUs>\n"
    assert "There is no run in progress." in error(shell, "%distributed stop")


@pytest.mark.front_end
def test_profile_of_a_run_is_a_timeline(shell: Shell) -> None:
    job = listed()
    for rank in range(2):
        job.deliver(rank, events.Started(pid=rank + 1))

    def answer(order: Any) -> None:
        assert isinstance(order, messages.Profile)
        spans = [events.Span("step", "ProfilerStep#1", 0.0, 5000.0), events.Span("phase", "forward", 0.0, 4000.0)]
        for rank in range(2):
            answer = events.Profiled(number=order.number, steps=order.steps, spans=spans)
            job.deliver(rank, events.Profiled(number=order.number, why="no CUDA") if order.memory else answer)

    job.send_order = answer
    outcome = shell.run("profile = %distributed profile --steps=2\nprofile")
    assert outcome.result.startswith("2 steps of 'train' on 2 ranks, "), outcome.traceback
    shown, _ = shell.ipython.display_formatter.format(shell.ipython.user_ns["profile"])
    assert 'aria-label="rank 1: 2 steps, ' in shown["text/html"]
    said = error(shell, "%distributed profile --memory")
    assert "ranks 0-1: no CUDA" in said and "torch.profiler.profile(profile_memory=True)" in said
    job.end("stopped")
    assert "The run 'train' has ended." in error(shell, "%distributed profile --run train")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "stpo",
            "no command 'stpo'; there are status, stop, interrupt, logs, stacks, why, profile, runs, attach",
        ),
        ("help", "%distributed? says what they do."),
        ("logs 0 --run nowhere", "There is no run 'nowhere'."),
        ("logs 7 --run=train", "has no rank 7: it has 2 ranks"),
        ("stop one", "%distributed stop: unexpected argument 'one'; a run is named with --run one."),
        ("stop 1", "unexpected argument '1'; a run is named with --run 1."),
        ("logs 1 2", "unexpected argument '2'"),
        ("logs first", "'first' is not a rank; a run is named with --run first."),
        ("logs --run", "%distributed logs: argument --run: expected one argument"),
        ("logs 'first", "a quote is not closed"),
        ("doctor 1", "%distributed doctor: unexpected argument '1'."),
        ("profile --steps", "%distributed profile: argument --steps: expected one argument."),
        ("profile --steps many", "%distributed profile: argument --steps: invalid int value: 'many'."),
        ("profile --memry", "%distributed profile: there is no option --memry; is it --memory?"),
        ("attach night day", "%distributed attach: unexpected argument 'day'"),
        ("runs --cleen", "%distributed runs: there is no option --cleen; is it --clean? %distributed? shows"),
    ],
)
def test_mistake_is_said_in_a_few_lines(shell: Shell, tmp_path: pathlib.Path, line: str, said: str) -> None:
    job = listed(log_folder=tmp_path)
    shown = error(shell, f"%distributed {line}")
    job.end("stopped")
    assert said in shown
    assert len(shown.strip().splitlines()) <= 3


def test_doctor_says_what_it_found_and_help_shows_every_command(shell: Shell) -> None:
    found = shell.run("%distributed doctor")
    assert found.status == "ok" and "refused: " not in found.stdout  # a machine with little shared memory is warned of
    shown = shell.ipython.find_line_magic("distributed").__doc__
    for command in ("status", "stop", "logs", "stacks", "why", "profile", "doctor"):
        assert f"%distributed {command}" in shown

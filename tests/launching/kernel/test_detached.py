"""Detached runs: launched here, and attached once more as another kernel would. Their ranks are scripts."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import msgspec
import pytest

from notebook_accel import attach, cli, detach, notebook_launcher, runs_command
from notebook_accel.errors import (
    ConfigError,
    LaunchError,
    NotebookAccelError,
    RankFailedError,
    RunError,
    RunStoppedError,
    SupervisorLostError,
)
from notebook_accel.launching import journal, run_folders
from notebook_accel.launching.kernel import detached, detached_runs, local, preflight
from notebook_accel.launching.kernel.detached_job import DetachedJob
from notebook_accel.launching.kernel.job import Job
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import peer_of
from tests import kernels, processes
from tests.launching.test_run_folders import ended, held
from tests.loopback import Loopback

pytestmark = pytest.mark.usefixtures("state_home")

_LONG_S = 100.0  # a detached run has a template of its own, whose import of torch can take a minute on a busy machine
Command = Callable[..., subprocess.CompletedProcess[str]]


def has_key(folder: run_folders.RunFolder) -> bool:
    """Whether the folder has the key to this process's ``multiprocessing.Manager``, which ranks of other runs get."""
    key = bytes(multiprocessing.current_process().authkey)
    return any(key in path.read_bytes() for path in folder.path.rglob("*") if path.is_file())


def printed(job: Job, rank: int) -> list[str]:
    """The lines of a rank, as they came to this kernel."""
    heard = [event.text for number, event in job.events() if number == rank and isinstance(event, events.Output)]
    return "\n".join(heard).split("\n")


def names_of(loopback: Loopback, job: Job) -> list[list[messages.ToRank]]:
    """What each rank was told, which is the name that ``ps`` shows from then on."""
    return [rank.told for rank in loopback.ranks_of(job)]


def _raise(error: BaseException) -> NoReturn:
    raise error


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process, which is quicker."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        status = cli.main(arguments)
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return run


@pytest.fixture
def ended_run(loopback: Loopback) -> run_folders.RunFolder:
    """The folder of a run of one rank that has reported metrics and ended."""
    job: DetachedJob = loopback.launch(ranks=1, detach=True)
    [rank] = loopback.ranks_of(job)
    rank.say(events.Metrics(step=1, values={"loss": math.nan, "peak": math.inf, "steps": 1.0}))
    rank.finish()
    assert job.results(1.0) == [None]
    assert not job.folder.is_held
    return job.folder


def test_who_attaches_has_all_that_the_launching_kernel_has(loopback: Loopback) -> None:
    first: DetachedJob = loopback.launch(detach=True)
    loopback.train(first, steps=3)
    second = detached.attach_and_show("night", show=lambda _: None)  # nobody else takes its events
    assert (second.status, second.world_size, second.devices) == ("running", 2, first.devices)
    assert [rank.pid for rank in second.ranks] == [rank.pid for rank in loopback.ranks_of(first)]
    assert [stack.rank for stack in second.stacks()] == [0, 1]
    assert second.logs(1) == "step 0\nstep 1\nstep 2\n"
    [found] = detached_runs.summaries()
    assert (found.id, found.name, found.status) == (first.folder.id, "night", "running")
    assert not has_key(first.folder)
    for _ in range(2):  # as an agent drops one that reads too slowly
        link = second.send_order.__self__  # type: ignore[union-attr]
        link._connection.shutdown()
        loopback.train(first, steps=3)
    for rank in loopback.ranks_of(first):
        rank.finish({"answer": rank.number})
    results = first.results(1.0)
    assert results == [{"answer": 0}, {"answer": 1}]
    assert not first.folder.is_held
    later = attach(view="none")
    assert (later.done, later.status) == (True, "succeeded")
    lines = [f"step {number}" for number in range(9)]
    for job in (second, later):
        assert job.results() == results
        assert [job.logs(rank).splitlines() for rank in range(2)] == [lines, lines]
        # The curve of who came later begins where the other's does, and ends where it does.
        curves = [run.state.history["loss"].ranks[0].points for run in (first, job)]
        assert curves[0][-1][1] == curves[1][-1][1]
    assert printed(second, 0) == lines  # each once
    assert later.ended_s is not None and first.ended_s is not None
    assert later.ended_s - later.started_s <= first.ended_s - first.started_s
    assert [summary.status for summary in detached_runs.summaries()] == ["succeeded"]


def test_failure_is_the_same_for_who_comes_later(loopback: Loopback) -> None:
    first: DetachedJob = loopback.launch(ranks=1, detach=True)
    loopback.ranks_of(first)[0].fail(ValueError("its own reason"))
    with pytest.raises(RankFailedError, match="its own reason") as here:
        first.results(1.0)
    with pytest.raises(RankFailedError) as there:
        attach("night", view="none").results()
    assert str(there.value) == str(here.value)
    assert type(there.value.__cause__) is type(here.value.__cause__)
    [summary] = detached_runs.summaries()
    assert (summary.status, summary.why) == ("failed", first.ending.why)


@pytest.fixture
def warning(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The words with which a detached run is warned of in a service of systemd, which this process is in."""
    (tmp_path / "groups").write_text("0::/system.slice/jupyter.service\n")
    monkeypatch.setattr(preflight, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(preflight, "_warned", set())
    return "arning: systemd ends a detached run when the service jupyter.service is stopped or restarted."


def test_run_that_was_lost_with_its_agent_tells_its_last_step_and_is_launched_again(
    loopback: Loopback, warning: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job: DetachedJob = loopback.launch(detach=True)
    assert warning in capsys.readouterr().err
    loopback.ranks_of(job)[0].say(events.CheckpointSaved(folder="older"))
    loopback.train(job, steps=9)
    ended = time.strftime("%Y-%m-%d %H:%M")
    loopback.agents[0].kill()
    with pytest.raises(SupervisorLostError, match=r"'night' has gone at .*, and the ranks with it"):
        job.results(1.0)
    facts = json.loads((job.folder.path / "run.json").read_text())
    (job.folder.path / "run.json").write_text(json.dumps({**facts, "boot_id": "of an earlier start"}))
    [lost] = detached_runs.summaries()
    assert (lost.status, lost.step) == ("lost", 8)
    said = re.fullmatch(
        r"The run 'night' was lost with the machine at (.*)\. Its last known step is 8\. "
        r"Its last checkpoint is in older\.",
        lost.why,
    )
    assert said is not None, lost.why
    assert ended <= said[1] <= time.strftime("%Y-%m-%d %H:%M")
    with pytest.raises(SupervisorLostError, match=re.escape(lost.why)):
        attach("night", view="none").results()
    # The journal of a long run gets samples late, after what is printed later.
    later: list[tuple[str, events.Event]] = [
        (run_folders.LATEST, events.CheckpointSaved(folder="newer")),
        (run_folders.JOURNAL, events.Output(text="printed later")),
    ]
    for number, (name, event) in enumerate(later, start=1_000_000):
        message = messages.Said(job_id=job.folder.id, rank=0, event=msgspec.Raw(events.encode(event)))
        with (job.folder.path / name).open("ab") as file:
            file.write(journal.frame(number, messages.encode(message)))
    [lost] = detached_runs.summaries()
    assert lost.why.endswith("Its last checkpoint is in newer.")
    # It is launched again, with what was sent to it.
    monkeypatch.setattr(preflight, "_warned", set())
    repeated = detached.again("night", show=lambda _: None)
    assert warning in capsys.readouterr().err
    assert repeated.folder.id != job.folder.id
    assert (repeated.folder.path / "payload").read_bytes() == (job.folder.path / "payload").read_bytes()
    loopback.train(repeated, steps=1)
    assert repeated.status == "running"
    repeated.stop()
    assert repeated.wait(1.0)
    assert [summary.status for summary in detached_runs.summaries()] == ["lost", "stopped"]


def test_run_that_goes_on_is_detached_with_its_curves_its_output_and_its_results(
    loopback: Loopback, warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here = loopback.launch(name="day")
    loopback.train(here, steps=5)
    before = here.state.history["loss"].ranks[1].points
    for name in ("a\nb", "a" * 81):
        with pytest.raises(ConfigError, match="can't be used"):
            detach(here, name)
    job = detach(here, "night")
    assert warning in capsys.readouterr().err
    assert cli.main(["doctor", "--use_cpu"]) == 0
    assert warning in capsys.readouterr().out
    assert (here.status, here.done, job.status, job.name) == ("detached", True, "running", "night")
    with pytest.raises(RunError, match=r"'day' was detached under the name 'night'.*\nFix: %distributed attach night"):
        here.results()
    with pytest.raises(RunError, match=r"'day' was detached under the name 'night'"):
        detach(here, "other")
    with pytest.raises(ConfigError, match="'night' keeps its name"):
        detach(job, "other")
    assert [rank.pid for rank in job.ranks] == [rank.pid for rank in here.ranks]
    assert names_of(loopback, job) == [[messages.Named(name="night")]] * 2
    assert job.state.history["loss"].ranks[1].points[: len(before) - 1] == before[:-1]
    assert len(job.stacks()) == 2
    assert here.spec.authkey and not has_key(job.folder)
    assert detach(job) is job
    assert detach(job, "night") is job
    # Later launches get another agent, which a Quit ends without the detached run.
    other = loopback.launch(name="other")
    local.engine().close()
    assert (other.status, len(loopback.agents)) == ("stopped", 2)
    loopback.train(job, steps=5)
    assert job.ranks[0].step == 9
    for rank in loopback.ranks_of(job):
        rank.finish({"answer": rank.number})
    results = job.results(1.0)
    assert results == [{"answer": 0}, {"answer": 1}]
    lines = [f"step {number}" for number in range(10)]
    assert job.logs(0).splitlines() == lines
    assert not job.folder.is_held
    later = attach("night", view="none")
    assert later.results() == results
    with pytest.raises(LaunchError, match="what was sent to its ranks wasn't kept"):
        detached.again("night")
    assert printed(detached.attach_and_show("night", show=lambda _: None), 0) == lines


def test_run_without_a_given_name_is_detached_under_a_free_one(loopback: Loopback) -> None:
    with held("training"):
        unnamed = loopback.launch(name="")
        assert unnamed.name == "training"
        with pytest.raises(LaunchError, match="'training' is in progress already"):
            detach(unnamed, "training")
        second = detach(unnamed)
        assert second.name == "training-2"
    assert names_of(loopback, second) == [[messages.Named(name="training-2")]] * 2


def test_run_that_cannot_be_detached_goes_on_as_before(loopback: Loopback, tmp_path: pathlib.Path) -> None:
    job, other = loopback.launch(), loopback.launch(name="other")
    with pytest.raises(RunError, match=r"can't be detached now\.\nAnother run of this notebook goes on\."):
        detach(job)
    for rank in loopback.ranks:
        rank.finish()
    assert [len(run.results(1.0)) for run in (job, other)] == [2, 2]  # which closes their files
    with pytest.raises(RunError, match=r"can't be detached now\.\nIt has ended\."):
        detach(job)
    assert list(run_folders.root().iterdir()) == []
    agent = local.engine()._agent  # it hears of the end later than a kernel that asks
    assert agent is not None
    with (tmp_path / "lock").open("w") as lock, pytest.raises(RunError, match=r"be detached now\.\nIt has ended\."):
        agent.detach(job, run_folders.RunFolder(tmp_path), lock.fileno())


def test_variable_that_is_not_kept(ended_run: run_folders.RunFolder) -> None:
    """Because no pull has named it, or because the folder was removed."""
    job = attach("night", view="none")
    with pytest.raises(NotebookAccelError, match="keeps no variable model"):
        job.pull("model")
    assert job.results() == [None]
    job.spec = msgspec.structs.replace(job.spec, pull=("answer",))  # as for a cell with --pull
    assert run_folders.remove_old(all_ended=True) == [ended_run.id]
    with pytest.raises(NotebookAccelError, match=r"of the run 'night' are gone\.\nIts folder /.* was removed\.$"):
        job.pull("answer")


@pytest.mark.usefixtures("ended_run")
def test_metrics_that_json_lacks_are_null_in_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    runs_command.print_runs(as_json=True)
    [listed] = json.loads(capsys.readouterr().out)
    assert listed["metrics"] == {"loss": None, "peak": None, "steps": 1.0}


def test_name_of_a_run_that_goes_on_is_refused_until_somebody_stops_it(loopback: Loopback) -> None:
    first: DetachedJob = loopback.launch(ranks=1, name="a night", detach=True)
    with pytest.raises(LaunchError, match=r"'a night' is in progress already\.\nFix: another name"):
        loopback.launch(ranks=1, name="a night", detach=True)
    with pytest.raises(
        LaunchError, match=r"goes on\.\nFix: %distributed attach 'a night'; notebook-accel stop 'a night'$"
    ):
        detached.again("a night")
    second = attach("a night", view="none")
    second.stop()
    for job in (first, second):
        with pytest.raises(RunStoppedError, match=rf"was stopped\.\nBy process {os.getpid()} \("):
            job.results(1.0)
    assert not first.folder.is_held
    with pytest.raises(RunStoppedError, match=rf"By process {os.getpid()} \("):
        attach("a night", view="none").results()


def test_name_of_a_run_that_is_over_is_free_though_its_agent_lives_for_a_moment_more(
    ended_run: run_folders.RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks = [ended_run.hold()]

    def sees_it_for_the_last_time(folder: run_folders.RunFolder) -> bool:
        found = is_ending(folder)
        while found and locks:
            os.close(locks.pop())
        return found

    is_ending = detached_runs.is_ending
    monkeypatch.setattr(detached_runs, "is_ending", sees_it_for_the_last_time)
    with detached._new_folder("night") as (folder, _, _):  # for a launch, or for another one of the run
        assert not locks  # it has waited
        assert (folder.name, folder.id != ended_run.id) == ("night", True)
    assert attach(ended_run.id, view="none").folder.id == ended_run.id


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"start_method": "inline"}, "forks of it"),
        ({"start_method": "fork"}, "forks of it"),
        ({"num_nodes": 2}, "several nodes"),
    ],
)
def test_what_cannot_go_on_without_the_kernel_is_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"can't be detached\.\n.*{why}"):
        notebook_launcher(len, num_processes=1, use_cpu=True, view="none", detach=True, **options)  # type: ignore[arg-type]
    assert not run_folders.every()


def test_launch_that_fails_leaves_no_folder(loopback: Loopback) -> None:
    with pytest.raises(NotebookAccelError):
        loopback.launch(ranks=1, detach=True, log_dir="/proc/none")
    assert list(run_folders.root().iterdir()) == []


def test_launch_that_the_agent_refuses_starts_no_rank_and_leaves_no_folder(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr(run_folders.RunFolder, "listen", lambda _: _raise(full))
        with pytest.raises(LaunchError, match=r"detached run could not be started\.\n.*No space left"):
            loopback.launch(detach=True)
    assert (loopback.ranks, list(run_folders.root().iterdir())) == ([], [])
    assert loopback.launch(detach=True).name == "night"


def test_detached_launch_has_an_agent_of_its_own(loopback: Loopback) -> None:
    here, detached_job = loopback.launch(name="day"), loopback.launch(detach=True)
    assert len(loopback.agents) == 2
    loopback.engine.close()
    assert (here.status, detached_job.status) == ("stopped", "running")


def test_run_that_could_not_be_started_says_why_to_who_comes_later_too(loopback: Loopback) -> None:
    loopback.delays_templates = True
    job: DetachedJob = loopback.launch(ranks=1, preload=["raises_at_import"], detach=True)
    loopback.templates[0].refuse("no such device")
    with pytest.raises(LaunchError, match="no such device"):
        job.results(1.0)
    with pytest.raises(LaunchError, match="no such device"):
        attach("night", view="none").results()


def test_another_versions_run_says_which_version_it_takes(ended_run: run_folders.RunFolder) -> None:
    facts = json.loads((ended_run.path / "run.json").read_text())
    later = {**facts, "journal_version": 99, "version": "9.9", "a_field_of_later": 1}
    (ended_run.path / "run.json").write_text(json.dumps(later))
    with pytest.raises(NotebookAccelError, match=r"notebook-accel 9\.9 has launched it.*\(99 instead of 2\)"):
        attach("night", view="none")
    assert [summary.status for summary in detached_runs.summaries()] == ["unreadable"]
    # What a newer version of the same format adds is no obstacle.
    (ended_run.path / "run.json").write_text(json.dumps({**facts, "config": {**facts["config"], "later": 1}}))
    assert attach("night", view="none").results() == [None]


def test_messages_that_only_another_version_knows_are_skipped(ended_run: run_folders.RunFolder) -> None:
    other = messages.encode(messages.Inspected(job_id=ended_run.id, ranks=[])).replace(b"Inspected", b"OfAnother")
    with pytest.raises(msgspec.ValidationError):
        messages.decode_for_kernel(other)
    link = attach("night", view="none").send_order.__self__  # type: ignore[union-attr]
    assert not link._take(other)
    told = (ended_run.path / run_folders.JOURNAL).read_bytes()
    (ended_run.path / run_folders.JOURNAL).write_bytes(journal.frame(1, other) + told)
    assert attach("night", view="none").results() == [None]


def test_runs_that_go_on_are_named_to_who_loads_the_extension_and_to_who_asks_the_doctor(here: Command) -> None:
    assert detached_runs.going_in_words() == ""
    said = (
        "A detached run of yours goes on: night (on 1 CPU). %distributed attach night brings it here; "
        "%distributed runs, or notebook-accel runs, tells more."
    )
    code = (
        "from IPython.core.interactiveshell import InteractiveShell as Shell\nShell().run_line_magic('load_ext', '{}')"
    )
    with held("night"):
        assert detached_runs.going_in_words() == said
        loaded = subprocess.run(
            [sys.executable, "-c", code.format("notebook_accel")],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        assert loaded.stdout == f"notebook_accel: {said}\n"
        assert f"note: {said} It takes a part of the devices and of the memory." in here("doctor", "--use_cpu").stdout
    assert detached_runs.going_in_words() == ""


def test_command_line_lists_shows_and_stops_it_and_cleans_up(loopback: Loopback, here: Command) -> None:
    assert here("runs").stdout == "You have no detached run on this machine.\n"
    assert here("attach").returncode == 1
    run_folders.root().mkdir(parents=True)
    for line in (["runs"], ["runs", "--json"]):
        refused = here(*line)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert re.match(r"The folder /.* isn't used, since others(.|\n)*\nFix: chmod 700 '?/", refused.stderr)
    assert detached_runs.going_in_words() == ""
    run_folders.root().chmod(0o700)
    job: DetachedJob = loopback.launch(detach=True)
    loopback.train(job, steps=3)
    [listed] = json.loads(here("runs", "--json").stdout)
    assert (listed["name"], listed["status"], listed["folder"]) == ("night", "running", str(job.folder.path))
    shown = here("runs").stdout.splitlines()
    assert re.match(r"name +state +since +step +metrics +folder$", shown[0])
    assert re.match(r"night +running +\d{4}-\d\d-\d\d \d\d:\d\d ", shown[1])
    logs = here("logs", "night", "--rank", "1", "--tail", "1").stdout
    assert re.fullmatch(r"rank 1: /.*/rank_1\.log\nstep 2\n", logs)
    assert here("stop", "").stderr.startswith("The run to stop has no name.")
    stopped = here("stop", "night")
    assert stopped.stdout.startswith("The run 'night' is stopped. Its results and logs are in /")
    with pytest.raises(RunStoppedError, match=r"By process \d+ \("):
        job.results(1.0)
    assert re.match(r"night: stopped by process \d+ \(", here("runs").stdout.splitlines()[-1])
    attached = here("attach", "night")
    assert attached.returncode == 1
    assert {"0 │ step 0", "1 │ step 0"} <= set(kernels.unfolded(attached.stdout))
    assert "The run 'night' was stopped.\nBy process " in attached.stdout
    cleaned = here("runs", "--clean").stdout
    assert cleaned == f"Removed: {job.folder.id}\nYou have no detached run on this machine.\n"
    assert not job.folder.path.exists()
    with pytest.raises(NotebookAccelError, match=r"The run's folder /.*/logs was removed\.$"):
        job.logs(0)


def test_command_line_interrupts_and_says_what_a_stop_has_lost(
    loopback: Loopback, here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detached, "pulled_names", lambda _: ("history",))
    for command, said in (("interrupt", "interrupted, and has ended"), ("stop", "stopped")):
        loopback.launch(name=command, detach=True)
        told = here(command, command).stdout
        assert told.startswith(f"The run {command!r} is {said}. Its results and logs are in /")
        assert ("It has left no history: notebook-accel interrupt would" in told) == (command == "stop")
    assert [summary.status for summary in detached_runs.summaries()] == ["stopped", "stopped"]


def test_log_of_a_rank_that_never_began_is_no_error(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    ended("night", world_size=2, log_folder=str(folder))
    (folder / "rank_1.log").write_text("hello\n")
    assert cli.main(["logs", "night"]) == 0
    said = f"rank 0 has printed nothing: {folder}/rank_0.log\nrank 1: {folder}/rank_1.log\nhello\n"
    assert capsys.readouterr().out == said
    shutil.rmtree(folder)
    assert cli.main(["logs", "night"]) == 1
    assert f"The run's folder {folder} was removed." in capsys.readouterr().err


@pytest.mark.slow
def test_script_that_a_terminal_has_launched_goes_on_without_it(tmp_path: pathlib.Path) -> None:
    mark, script = tmp_path / "mark", tmp_path / "train.py"
    script.write_text(f"import os, time\nwhile not os.path.exists({str(mark)!r}): time.sleep(0.01)\nprint('trained')")

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "notebook_accel", *arguments]
        return subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)

    with held("train.py"):
        ended = command("launch", "--detach", "--num_processes=2", "--use_cpu", str(script))
        assert (ended.returncode, ended.stderr) == (0, "")
        assert (
            ended.stdout.startswith("'train.py-2' is launched") and "notebook-accel attach train.py-2. " in ended.stdout
        )
        job = attach("train.py-2", view="none")
        mark.touch()
        job.results(_LONG_S)
        assert job.logs(0) == "trained\n"
        processes.wait_until(lambda: not job.folder.is_held, "the agent has gone", _LONG_S)


@pytest.mark.slow
def test_signals_of_the_agent_end_nothing_but_sigterm_the_run(tmp_path: pathlib.Path) -> None:
    job = notebook_launcher(time.sleep, (600,), 1, name="night", use_cpu=True, view="none", detach=True)
    assert isinstance(job, DetachedJob)
    processes.wait_until(lambda: job.status == "running", "it runs", _LONG_S)
    with job.folder.connect() as connected:
        pid, _ = peer_of(connected)
    [agent] = [process for process in processes.descendants(os.getpid()) if process.pid == pid]
    assert agent.session == agent.pid
    processes.kill(agent, signal.SIGHUP)
    processes.kill(agent, signal.SIGINT)
    assert len(job.stacks(_LONG_S)) == 1  # the agent has gone on
    processes.kill(agent, signal.SIGSTOP)
    assert attach("night", view="none").status == "running"  # who attaches lets it go on
    assert len(job.stacks(_LONG_S)) == 1
    processes.kill(agent, signal.SIGTERM)
    with pytest.raises(RunStoppedError, match="its agent process got SIGTERM"):
        job.results(_LONG_S)
    processes.wait_until(lambda: not job.folder.is_held, "the agent has gone", _LONG_S)

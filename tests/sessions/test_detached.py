"""Detached sessions: kernels that are killed or leave, and others that take the ranks over with their variables."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from notebook_accel.errors import ConfigError, LaunchError, RankFailedError, RunError
from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import detached, detached_runs, local, registry
from notebook_accel.launching.kernel.detached_job import DetachedJob
from notebook_accel.launching.kernel.detached_link import send_order
from notebook_accel.launching.run_folders import RunFolder
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import session_messages
from notebook_accel.sessions.kernel import detached_pool
from notebook_accel.sessions.kernel.session import Session
from tests import processes
from tests.launching.test_run_folders import held

pytestmark = pytest.mark.usefixtures("state_home")

_ROOT = pathlib.Path(__file__).parents[2]
_LONG_S = 100.0
# A kernel that starts a session, runs what it is given, says so, and waits to be killed.
_KERNEL = """
import contextlib, sys, time
from notebook_accel import Session
from notebook_accel.errors import RankFailedError

def double(value):
    return 2 * value

lr, stale = 0.1, 1
print("ready", flush=True)
session = Session(2, use_cpu=True, view="none", detach=True, name="lab")
for code in sys.argv[1:]:
    print("runs", flush=True)
    with contextlib.suppress(RankFailedError):
        session.execute(code)
print("done", flush=True)
time.sleep(1000)
"""
BEGIN = "import os, time, torch\nrank = int(os.environ['RANK'])\nkept = [rank * 10]"
GROUP = "from notebook_accel import Accelerator\naccelerator = Accelerator()"
SUM = "int(accelerator.gather(torch.tensor([accelerator.process_index + 1])).sum())"
_sessions: list[Session] = []  # of the running test, the latest last


@contextlib.contextmanager
def kernel(*cells: str) -> Iterator[subprocess.Popen[str]]:
    """A process with a detached session, which runs these cells."""
    process = subprocess.Popen(
        [sys.executable, "-c", _KERNEL, *cells], stdout=subprocess.PIPE, text=True, cwd=_ROOT, bufsize=1
    )
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for said in process.stdout:
        if said == f"{line}\n":
            return
    raise AssertionError(f"the kernel has ended before it said {line!r}")


@contextlib.contextmanager
def attached(name: str = "lab") -> Iterator[Session]:
    """The session that an earlier kernel has left. It ends with the block."""
    session = Session.attach(name)
    try:
        yield session
    finally:
        session.close()
    folder = folder_of(session)
    processes.wait_until(lambda: not folder.is_held, "the session's agent has gone", _LONG_S)


@contextlib.contextmanager
def begun(session: Session) -> Iterator[Session]:
    """A session in whose ranks BEGIN has run. At the end of the block, this process leaves it."""
    _sessions.append(session)
    try:
        session.execute(BEGIN)
        yield session
    finally:
        while _sessions:
            _sessions.pop().leave()


def new_session() -> Session:
    return Session(2, use_cpu=True, view="none", detach=True, name="lab")


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A folder for detached runs with a session that no kernel has."""
    home = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(home))
        session = new_session()
    session.leave()
    yield home
    detached.stop(folder_of(session))


@pytest.fixture
def lab(shared_home: pathlib.Path, state_home: pathlib.Path) -> Iterator[Session]:
    """The shared detached session, attached, for tests that leave its ranks alive and idle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(shared_home))  # not any more when ``state_home`` ends what is in its own
        with begun(Session.attach("lab")) as session:
            yield session


@pytest.fixture
def own_lab() -> Iterator[Session]:
    """A new detached session, for tests in which it or a rank ends."""
    with begun(new_session()) as session:
        yield session
    detached.stop(folder_of(session))


def folder_of(session: Session) -> RunFolder:
    assert isinstance(session.job, DetachedJob)
    return session.job.folder


def again(session: Session) -> Session:
    """Leave a session, and attach to it as the next kernel does."""
    session.leave()
    _sessions.append(Session.attach("lab"))
    return _sessions[-1]


def test_next_kernel_has_the_variables_of_the_ranks_once_the_first_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    for name, value in (("lr", 0.5), ("kept", "the notebook's")):
        monkeypatch.setattr(main, name, value, raising=False)
    with kernel(BEGIN, "before = lr + stale + double(rank)\nkept.append(double(1))") as first:
        wait_for(first, "done")
        with pytest.raises(
            RunError, match=rf"'lab' belongs to another notebook just now: process {first.pid} "
        ) as raised:
            Session.attach("lab")
        assert "%distributed detach" in raised.value.fix
        assert run_folders.every()[0].is_held
        first.kill()
        first.wait()
    with attached() as session:
        assert repr(session.execute("kept, before")) == "rank 0: ([0, 2], 1.1)\nrank 1: ([10, 2], 3.1)"
        assert repr(session.execute("lr")) == "ranks 0-1: 0.1"  # not what the notebook has had when it attached
        monkeypatch.setattr(main, "lr", 0.7)
        monkeypatch.setattr(main, "stale", 100, raising=False)
        assert repr(session.execute("lr, stale")) == "ranks 0-1: (0.7, 100)"
        assert repr(session.execute("double(3)")) == "ranks 0-1: 6"
        monkeypatch.setattr(main, "double", lambda value: 20 * value, raising=False)
        assert repr(session.execute("double(3)")) == "ranks 0-1: 60"
        session.push(kept=1)
        assert session.pull("kept", rank=1) == 1
    assert session.job.status == "succeeded"
    assert run_folders.remove_old(all_ended=True) == [session.job.id]
    assert list(run_folders.root().iterdir()) == []


@pytest.mark.slow
def test_cell_goes_on_without_its_kernel(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "mark"
    slow = (
        f"import pathlib\nprint('slow')\nwhile not pathlib.Path({str(mark)!r}).exists(): time.sleep(0.01)\nkept += [1]"
    )
    slow += "\nprint('end of', rank)"
    with kernel(BEGIN, slow) as first:
        [folder] = processes.wait_until(run_folders.every, "the session is there", _LONG_S)
        log_files = [folder.log_folder / f"rank_{rank}.log" for rank in range(2)]
        processes.wait_until(lambda: all(map(has_begun, log_files)), "both ranks run the cell", _LONG_S)
        first.kill()
    processes.wait_until(lambda: busy().startswith("busy with session["), "the list has the cell", _LONG_S)
    [line] = re.findall(r"lab \(a session on 2 CPUs, busy with \S+ since .*?\)", detached_runs.going_in_words())
    assert time.strftime("%Y-%m-%d") in line
    timer = threading.Thread(target=lambda: (said(capfd, "are still busy with session["), mark.touch()))
    timer.start()
    with attached() as session:
        timer.join()
        assert "end of 0\n" in session.job.logs(0)
        assert repr(session.execute("kept")) == "rank 0: [0, 1]\nrank 1: [10, 1]"
        out = capfd.readouterr().out
        assert "slow" not in out  # printed before this kernel was there
        processes.wait_until(lambda: busy() == "idle", "both ranks wait", _LONG_S)
        assert ", idle since " in detached_runs.going_in_words()


def has_begun(log_file: pathlib.Path) -> bool:
    return log_file.exists() and "slow" in log_file.read_text()


def busy() -> str:
    [found] = detached_runs.summaries()
    return found.session


def said(capfd: pytest.CaptureFixture[str], text: str) -> None:
    heard: list[str] = []

    def is_there() -> bool:
        heard.append(capfd.readouterr().err)
        return text in "".join(heard)

    processes.wait_until(is_there, f"somebody says {text}", _LONG_S)


@pytest.mark.slow
def test_interrupt_of_the_wait_leaves_the_session_as_it_was(lab: Session, capfd: pytest.CaptureFixture[str]) -> None:
    lab.execute(GROUP)
    assert repr(lab.execute(SUM)) == "ranks 0-1: 3"
    lab.start("if rank == 0: accelerator.wait_for_everyone()\nelse: time.sleep(1000)")
    processes.wait_until(lambda: all(stack.user_line for stack in lab.stacks()), "both ranks run the cell", _LONG_S)
    lab.leave()

    def interrupt() -> None:
        said(capfd, "An interrupt ends only the waiting")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        Session.attach("lab")
    thread.join()
    job = registry.find("lab", running=True).job
    assert isinstance(job, DetachedJob)
    processes.wait_until(lambda: job.doing().startswith("busy with session["), "it knows what the ranks do", _LONG_S)
    job.interrupt(escalate=False)
    job.leave()
    second = again(lab)
    assert repr(second.execute("kept")) == "rank 0: [0]\nrank 1: [10]"
    assert repr(second.execute(SUM)) == "ranks 0-1: 3"  # in a new process group, since an interrupt has broken the old


@pytest.mark.slow
def test_fork_of_a_kernel_doesnt_hold_its_session(tmp_path: pathlib.Path) -> None:
    # The fork says that it is done: from then on it has let go of what it had of the session.
    forks = _KERNEL.replace('print("done"', 'import os\nif os.fork(): time.sleep(1000)\nprint("done"')
    process = subprocess.Popen([sys.executable, "-c", forks, BEGIN], stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    try:
        wait_for(process, "done")
        [child] = [each for each in processes.children(process.pid) if each.command.endswith(BEGIN)]
        process.kill()
        process.wait()
        with attached() as session:
            assert repr(session.execute("kept")) == "rank 0: [0]\nrank 1: [10]"
        assert processes.kill(child)
    finally:
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.slow
def test_rank_that_dies_while_no_kernel_is_there(own_lab: Session) -> None:
    own_lab.execute(GROUP)
    assert repr(own_lab.execute(SUM)) == "ranks 0-1: 3"
    [victim] = own_lab.execute("os.getpid()", ranks=[1])._bundles.values()
    own_lab.leave()
    os.kill(int(victim["text/plain"]), signal.SIGKILL)
    job = detached.attach("lab", view="none")
    processes.wait_until(lambda: job.death(1), "the death is known", _LONG_S)
    job.leave()
    second = again(own_lab)
    with pytest.raises(RankFailedError, match="rank 1 of 2 was killed by SIGKILL"):
        second.execute("1")
    assert second.restart() == [1]
    assert repr(second.execute("kept", ranks=[0])) == "rank 0: [0]"
    second.execute(BEGIN, ranks=[1])
    second.execute(GROUP)
    assert repr(second.execute(SUM)) == "ranks 0-1: 3"
    third = again(second)  # which reads of the restart in the journal
    assert third.job.ranks[1].starts == 2
    assert repr(third.execute(SUM)) == "ranks 0-1: 3"
    assert repr(third.execute("kept")) == "rank 0: [0]\nrank 1: [10]"


@pytest.mark.slow
def test_rank_that_is_started_again_waits_for_the_next_kernel(own_lab: Session) -> None:
    with pytest.raises(RankFailedError, match="rank 1 of 2 exited with status 3"):
        own_lab.execute("if rank == 1: os._exit(3)")
    own_lab.leave()
    # One that lives, one that isn't there, and the dead one, as a kernel that is killed in %distributed restart.
    for rank in (0, 99, 1):
        send_order(folder_of(own_lab), messages.Respawn(job_id=own_lab.job.id, rank=rank))
    second = again(own_lab)
    assert repr(second.execute("'kept' in globals()")) == "rank 0: True\nrank 1: False"


def test_failure_that_nobody_has_seen_is_shown(lab: Session, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailedError):
        lab.execute("if rank == 1: raise ValueError('unseen')")
    second = again(lab)
    error = capfd.readouterr().err
    assert "the last code of the earlier notebook, has failed on rank 1]" in error
    assert "ValueError: unseen" in error
    second.execute("1")
    again(second)
    assert "unseen" not in capfd.readouterr().err


@pytest.mark.slow
def test_kernel_that_is_killed_while_it_ends_its_session(own_lab: Session) -> None:
    own_lab._pool._connections.tell(0, session_messages.Leave())
    processes.wait_until(lambda: own_lab.job.ranks[0].has_result, "rank 0 has left", _LONG_S)
    own_lab.leave()
    with pytest.raises(RunError, match="'lab' has been ended by an earlier notebook"):
        Session.attach("lab")
    processes.wait_until(lambda: not folder_of(own_lab).is_held, "the session has ended", _LONG_S)


def test_session_that_is_attached_twice_is_one_run_whose_requests_have_new_numbers(lab: Session) -> None:
    lab.execute("kept += ['first']")
    numbers = lab._pool._numbers
    second = again(lab)
    assert registry.find("lab", running=True).job is second.job
    # Another file's session may be running in this process too.
    assert [entry.name for entry in registry.latest() if entry.is_running].count("lab") == 1
    assert next(second._pool._numbers) >= next(numbers) - 1
    assert second.pull("kept", rank=1) == [10, "first"]


def test_classes_of_both_notebooks_come_back(lab: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    old, new = (type(name, (), {"__module__": "__main__", "name": name}) for name in ("Old", "New"))
    monkeypatch.setattr(main, "Old", old, raising=False)
    lab.execute("made = Old()")
    assert type(lab.pull("made")) is old
    second = again(lab)
    monkeypatch.setattr(main, "New", new, raising=False)
    second.execute("other = New()")
    made, other = second.pull("made", "other")  # of which the earlier kernel has given one the other's number
    assert (type(made).__name__, type(other)) == ("Old", new)


def test_session_that_was_left_says_so(lab: Session) -> None:
    lab.leave()
    assert lab.is_over
    assert repr(lab) == "<Session 'lab': left, on 2 CPUs>"
    with pytest.raises(RunError, match=r"'lab' was detached .* goes on without this notebook") as raised:
        lab.execute("1")
    assert raised.value.fix.startswith("%distributed attach lab, ")
    name = f"notebook-accel-attached-{lab.job.id}"
    processes.wait_until(lambda: name not in [thread.name for thread in threading.enumerate()], "it follows no more")
    processes.wait_until(lambda: busy() == "idle", "the list has its state", _LONG_S)
    [found] = detached_runs.summaries()
    assert (found.state, found.since >= found.began) == ("session, idle", True)


@pytest.mark.slow
def test_session_that_another_process_stops(own_lab: Session) -> None:
    detached.stop(folder_of(own_lab))
    assert own_lab.job.wait(_LONG_S)
    with pytest.raises(RunError, match="was stopped"):
        own_lab.execute("1")
    with pytest.raises(RunError, match="no detached session 'lab' in progress"):
        Session.attach("lab")
    with pytest.raises(LaunchError, match="'lab' is a session that has ended"):
        detached.again("lab")


def test_session_of_another_version_is_refused(lab: Session) -> None:
    lab.leave()
    folder = folder_of(lab)
    facts = folder.facts
    folder.replace("run.json", msgspec.json.encode(msgspec.structs.replace(facts, version="0.0.1")))
    try:
        with pytest.raises(RunError, match="can't be attached by notebook-accel") as raised:
            detached_pool.find("lab")
    finally:
        folder.replace("run.json", msgspec.json.encode(facts))
    assert raised.value.why == "notebook-accel 0.0.1 has started it."


def test_usual_session_ends_with_its_kernel(engine: local.LocalEngine) -> None:
    with Session(1, use_cpu=True, view="none") as session:
        with pytest.raises(ConfigError, match="is a session, which is detached as a whole") as raised:
            detached.let_go(session.job)
        assert "%distributed detach" in raised.value.fix
    assert session.job.done


# A kernel with a session that wasn't started to outlive it. It runs what it is given, and waits to be killed.
_USUAL_KERNEL = f"""
import sys, time
from notebook_accel import Session, notebook_launcher
from notebook_accel.errors import RunError

def refusal(action):
    try:
        action()
    except RunError as error:
        return [error.why, error.fix]

session = Session(2, use_cpu=True, view="none", name="usual")
session.execute({BEGIN!r})
exec(sys.argv[1])
print("done", flush=True)
time.sleep(1000)
"""


def said_by_usual_kernel(code: str) -> list[str]:
    """Return the lines that a kernel prints before it is killed."""
    arguments = [sys.executable, "-c", _USUAL_KERNEL, code]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=_ROOT, bufsize=1) as process:
        assert process.stdout is not None
        try:
            return [line.rstrip() for line in itertools.takewhile(lambda line: line != "done\n", process.stdout)]
        finally:
            process.kill()


@pytest.mark.slow
def test_usual_session_can_be_left_later() -> None:
    *pids, state, fix, no_stacks = said_by_usual_kernel(f"""
session.execute({GROUP!r})
print(session.execute("os.getpid()"))
session.leave("late")
print(session)
print(refusal(lambda: session.execute("1"))[1])
print(session.leave() is None and session.is_detached and refusal(session.stacks) is not None)""")
    assert state == "<Session 'usual': left, on 2 CPUs>"
    assert fix.startswith("%distributed attach late")
    assert no_stacks == "True"
    with attached("late") as session:
        assert str(session.execute("os.getpid()")).split("\n") == pids
        assert str(session.execute(f"kept, {SUM}")) == "rank 0: ([0], 3)\nrank 1: ([10], 3)"
        # A rank that is started again outlives this kernel too.
        assert session.restart([1]) == [1]
        for rank in range(2):
            title = f"notebook-accel rank {rank} of late"
            processes.wait_until(
                lambda rank=rank, title=title: title in str(processes.read(session.job.ranks[rank].pid)), title, _LONG_S
            )
        session.leave()
        with attached("late") as second:
            assert str(second.execute("'kept' in globals()")) == "rank 0: True\nrank 1: False"


@pytest.mark.slow
def test_interrupts_come_too_late_for_a_session_that_is_being_left() -> None:
    state, *_ = said_by_usual_kernel("""
import os, signal
from notebook_accel.launching.kernel import detached
write = detached._write_definitions
def interrupted(*arguments):
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.6)  # two within half a second count as one
    return write(*arguments)
detached._write_definitions = interrupted
try:
    session.leave("late")
except KeyboardInterrupt:
    print(session)""")
    assert state == "<Session 'usual': left, on 2 CPUs>"
    with attached("late") as session:
        assert str(session.execute("kept")) == "rank 0: [0]\nrank 1: [10]"


@pytest.mark.slow
def test_session_that_could_not_be_left_goes_on_and_ends_with_its_kernel() -> None:
    """Because of its name, an error in the middle, another run, or a dead rank."""
    with held("lab"):
        said = said_by_usual_kernel("""
from notebook_accel.launching.kernel import detached

def try_to_leave(name):
    try:
        session.leave(name)
    except Exception as error:
        print(type(error).__name__)
    print(session)
    print(session.execute("kept"))

try_to_leave("lab")
write, detached._write_definitions = detached._write_definitions, None
try_to_leave("late")
detached._write_definitions = write
job = notebook_launcher(time.sleep, (1000,), num_processes=1, use_cpu=True, view="none", background=True)
print(refusal(session.leave)[0])
print(session.execute("kept"))
job.stop()
job.wait(60)
refusal(lambda: session.execute("if rank == 1: os._exit(3)"))
print(refusal(session.leave))
print(session.execute("kept", ranks=[0]))
print(*(rank.pid for rank in session.job.ranks))""")
        assert [folder.facts.name for folder in run_folders.every()] == ["lab"]
    *said, pids = [line for line in said if not line.startswith("Launching ")]
    kept = ["rank 0: [0]", "rank 1: [10]"]
    as_before = ["<Session 'usual': 2 of 2 ranks are there, on 2 CPUs>", *kept]
    assert said == [
        *("LaunchError", *as_before),
        *("TypeError", *as_before),
        *("Another run of this notebook goes on.", *kept),
        *("['Some of its ranks have died.', '%distributed restart, then detach it']", "rank 0: [0]"),
    ]
    ranks = [rank for rank in map(processes.read, map(int, pids.split())) if rank is not None]
    processes.wait_until(lambda: not any(rank.is_alive for rank in ranks), "its ranks have ended", _LONG_S)


def test_refused_attaching_leaves_nothing(lab: Session) -> None:
    threads, descriptors = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(RunError, match="belongs to another notebook just now"):
            Session.attach("lab")
    assert set(threading.enumerate()) == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_ranks_in_a_data_loader_or_another_fork_serve_no_kernel(lab: Session) -> None:
    """A worker of an earlier kernel's cell must not hold the connection to the next one open."""
    lab.execute("pid = os.fork()\nif pid == 0: time.sleep(1000)")
    second = again(lab)
    assert repr(second.execute("kept")) == "rank 0: [0]\nrank 1: [10]"
    second.execute("os.kill(pid, 9)\nos.waitpid(pid, 0)")

"""Processes that leave a login session: systemd is played by a program in its place."""

from __future__ import annotations

import os
import pathlib
import signal
import sys

import pytest

from notebook_accel import detach
from notebook_accel.launching import login_session
from notebook_accel.launching.kernel import local
from tests import processes
from tests.launching import functions
from tests.launching.kernel.test_detached import agent_of, launch, launch_here, wait_for_its_end, wait_for_steps

_LOGIN = "0::/user.slice/user-1000.slice/session-3.scope\n"
_SERVICE = "0::/system.slice/jupyter.service\n"
_MANAGER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/{}\n"
# It answers a question with the folder's file, and moves processes by writing their groups.
_BUSCTL = """#!{python}
import os, pathlib, sys
folder = pathlib.Path({folder!r})
if "get-property" in sys.argv:
    print((folder / "kills").read_text())
    sys.exit()
assert os.environ["DBUS_SESSION_BUS_ADDRESS"].endswith("/bus")
unit, begin = sys.argv[8], sys.argv.index("au")
for pid in sys.argv[begin + 2 : begin + 2 + int(sys.argv[begin + 1])]:
    (folder / pid / "cgroup").write_text({manager!r}.format(unit))
"""


_IN_AN_AGENT = """
import pathlib
from notebook_accel.launching import login_session

def leave(sessions, run_id):
    pathlib.Path({told!r}).write_text(f"{{sorted(sessions)}} {{run_id}}")

login_session.leave = leave
"""


@pytest.fixture
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder in place of /proc, in which this process belongs to a login whose end kills its processes."""
    program = tmp_path / "bin" / "busctl"
    program.parent.mkdir()
    program.write_text(_BUSCTL.format(python=sys.executable, folder=str(tmp_path), manager=_MANAGER))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("DBUS_SESSION_BUS_ADDRESS", "unix:path=/of another bus")
    monkeypatch.setattr(login_session, "_PROC", tmp_path)
    monkeypatch.setattr(login_session, "_LINGERING", tmp_path / "linger")
    (tmp_path / "kills").write_text("b true")
    for pid in ("self", str(os.getpid()), str(os.getppid())):
        put(tmp_path, pid)
    return tmp_path


def put(machine: pathlib.Path, pid: str) -> None:
    (machine / pid).mkdir()
    (machine / pid / "cgroup").write_text(_LOGIN)


def test_all_processes_of_the_sessions_leave_also_one_that_has_just_begun(
    machine: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.pause()
    move = login_session._move

    def move_while_another_begins(pids: list[str], scope: str) -> bool:
        if not (machine / str(child)).exists():
            put(machine, str(child))
        return move(pids, scope)

    monkeypatch.setattr(login_session, "_move", move_while_another_begins)
    try:
        processes.wait_until(lambda: os.getsid(child) == child, "it leads a session")
        login_session.leave({os.getsid(0), child}, "2026-night of ä")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    groups = [(machine / str(pid) / "cgroup").read_text() for pid in (os.getpid(), child)]
    assert groups == [_MANAGER.format(f"notebook-accel-2026-night_of__-{number}.scope") for number in (0, 1)]


@pytest.mark.parametrize("lingers", [True, False])
def test_service_is_left_if_the_manager_outlives_the_last_session(machine: pathlib.Path, lingers: bool) -> None:
    for pid in ("self", str(os.getpid())):
        (machine / pid / "cgroup").write_text(_SERVICE)
    if lingers:
        (machine / "linger").mkdir()
        (machine / "linger" / login_session.user_name()).touch()
    login_session.leave({os.getsid(0)}, "night")
    left = _MANAGER.format("notebook-accel-night-0.scope")
    assert (machine / str(os.getpid()) / "cgroup").read_text() == (left if lingers else _SERVICE)


@pytest.mark.parametrize(("group", "kills"), [(_LOGIN, "b false"), (_MANAGER.format("x.scope"), "b true")])
def test_what_no_logout_ends_stays(machine: pathlib.Path, group: str, kills: str) -> None:
    (machine / "kills").write_text(kills)
    (machine / "self" / "cgroup").write_text(group)
    login_session.leave({os.getsid(0)}, "night")
    assert (machine / str(os.getpid()) / "cgroup").read_text() == _LOGIN


def test_without_systemd_nothing_is_moved(machine: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_session, "_ASK_LOGIND", ("true",))
    monkeypatch.setattr(login_session, "_kills_user_processes", lambda: True)
    monkeypatch.setattr(login_session, "_START_SCOPE", ("false",))
    login_session.leave({os.getsid(0)}, "night")
    assert (machine / str(os.getpid()) / "cgroup").read_text() == _LOGIN


@pytest.mark.usefixtures("state_home")
@pytest.mark.parametrize("is_late", [False, True])
def test_run_leaves_the_login_when_it_is_detached(
    is_late: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, told = tmp_path / "mark", tmp_path / "told"
    (tmp_path / "sitecustomize.py").write_text(_IN_AN_AGENT.format(told=str(told)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    local.engine().close()  # this process's agent is a new one, too
    if is_late:
        early = launch_here(functions.reports_until, str(mark))
        wait_for_steps(early)
        [agent] = [child for child in processes.children(os.getpid()) if processes.is_agent(child)]
        job = detach(early)
        expected = sorted([agent.pid, *(rank.pid or 0 for rank in job.ranks)])
    else:
        job = launch(functions.reports_until, str(mark))
        expected = [agent_of(job).pid]
    assert told.read_text() == f"{expected} {job.folder.id}"
    mark.touch()
    job.results(60)
    wait_for_its_end(job)
    local.engine().close()

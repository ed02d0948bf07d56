"""The folders of detached runs: who may use them, whether their agents live, and when they go."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest

from notebook_accel.errors import LaunchError, NotebookAccelError
from notebook_accel.launching import run_folders
from notebook_accel.launching.run_folders import RunFacts, RunFolder
from tests import processes

pytestmark = pytest.mark.usefixtures("state_home")
_NOBODY = 65534
_DAY_S = 86_400.0


def facts(name: str = "night", **other: object) -> RunFacts:
    values: dict[str, object] = {
        "name": name,
        "world_size": 1,
        "devices": "1 CPU",
        "config": {},
        "log_folder": "",
        "began": time.time(),
        "began_s": time.monotonic(),
        "keep_days": 7.0,
        "version": "0.1.0",
        "journal_version": run_folders.JOURNAL_VERSION,
        "host": socket.gethostname(),
        "boot_id": run_folders.boot_id(),
    }
    return RunFacts(**(values | other))  # type: ignore[arg-type]


@contextlib.contextmanager
def held(name: str = "night", **other: object) -> Iterator[RunFolder]:
    """The folder of a run that goes on during the block."""
    folder, lock = run_folders.make(name)
    try:
        folder.write_facts(facts(name, **other))
        folder.publish()
        yield folder
    finally:
        os.close(lock)


def ended(name: str = "night", days_ago: float = 0.0, **other: object) -> RunFolder:
    with held(name, **other) as folder:
        pass
    then = time.time() - days_ago * _DAY_S
    for path in folder.path.iterdir():
        os.utime(path, (then, then))
    os.utime(folder.path, (then, then))
    return folder


def test_folder_is_held_until_the_last_process_with_the_lock_has_gone() -> None:
    folder, lock = run_folders.make("night")
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    os.close(lock)
    assert folder.is_held
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert not folder.is_held


def test_name_is_taken_from_the_moment_of_the_launch_and_free_when_its_holder_has_gone() -> None:
    _, lock = run_folders.make("the night", is_fixed=True)
    with pytest.raises(
        LaunchError, match=r"'the night' is in progress already\.\nFix: .* attach 'the night', .* stop 'the night'$"
    ):
        run_folders.make("the night", is_fixed=True)
    numbered = [run_folders.make("the night") for _ in range(2)]
    assert [folder.name for folder, _ in numbered] == ["the night-2", "the night-3"]
    os.close(lock)
    again, lock = run_folders.make("the night", is_fixed=True)
    assert again.name == "the night"
    for each in (lock, *(lock for _, lock in numbered)):
        os.close(each)


def test_of_launches_at_the_same_time_one_gets_the_name() -> None:
    begin, may_begin = os.pipe()
    told, tell = os.pipe()

    def launches() -> None:
        os.read(begin, 1)
        try:
            run_folders.make("night", is_fixed=True)
            os.write(tell, b"1")
        except LaunchError:
            os.write(tell, b"0")
        signal.pause()  # so that it holds its folder until all have tried

    children = []
    for _ in range(8):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                launches()
            finally:
                os._exit(1)
    try:
        os.write(may_begin, b"x" * len(children))
        assert sorted(os.read(told, 1) for _ in children) == [b"0"] * 7 + [b"1"]
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for descriptor in (begin, may_begin, told, tell):
            os.close(descriptor)


def test_run_is_found_by_name_or_id_and_one_that_goes_on_first() -> None:
    with pytest.raises(NotebookAccelError, match=r"no detached run of yours.*\n.*\nFix: start one"):
        run_folders.find("night")
    with held() as first, held("day"):
        later = ended()
        assert run_folders.find("night").id == first.id
        assert run_folders.find(later.id).id == later.id
        with pytest.raises(NotebookAccelError, match=r"There are several detached runs.*\nFix: name one of: "):
            run_folders.find()
    assert run_folders.find("night").id == later.id
    assert run_folders.find().id == later.id
    with pytest.raises(
        NotebookAccelError, match=r"no detached run 'noon'.*\nFix: name one of: (night, day|day, night)"
    ):
        run_folders.find("noon")
    for which in ("..", ".", "/", "../runs"):
        with pytest.raises(NotebookAccelError, match="no detached run"):
            run_folders.find(which)


def test_folders_go_when_their_time_is_over() -> None:
    old, young = ended("old", 8.0), ended("young", 6.0)
    kept, unnamed = ended("kept", 8.0, keep_days=30.0), run_folders.make("killed at its launch")
    os.close(unnamed[1])
    elsewhere = ended("elsewhere", 0.5, host="another machine")
    with held("going") as going:
        os.utime(going.path / "run.json", (0, 0))
        assert run_folders.remove_old() == [old.id]
        assert sorted(run_folders.remove_old(all_ended=True)) == sorted([young.id, kept.id])
        left = {path.name for path in run_folders.root().iterdir()}
        assert left == {going.id, unnamed[0].id, elsewhere.id}
    os.utime(unnamed[0].path, (0, 0))
    assert unnamed[0].id in run_folders.remove_old()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o770, 0o701])
def test_folder_that_others_can_open_is_refused(mode: int) -> None:
    folder = ended()
    folder.path.chmod(mode)
    assert run_folders.every() == []
    for which in (folder.id, folder.facts.name, ""):
        with pytest.raises(NotebookAccelError, match=r"used, since others than you can open it\.(.|\n)*chmod 700 '?/"):
            run_folders.find(which)
    assert run_folders.remove_old(all_ended=True) == []
    folder.path.chmod(0o700)
    assert [found.id for found in run_folders.every()] == [folder.id]
    run_folders.root().chmod(mode)
    for act in (run_folders.every, lambda: run_folders.find("night"), lambda: run_folders.make("night")):
        with pytest.raises(NotebookAccelError, match="isn't used"):
            act()
    run_folders.root().chmod(0o700)


def test_advice_about_a_folder_can_be_typed(monkeypatch: pytest.MonkeyPatch, state_home: pathlib.Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(state_home / "my state"))
    run_folders.root().mkdir(parents=True)
    with pytest.raises(NotebookAccelError, match=rf"chmod 700 '{re.escape(str(run_folders.root()))}', if it is yours"):
        run_folders.find()
    run_folders.root().chmod(0o700)
    ended("a b")
    with pytest.raises(NotebookAccelError, match=r"Fix: name one of: 'a b'$"):
        run_folders.find("c")


def test_run_is_found_once_its_agent_has_taken_over_the_launch() -> None:
    folder, lock = run_folders.make("night")
    folder.write_facts(facts())
    assert run_folders.every() == []
    with pytest.raises(NotebookAccelError, match="no detached run"):
        run_folders.find("night")
    folder.publish()
    assert [found.id for found in run_folders.every()] == [folder.id]
    os.close(lock)


def test_link_in_place_of_a_folder_is_refused(tmp_path: pathlib.Path) -> None:
    folder = ended()
    moved = folder.path.rename(tmp_path / "moved")
    folder.path.symlink_to(moved)
    assert run_folders.every() == []
    assert run_folders.remove_old(all_ended=True) == []
    assert moved.is_dir()


def test_place_that_cannot_be_written_to_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    with pytest.raises(LaunchError, match=r"can't be made: .*\nFix: set XDG_STATE_HOME to a folder of yours"):
        run_folders.make("night")


def test_socket_works_however_long_the_path_is(tmp_path: pathlib.Path) -> None:
    folder = RunFolder(tmp_path / ("long" * 40))
    folder.path.mkdir(mode=0o700)
    with folder.listen() as listening, folder.connect() as connected:
        accepted, _ = listening.accept()
        with accepted:
            connected.sendall(b"x")
            assert accepted.recv(1) == b"x"
    folder.close_socket()
    assert list(folder.path.iterdir()) == []


def as_nobody(act: Callable[[], int]) -> int:
    """Run a function in a child process of another user, and return its result."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
            status = act()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: only root can become another user")
def test_another_user_neither_sees_nor_removes_nor_connects(state_home: pathlib.Path) -> None:
    with held() as folder, folder.listen():

        def tries() -> int:
            reached = len(run_folders.remove_old(all_ended=True))
            journal = functools.partial(folder.open, run_folders.JOURNAL)
            for act in (run_folders.every, folder.connect, journal, lambda: os.listdir(folder.path)):
                try:
                    act()
                    reached += 1
                except (PermissionError, NotebookAccelError):
                    continue
            return reached

        # The tests' folders are open, but for those of the runs. What is above them isn't the tests' to open.
        for path in folder.path.parents:
            if pathlib.Path(tempfile.gettempdir()) in path.parents and path != run_folders.root():
                path.chmod(0o711)
        if not as_nobody(lambda: os.access(state_home, os.X_OK)):
            pytest.skip("NOT TESTED: other users can't open the folder for temporary files")
        assert as_nobody(tries) == 0
        assert folder.is_held
    processes.wait_until(lambda: not folder.is_held, "the run is over")


def test_process_is_described_by_its_notebook_if_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    monkeypatch.setattr(sys, "argv", ["/venv/ipykernel_launcher.py", "-f", "x.json"])
    pid = os.getpid()
    assert run_folders.this_process() == f"process {pid} (ipykernel_launcher.py)"
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/train-jvsc-1.ipynb")
    assert run_folders.this_process() == f"process {pid} (train-jvsc-1.ipynb)"
    monkeypatch.setattr(sys.modules["__main__"], "__vsc_ipynb_file__", "/home/me/tr\udcffin.ipynb", raising=False)
    assert run_folders.this_process() == f"process {pid} (tr\ufffdin.ipynb)"

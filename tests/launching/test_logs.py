"""Log folders: private, the newest ones kept, never somebody else's."""

from __future__ import annotations

import os
import pathlib
import subprocess
import tempfile

import pytest

from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.launching import logs


@pytest.fixture
def root(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where the temporary folders go, which isn't there yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"notebook-accel-{os.getuid()}"


def made(name: str = "train", log_dir: str = "") -> pathlib.Path:
    folder = logs.make_folder(log_dir, name)
    assert folder is not None
    return folder


def test_folder_is_the_users_own_and_says_what_it_is_of(root: pathlib.Path) -> None:
    folder = made("../In[7] über")
    assert folder.parent == root
    assert "In-7-ber" in folder.name
    assert [path.stat().st_mode & 0o777 for path in (root, folder)] == [0o700, 0o700]


def test_two_runs_never_share_a_folder(root: pathlib.Path) -> None:
    assert made() != made()


@pytest.mark.parametrize("taken", ["link", "open to all", "a file"])
def test_name_that_somebody_else_has_taken_is_not_used(root: pathlib.Path, tmp_path: pathlib.Path, taken: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if taken == "link":
        root.symlink_to(elsewhere)
    elif taken == "a file":
        root.touch()
    else:
        root.mkdir()
        root.chmod(0o777)
    assert logs.make_folder("", "train") is None
    assert list(elsewhere.iterdir()) == []


def test_named_folder_is_made_and_used(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert made(log_dir=str(tmp_path / "a" / "b")).parent == tmp_path / "a" / "b"
    assert not root.exists()


def test_named_folder_that_cannot_be_had_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't hold the ranks' logs") as caught:
        logs.make_folder(str(tmp_path / "file" / "below"), "train")
    assert caught.value.fix


@pytest.mark.parametrize(
    ("content", "tail", "text"),
    [
        ("", 5, ""),
        ("a\nb\nc\n", 2, "b\nc\n"),
        ("a\nb\nc", 2, "b\nc"),
        ("a\nb\n", 9, "a\nb\n"),
        ("a\nb\n", 0, ""),
        ("a\n\n\n", 2, "\n\n"),
        ("a\rb\nc\n", 1, "c\n"),
        ("a\nb\n", None, "a\nb\n"),
        ("".join(f"{n:0100}\n" for n in range(20_000)), 9_000, "".join(f"{n:0100}\n" for n in range(11_000, 20_000))),
    ],
)
def test_last_lines(tmp_path: pathlib.Path, content: str, tail: int | None, text: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content.encode())
    assert logs.read(path, tail) == text


def test_log_of_a_rank_that_has_not_begun_is_empty(tmp_path: pathlib.Path) -> None:
    assert logs.read(tmp_path / "rank_0.log", 5) == ""


def test_log_that_is_gone_says_why(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotebookAccelError, match="kept for 20 runs of a notebook"):
        logs.read(root / "a run" / "gone")
    with pytest.raises(NotebookAccelError) as refused:
        logs.read(tmp_path / "a run" / "gone")
    assert refused.value.why == f"The run's folder {tmp_path / 'a run'} was removed."


def aged(root: pathlib.Path, owner_pid: int, count: int) -> list[pathlib.Path]:
    """Folders of a process's runs, as if a day lay between them."""
    folders = [root / f"2026010{day}-000000-my-run-{owner_pid}-{day}abc" for day in range(1, count + 1)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "rank_0.log").touch()
    root.chmod(0o700)
    return folders


def test_a_kernels_oldest_folders_go_and_those_of_runs_that_go_on_stay(root: pathlib.Path) -> None:
    folders = aged(root, os.getpid(), 6)
    held = logs.hold(str(folders[1]))
    assert held is not None
    logs.remove_old(os.getpid(), kept=3)
    assert sorted(root.iterdir()) == [folders[1], *folders[3:]]
    os.close(held)
    logs.remove_old(os.getpid(), kept=3)
    assert sorted(root.iterdir()) == folders[3:]
    newest = logs.make_folder("", "train")
    logs.remove_old(os.getpid(), kept=1)
    assert list(root.iterdir()) == [newest]


def test_folders_of_another_kernel_go_when_it_is_gone(root: pathlib.Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        theirs = aged(root, other.pid, 4)
        logs.remove_old(os.getpid(), kept=1)
        assert sorted(root.iterdir()) == theirs
        other.kill()
    logs.remove_old(os.getpid(), kept=1)
    assert sorted(root.iterdir()) == theirs[3:]

"""Temporary logs: the newest ones are kept, and never are somebody else's removed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import tempfile

import pytest

from notebook_accel.launching import logs


@pytest.fixture
def root(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Where the temporary folders go, which isn't there yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"notebook-accel-{os.getuid()}"


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

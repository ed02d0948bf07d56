"""Tests of ``one_at_a_time`` with processes of one machine."""

from __future__ import annotations

import os
import pathlib
import signal

import pytest

from notebook_accel import host_memory
from notebook_accel.training.backends import xla
from tests import processes
from tests.training import ranks

_PAIR = ("0", "1")


def is_waiting(pid: int) -> bool:
    """Return whether a process waits for a lock that another one holds."""
    locks = [line.split() for line in pathlib.Path("/proc/locks").read_text().splitlines()]
    return any(fields[1] == "->" and fields[5] == str(pid) for fields in locks)


def note_in_turn(folder: pathlib.Path) -> list[str]:
    """Return the ranks inside in the middle of this rank's turn. The first turn lasts until the other rank waits."""
    own = os.environ["RANK"]
    [other] = set(_PAIR) - {own}
    (folder / f"pid_{own}").write_text(str(os.getpid()))
    with xla.one_at_a_time():
        (folder / f"in_{own}").touch()
        if not (folder / f"out_{other}").exists():
            file = folder / f"pid_{other}"
            pid = int(processes.wait_until(lambda: file.exists() and file.read_text(), "the other rank runs"))
            processes.wait_until(lambda: is_waiting(pid), "the other rank waits for its turn")
        inside = [rank for rank in _PAIR if (folder / f"in_{rank}").exists() and not (folder / f"out_{rank}").exists()]
        (folder / f"out_{own}").touch()
    return inside


def die_in_turn() -> int:
    """Kill a child in its turn, take a turn in the parent, and return the signal."""
    child = os.fork()
    if child == 0:
        with xla.one_at_a_time():
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with xla.one_at_a_time():
        return os.WTERMSIG(status)


def test_one_is_in_at_a_time_and_death_gives_the_turn_back(tmp_path: pathlib.Path) -> None:
    with ranks.running(2) as running:
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            assert running.run(note_in_turn, folder) == [["0"], ["1"]]
        assert running.run(die_in_turn) == [signal.SIGKILL] * 2


@pytest.mark.parametrize(
    ("size_bytes", "count", "expected"), [(100, 8, False), (130, 8, True), (1900, 1, False), (600, 2, True)]
)
def test_memory_is_short_for_all_together(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int, count: int, expected: bool
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 2000)
    assert xla.is_memory_short(size_bytes, count) is expected

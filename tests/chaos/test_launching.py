"""Launches of random size, and to each of them something happens. After it nothing is left, and the next one works."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random

import pytest

from tests import kernels, processes
from tests.chaos import rounds
from tests.chaos.troubles import TROUBLES, Round, Trouble, may_mount, standing
from tests.launches import prepare

_SHARE = 0.75  # the rest is for sessions
CLEAN_S = 10.0
WORKS = "%%distributed --num_processes 2\nint(os.environ['RANK'])"


class Notebook:
    """A kernel, and a new one when it has died."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._made = 0
        self._stack = contextlib.ExitStack()
        self._kernel: kernels.Kernel | None = None

    @property
    def kernel(self) -> kernels.Kernel:
        if self._kernel is None or not self._kernel.process.is_alive:
            self.close()
            folder = self._folder / f"kernel-{self._made}"
            folder.mkdir()
            self._made += 1
            self._kernel = self._stack.enter_context(kernels.running(folder))
            prepare(self._kernel)
        return self._kernel

    def close(self) -> None:
        self._stack.close()
        self._kernel = None


@pytest.mark.chaos
@pytest.mark.timeout(rounds.DURATION_S + 240)
def test_whatever_happens_to_a_run_it_ends_well(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    mounts = may_mount(tmp_path / "disk")
    troubles = [trouble for trouble in TROUBLES if mounts or not trouble.needs_mount]
    notebook = Notebook(tmp_path)

    def play(trouble: Trouble, rng: random.Random, _: int) -> str:
        return one_round(trouble, Round.draw(rng, notebook.kernel, tmp_path))

    try:
        rounds.play("chaos", _SHARE, troubles, play, capsys)
    finally:
        notebook.close()
    with capsys.disabled():
        print("" if mounts else "\nA full log disk was not among the troubles: it takes the right to mount one.")


def one_round(trouble: Trouble, round_: Round) -> str:
    """Launch once, with trouble or without, and return a line that says what happened."""
    try:
        end = trouble.check(round_, trouble.happen(round_))
        processes.wait_until(lambda: not left(round_.kernel), "no process is left", CLEAN_S)
        if round_.kernel.process.is_alive:
            processes.wait_until(lambda: not files_left(round_.kernel), "no memory file is left", CLEAN_S)
            works = round_.kernel.run(WORKS)
            assert works.result == "[0, 1]", works
    except AssertionError as error:
        remaining = "\n".join([*map(str, left(round_.kernel)), *files_left(round_.kernel)])
        raise AssertionError(f"{round_}:\n{error}\nleft:\n{remaining}") from error
    return f"{trouble.name} ({round_}): {end}"


def left(kernel: kernels.Kernel) -> list[processes.Process]:
    """Return processes below the tests, adopted orphans too, but for the kernel and the processes it keeps ready."""
    kept = {kernel.pid, *(process.pid for process in standing(kernel))} if kernel.process.is_alive else set()
    return [process for process in processes.descendants(os.getpid()) if process.pid not in kept]


def files_left(kernel: kernels.Kernel) -> set[str]:
    """Return the memory files that the kernel still has open after its runs have ended."""
    return processes.memory_files(kernel.pid) - {"notebook-accel-agent-log"} if kernel.process.is_alive else set()

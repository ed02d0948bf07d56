"""Ranks that are killed while they save, many times.

All are forked from the process that calls ``run``, which has only imported torch. Each rank first loads the checkpoint
that the rank before it has left.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from notebook_accel import Accelerator, ProjectConfiguration
from notebook_accel.errors import CheckpointError

_CHANGES = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove")


class Number:
    """A registered object of a user."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Training:
    """Training in which every part has the number of the last step."""

    def __init__(self, folder: str, *, numbered: bool, is_async: bool = False) -> None:
        configuration = ProjectConfiguration(folder, automatic_checkpoint_naming=numbered, total_limit=2)
        self.accelerator = Accelerator(cpu=True, project_config=configuration)
        self.folder = None if numbered else f"{folder}/state"
        self._is_async = is_async
        model = torch.nn.Linear(40, 40)
        self.net, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.number = Number()
        self.accelerator.register_for_checkpointing(self.number)

    def save(self, number: int) -> None:
        self.number.value = number
        self.optimizer.param_groups[0]["lr"] = float(number)
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.fill_(number)
        self.accelerator.save_state(self.folder, async_=self._is_async)

    def load(self) -> int:
        """Load the last checkpoint and return its number, which all parts must have; -1 without a checkpoint."""
        try:
            self.accelerator.load_state(self.folder)
        except CheckpointError as error:
            if "There is no checkpoint" in str(error):
                return -1
            raise
        number = self.number.value
        assert self.optimizer.param_groups[0]["lr"] == number
        assert all(bool((parameter == number).all()) for parameter in self.net.parameters())
        return number


def _killed_at(change: int, folder: str) -> None:
    """Kill this process before its n-th change in a folder."""
    count = itertools.count()

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES and str(args[0]).startswith(folder) and next(count) == change:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def _fork(work: Callable[[Callable[[int], None]], None]) -> tuple[int, int]:
    """Start a child; return it with a pipe from which its numbers can be read."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.close(reading)
        work(lambda number: os.write(writing, f"{number}\n".encode()) and None)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def _read(descriptor: int) -> list[int]:
    with os.fdopen(descriptor) as file:
        return [int(line) for line in file]


def at_every_change(folder: str, *, numbered: bool, **kind: bool) -> dict[str, Any]:
    """Kill a saving rank at each change that it makes in the folder, one after the other."""
    found: list[int] = []

    def begin(_: Callable[[int], None]) -> None:
        training = Training(folder, numbered=numbered, **kind)
        for number in range(3):
            training.save(number)
        training.accelerator.end_training()

    pid, pipe = _fork(begin)
    assert (_read(pipe), os.waitpid(pid, 0)[1]) == ([], 0)
    for change in itertools.count():

        def work(say: Callable[[int], None], change: int = change) -> None:
            training = Training(folder, numbered=numbered, **kind)
            number = training.load()
            say(number)
            _killed_at(change, folder)
            training.save(number + 1)
            training.accelerator.end_training()

        pid, pipe = _fork(work)
        found += _read(pipe)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            return {"found": found, "kills": change}
    raise AssertionError


def run(folder: str, naming: str, kind: dict[str, bool]) -> dict[str, Any]:
    """Return the numbers of the checkpoints that were found, and how often ranks were killed."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)]).state_dict()  # the first call imports half of torch
    return at_every_change(folder, numbered=naming == "numbered", **kind)

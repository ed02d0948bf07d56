"""Tests that the last complete checkpoint loads, at whichever change of its folder a saving rank was killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import signal
import sys
from typing import Any

import pytest
import torch

from notebook_accel import Accelerator, ProjectConfiguration
from tests.training import ranks

_CHANGES = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove")
_NEVER = -1


class Number:
    """A registered object of a user."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def die_at(change: int, folder: str) -> None:
    """Kill this process before its n-th change in a folder."""
    count = itertools.count()

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES and str(args[0]).startswith(folder) and next(count) == change:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def load_and_save(folder: str, told: pathlib.Path, numbered: bool, is_async: bool, change: int) -> None:
    """Tell the number of the last checkpoint, which all its parts have, and save the next one until ``change``."""
    configuration = ProjectConfiguration(folder, automatic_checkpoint_naming=numbered, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    path = None if numbered else f"{folder}/state"
    model, number = torch.nn.Linear(40, 40), Number()
    net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.register_for_checkpointing(number)
    if told.exists():
        accelerator.load_state(path)
        assert optimizer.param_groups[0]["lr"] == number.value
        assert all(bool((parameter == number.value).all()) for parameter in net.parameters())
    told.write_text(str(number.value))
    number.value += 1
    optimizer.param_groups[0]["lr"] = float(number.value)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(number.value)
    die_at(change, folder)
    accelerator.save_state(path, async_=is_async)
    accelerator.end_training()


@pytest.mark.parametrize(("naming", "is_async"), [
    ("numbered", False),
    pytest.param("one name", False, marks=pytest.mark.slow),
    pytest.param("numbered", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_at_every_change_that_saving_makes(tmp_path: pathlib.Path, naming: str, is_async: bool) -> None:
    """It takes some seconds: a rank is killed at each of more than twenty changes."""
    folder, told, numbered = tmp_path / "saved", tmp_path / "number", naming == "numbered"
    found = []
    for change in itertools.chain([_NEVER] * 3, itertools.count()):
        with contextlib.closing(ranks.Ranks([{}])) as rank:
            try:
                rank.run(load_and_save, str(folder), told, numbered, is_async, change)
                is_killed = False
            except ChildProcessError as error:
                assert "exit code -9" in str(error)  # noqa: PT017
                is_killed = True
        found.append(int(told.read_text()))
        if not is_killed and change != _NEVER:
            break
    assert change >= 20
    # No checkpoint is lost, and at most the one that was being written when the rank was killed is new.
    assert all(0 <= following - number <= 1 for number, following in itertools.pairwise(found))
    assert found[3] == 3
    assert found[-1] > 3
    left = os.listdir(folder / "checkpoints" if numbered else folder)
    assert not [name for name in left if name.startswith(".")]
    assert len(left) == (2 if numbered else 1)

"""Ranks that stop before the time limit: at the same step, and with their state saved."""

from __future__ import annotations

import logging
import os
import pathlib
import threading
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration, time_limit
from notebook_accel.errors import ConfigError
from notebook_accel.utils import set_seed
from tests.processes import wait_until
from tests.training.ranks import Ranks, on_ranks

_EPOCHS = 2
_STEPS = 6  # of an epoch, on each of two ranks
_STOPS_IN = 3


def _accelerator(left_s: float, **options: Any) -> Accelerator:
    """Return the Accelerator of a rank that has so many seconds left, once all ranks are here."""
    Accelerator(cpu=True).wait_for_everyone()
    os.environ[time_limit.TIME_LIMIT] = str(time.time() + left_s)
    os.environ[time_limit.END_MARGIN] = "0"
    try:
        return Accelerator(cpu=True, **options)
    finally:
        del os.environ[time_limit.TIME_LIMIT], os.environ[time_limit.END_MARGIN]


@on_ranks(2)
def test_all_ranks_stop_at_the_same_step() -> None:
    """Train in step with the other ranks, for which the end comes at other times."""
    left_s = 0.6 + 0.3 * int(os.environ["RANK"])
    end_s, steps = time.time() + 0.6, 0
    accelerator = _accelerator(left_s)
    while not accelerator.should_stop:
        accelerator.reduce(torch.ones(1))
        steps += 1
        time.sleep(0.001)
    assert time.time() >= end_s, "the ranks have stopped before the time"
    by_rank = accelerator.gather(torch.tensor([steps])).tolist()  # hangs if a rank has made another number of calls
    assert steps > 0
    assert by_rank == [steps, steps]
    assert accelerator.should_stop
    accelerator.end_training()


@on_ranks(2)
def test_a_rank_that_has_left_its_loop_keeps_no_other_waiting(tmp_path: pathlib.Path) -> None:
    """Ask five times on rank 1, which then leaves its loop, and afterwards on rank 0 until the answer is yes."""
    accelerator, mark = _accelerator(3600.0), tmp_path / "has left"
    answers: list[bool] = []
    if accelerator.process_index == 1:
        answers = [accelerator.should_stop for _ in range(5)]
        mark.touch()
    else:
        wait_until(mark.exists, "rank 1 has left its loop")
    accelerator._stopping.agree()  # the time has come
    while accelerator.process_index == 0 and True not in answers:
        answers.append(accelerator.should_stop)
    assert answers == [*[False] * 5, *[True] * accelerator.is_main_process]


@on_ranks(1)
def test_without_an_end_nothing_stops_and_no_thread_waits() -> None:
    accelerator = Accelerator(cpu=True)
    assert not any(accelerator.should_stop for _ in range(100))
    assert "notebook-accel-end" not in [thread.name for thread in threading.enumerate()]


def _train(folder: str, stops: bool) -> tuple[list[float], int]:
    """Train from the checkpoint, if there is one; return the weights, and how many batches this call has trained."""
    set_seed(1)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = _accelerator(3600.0, project_config=project, save_on_end=True)
    model = torch.nn.Linear(3, 1)
    data = TensorDataset(torch.randn(4 * _STEPS, 3), torch.randn(4 * _STEPS, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2, shuffle=True))
    if os.path.isdir(f"{folder}/checkpoints"):
        accelerator.load_state()
    trained = 0
    try:
        for _ in range(loader.epoch, _EPOCHS):
            for x, y in loader:
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                trained += 1
                if stops and trained == _STOPS_IN:
                    accelerator._stopping.agree()  # the time has come
            with torch.no_grad():
                for x, _ in loader:  # an evaluation between the epochs never ends the run
                    model(x)
            loader.set_epoch(loader.epoch)
    except SystemExit:
        trained = -trained
    weights = [float(weight) for weight in accelerator.unwrap_model(model).weight.flatten()]
    accelerator.end_training()
    return weights, trained


def test_a_prepared_loop_saves_and_ends_by_itself_and_resumes(two_ranks: Ranks, tmp_path: pathlib.Path) -> None:
    whole = two_ranks.run(_train, str(tmp_path / "whole"), False)
    stopped = two_ranks.run(_train, str(tmp_path / "parts"), True)
    assert [trained for _, trained in stopped] == [-_STOPS_IN, -_STOPS_IN]
    assert [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()] == ["checkpoint_0"]
    resumed = two_ranks.run(_train, str(tmp_path / "parts"), False)
    assert [trained for _, trained in resumed] == [_EPOCHS * _STEPS - _STOPS_IN] * 2
    assert [weights for weights, _ in resumed] == [weights for weights, _ in whole]


@on_ranks(2)
def test_a_window_of_a_sharded_model_is_finished_before_it_is_saved(tmp_path: pathlib.Path) -> None:
    """Windows have three batches, and the time comes after the first."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 3, "fsdp_plugin": FullyShardedDataParallelPlugin()}
    accelerator = _accelerator(3600.0, save_on_end=str(tmp_path / "state"), **options)
    model, loader = torch.nn.Linear(4, 4), DataLoader(torch.randn(36, 4), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    trained = 0
    with pytest.raises(SystemExit):
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
            trained += 1
            if trained == 1:
                accelerator._stopping.agree()  # the time has come
    accelerator.end_training()
    assert trained == 3
    assert (tmp_path / "state" / "checkpoint.json").exists()


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize(
    ("missing", "fix"),
    [
        ("backward", "accelerator.backward(loss) instead of loss.backward()"),
        ("loader", "loader = accelerator.prepare(loader)"),
        ("nothing, since it asks", ""),
    ],
)
@on_ranks(2)
def test_a_loop_that_cannot_stop_by_itself_is_told_once_which_call_is_missing(
    missing: str, fix: str, tmp_path: pathlib.Path
) -> None:
    warned = _Warnings()
    logging.getLogger("notebook_accel").addHandler(warned)
    accelerator = _accelerator(3600.0, save_on_end=str(tmp_path / "state"))
    model, loader = torch.nn.Linear(3, 1), DataLoader(torch.randn(4, 3), batch_size=2)
    model = accelerator.prepare(model)
    if missing != "loader":
        loader = accelerator.prepare(loader)
    for x in loader:
        loss = model(x).sum()
        loss.backward() if missing == "backward" else accelerator.backward(loss)
        if missing == "nothing, since it asks":
            accelerator.should_stop  # noqa: B018
    accelerator._stopping.agree()  # the time has come
    is_told = fix and accelerator.is_main_process
    accelerator.end_training()
    assert [fix in text for text in warned.texts if "save_on_end" in text] == ([True] if is_told else [])


def test_a_folder_is_needed_to_save_at_the_end() -> None:
    with pytest.raises(ConfigError, match="no folder"):
        Accelerator(cpu=True, save_on_end=True)

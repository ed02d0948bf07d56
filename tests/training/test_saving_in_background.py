"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import pathlib
import subprocess
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch

from notebook_accel import Accelerator, ProjectConfiguration
from notebook_accel.errors import CheckpointError
from notebook_accel.training import checkpoint_folders, checkpoint_saving, model_files
from tests.training import ranks
from tests.training.ranks import on_ranks
from tests.training.sharded_programs import Case, Program


class Held:
    """Holds back every checkpoint that is complete but for its name, until ``release`` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_go = threading.Event()
        self.has_come = threading.Event()
        publish = checkpoint_folders.publish

        def held(folder: pathlib.Path, manifest: dict[str, Any]) -> None:
            self.has_come.set()
            assert self._may_go.wait(60)
            publish(folder, manifest)

        monkeypatch.setattr(checkpoint_folders, "publish", held)

    def release(self) -> None:
        self._may_go.set()


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(2)
def test_the_state_is_that_of_the_call(tmp_path: pathlib.Path, sharded: bool) -> None:
    folder = str(tmp_path / "state")
    with pytest.MonkeyPatch.context() as patches:
        held = Held(patches)
        program = Program(Case(sharded=sharded))
        program.train(3)
        before = program.weights()
        assert program.accelerator.save_state(folder, async_=True) == folder
        assert not os.path.exists(folder)
        losses = program.train(6)[3:]
        held.release()
        program.accelerator.end_training()
    again = Program(Case(sharded=sharded, seed=9))
    again.accelerator.load_state(folder)
    assert again.weights() == before
    again.losses = [0.0] * 3
    assert again.train(6)[3:] == losses
    assert len(losses) == 3


class Counts:
    """An object with state that isn't in tensors, and that changes in place."""

    def __init__(self) -> None:
        holder = types.SimpleNamespace(loss=torch.zeros(1, requires_grad=True) * 2, steps=[0])
        self.state: dict[str, Any] = {"array": np.zeros(3), "set": {1}, "nested": [{"list": [0]}], "holder": holder}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def change(self) -> None:
        self.state["array"] += 1
        self.state["set"].add(2)
        self.state["nested"][0]["list"].append(1)
        with torch.no_grad():
            self.state["holder"].loss += 1
        self.state["holder"].steps.append(1)


def test_an_object_is_saved_as_it_was(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, counts = Accelerator(cpu=True), Counts()
    accelerator.register_for_checkpointing(counts)
    write, may_go = model_files.write_object, threading.Event()

    def held(*args: Any) -> None:
        assert may_go.wait(60)
        write(*args)

    monkeypatch.setattr(model_files, "write_object", held)
    accelerator.save_state(tmp_path / "state", async_=True)
    counts.change()
    may_go.set()
    accelerator.load_state(tmp_path / "state", {"weights_only": False})
    assert counts.state["array"].tolist() == [0.0] * 3
    assert counts.state["set"] == {1}
    assert counts.state["nested"] == [{"list": [0]}]
    assert counts.state["holder"].loss.item() == 0.0
    assert counts.state["holder"].steps == [0]


def test_an_object_that_cannot_be_saved_gives_the_same_error(tmp_path: pathlib.Path) -> None:
    accelerator, counts = Accelerator(cpu=True), Counts()
    counts.state["lock"] = threading.Lock()
    accelerator.register_for_checkpointing(counts)
    texts = []
    for is_async in (False, True):
        with pytest.raises(CheckpointError) as raised:
            accelerator.save_state(tmp_path / "state", async_=is_async)
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
    assert "lock" in texts[0]
    assert os.listdir(tmp_path) == []


def test_the_next_one_waits_for_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    net = accelerator.prepare(torch.nn.Linear(2, 2))
    held = Held(monkeypatch)
    accelerator.save_state(async_=True)
    assert held.has_come.wait(60)
    assert not os.path.exists(tmp_path / "checkpoints" / "checkpoint_0")
    threading.Timer(0.0, held.release).start()
    for _ in range(3):
        accelerator.save_state(async_=True)
    expected = net.weight.detach().clone()
    net.weight.data.zero_()
    accelerator.load_state()
    assert torch.equal(net.weight, expected)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_2", "checkpoint_3"]


def test_an_interrupted_wait_is_made_up_for(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(torch.nn.Linear(2, 2))
    held = Held(monkeypatch)
    accelerator.save_state(tmp_path / "state", async_=True)
    assert held.has_come.wait(60)
    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(checkpoint_saving.Saving, "wait", _interrupted)
        accelerator.save_state(tmp_path / "state", async_=True)
    threading.Timer(0.0, held.release).start()
    net.weight.data.fill_(2.0)
    accelerator.save_state(tmp_path / "state", async_=True)
    accelerator.end_training()
    assert os.listdir(tmp_path) == ["state"]
    again = Accelerator(cpu=True)
    loaded = again.prepare(torch.nn.Linear(2, 2))
    again.load_state(tmp_path / "state")
    assert loaded.weight.eq(2.0).all()


def _interrupted(_: checkpoint_saving.Saving) -> None:
    raise KeyboardInterrupt


@on_ranks(2)
def test_a_failure_is_raised_when_it_is_waited_for(tmp_path: pathlib.Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "state")
    with pytest.MonkeyPatch.context() as patches:
        if accelerator.process_index == 1:

            def fail(*_: Any, **__: Any) -> None:
                raise OSError("no space left")

            patches.setattr("notebook_accel.training.model_files.write_object", fail)
        accelerator.save_state(tmp_path / "state", async_=True)
        with pytest.raises(CheckpointError, match=r"(?s)saved while training went on, failed: .*no space left"):
            accelerator.end_training()
    accelerator.end_training()
    again = Accelerator(cpu=True)
    again.prepare(torch.nn.Linear(2, 2))
    again.load_state(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]


_AT_EXIT = """
import sys
import torch
from notebook_accel import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(9, 9))
accelerator.save_state(sys.argv[1], async_=True)
"""


@pytest.mark.slow
def test_a_script_that_ends_meanwhile_completes_it(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-c", _AT_EXIT, str(tmp_path / "state")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "Traceback" not in ended.stderr
    assert checkpoint_folders.read_manifest(tmp_path / "state")


def printed_at_exit(folder: str) -> str:
    accelerator = Accelerator(cpu=True)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patches, contextlib.redirect_stderr(io.StringIO()) as printed:
        patches.setattr("notebook_accel.training.model_files.write_object", fail)
        accelerator.save_state(f"{folder}/state", async_=True)
        atexit._run_exitfuncs()
    return printed.getvalue()


def test_a_failure_that_nobody_waits_for_is_printed_at_the_end_of_a_script(tmp_path: pathlib.Path) -> None:
    with ranks.running(1) as script:
        [printed] = script.run(printed_at_exit, str(tmp_path))
    assert "no space left" in printed

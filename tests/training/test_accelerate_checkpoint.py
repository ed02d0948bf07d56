"""Tests of reading the weights in checkpoints that Accelerate has saved. Accelerate itself writes them."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader

from notebook_accel import ConfigError, ProjectConfiguration
from notebook_accel.errors import CheckpointError
from tests.training.ranks import Ranks, caught_warnings


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(rows))
        return logits


class Counts:
    """A registered object."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def forget_accelerate() -> None:
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()


@pytest.fixture(autouse=True)
def _this_process_is_as_before() -> Iterator[None]:
    """Later tests launch from this process, and a kernel with an Accelerator of that library can't be forked."""
    yield
    forget_accelerate()


def prepared(library: Any, model: torch.nn.Module | None = None, **options: Any) -> tuple[Any, Any, Any]:
    if library is accelerate:
        forget_accelerate()
    accelerator = library.Accelerator(cpu=True, **options)
    model = torch.nn.Linear(3, 2) if model is None else model
    optimizer = torch.optim.Adam(model.parameters())
    net, optimizer, _ = accelerator.prepare(model, optimizer, DataLoader(range(4), batch_size=2))
    return accelerator, net, optimizer


def saved_by_accelerate(folder: pathlib.Path, model: torch.nn.Module | None = None, **options: Any) -> Any:
    accelerator, net, optimizer = prepared(accelerate, model, **options)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    accelerator.save_state(str(folder))
    return accelerator.unwrap_model(net)


def notebook() -> Any:
    import notebook_accel

    return notebook_accel


def load(accelerator: Any, folder: pathlib.Path | None) -> str:
    """Load a checkpoint of Accelerate, of which rank 0 says in one warning that its weights alone are loaded."""
    with caught_warnings() as caught:
        loaded: str = accelerator.load_state(folder)
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    told = ["the weights of models are loaded, and nothing else" in text for text in texts]
    assert told == [True] * accelerator.is_main_process, texts
    return loaded


def weights(model: torch.nn.Module) -> list[Any]:
    return [value.tolist() for value in model.state_dict().values()]


@pytest.mark.parametrize("safe", [True, False])
def test_tied_weights(tmp_path: pathlib.Path, safe: bool) -> None:
    accelerator, net, _ = prepared(accelerate, Tied())
    accelerator.save_state(str(tmp_path), safe_serialization=safe)
    again, other, _ = prepared(notebook(), Tied())
    assert weights(other) != weights(net)
    load(again, tmp_path)
    assert weights(other) == weights(net)
    assert other.head.weight is other.embed.weight


def test_weights_of_a_compiled_model(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(3, 2)
    saved_by_accelerate(tmp_path, torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    accelerator, other, _ = prepared(notebook())
    load(accelerator, tmp_path)
    assert weights(other) == weights(model)


def test_everything_but_the_weights_stays_as_it_is(tmp_path: pathlib.Path) -> None:
    saving, net, _ = prepared(accelerate)
    saving.register_for_checkpointing(Counts())
    saving.save_state(str(tmp_path))
    accelerator, other, optimizer = prepared(notebook())
    counts = Counts()
    counts.seen = 5
    accelerator.register_for_checkpointing(counts)
    prompt = accelerator.prepare(torch.ones(2, requires_grad=True))
    loader = accelerator._dataloaders[0]
    batches = iter(loader)
    next(batches)
    other(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    moments = [state["exp_avg"].tolist() for state in optimizer.state.values()]
    random_state = torch.get_rng_state()
    load(accelerator, tmp_path)
    assert weights(other) == weights(net)
    assert [state["exp_avg"].tolist() for state in optimizer.state.values()] == moments
    assert (counts.seen, prompt.tolist(), loader.state_dict()["batches"]) == (5, [1, 1], 1)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is not None for parameter in other.parameters())


def test_a_model_has_to_be_prepared(tmp_path: pathlib.Path) -> None:
    saved_by_accelerate(tmp_path)
    accelerator = notebook().Accelerator(cpu=True)
    accelerator.prepare(DataLoader(range(4)))
    with pytest.raises(CheckpointError, match="no model has been prepared"):
        accelerator.load_state(tmp_path)


def test_what_does_not_fit(tmp_path: pathlib.Path) -> None:
    saved_by_accelerate(tmp_path)
    accelerator, net, _ = prepared(notebook(), torch.nn.Linear(3, 4))
    before = weights(net)
    with pytest.raises(CheckpointError, match=r"is of another model:\n  bias: \(2,\) in the checkpoint"):
        accelerator.load_state(tmp_path)
    accelerator.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="has 1 objects of kind 'model', this run has 2"):
        accelerator.load_state(tmp_path)
    assert weights(net) == before
    os.truncate(tmp_path / "model.safetensors", 20)
    with pytest.raises(CheckpointError, match="can't be read"):
        prepared(notebook())[0].load_state(tmp_path)


def test_sharded_weights(tmp_path: pathlib.Path) -> None:
    saved_by_accelerate(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model_fsdp.bin")
    with pytest.raises(CheckpointError, match="without the whole weights of a model") as raised:
        prepared(notebook())[0].load_state(tmp_path)
    assert "merge-weights" in raised.value.fix


def test_numbered_checkpoints(tmp_path: pathlib.Path) -> None:
    names = {"project_dir": str(tmp_path), "automatic_checkpoint_naming": True}
    saving, net, _ = prepared(accelerate, project_config=accelerate.utils.ProjectConfiguration(**names))
    for _ in range(2):
        saving.save_state()
    with torch.no_grad():
        net.weight.fill_(math.pi)
    saving.save_state()
    accelerator, other, _ = prepared(notebook(), project_config=ProjectConfiguration(**names))
    with pytest.raises(ConfigError, match=r"a checkpoint .*checkpoint_0 already"):
        accelerator.save_state()
    assert load(accelerator, None) == str(tmp_path / "checkpoints" / "checkpoint_2")
    assert weights(other) == weights(net)
    assert accelerator.save_state() == str(tmp_path / "checkpoints" / "checkpoint_3")
    assert json.loads((tmp_path / "checkpoints" / "checkpoint_3" / "checkpoint.json").read_text())["world_size"] == 1


def test_accelerate_reads_ours(tmp_path: pathlib.Path) -> None:
    saving, net, _ = prepared(notebook(), Tied())
    saving.save_state(tmp_path)
    accelerator, other, _ = prepared(accelerate, Tied())
    assert weights(other) != weights(net)
    accelerator.load_state(str(tmp_path))
    assert weights(other) == weights(net)


def load_sharded(folder: str) -> Any:
    plugin = notebook().FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator, net, _ = prepared(notebook(), Tied(), fsdp_plugin=plugin)
    load(accelerator, pathlib.Path(folder))
    found = [value.tolist() for value in accelerator.get_state_dict(net).values()]  # rank 0 gets it
    accelerator.end_training()
    return found


def test_sharded_models_load_whole_ones(two_ranks: Ranks, tmp_path: pathlib.Path) -> None:
    model = saved_by_accelerate(tmp_path, Tied())
    assert two_ranks.run(load_sharded, str(tmp_path))[0] == weights(model)

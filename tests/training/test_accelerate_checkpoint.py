"""Tests of reading the checkpoints that Accelerate has saved, and of the errors. Accelerate itself writes them."""

from __future__ import annotations

import json
import math
import os
import pathlib
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader

from notebook_accel import Accelerator, ConfigError, DataLoaderConfiguration, ProjectConfiguration
from notebook_accel.errors import CheckpointError
from notebook_accel.training.accelerate_checkpoint import AccelerateCheckpoint
from notebook_accel.training.handlers import GradScalerKwargs
from notebook_accel.training.precision import LossScaler
from tests.training.programs import Counts
from tests.training.ranks import Ranks, running


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(rows))
        return logits


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


def weights(model: torch.nn.Module) -> list[Any]:
    return [value.tolist() for value in model.state_dict().values()]


@pytest.mark.parametrize("safe", [True, False])
def test_tied_weights(tmp_path: pathlib.Path, safe: bool) -> None:
    accelerator, net, _ = prepared(accelerate, Tied())
    accelerator.save_state(str(tmp_path), safe_serialization=safe)
    again, other, _ = prepared(notebook(), Tied())
    assert weights(other) != weights(net)
    again.load_state(tmp_path)
    assert weights(other) == weights(net)
    assert other.head.weight is other.embed.weight


def test_weights_of_a_compiled_model(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(3, 2)
    saved_by_accelerate(tmp_path, torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    accelerator, other, _ = prepared(notebook())
    accelerator.load_state(tmp_path)
    assert weights(other) == weights(model)


def test_random_numbers(tmp_path: pathlib.Path) -> None:
    saved_by_accelerate(tmp_path)
    drawn = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    accelerator, _, _ = prepared(notebook())
    accelerator.load_state(tmp_path)
    assert [torch.rand(1).item(), random.random(), float(np.random.rand())] == drawn


def save_and_load_on_other_ranks(folder: str, saves: bool) -> Any:
    path = pathlib.Path(folder)
    if saves:
        accelerator, net, _ = prepared(accelerate)
        accelerator.save_state(folder)
        drawn, found = torch.rand(1).item(), weights(accelerator.unwrap_model(net))
        accelerator.end_training()
        PartialState().destroy_process_group()
        return found, drawn
    accelerator, net, _ = prepared(notebook())
    if accelerator.num_processes == 2 and accelerator.is_main_process:
        with pytest.warns(UserWarning, match="rank 1 draws its random numbers afresh"):
            accelerator.load_state(path)
    else:
        accelerator.load_state(path)
    found = weights(accelerator.unwrap_model(net)), torch.rand(1).item()
    accelerator.end_training()
    return found


def test_another_number_of_ranks(tmp_path: pathlib.Path) -> None:
    saved, drawn = save_and_load_on_other_ranks(str(tmp_path / "one"), True)
    with running(2) as own_ranks:  # Accelerate makes a group in them that it can't leave behind
        by_two = own_ranks.run(save_and_load_on_other_ranks, str(tmp_path / "two"), True)
        first, second = own_ranks.run(save_and_load_on_other_ranks, str(tmp_path / "one"), False)
    assert save_and_load_on_other_ranks(str(tmp_path / "two"), False) == by_two[0]
    assert first == (saved, drawn)
    assert second[0] == saved
    assert second[1] != drawn


def test_the_scale_of_losses(tmp_path: pathlib.Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3)
    scaler.scale(torch.ones(1))
    torch.save(scaler.state_dict(), tmp_path / "scaler.pt")
    saved_by_accelerate(tmp_path)
    checkpoint = AccelerateCheckpoint(tmp_path)
    assert checkpoint.counts(["scaler", "optimizer"]) == {"model": 1, "scaler": 1, "optimizer": 1}
    ours = LossScaler(torch.device("cpu"), GradScalerKwargs())
    ours.load_state_dict(checkpoint.state("scaler", 0, weights_only=True))
    assert (ours.get_scale(), ours.get_growth_interval()) == (512.0, 3)


class Trap:
    """An object whose unpickling leaves a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_the_epoch_of_a_sampler_is_read_without_its_dataset(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = types.ModuleType("gone")
    monkeypatch.setitem(sys.modules, "gone", gone)
    exec("class Data(list): pass", vars(gone))
    data = gone.Data([1, {2: [3]}, torch.ones(2), Trap(str(tmp_path / "trap"))])
    sampler = SeedableRandomSampler(data, data_seed=5, generator=torch.Generator())
    sampler.set_epoch(7)
    saved_by_accelerate(tmp_path / "saved")
    torch.save(sampler, tmp_path / "saved" / "sampler.bin")
    monkeypatch.delitem(sys.modules, "gone")

    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader, unsaved = accelerator.prepare(DataLoader(range(4), shuffle=True), DataLoader(range(4)))
    accelerator.load_state(tmp_path / "saved")
    assert (loader.epoch, unsaved.epoch) == (7, 0)
    assert not (tmp_path / "trap").exists()
    (tmp_path / "saved" / "sampler.bin").write_bytes(b"cut off")
    with pytest.raises(CheckpointError, match=r"sampler\.bin can't be read"):
        accelerator.load_state(tmp_path / "saved")


def test_registered_objects(tmp_path: pathlib.Path) -> None:
    saving, _, _ = prepared(accelerate)
    counts = Counts()
    counts.seen = pathlib.PurePosixPath("an object of some class")  # type: ignore[assignment]
    saving.register_for_checkpointing(counts)
    saving.save_state(str(tmp_path))
    accelerator, _, _ = prepared(notebook())
    with pytest.raises(CheckpointError, match="1 objects of kind 'custom_checkpoint', this run has 0"):
        accelerator.load_state(tmp_path)
    again = Counts()
    accelerator.register_for_checkpointing(again)
    with pytest.raises(CheckpointError, match="more than tensors and plain values"):
        accelerator.load_state(tmp_path)
    accelerator.load_state(tmp_path, load_kwargs={"weights_only": False})
    assert again.seen == counts.seen


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
    with pytest.raises(CheckpointError, match="with sharded weights") as raised:
        prepared(notebook())[0].load_state(tmp_path)
    assert "merge-weights" in raised.value.fix


# What Accelerate 1.15.0 saves after two batches, with torchdata 0.11.0, without worker processes and with two.
_WITHOUT_WORKERS = {
    "_index_sampler_state": None,
    "_sampler_iter_state": None,
    "_sampler_iter_yielded": 2,
    "_num_yielded": 2,
    "_IterableDataset_len_called": None,
    "_shared_seed": None,
    "fetcher_state": None,
    "dataset_state": None,
    "_iterator_finished": False,
}
_WITH_WORKERS = {
    "_snapshot": {
        "_snapshot_step": 1,
        "_last_yielded_worker_id": 1,
        "_main_snapshot": {"_num_workers": 2, "_sampler_iter_yielded": 1, "_base_seed": 5366245355481424840},
        "_worker_snapshots": {
            f"worker_{number}": {"worker_id": number, "dataset_state": None, "fetcher_state": None}
            for number in range(2)
        },
    },
    "_steps_since_snapshot": 1,
    "_iterator_finished": False,
}


def resumed_epochs(folder: str) -> list[Any]:
    accelerator, _, _ = prepared(notebook())
    accelerator._dataloaders.clear()
    loader = accelerator.prepare(DataLoader(range(16), batch_size=2))
    accelerator.load_state(folder)
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    accelerator.end_training()
    return epochs


_OF_DATASET = {**_WITHOUT_WORKERS, "dataset_state": {"file": pathlib.Path("an object of some class")}}


@pytest.mark.parametrize("state", [_WITHOUT_WORKERS, _WITH_WORKERS, _OF_DATASET])
def test_a_position_inside_an_epoch(tmp_path: pathlib.Path, state: dict[str, Any]) -> None:
    saved_by_accelerate(tmp_path)
    torch.save(state, tmp_path / "dl_state_dict.bin")
    rest, whole = resumed_epochs(str(tmp_path))
    assert whole == [[number, number + 1] for number in range(0, 16, 2)]
    assert rest == whole[2:]
    torch.save({**state, "_iterator_finished": True}, tmp_path / "dl_state_dict.bin")
    assert resumed_epochs(str(tmp_path)) == [whole, whole]


def test_a_position_inside_an_epoch_on_two_ranks(
    two_ranks: Ranks, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_by_accelerate(tmp_path)
    torch.save(_WITHOUT_WORKERS, tmp_path / "dl_state_dict.bin")
    (tmp_path / "random_states_1.pkl").write_bytes((tmp_path / "random_states_0.pkl").read_bytes())
    assert [epochs[0] for epochs in two_ranks.run(resumed_epochs, str(tmp_path))] == [
        [[8, 9], [12, 13]],
        [[10, 11], [14, 15]],
    ]
    with pytest.warns(UserWarning, match=r"the epoch begins anew.*skip_first_batches\(loader, 2\)"):
        assert len(resumed_epochs(str(tmp_path))[0]) == 8  # on one rank
    os.remove(tmp_path / "random_states_1.pkl")
    monkeypatch.setenv("NOTEBOOK_ACCEL_COMPAT", "accelerate")
    with pytest.warns(UserWarning, match="the epoch begins anew"):
        assert len(resumed_epochs(str(tmp_path))[0]) == 8


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
    assert accelerator.load_state() == str(tmp_path / "checkpoints" / "checkpoint_2")
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
    accelerator, net, optimizer = prepared(notebook(), Tied(), fsdp_plugin=plugin)
    accelerator.load_state(folder)
    found = [value.tolist() for value in accelerator.get_state_dict(net).values()]  # rank 0 gets it
    moments = [state["exp_avg"].full_tensor().sum().item() for state in optimizer.state.values()]
    accelerator.end_training()
    return found, moments


def test_sharded_models_load_whole_ones(two_ranks: Ranks, tmp_path: pathlib.Path) -> None:
    model = saved_by_accelerate(tmp_path, Tied())
    first, second = two_ranks.run(load_sharded, str(tmp_path))
    assert first[0] == weights(model)
    assert first[1] == second[1] == [pytest.approx(0.1 * model.embed.weight.numel())]

from __future__ import annotations

import json
import os
import pathlib

import pytest
import safetensors.torch
import torch

from notebook_accel import Accelerator
from notebook_accel.errors import CheckpointError, ConfigError
from notebook_accel.training import model_files


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.LayerNorm(4)
        self.register_buffer("part", self.norm.weight.data[1:3])


def test_weights_of_one_memory_are_written_once_and_load_whole(tmp_path: pathlib.Path) -> None:
    model = Tied()
    path = tmp_path / "model.safetensors"
    model_files.write_weights(model.state_dict(), path, safe=True)
    assert sorted(safetensors.torch.load_file(path)) == ["embed.weight", "norm.bias", "norm.weight", "part"]
    again = model_files.read_weights(path)
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    assert safetensors.torch.load_model(Tied(), path, strict=False)[0] == set()


@pytest.mark.parametrize("safe", [True, False])
def test_shards(tmp_path: pathlib.Path, safe: bool) -> None:
    accelerator = Accelerator()
    model = torch.nn.Sequential(*(torch.nn.Linear(10, 10) for _ in range(3)))
    net = accelerator.prepare(model)
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    accelerator.save_model(net, tmp_path, max_shard_size="0.5KB", safe_serialization=safe)
    index = json.loads((tmp_path / f"{stem}.{suffix}.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 330
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"{stem}-0000{number}-of-00003.{suffix}" for number in (1, 2, 3)]
    read = {name: value for file in files for name, value in model_files.read_weights(tmp_path / file).items()}
    assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())
    accelerator.save_model(net, tmp_path, safe_serialization=safe)
    assert os.listdir(tmp_path) == [f"{stem}.{suffix}"]


def test_what_can_not_be_saved(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="max_shard_size is 'big'"):
        model_files.save_model({}, tmp_path, "big")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file"):
        model_files.save_model({}, tmp_path / "file")
    with pytest.raises(CheckpointError, match="extra of the model's state is int"):
        model_files.save_model({"extra": 1}, tmp_path)

"""Batches on their way to a device that takes them in turn."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel.environment import RankPlace
from notebook_accel.training.data import DataLoaderConfiguration, share_out
from notebook_accel.training.feeds import Uploading
from notebook_accel.training.runtimes.single_process import SingleProcess


class Doubler:
    """An uploader to a device on which everything is twice as much."""

    def __init__(self) -> None:
        self.waiting: collections.deque[list[torch.Tensor]] = collections.deque()
        self.done: list[str] = []

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        self.done.append("send")
        self.waiting.append([tensor * 2 for tensor in tensors])

    def take(self) -> Sequence[torch.Tensor]:
        self.done.append("take")
        return self.waiting.popleft()

    def close(self) -> None:
        self.done.append("close")


class OnMeta(SingleProcess):
    """A rank whose device is none that batches are on already."""

    def __init__(self) -> None:
        super().__init__(RankPlace(), torch.device("meta"))
        self.uploaders: list[Doubler] = []

    def uploader(self) -> Doubler:  # type: ignore[override]
        self.uploaders.append(Doubler())
        return self.uploaders[-1]


def test_tensors_come_back_to_their_places() -> None:
    doubler = Doubler()
    feed = Uploading(doubler, torch.device("cpu"))
    held = feed.send({"x": (torch.ones(2), "a name"), "y": torch.tensor(3)})
    taken = feed.take(held)
    assert taken["x"][0].tolist() == [2.0, 2.0] and taken["x"][1] == "a name" and int(taken["y"]) == 6


def test_a_pass_has_one_batch_on_its_way_and_ends_with_a_break_too() -> None:
    runtime = OnMeta()
    loader = share_out(
        DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2),
        runtime=runtime,
        config=DataLoaderConfiguration(),
        device=runtime.device,
    )
    assert [batch.tolist() for [batch] in loader] == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    assert runtime.uploaders[0].done == ["send", *["take", "send"] * 2, "take", "close"]
    for _ in loader:
        break
    assert runtime.uploaders[1].done == ["send", "take", "send", "close"]

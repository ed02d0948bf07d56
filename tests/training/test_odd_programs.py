"""Tests of unusual programs: they compute the right numbers or raise an error."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from notebook_accel import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin
from tests.training.datasets import Numbers, Stream
from tests.training.ranks import Ranks


class Texts(Dataset[dict[str, Any]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": index, "text": f"number {index}", "parts": [float(index), (str(index), b"bytes")]}


class Buckets:
    """A batch sampler without a length, whose batches have different sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]])


def loader_of(kind: str, n: int, size: int) -> DataLoader[Any]:
    parallel = {"num_workers": 1, "persistent_workers": True}
    made: dict[str, Any] = {
        "plain": lambda: DataLoader(Numbers(n), batch_size=size),
        "pinned": lambda: DataLoader(Numbers(n), batch_size=size, pin_memory=True),
        "persistent": lambda: DataLoader(Numbers(n), batch_size=size, **parallel),
        "two workers": lambda: DataLoader(Numbers(n), batch_size=size, num_workers=2),
        "stream": lambda: DataLoader(Stream(n), batch_size=size),
        "stream, a worker": lambda: DataLoader(Stream(n), batch_size=size, **parallel),
        "buckets": lambda: DataLoader(Numbers(11), batch_sampler=Buckets()),  # type: ignore[arg-type]
    }
    loader: DataLoader[Any] = made[kind]()
    return loader


def gathered(kind: str, sizes: list[tuple[int, int]], options: dict[str, Any]) -> list[Any]:
    """Return the samples of two epochs of each size, and which batches were known to be the last."""
    warnings.simplefilter("ignore")  # memory can't be pinned without a GPU
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    found = []
    for n, size in sizes:
        loader = accelerator.prepare(loader_of(kind, n, size))
        for _ in range(2):
            epoch: list[int] = []
            ends = []
            for batch in loader:
                # Tensors of different lengths can't be gathered; objects can.
                epoch += accelerator.gather_for_metrics(batch.tolist() if kind == "buckets" else batch)
                ends.append(accelerator.gradient_state.end_of_dataloader)
            found.append(([int(sample) for sample in epoch], ends))
    return found


KINDS = ["plain", "pinned", "persistent", "two workers", "stream", "stream, a worker", "buckets"]
# No sample, fewer samples than ranks, one batch, a batch larger than the data, and several batches.
SIZES = [(0, 2), (1, 2), (2, 1), (4, 4), (3, 8), (13, 2)]


def sizes_of(kind: str) -> list[tuple[int, int]]:
    return SIZES[1::2] if "worker" in kind else SIZES  # workers take a while to start


@pytest.mark.skipif(
    sys.version_info < (3, 10, 15), reason="a worker can hang in its fork: python/cpython#112275, mended in 2024"
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dispatch", [None, True])
def test_loaders_of_every_size(three_ranks: Ranks, dispatch: bool | None, kind: str) -> None:
    lengths = [n for n, _ in sizes_of(kind) for _ in range(2)]
    for epochs in three_ranks.run(gathered, kind, sizes_of(kind), {"dispatch_batches": dispatch}):
        for n, (samples, ends) in zip(lengths, epochs, strict=True):
            assert samples == list(range(11 if kind == "buckets" else n)), n
            assert ends == [False] * (len(ends) - 1) + [True] * bool(ends)


def batches_of_texts(dispatch: bool) -> list[Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(Texts(5), batch_size=2))
    return [{**batch, "id": batch["id"].tolist(), "parts": repr(batch["parts"])} for batch in loader]


def test_batches_of_anything(two_ranks: Ranks) -> None:
    whole = [{**batch, "id": batch["id"].tolist(), "parts": repr(batch["parts"])} for batch in DataLoader(Texts(4), 2)]
    for dispatch in (False, True):
        first, second = two_ranks.run(batches_of_texts, dispatch)
        assert [first[0], second[0]] == whole
        assert first[1]["text"] == ["number 4", "number 0"]


class Sentences(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter("abcdefg")


def with_no_label(rows: list[str]) -> dict[str, Any]:
    return {"text": rows, "label": None, "length": torch.ones(len(rows)), "is_last": "g" in rows}


def dispatched_sentences() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Sentences(), batch_size=2, collate_fn=with_no_label))
    return [
        ({**batch, "length": len(batch["length"])}, accelerator.gather_for_metrics(batch["text"])) for batch in loader
    ]


def test_dispatched_batches_of_strings_and_none(two_ranks: Ranks) -> None:
    for rank, epoch in enumerate(two_ranks.run(dispatched_sentences)):
        texts = (["ab", "ef"], ["cd", "ga"])[rank]
        assert [batch for batch, _ in epoch] == [
            {"text": [*text], "label": None, "length": 2, "is_last": "g" in text} for text in texts
        ]
        assert [text for _, texts in epoch for text in texts] == [*"abcdefg"]


def objects_of_some_ranks() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    return [
        accelerator.gather_for_metrics(["found"] * rank),
        accelerator.gather_for_metrics([]),
        accelerator.gather_for_metrics([torch.tensor([rank])] * rank, use_gather_object=True),
    ]


def test_a_rank_that_has_no_objects(two_ranks: Ranks) -> None:
    assert two_ranks.run(objects_of_some_ranks) == [[["found"], [], [torch.tensor([1])]]] * 2


def model_of_ones() -> torch.nn.Linear:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


def gradients_after_an_error() -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net, loader = accelerator.prepare(model_of_ones(), DataLoader(Numbers(12)))
    weight = accelerator.unwrap_model(net).weight
    seen = []
    for step, rows in enumerate(loader):
        with contextlib.suppress(ValueError), accelerator.accumulate(net):
            accelerator.backward(net(rows.float().view(-1, 1)).sum())
            if step == 0:
                raise ValueError("boom")
        seen.append((accelerator.sync_gradients, weight.grad.item()))
        if accelerator.sync_gradients:
            weight.grad = None
    return seen


def test_an_error_inside_of_accumulate(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(gradients_after_an_error)
    assert [syncs for syncs, _ in first] == [False, True] * 3
    assert [gradient for syncs, gradient in first if syncs] == [gradient for syncs, gradient in second if syncs]
    assert [gradient for syncs, gradient in first if syncs] == [1.5, 5.5, 9.5]
    assert (first[0][1], second[0][1]) == (0.0, 0.5)


def train_two_models(turned: bool) -> Any:
    """Train two models with each other's outputs, like a generator and a critic; ``turned`` reverses the steps."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    models = [model_of_ones(), model_of_ones()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1 * (i + 1)) for i, model in enumerate(models)]
    *nets, first, second, loader = accelerator.prepare(*models, *optimizers, DataLoader(Numbers(10)))
    for rows in loader:
        x = rows.float().view(-1, 1) / 10
        with accelerator.accumulate(*nets):
            accelerator.backward(nets[0](x).pow(2).sum())
            accelerator.backward((nets[1](nets[0](x).detach()) - x).pow(2).sum())
            steps = [first, second]
            for optimizer in reversed(steps) if turned == bool(accelerator.process_index) else steps:
                optimizer.step()
                optimizer.zero_grad()
    return [model.weight.item() for model in models]


def test_two_models_and_two_optimizers(two_ranks: Ranks) -> None:
    models = [model_of_ones(), model_of_ones()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1 * (i + 1)) for i, model in enumerate(models)]
    for window in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9]):
        for row in window:
            x = torch.tensor([[row / 10]])
            hidden = models[0](x)
            ((hidden.pow(2) + (models[1](hidden.detach()) - x).pow(2)).sum() / 4).backward()  # 2 ranks, 2 micro-batches
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = [model.weight.item() for model in models]
    for turned in (False, True):
        for weights in two_ranks.run(train_two_models, turned):
            assert weights == pytest.approx(expected, abs=1e-6)


def prepare_again_and_again() -> list[float]:
    accelerator = Accelerator(cpu=True)
    model = model_of_ones()
    found = []
    for fold in range(10):
        net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(net(torch.tensor([[float(accelerator.process_index + fold)]])).sum())
        found.append(model.weight.grad.item())  # type: ignore[union-attr]
        optimizer.zero_grad()
        net, optimizer = accelerator.free_memory(net, optimizer)
    return found


def test_one_model_prepared_again_and_again(two_ranks: Ranks) -> None:
    assert two_ranks.run(prepare_again_and_again) == [[fold + 0.5 for fold in range(10)]] * 2


def compiled_gradients(first: bool) -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = model_of_ones()
    if first:
        net = accelerator.prepare(torch.compile(model, backend="eager"))
    else:
        net = torch.compile(accelerator.prepare(model), backend="eager")
    seen = []
    for step in range(2):
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.tensor([[float(accelerator.process_index + step)]])).sum())
            seen.append(model.weight.grad.item())  # type: ignore[union-attr]
    return seen


@pytest.mark.parametrize("first", [True, False])
def test_compiled_before_or_after_prepare(two_ranks: Ranks, first: bool) -> None:
    assert two_ranks.run(compiled_gradients, first) == [[0.0, 1.0], [0.5, 1.0]]


def train_on_pairs() -> Any:
    """Iterate over two loaders at once, over a nested one, and abandon an iterator in the middle."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4))
    net, one, other, test = accelerator.prepare(
        model_of_ones(), DataLoader(Numbers(12)), DataLoader(Numbers(12)), DataLoader(Numbers(5), batch_size=2)
    )
    synced, tested = [], []
    for _ in range(2):
        given_up = iter(other)
        next(given_up)
        for pair in zip(one, other, strict=True):
            with accelerator.accumulate(net):
                accelerator.backward(net(torch.stack(pair).float().view(-1, 1)).sum())
            synced.append(accelerator.sync_gradients)
            tested.append([row for rows in test for row in accelerator.gather_for_metrics(rows).tolist()])
            for rows in test:
                if accelerator.gather_for_metrics(rows).tolist() == [0, 1, 2, 3]:
                    break
    return synced, tested, len(accelerator.gather_for_metrics(torch.ones(3)))


def test_several_loaders_at_once(two_ranks: Ranks) -> None:
    for synced, tested, rows in two_ranks.run(train_on_pairs):
        assert synced == [False, False, False, True, False, True] * 2
        assert tested == [list(range(5))] * 12
        assert rows == 6

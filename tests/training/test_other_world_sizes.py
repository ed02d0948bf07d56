"""Checkpoints that another number of ranks loads."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from notebook_accel import Accelerator, DataLoaderConfiguration
from notebook_accel.utils import set_seed
from tests.training.ranks import Ranks

_SAMPLES = 23
Run = Callable[..., list[Any]]


@pytest.fixture
def run(two_ranks: Ranks, three_ranks: Ranks) -> Run:
    """Return a function of a number of ranks, a function and its arguments, which returns the values by rank."""

    def on(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        if ranks == 1:
            return [function(*args)]
        return {2: two_ranks, 3: three_ranks}[ranks].run(function, *args)

    return on


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        yield from torch.arange(_SAMPLES) if worker is None else torch.arange(worker.id, _SAMPLES, worker.num_workers)


def loader_of(kind: str, batch_size: int = 2) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=batch_size)
    if kind == "stream of workers":
        return DataLoader(Stream(), batch_size=batch_size, num_workers=2)
    generator = torch.Generator().manual_seed(3) if kind == "generator" else None
    return DataLoader(torch.arange(_SAMPLES), batch_size=batch_size, shuffle=True, generator=generator)  # type: ignore[arg-type]


def read_samples(
    kind: str, options: dict[str, Any], batch_size: int, load: str | None, save: str | None, rounds: int | None
) -> list[int]:
    """Return the samples that all ranks take together, after a checkpoint was loaded and until one is saved."""
    set_seed(5)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(loader_of(kind, batch_size))
    if load is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator.load_state(load)
    seen: list[int] = []
    for number, batch in enumerate(loader, start=1):
        seen += accelerator.gather_for_metrics(batch).tolist()
        if number == rounds:
            accelerator.save_state(save)
            break
    return seen


@pytest.mark.parametrize(("kind", "options", "rounds"), [
    ("map", {}, (2, 1)),
    ("generator", {}, (1, 1)),
    ("generator", {"dispatch_batches": True}, (2, 1)),
    ("map", {"use_seedable_sampler": True}, (3, 1)),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [(2, 3, 1), (3, 2, 3), (1, 3, 2)])
def test_each_sample_of_an_epoch_comes_once(
    run: Run,
    tmp_path: pathlib.Path,
    kind: str,
    options: dict[str, Any],
    rounds: tuple[int, int],
    ranks: tuple[int, ...],
) -> None:
    saved = [None, str(tmp_path / "first"), str(tmp_path / "second"), None]
    seen: list[int] = []
    for number, stop in enumerate((*rounds, None)):
        by_rank = run(ranks[number], read_samples, kind, options, 2, saved[number], saved[number + 1], stop)
        assert all(of_rank == by_rank[0] for of_rank in by_rank)
        seen += by_rank[0]
    # The order is the one that was drawn when the epoch began.
    (undisturbed,) = run(1, read_samples, kind, options, 2, None, None, None)
    assert seen == undisturbed
    assert sorted(seen) == list(range(_SAMPLES))


@pytest.mark.parametrize(("kind", "options", "batch_sizes"), [
    ("map", {"split_batches": True}, (6, 6)),
    ("generator", {}, (3, 2)),  # the batches differ, and six samples come out at a time
    ("stream", {}, (3, 2)),
    ("stream", {"dispatch_batches": False}, (3, 2)),
])  # fmt: skip
def test_with_as_many_samples_at_a_time(
    run: Run, tmp_path: pathlib.Path, kind: str, options: dict[str, Any], batch_sizes: tuple[int, int]
) -> None:
    first = run(2, read_samples, kind, options, batch_sizes[0], None, str(tmp_path / "state"), 2)[0]
    rest = run(3, read_samples, kind, options, batch_sizes[1], str(tmp_path / "state"), None, None)[0]
    assert len(first) == 12
    assert sorted(first + rest) == list(range(_SAMPLES))


def test_a_stream_repeats_what_can_not_be_dealt_out_and_says_so(run: Run, tmp_path: pathlib.Path) -> None:
    first = run(3, read_samples, "stream", {}, 3, None, str(tmp_path / "state"), 1)[0]
    assert first == list(range(9))
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of("stream", 4))
    with pytest.warns(UserWarning, match="1 samples of epoch 0 are repeated: the loader had yielded 9"):
        accelerator.load_state(tmp_path / "state")
    assert torch.cat(list(loader)).tolist() == list(range(8, _SAMPLES))


def test_a_stream_that_several_workers_read_begins_anew_and_says_so(run: Run, tmp_path: pathlib.Path) -> None:
    """Its workers have yielded different numbers of samples after an odd number of batches."""
    folder = str(tmp_path / "state")
    run(2, read_samples, "stream of workers", {}, 2, None, folder, 3)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of("stream of workers"))
    with pytest.warns(UserWarning, match="2 ranks had read a stream with 2 workers .*, and 1 ranks read it with 2 now"):
        accelerator.load_state(folder)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(_SAMPLES))
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(loader_of("stream"))
    with pytest.warns(UserWarning, match="2 ranks had read a stream with 2 workers .*, and 1 ranks read it with 1 now"):
        accelerator.load_state(folder)
    assert torch.cat(list(loader)).tolist() == list(range(_SAMPLES))


def test_after_the_last_batch_the_epoch_ends(run: Run, tmp_path: pathlib.Path) -> None:
    assert len(run(2, read_samples, "map", {}, 2, None, str(tmp_path / "state"), 6)[0]) == _SAMPLES
    assert run(3, read_samples, "map", {}, 2, str(tmp_path / "state"), None, None) == [[]] * 3


def train(
    batch_size: int, steps: int, load: str | None = None, save: str | None = None, stop_after: int | None = None
) -> dict[str, Any]:
    """Train two epochs, or from a checkpoint to their end, or save one after some micro-batches."""
    set_seed(1)
    x = torch.randn(48, 4)
    data = TensorDataset(x, (x @ torch.randn(4, 3)).argmax(1))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    # The schedule counts steps, however many ranks there are.
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 100)
    net, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size, shuffle=True))
    accelerator.register_for_checkpointing(scheduler)
    if load is not None:
        accelerator.load_state(load)
    loaded = states_of(accelerator, net, optimizer, scheduler)
    losses, number = [], 0
    for _ in range(loader.epoch, 2):
        for inputs, targets in loader:
            with accelerator.accumulate(net):
                loss = F.cross_entropy(net(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    scheduler.step()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            number += 1
            if number == stop_after:
                accelerator.save_state(save)
                return {"losses": losses, "states": states_of(accelerator, net, optimizer, scheduler)}
    return {"losses": losses, "states": loaded, "weights": states_of(accelerator, net, optimizer, scheduler)}


def states_of(accelerator: Accelerator, net: Any, optimizer: Any, scheduler: Any) -> list[Any]:
    moments = [
        {name: value.tolist() for name, value in values.items()} for values in optimizer.state_dict()["state"].values()
    ]
    weights = {name: value.tolist() for name, value in accelerator.get_state_dict(net).items()}
    return [weights, moments, scheduler.state_dict()]


@pytest.mark.parametrize(
    ("ranks", "stop_after", "steps"), [((2, 1), 3, 1), ((1, 2), 3, 1), ((2, 3), 2, 1), ((3, 2), 4, 3)]
)
def test_training_goes_on_as_if_undisturbed(
    run: Run, tmp_path: pathlib.Path, ranks: tuple[int, int], stop_after: int, steps: int
) -> None:
    """All ranks together take twelve samples at a time. The last case stops inside an accumulation window."""
    folder = str(tmp_path / "state")
    undisturbed = train(12, steps)
    saved = run(ranks[0], train, 12 // ranks[0], steps, None, folder, stop_after)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed = run(ranks[1], train, 12 // ranks[1], steps, folder)
    assert all(of_rank["states"] == saved[0]["states"] for of_rank in resumed)
    losses = saved[0]["losses"] + resumed[0]["losses"]
    assert losses == pytest.approx(undisturbed["losses"], abs=1e-6)
    assert len(losses) == 8


def numbers_after(folder: str, *, load: bool) -> Any:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(1, 1))
    set_seed(9)  # on every rank, as programs do
    if not load:
        accelerator.save_state(folder)
        return torch.rand(3).tolist(), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.load_state(folder)
    return torch.rand(3).tolist(), [str(warning.message) for warning in caught]


def test_new_ranks_draw_numbers_of_their_own(run: Run, tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path / "state")
    ((expected, _),) = run(1, _numbers_saved, folder)
    for _ in range(2):
        by_rank = run(3, _numbers_loaded, folder)
        numbers = [tuple(drawn) for drawn, _ in by_rank]
        assert list(numbers[0]) == expected
        assert len(set(numbers)) == 3
        text = "was saved by 1 of this run's 3 ranks: ranks 1 to 2 draw their random numbers afresh."
        assert by_rank[0][1] == [f"The checkpoint {folder} {text}"]
        assert by_rank[1][1] == by_rank[2][1] == []
    assert run(3, _numbers_loaded, folder) == by_rank


def _numbers_saved(folder: str) -> Any:
    return numbers_after(folder, load=False)


def _numbers_loaded(folder: str) -> Any:
    return numbers_after(folder, load=True)

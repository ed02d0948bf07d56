from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from notebook_accel.environment import RankPlace
from notebook_accel.errors import CollectiveError, ConfigError, TrainingError
from notebook_accel.training import collectives, process_group
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.backends.single_process import SingleProcess
from notebook_accel.training.sharding import Tail
from notebook_accel.utils import operations
from tests.training.ranks import Ranks, caught_warnings, on_ranks


class Pair(NamedTuple):
    left: Any
    right: Any


def alone() -> Backend:
    return SingleProcess(RankPlace(), torch.device("cpu"))


@on_ranks(2)
def test_gather_keeps_the_structure() -> None:
    backend = process_group.join()
    own = torch.tensor([[backend.place.rank, 7]])
    tree = {"pair": Pair(own, [own.float().requires_grad_() * 2]), "scalar": torch.tensor(backend.place.rank)}
    gathered = collectives.gather(backend, tree)
    assert isinstance(gathered["pair"], Pair)
    assert gathered["pair"].left.tolist() == [[0, 7], [1, 7]]
    assert gathered["pair"].right[0].tolist() == [[0, 14], [2, 14]]
    assert gathered["scalar"].tolist() == [0, 1]


@on_ranks(3)
def test_gather_takes_every_type() -> None:
    backend = process_group.join()
    own = torch.arange(6).reshape(2, 3).t()  # not contiguous
    expected = torch.cat([own, own + 1, own + 2])
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.complex64):
        gathered = collectives.gather(backend, (own + backend.place.rank).to(dtype))
        assert torch.equal(gathered, expected.to(dtype)), dtype


def views(rank: int) -> list[torch.Tensor]:
    both = torch.tensor([[1 + 1j, 2 + 2j], [3 + 3j, 4 + 4j]]) + rank
    return [both.conj(), both.mT.conj(), both.imag.mT, both[:1].conj().imag, both.real[:1, 1], both[0, 0].conj()]


@on_ranks(2)
def test_collectives_take_every_view() -> None:
    backend = process_group.join()
    kept = torch.zeros(1, 2)
    for own, first, second in zip(views(backend.place.rank), views(0), views(1), strict=True):
        expected = torch.cat([first, second]) if own.ndim else torch.stack([first, second])
        assert torch.equal(collectives.gather(backend, own), expected)
        assert torch.equal(collectives.reduce(backend, own), (first + second) / 2)
        collectives.broadcast(backend, kept[:, 1:].copy_(own.real.reshape(-1)[:1]), from_process=1)
        assert kept[0, 1] == second.real.reshape(-1)[0]


WHOLE, SMALL, REAL = torch.int64, torch.uint8, torch.float32


@pytest.mark.parametrize(("reduction", "value", "dtypes"), [
    ("sum", [400, 1], [WHOLE, WHOLE, REAL]),
    ("mean", [200, 0.5], [REAL, REAL, REAL]),
    ("max", [200, 1], [WHOLE, SMALL, REAL]),
    ("min", [200, 0], [WHOLE, SMALL, REAL]),
])  # fmt: skip
@on_ranks(2)
def test_reduce(reduction: str, value: list[float], dtypes: list[torch.dtype]) -> None:
    backend = process_group.join()
    own = [torch.tensor([200, backend.place.rank]).to(dtype) for dtype in (WHOLE, SMALL, REAL)]
    kept = [tensor.clone() for tensor in own]
    reduced = collectives.reduce(backend, own, reduction)
    assert all(map(torch.equal, own, kept))
    assert [(tensor.dtype, tensor.tolist()) for tensor in reduced] == [(dtype, value) for dtype in dtypes]


def test_unknown_reduction() -> None:
    with pytest.raises(ConfigError, match="'most'"):
        collectives.reduce(alone(), torch.ones(1), "most")


@on_ranks(2)
def test_broadcast_is_in_place() -> None:
    backend = process_group.join()
    own = torch.full((2, 3), float(backend.place.rank)).t().requires_grad_()
    flag = torch.tensor(backend.place.rank == 1)
    received = collectives.broadcast(backend, (own, flag), from_process=1)
    assert received[0] is own
    assert (own.tolist(), flag.item()) == ([[1.0, 1.0]] * 3, True)


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize("pad_first", [False, True])
@on_ranks(2)
def test_pad_to_the_longest(dim: int, pad_first: bool) -> None:
    backend = process_group.join()
    length = 1 + backend.place.rank
    own = torch.ones((length, 2) if dim in (0, -2) else (2, length), dtype=torch.int64)
    padded, scalar = collectives.pad_across_processes(
        backend, [own, torch.tensor(1)], dim=dim, pad_index=-1, pad_first=pad_first
    )
    column = [1, 1] if length == 2 else [-1, 1] if pad_first else [1, -1]
    expected = torch.tensor([column, column])
    assert torch.equal(padded, expected.t() if dim in (0, -2) else expected)
    assert scalar == 1
    assert collectives.gather(backend, padded).shape == (4, 2)


@on_ranks(3)
def test_objects() -> None:
    backend = process_group.join()
    rank = backend.place.rank
    values = [rank, {"rank": rank}]
    assert operations.broadcast_object_list(values, from_process=1) is values
    assert values == [1, {"rank": 1}]
    assert collectives.gather_object(backend, [f"rank {rank}"] * rank) == ["rank 1", "rank 2", "rank 2"]


@on_ranks(2)
def test_each_rank_gets_its_own_object_however_long_it_is() -> None:
    backend = process_group.join()
    rank = backend.place.rank
    for size in (0, 1, 4000, 5000, 10, 100_000, 99_999, 3_000_000, 2):
        values = [f"{size}", bytes(size)]
        assert collectives.scatter_object(backend, values if rank == 0 else None) == values[rank]
    tensors = [torch.ones(3, dtype=torch.bfloat16), torch.arange(6).view(2, 3).t()]
    last = collectives.scatter_object(backend, [{"own": tensor} for tensor in tensors] if rank == 0 else None)
    assert torch.equal(last["own"], tensors[rank])


def disagree(kind: str, backend: Backend) -> None:
    is_first = backend.place.rank == 0
    if kind == "shapes":
        collectives.gather(backend, torch.ones(2 if is_first else 5, 3))
    elif kind == "types":
        collectives.reduce(backend, torch.ones(2) if is_first else torch.ones(2).long())
    elif kind == "paddings":
        collectives.pad_across_processes(backend, torch.ones(1, 3) if is_first else torch.ones(2, 4))
    elif is_first:
        collectives.wait_for_everyone(backend)
    else:
        collectives.gather_object(backend, [1])


@pytest.mark.parametrize(("kind", "told"), [
    ("shapes", ["rank 0: gather float32 (2, 3) at ", "rank 1: gather float32 (5, 3) at ", "test_collectives.py, line"]),
    ("types", ["rank 0: reduce mean float32 (2,)", "rank 1: reduce mean int64 (2,)"]),
    ("paddings", ["rank 0: pad_across_processes along dimension 0 [(1, 3)]", "[(2, 4)]"]),
    ("calls", ["rank 0: wait for everyone", "rank 1: gather objects"]),
])  # fmt: skip
@on_ranks(2)
def test_disagreement_is_an_error_on_every_rank_and_the_group_lives_on(kind: str, told: list[str]) -> None:
    backend = process_group.join()
    with pytest.raises(CollectiveError) as raised:
        disagree(kind, backend)
    assert all(line in str(raised.value) for line in told), raised.value
    assert collectives.gather(backend, torch.ones(1)).tolist() == [1, 1]


@on_ranks(2)
def test_what_cannot_be_gathered() -> None:
    backend = process_group.join()
    with pytest.raises(TrainingError, match=r"gather takes tensors; str isn't one\."):
        collectives.gather(backend, ["text"])
    with pytest.raises(TrainingError, match=r"gather takes dense .* torch.sparse_coo\.\nFix: tensor\.to_dense\(\)"):
        collectives.gather(backend, torch.eye(2).to_sparse())
    with pytest.raises(TrainingError, match=r"reduce takes dense .* is nested\.\nFix: list\(tensor\.unbind\(\)\)"):
        collectives.reduce(backend, torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged))
    with pytest.raises(TrainingError, match=r"\[value\]"):
        collectives.gather_object(backend, "text")


def test_one_process_gets_back_what_it_gave() -> None:
    tree = {"scalar": torch.tensor(1), "text": "a"}
    backend = alone()
    assert collectives.gather(backend, tree) is tree
    assert collectives.gather_for_metrics(backend, tree, None) is tree
    reduced = collectives.reduce(backend, tree)
    assert reduced == tree
    assert reduced["scalar"] is not tree["scalar"]  # with any number of ranks the tensors are new
    assert collectives.broadcast(backend, tree) is tree
    assert collectives.pad_across_processes(backend, tree) is tree
    assert collectives.gather_object(backend, [1]) == [1]
    assert collectives.scatter_object(backend, ["mine"]) == "mine"
    assert operations.broadcast_object_list([1]) == [1]
    collectives.wait_for_everyone(backend)


def fail_first() -> str:
    backend = process_group.join()
    is_first = backend.place.rank == 1
    with collectives.first(backend, is_first=is_first):
        if is_first:
            raise ValueError("boom")
    return "went on"


def test_first_ranks_release_the_others_when_they_fail(two_ranks: Ranks) -> None:
    second, first = two_ranks.replies(fail_first, deadline_s=20)
    assert second == "went on"
    assert str(first) == "boom"


@on_ranks(3)
def test_first_ranks_come_first(tmp_path: Any) -> None:
    backend = process_group.join()
    for first in (2, 0):
        with collectives.first(backend, is_first=backend.place.rank == first), open(tmp_path / "order", "a") as file:
            file.write(str(backend.place.rank))
        collectives.wait_for_everyone(backend)
        order = (tmp_path / "order").read_text()[-3:]
        assert order[0] == str(first)
        assert sorted(order) == ["0", "1", "2"]
        collectives.wait_for_everyone(backend)


def gather_rows_of_a_tail(rows: int) -> list[str]:
    collectives._has_warned = False
    backend = process_group.join()
    tail = Tail((4, 1), (4, 4))
    with caught_warnings() as caught:
        for _ in range(2):
            collectives.gather(backend, {"loss": torch.tensor(1.0), "rows": torch.ones(rows)}, tail)
            collectives.gather_for_metrics(backend, torch.ones(rows), tail)
    return [str(warning.message) for warning in caught]


def test_gather_warns_once_of_repeated_rows(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(gather_rows_of_a_tail, 4)
    assert len(first) == 1
    assert "3 of 8 rows are repeated" in first[0]
    assert "gather_for_metrics" in first[0]
    assert second == []
    assert two_ranks.run(gather_rows_of_a_tail, 1) == [[], []]  # one row a rank isn't about samples

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
from tests.training.ranks import Ranks, caught_warnings


class Pair(NamedTuple):
    left: Any
    right: Any


def alone() -> Backend:
    return SingleProcess(RankPlace(), torch.device("cpu"))


def gather_nested() -> Any:
    backend = process_group.join()
    own = torch.tensor([[backend.place.rank, 7]])
    tree = {"pair": Pair(own, [own.float().requires_grad_() * 2]), "scalar": torch.tensor(backend.place.rank)}
    return collectives.gather(backend, tree)


def test_gather_keeps_the_structure(two_ranks: Ranks) -> None:
    for gathered in two_ranks.run(gather_nested):
        assert isinstance(gathered["pair"], Pair)
        assert gathered["pair"].left.tolist() == [[0, 7], [1, 7]]
        assert gathered["pair"].right[0].tolist() == [[0, 14], [2, 14]]
        assert gathered["scalar"].tolist() == [0, 1]


def gather_types(dtypes: list[torch.dtype]) -> list[Any]:
    backend = process_group.join()
    own = torch.arange(6).reshape(2, 3).t() + backend.place.rank  # not contiguous
    return [collectives.gather(backend, own.to(dtype)) for dtype in dtypes]


def test_gather_takes_every_type(three_ranks: Ranks) -> None:
    dtypes = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.complex64]
    own = torch.arange(6).reshape(2, 3).t()
    expected = torch.cat([own, own + 1, own + 2])
    for gathered in three_ranks.run(gather_types, dtypes):
        for dtype, tensor in zip(dtypes, gathered, strict=True):
            assert torch.equal(tensor, expected.to(dtype))


def views() -> list[Any]:
    backend = process_group.join()
    both = torch.tensor([[1 + 1j, 2 + 2j], [3 + 3j, 4 + 4j]]) + backend.place.rank
    kept = torch.zeros(1, 2)
    found = []
    for own in (both.conj(), both.mT.conj(), both.imag.mT, both[:1].conj().imag, both.real[:1, 1], both[0, 0].conj()):
        gathered = collectives.gather(backend, own).tolist()
        collectives.broadcast(backend, kept[:, 1:].copy_(own.real.reshape(-1)[:1]), from_process=1)
        found.append((own.tolist(), gathered, collectives.reduce(backend, own).tolist(), kept[0, 1].item()))
    return found


def test_collectives_take_every_view(two_ranks: Ranks) -> None:
    for first, second in zip(*two_ranks.run(views), strict=True):
        own, other = torch.tensor(first[0]), torch.tensor(second[0])
        expected = torch.cat([own, other]) if own.ndim else torch.stack([own, other])
        for _, gathered, mean, kept in (first, second):
            assert gathered == expected.tolist()
            assert mean == ((own + other) / 2).tolist()
            assert kept == other.real.reshape(-1)[0]


def reduce_types(reduction: str) -> list[Any]:
    backend = process_group.join()
    own = [torch.tensor([200, backend.place.rank]).to(dtype) for dtype in (torch.int64, torch.uint8, torch.float32)]
    kept = [tensor.clone() for tensor in own]
    reduced = collectives.reduce(backend, own, reduction)
    assert all(map(torch.equal, own, kept))
    return [(tensor.dtype, tensor.tolist()) for tensor in reduced]


def test_reduce(two_ranks: Ranks) -> None:
    for sums in two_ranks.run(reduce_types, "sum"):
        assert sums == [(torch.int64, [400, 1]), (torch.int64, [400, 1]), (torch.float32, [400, 1])]
    for means in two_ranks.run(reduce_types, "mean"):
        assert means == [(torch.float32, [200, 0.5])] * 3
    kinds = torch.int64, torch.uint8, torch.float32
    for reduction, expected in (("max", [200, 1]), ("min", [200, 0])):
        for found in two_ranks.run(reduce_types, reduction):
            assert found == [(kind, expected) for kind in kinds]


def test_unknown_reduction() -> None:
    with pytest.raises(ConfigError, match="'most'"):
        collectives.reduce(alone(), torch.ones(1), "most")


def broadcast_from_1() -> Any:
    backend = process_group.join()
    own = torch.full((2, 3), float(backend.place.rank)).t().requires_grad_()
    flag = torch.tensor(backend.place.rank == 1)
    received = collectives.broadcast(backend, (own, flag), from_process=1)
    assert received[0] is own
    return own.tolist(), flag.item()


def test_broadcast_is_in_place(two_ranks: Ranks) -> None:
    assert two_ranks.run(broadcast_from_1) == [([[1.0, 1.0]] * 3, True)] * 2


def pad(dim: int, pad_first: bool) -> Any:
    backend = process_group.join()
    length = 1 + backend.place.rank
    own = torch.ones((length, 2) if dim in (0, -2) else (2, length), dtype=torch.int64)
    padded = collectives.pad_across_processes(
        backend, [own, torch.tensor(1)], dim=dim, pad_index=-1, pad_first=pad_first
    )
    return padded[0].tolist(), padded[1].item(), collectives.gather(backend, padded[0]).shape


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize("pad_first", [False, True])
def test_pad_to_the_longest(two_ranks: Ranks, dim: int, pad_first: bool) -> None:
    shorter, longer = two_ranks.run(pad, dim, pad_first)
    column = [-1, 1] if pad_first else [1, -1]
    own = torch.tensor([column, column])
    assert shorter[0] == (own.t() if dim in (0, -2) else own).tolist()
    assert longer[0] == [[1, 1], [1, 1]]
    assert shorter[1] == 1
    assert shorter[2] == (4, 2)


def objects() -> Any:
    backend = process_group.join()
    rank = backend.place.rank
    values = [rank, {"rank": rank}]
    assert operations.broadcast_object_list(values, from_process=1) is values
    return collectives.gather_object(backend, [f"rank {rank}"] * rank), values


def test_objects(three_ranks: Ranks) -> None:
    expected = (["rank 1", "rank 2", "rank 2"], [1, {"rank": 1}])
    assert three_ranks.run(objects) == [expected] * 3


LONGER_BYTES = [0, 1, 4000, 5000, 10, 100_000, 99_999, 3_000_000, 2]


def scatter() -> list[Any]:
    """Return what this rank gets when rank 0 has longer and longer objects for rank 1, and tensors at last."""
    backend = process_group.join()
    found = []
    for size in LONGER_BYTES:
        values = [f"{size}", bytes(size)] if backend.place.rank == 0 else None
        found.append(collectives.scatter_object(backend, values))
    tensors = [{"half": torch.ones(3, dtype=torch.bfloat16)}, torch.arange(6).view(2, 3).t()]
    last = collectives.scatter_object(backend, tensors if backend.place.rank == 0 else None)
    expected = tensors[backend.place.rank]
    assert torch.equal(last["half"], expected["half"]) if isinstance(expected, dict) else torch.equal(last, expected)
    return found


def test_each_rank_gets_its_own_object_however_long_it_is(two_ranks: Ranks) -> None:
    assert two_ranks.run(scatter) == [[str(size) for size in LONGER_BYTES], [bytes(size) for size in LONGER_BYTES]]


def disagree(kind: str) -> Any:
    backend = process_group.join()
    is_first = backend.place.rank == 0
    try:
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
    except CollectiveError as error:
        return str(error), collectives.gather(backend, torch.ones(1)).tolist()


@pytest.mark.parametrize(("kind", "told"), [
    ("shapes", ["rank 0: gather float32 (2, 3) at ", "rank 1: gather float32 (5, 3) at ", "test_collectives.py, line"]),
    ("types", ["rank 0: reduce mean float32 (2,)", "rank 1: reduce mean int64 (2,)"]),
    ("paddings", ["rank 0: pad_across_processes along dimension 0 [(1, 3)]", "[(2, 4)]"]),
    ("calls", ["rank 0: wait for everyone", "rank 1: gather objects"]),
])  # fmt: skip
def test_disagreement_is_an_error_on_every_rank_and_the_group_lives_on(
    two_ranks: Ranks, kind: str, told: list[str]
) -> None:
    for message, gathered in two_ranks.run(disagree, kind):
        assert all(line in message for line in told), message
        assert gathered == [1, 1]


def misuse(what: str) -> None:
    backend = process_group.join()
    if what == "gather text":
        collectives.gather(backend, ["text"])
    if what == "gather a sparse tensor":
        collectives.gather(backend, torch.eye(2).to_sparse())
    if what == "reduce a nested tensor":
        collectives.reduce(backend, torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged))
    collectives.gather_object(backend, "text")


def test_what_cannot_be_gathered(two_ranks: Ranks) -> None:
    for error in two_ranks.replies(misuse, "gather text"):
        assert isinstance(error, TrainingError)
        assert "gather takes tensors; str isn't one." in str(error)
    for error in two_ranks.replies(misuse, "gather a sparse tensor"):
        assert isinstance(error, TrainingError)
        assert "gather takes dense tensors, and this one is torch.sparse_coo.\nFix: tensor.to_dense()" in str(error)
    for error in two_ranks.replies(misuse, "reduce a nested tensor"):
        assert isinstance(error, TrainingError)
        assert "reduce takes dense tensors, and this one is nested.\nFix: list(tensor.unbind())" in str(error)
    for error in two_ranks.replies(misuse, "gather an object"):
        assert isinstance(error, TrainingError)
        assert "[value]" in str(error)


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


def write_in_turn(path: str) -> None:
    backend = process_group.join()
    for is_first in (backend.place.rank == 2, backend.place.rank == 0):
        with collectives.first(backend, is_first=is_first), open(path, "a") as file:
            file.write(str(backend.place.rank))
        collectives.wait_for_everyone(backend)


def test_first_ranks_come_first(three_ranks: Ranks, tmp_path: Any) -> None:
    three_ranks.run(write_in_turn, str(tmp_path / "order"))
    order = (tmp_path / "order").read_text()
    assert (order[0], order[3]) == ("2", "0")
    assert sorted(order) == sorted("012012")


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

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from notebook_accel.training.trees import leaves_of, map_leaves, send_to_device, to_float32


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize("tree", [
    [1, (2, 3)],
    {"a": 1, "b": [2]},
    Point(1, {"deep": (2,)}),
    collections.OrderedDict(b=1, a=2),
    collections.defaultdict(list, a=1),
    collections.UserDict(a=[1]),
    (),
    7,
])  # fmt: skip
def test_structure_and_types_are_kept(tree: Any) -> None:
    same = map_leaves(lambda leaf: leaf, tree)
    assert same == tree
    assert type(same) is type(tree)
    assert leaves_of(map_leaves(lambda leaf: leaf * 10, tree)) == [leaf * 10 for leaf in leaves_of(tree)]


def test_default_factory_stays() -> None:
    mapped = map_leaves(str, collections.defaultdict(list, a=1))
    assert mapped["a"] == "1"
    assert mapped["missing"] == []


def test_leaves_come_in_order() -> None:
    assert leaves_of({"a": [1, (2, 3)], "b": Point(4, 5)}) == [1, 2, 3, 4, 5]


def test_only_half_precision_is_widened() -> None:
    tree = [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64), torch.ones(1).long(), "text"]
    half, double, whole, text = to_float32(tree)
    assert (half.dtype, double.dtype, whole.dtype, text) == (torch.float32, torch.float64, torch.int64, "text")


def test_everything_that_can_move_is_moved() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = send_to_device({"x": torch.ones(2), "packed": packed, "name": "a"}, torch.device("meta"))
    assert moved["x"].device.type == "meta"
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["packed"].data.device.type == "meta"
    assert moved["packed"].batch_sizes.device.type == "cpu"  # torch needs it there
    assert moved["name"] == "a"

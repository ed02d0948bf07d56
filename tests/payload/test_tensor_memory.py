"""Tensors and arrays by value: shared memory stays shared, and only the used parts are sent."""

from __future__ import annotations

import gc
import os
import pathlib
from typing import Any

import numpy
import pytest
import torch

from notebook_accel.payload import memory_files, serialization

MIB = 1 << 20


def through(value: Any, name: str = "test") -> tuple[Any, int]:
    """Return the received object, and the number of bytes that the memory file of this name took."""
    descriptor = memory_files.memory_file(name)
    try:
        serialization.dump(descriptor, serialization.pickle_by_value(value, roots={"value": value}))
        return serialization.load(descriptor).value, os.fstat(descriptor).st_blocks * 512
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("view", [
    lambda t: t[:, 1:], lambda t: t[::2], lambda t: t.t(), lambda t: t[3:4].expand(50, 100),
    lambda t: t.view(torch.int32),
    lambda t: t[:0], lambda t: t[5, 5], lambda t: t.as_strided((3, 3), (1, 1), 7), lambda t: t.view(torch.complex64),
], ids=range(9))  # fmt: skip
def test_view_of_a_tensor_stays_one(view: Any) -> None:
    whole = torch.arange(10_000.0).reshape(100, 100)
    (got_whole, got_view), taken = through((whole, view(whole)))
    assert torch.equal(got_view, view(whole))
    assert got_view.stride() == view(whole).stride()
    got_whole.add_(1)
    assert torch.equal(got_view, view(whole + 1))
    assert taken < whole.nbytes + 16_384


@pytest.mark.parametrize("view", [
    lambda a: a[:, 1:], lambda a: a[::-1], lambda a: a.T, lambda a: a[::3, ::-2], lambda a: a.view("i4"),
    lambda a: numpy.broadcast_to(a[2], (50, 100)), lambda a: a[4, 4, ...], lambda a: a.ravel()[10:20],
], ids=range(8))  # fmt: skip
def test_view_of_an_array_stays_one(view: Any) -> None:
    whole = numpy.arange(10_000.0, dtype="f4").reshape(100, 100)
    (got_whole, got_view), taken = through((whole, view(whole)))
    assert numpy.array_equal(got_view, view(whole))
    assert got_view.flags.writeable == view(whole).flags.writeable
    got_whole += 1
    assert numpy.array_equal(got_view, view(whole + 1))
    assert taken < whole.nbytes + 16_384


def test_tensor_and_array_over_the_same_memory_stay_over_the_same_memory() -> None:
    array = numpy.zeros((1000, 10))
    tensor = torch.ones(5000)
    (array_again, tensor_of_array, tensor_again, array_of_tensor), _ = through(
        (array, torch.from_numpy(array), tensor, tensor.numpy()[10:])
    )
    array_again[3, 3] = 7.0
    tensor_again[12] = 9.0
    assert tensor_of_array[3, 3] == 7.0
    assert array_of_tensor[2] == 9.0


def test_two_tensors_over_one_storage_have_one_storage() -> None:
    array = numpy.zeros(5000)
    (first, second), _ = through((torch.from_numpy(array), torch.from_numpy(array)))
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata


@pytest.mark.parametrize("make", [torch.zeros, numpy.zeros])
def test_only_what_a_view_looks_at_is_sent(make: Any) -> None:
    whole = make((64 * MIB, 2))
    whole[5] = 3
    view = whole[5:10]
    del whole
    got, taken = through(view)
    assert got.sum() == 6 and got.shape == (5, 2)
    assert taken < MIB


def test_rows_of_a_batch_are_sent_once_and_stay_rows_of_one_memory() -> None:
    data = torch.arange(1_000_000.0).reshape(1000, 1000)
    rows, taken = through([data[i] for i in range(0, 1000, 2)])
    assert torch.equal(torch.stack(rows), data[::2])
    assert taken < data.nbytes + 100_000
    assert rows[0].untyped_storage()._cdata == rows[1].untyped_storage()._cdata


def test_storage_itself_is_sent_whole() -> None:
    whole = torch.arange(10_000.0)
    (view, storage), _ = through((whole[:10], whole.untyped_storage()))
    assert view.untyped_storage()._cdata == storage._cdata
    assert torch.equal(view.as_strided((10_000,), (1,)), whole)


def test_of_a_tensor_with_a_graph_the_values_arrive() -> None:
    leaf = torch.ones(3000, requires_grad=True)
    (got_leaf, got), _ = through((leaf, leaf * 2))
    assert got_leaf.requires_grad and got_leaf.is_leaf
    assert not got.requires_grad and got.sum() == 6000


class Sub(torch.Tensor):
    """A subclass, as a library would define it."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
@pytest.mark.parametrize("make", [
    lambda: torch.ones(3000).as_subclass(Sub),
    lambda: torch.nn.Parameter(torch.ones(3000)),
    lambda: torch.nested.nested_tensor([torch.ones(300), torch.ones(5000)]),
    lambda: torch.nested.nested_tensor([torch.ones(30, 200), torch.ones(5, 200)], layout=torch.jagged),
    lambda: torch.ones(3000, device="meta"),
    lambda: torch.eye(200).to_sparse(), lambda: torch.eye(200).to_sparse_csr(),
    lambda: torch.ones(3000, dtype=torch.complex64).conj(),
    lambda: torch.ones(3000, dtype=torch.bfloat16), lambda: torch.ones(9000).to(torch.float8_e4m3fn),
    lambda: torch.ones(4000, dtype=torch.uint16), lambda: torch.ones(4000, dtype=torch.bool),
    lambda: torch.ones(3000).share_memory_(), lambda: torch.empty(0), lambda: torch.tensor(3),
], ids=range(15))  # fmt: skip
def test_kinds_of_tensors(make: Any) -> None:
    tensor = make()
    got, _ = through(tensor)
    assert (type(got), got.dtype, got.layout, got.device) == (type(tensor), tensor.dtype, tensor.layout, tensor.device)
    assert got.requires_grad == tensor.requires_grad
    if tensor.device.type != "meta":
        pairs = zip(tensor.unbind(), got.unbind(), strict=True) if tensor.is_nested else [(tensor, got)]
        assert all(a.tolist() == b.tolist() if a.layout is torch.strided else torch.equal(a.to_dense(), b.to_dense())
                   for a, b in pairs)  # fmt: skip


@pytest.mark.parametrize("array", [
    numpy.zeros((0, 3)), numpy.array(3.0), numpy.array([None, "x"]), numpy.array(["text"] * 5000),
    numpy.array(["2020-01-01"] * 3000, dtype="datetime64[ns]"), numpy.zeros(1000, dtype=[("a", "f4"), ("b", "i8")]),
    numpy.asfortranarray(numpy.ones((100, 100))), numpy.ones((60, 60)).view(numpy.matrix),
    numpy.zeros(1000, dtype=[("a", "f4")]).view(numpy.recarray),
], ids=range(9))  # fmt: skip
def test_kinds_of_arrays(array: Any) -> None:
    got, _ = through(array)
    assert (type(got), got.dtype, got.shape) == (type(array), array.dtype, array.shape)
    assert got.strides == array.strides or array.size == 0
    assert numpy.array_equal(got, array)


def test_read_only_array_stays_read_only() -> None:
    array = numpy.ones(5000)
    array.flags.writeable = False
    (got, view), _ = through((array, array[5:]))
    assert not got.flags.writeable and not view.flags.writeable


def test_mapped_file_is_opened_again_not_copied(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "data.npy"
    numpy.save(path, numpy.arange(4 * MIB, dtype="f8"))
    mapped = numpy.load(path, mmap_mode="r")
    (whole, view, plain), taken = through((mapped, mapped[10:20], numpy.asarray(mapped)[::-1]))
    assert taken < MIB
    assert numpy.array_equal(whole, mapped) and type(whole) is numpy.memmap and type(plain) is numpy.ndarray
    assert view.tolist() == list(range(10, 20)) and plain[0] == 4 * MIB - 1
    assert not whole.flags.writeable
    again, taken = through(whole[1:])  # and so from where it has come to
    assert again[0] == 1 and taken < MIB


def test_mapped_file_that_is_written_is_the_file_for_everybody(tmp_path: pathlib.Path) -> None:
    mapped = numpy.memmap(tmp_path / "out", "f4", "w+", shape=(1000, 100))
    got, _ = through(mapped)
    got[3] = 5
    got.flush()
    assert mapped[3].sum() == 500


@pytest.mark.parametrize("mode", ["gone", "c"])
def test_mapped_array_without_its_file_is_sent_by_value(tmp_path: pathlib.Path, mode: str) -> None:
    path = tmp_path / "data"
    numpy.ones(5000).tofile(path)
    mapped = numpy.memmap(path, "f8", "r" if mode == "gone" else "c")
    if mode == "gone":
        path.unlink()
    else:
        mapped[0] = 7  # in this process's own copy of the page
    got, _ = through(mapped)
    assert numpy.array_equal(got, mapped)


@pytest.mark.parametrize("ones", [numpy.ones, torch.ones])
def test_nothing_keeps_the_memory_after_the_last_view(ones: Any) -> None:
    def is_mapped() -> bool:
        gc.collect()
        return "memfd:kept" in pathlib.Path("/proc/self/maps").read_text()

    got, _ = through(ones(5000), "kept")
    view = got[5:]
    del got
    assert is_mapped() and view.sum() == 4995
    del view
    assert not is_mapped()

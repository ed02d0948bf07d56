"""Pickling by value: sharing, isolation, references to the sender's objects, and errors with a path."""

from __future__ import annotations

import errno
import functools
import gc
import os
import pathlib
import resource
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils import parametrizations, parametrize

from notebook_accel import host_memory
from notebook_accel.errors import PayloadError
from notebook_accel.payload import memory_files, serialization
from tests.payload.test_definitions import through


@pytest.fixture
def memory_file() -> Iterator[int]:
    descriptor = memory_files.memory_file("test")
    yield descriptor
    os.close(descriptor)


def notebook(source: str) -> dict[str, Any]:
    """A stand-in for a notebook's namespace. Definitions in it are pickled by value."""
    namespace: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(source, namespace)
    return namespace


def send(
    value: Any, descriptor: int, *, namespace: dict[str, Any] | None = None, into: dict[str, Any] | None = None
) -> tuple[serialization.Pickled, serialization.Opened]:
    pickled = serialization.pickle_by_value(value, roots={"value": value}, namespace=namespace)
    serialization.dump(descriptor, pickled, b"the head")
    memory_files.make_unwritable(descriptor)
    assert memory_files.read_head(descriptor) == b"the head"
    return pickled, serialization.load(descriptor, namespace=into)


def test_views_and_ties_of_tensors_stay(memory_file: int) -> None:
    whole = torch.arange(40_000.0).reshape(200, 200)
    layer = torch.nn.Linear(100, 100)
    pair = torch.nn.ModuleList([layer, torch.nn.Linear(100, 100)])
    pair[1].weight = layer.weight
    _, opened = send({"whole": whole, "row": whole[3], "pair": pair}, memory_file)
    got = opened.value
    got["row"][0] = -1.0
    assert got["whole"][3, 0] == -1.0
    assert got["pair"][0].weight is got["pair"][1].weight
    assert torch.equal(got["pair"][0].weight, layer.weight)


def test_receivers_are_isolated_from_the_sender_and_each_other(memory_file: int) -> None:
    tensor, array = torch.zeros(100_000), numpy.zeros(100_000)
    _, first = send((tensor, array), memory_file)
    second = serialization.load(memory_file)
    first.value[0].fill_(1.0)
    first.value[1].fill(1.0)
    assert tensor.sum() == 0 and array.sum() == 0
    assert second.value[0].sum() == 0 and second.value[1].sum() == 0


def test_large_buffers_travel_beside_the_pickle(memory_file: int) -> None:
    pickled, _ = send([torch.zeros(1 << 20), numpy.zeros(1 << 20)], memory_file)
    assert [buffer.size_bytes for buffer in pickled.buffers] == [4 << 20, 8 << 20]
    assert len(pickled.data) < 5000


class Symmetric(torch.nn.Module):
    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.triu() + matrix.triu(1).T

    def right_inverse(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.triu()


def without_parametrizations(module: torch.nn.Module) -> torch.nn.Module:
    return parametrize.remove_parametrizations(parametrizations.weight_norm(module), "weight")


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [
    parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal,
    lambda module: parametrize.register_parametrization(module, "weight", Symmetric()),
    lambda module: parametrizations.weight_norm(parametrizations.spectral_norm(module), "bias"),
    without_parametrizations, torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm,
])  # fmt: skip
def test_modules_with_parametrizations_train_alike(
    norm: Callable[[torch.nn.Module], torch.nn.Module], memory_file: int
) -> None:
    module = norm(torch.nn.Linear(5, 5))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    got, got_optimizer = send((module, optimizer), memory_file)[1].value
    assert isinstance(got, torch.nn.Linear)
    for each, its_optimizer in ((module, optimizer), (got, got_optimizer)):
        for _ in range(3):
            its_optimizer.zero_grad()
            each(torch.arange(10.0).reshape(2, 5)).sum().backward()
            its_optimizer.step()
    values = zip(module.state_dict().items(), got.state_dict().items(), strict=True)
    assert all(name == got_name and torch.equal(value, other) for (name, value), (got_name, other) in values)
    with torch.no_grad():
        assert torch.equal(module(torch.ones(5)), got(torch.ones(5)))
    assert parametrize.type_before_parametrizations(got) is torch.nn.Linear
    if parametrize.is_parametrized(module, "weight"):
        with parametrize.cached():
            assert got.weight is got.weight
        parametrize.remove_parametrizations(got, "weight")
        assert not parametrize.is_parametrized(got, "weight")


def test_loader_leaves_its_persistent_workers_behind(memory_file: int) -> None:
    loader = torch.utils.data.DataLoader(range(4), batch_size=2, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]
    iterator = iter(loader)
    next(iterator)
    _, opened = send(loader, memory_file)
    assert [batch.tolist() for batch in opened.value] == [[0, 1], [2, 3]]
    assert [batch.tolist() for batch in iterator] == [[2, 3]]
    with pytest.raises(PayloadError, match="can't be sent"):
        serialization.pickle_by_value(iterator, roots={"iterator": iterator})
    for each in (loader, opened.value):
        each._iterator._shutdown_workers()  # which would take seconds at the next look


def test_what_cannot_be_rebuilt_is_named() -> None:
    """Whether its class, its module or an object inside it is what fails."""
    namespace = notebook("""
class Picky:
    def __setstate__(self, state): raise ValueError("not here")
    def __getstate__(self): return {"x": 1}
class Pair(Exception):
    def __init__(self, one, two): super().__init__(one)
""")
    for value in (namespace["Picky"](), {"deep": [namespace["Picky"]()]}, namespace["Pair"](1, 2)):
        roots = {"before": [1], "it": value, "after": "x"}
        pickled = serialization.pickle_by_value(list(roots.values()), roots=roots)
        with pytest.raises((ValueError, TypeError)) as caught:
            serialization.loads(bytes(pickled.data))
        assert vars(caught.value)[serialization.ROOT_ATTRIBUTE] == "it"


def test_functions_share_the_receivers_namespace(memory_file: int) -> None:
    namespace = notebook("FACTOR = 2\ndef helper(x): return x * FACTOR\ndef outer(x): return helper(x) + 1")
    into: dict[str, Any] = {}
    _, opened = send(namespace["outer"], memory_file, namespace=namespace, into=into)
    assert opened.value.__globals__ is into
    assert into["helper"].__globals__ is into
    into["FACTOR"] = 10
    assert opened.value(1) == 11


def test_what_came_from_the_sender_goes_back_as_its_own(memory_file: int) -> None:
    namespace = notebook("class Model: pass\ndef helper(): return Model")
    there: dict[str, Any] = {}
    pickled, opened = send((namespace["Model"](), namespace["helper"]), memory_file, namespace=namespace, into=there)
    by_value = [obj for _, obj in opened.by_value]
    back = serialization.pickle_by_value(opened.value, roots={"value": opened.value}, origins=by_value)
    instance, helper = through(back, origins=pickled.by_value).value
    assert type(instance) is namespace["Model"]
    assert helper is namespace["helper"]
    assert namespace["helper"]() is namespace["Model"]


def test_shipped_names_are_those_of_the_namespace(memory_file: int) -> None:
    namespace = notebook("class Model: pass\nold = Model()\nclass Model: pass\nnew = Model()")
    _, opened = send((namespace["old"], namespace["new"]), memory_file, namespace=namespace, into={})
    named = [obj for name, obj in opened.by_value if name == "Model"]
    assert named == [type(opened.value[1])]


class _Holder:
    def __init__(self, held: Any) -> None:
        self.held = held
        self.me = self


class _Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def _closure(value: Any) -> Any:
    def inner() -> Any:
        return value

    inner.__module__ = "__main__"
    return inner


LOCK = threading.Lock()


@pytest.mark.parametrize(("value", "path"), [
    (LOCK, 'global "bad"'),
    ((i for i in range(3)), 'global "bad"'),
    ([1, {"key": LOCK}], "global \"bad\" -> item 1 -> item 'key'"),
    (_Holder(_Holder(LOCK)), 'global "bad" -> attribute "held" -> attribute "held"'),
    (_Slotted(LOCK), 'global "bad" -> attribute "inner"'),
    (_closure([LOCK]), 'global "bad" -> closure variable "value" -> item 0'),
    (functools.partial(print, LOCK), 'global "bad" -> item 0'),
    (_Holder(LOCK).__init__, 'global "bad" -> its object -> attribute "held"'),
])  # fmt: skip
def test_what_cannot_be_sent_is_named_with_the_way_to_it(value: Any, path: str) -> None:
    with pytest.raises(PayloadError) as caught:
        serialization.pickle_by_value({"fine": 1, "bad": value}, roots={'global "fine"': 1, 'global "bad"': value})
    assert caught.value.path == path
    assert path in str(caught.value)


def _nested(depth: int, inner: Any = None) -> Any:
    for _ in range(depth):
        inner = (1, [inner])
    return inner


def test_what_is_nested_too_deeply_is_named() -> None:
    namespace = notebook("def train(): return tree")
    namespace["tree"] = _nested(20_000)
    with pytest.raises(PayloadError) as caught:
        serialization.pickle_by_value(namespace["train"], roots={'function "train"': namespace["train"]})
    assert caught.value.path == 'function "train" -> global "tree" -> item 1 -> item 0 -> ...'
    assert "nested too deeply" in caught.value.what and "a list of its nodes" in caught.value.fix


class _Endless:
    def __reduce__(self) -> Any:
        return self.__reduce__()


def test_what_recurses_without_end_is_named() -> None:
    with pytest.raises(PayloadError) as caught:
        serialization.pickle_by_value(None, roots={"fine": 1, "bad": {"one": [_Endless()]}})
    assert caught.value.path == "bad -> item 'one' -> item 0"
    assert "recurses without end" in caught.value.why


def test_what_only_just_is_nested_too_deeply_is_named_too() -> None:
    def error(depth: int) -> PayloadError | None:
        tree = _nested(depth)
        try:
            serialization.pickle_by_value({"fine": 1, "tree": tree}, roots={"fine": 1, "tree": tree})
        except PayloadError as error:
            return error
        return None

    low, high = 0, 20_000
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if error(middle) else (middle, high)
    found = error(high)
    assert found is not None and found.path.startswith("tree") and "nested too deeply" in found.what


def test_long_path_is_cut_in_its_middle() -> None:
    with pytest.raises(PayloadError) as caught:
        serialization.pickle_by_value(None, roots={"tree": _nested(50, [LOCK])})
    start, end = "tree -> item 1 -> item 0 -> item 1", "item 0 -> item 1 -> item 0 -> item 0"
    assert caught.value.path == f"{start} -> ... 94 more ... -> {end}"
    assert "it is a lock" in caught.value.what


def test_a_global_of_a_function_is_named() -> None:
    namespace = notebook("def train(): return connection.recv(1)")
    with socket.socket() as connection:
        namespace["connection"] = connection
        with pytest.raises(PayloadError, match="an open socket") as caught:
            serialization.pickle_by_value(namespace["train"], roots={'function "train"': namespace["train"]})
    assert caught.value.path == 'function "train" -> global "connection"'


def test_opened_tensors_hold_no_descriptor(memory_file: int) -> None:
    held = len(os.listdir("/proc/self/fd"))
    _, opened = send(torch.zeros(1 << 20), memory_file)
    assert len(os.listdir("/proc/self/fd")) == held
    assert opened.value.sum() == 0


@pytest.mark.parametrize("size_bytes", [100, 1 << 20])
def test_what_has_been_sent_is_kept_only_as_long_as_its_pickle(size_bytes: int) -> None:
    array = numpy.zeros(size_bytes, dtype=numpy.uint8)
    kept = weakref.ref(array)
    gc.disable()  # no reference cycle needs the collector
    try:
        pickled = serialization.pickle_by_value({"array": array}, roots={"array": array})
        del array, pickled
        assert kept() is None
    finally:
        gc.enable()


def test_pickle_can_be_collected_as_part_of_a_cycle() -> None:
    class Job:
        pass

    job: Any = Job()
    job.itself, job.pickled = job, serialization.pickle_by_value(torch.ones(1 << 12), roots={})
    # A view of a BytesIO can't: it ends the process on Python 3.12.1, and is an error on 3.13.0.
    assert type(job.pickled.data.obj) is bytes
    kept = weakref.ref(job)
    del job
    gc.collect()
    assert kept() is None


def test_each_roots_size_is_known_and_what_is_shared_counts_once(memory_file: int) -> None:
    model = torch.nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    roots = {"model": model, "optimizer": optimizer, "text": "x" * 300_000, "few": model.weight[:10]}
    sizes = serialization.pickle_by_value((model, optimizer, roots), roots=roots).sizes_bytes
    assert sizes["model"] == pytest.approx(4_000_000, abs=5_000)
    assert sizes["optimizer"] == pytest.approx(8_000_000, abs=5_000)
    assert sizes["text"] == pytest.approx(300_000, abs=70_000)  # pickle writes 64 KiB at a time
    assert sizes["few"] < 70_000


def test_what_does_not_fit_into_memory_is_refused_before_it_is_copied(memory_file: int) -> None:
    # Untouched pages take no memory, so a test can have more of them than the machine has memory. The free memory
    # doesn't matter here: there may be more a moment later, when another process has ended.
    size_bytes = max(host_memory.total_bytes(), host_memory.available_bytes()) * 3 // 4
    vast = [torch.from_numpy(numpy.zeros(size_bytes, dtype=numpy.uint8)) for _ in range(2)]
    roots = {'global "vast"': vast, 'global "small"': torch.ones(1 << 20)}
    pickled = serialization.pickle_by_value(roots, roots=roots)
    with pytest.raises(PayloadError, match="don't fit into memory") as caught:
        serialization.dump(memory_file, pickled)
    assert os.fstat(memory_file).st_size == 0
    assert caught.value.path == 'global "vast"'
    assert "GiB" in caught.value.why and 'global "small": 4.0 MiB' in caught.value.why
    assert "mmap_mode" in caught.value.fix


def test_pickle_that_outgrows_the_memory_is_refused_with_what_it_was_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 50 << 20)  # a real end of memory would end the test
    roots = {"first": b"", "texts": [bytes(1 << 20) for _ in range(200)]}
    with pytest.raises(PayloadError, match=r"at least 6[34] MiB, and 50 MiB is free") as caught:
        serialization.pickle_by_value(roots, roots=roots)
    assert caught.value.path == "texts"


def test_file_that_may_not_grow_so_far_is_an_error_of_ours(memory_file: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    pickled = serialization.pickle_by_value(torch.ones(1 << 20), roots={"ones": torch.ones(1 << 20)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(PayloadError, match=r"the limit on files is less \(ulimit -f\)"):
            serialization.dump(memory_file, pickled)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_file_on_a_disk_without_room_says_so(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"x" * 200_000
    pickled = serialization.pickle_by_value(data, roots={"the data": data})
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)

    def is_full(*_: object) -> int:  # a disk that is full for real would need the right to mount one
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", is_full)
    try:
        with pytest.raises(PayloadError, match=r"The disk has no room .* they take 195 KiB, and .* is free") as raised:
            serialization.dump(descriptor, pickled)
    finally:
        os.close(descriptor)
    assert raised.value.path == "the data"

"""Results of ranks: each is unpickled by itself, and objects that share parts still share them."""

from __future__ import annotations

import os
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy
import pytest
import torch

from notebook_accel import host_memory
from notebook_accel.errors import PayloadError, ResultError
from notebook_accel.launching.results import ResultFile, ResultFiles, result_error, write_result_file
from notebook_accel.payload import memory_files


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = memory_files.memory_file("test")
    yield descriptor
    os.close(descriptor)


def sent(descriptor: int, values: Mapping[str, Any], **how: Any) -> ResultFile:
    write_result_file(descriptor, values, rank=0, advice="send less", **how)
    opening = ResultFile(descriptor, 0)
    opening.unpickle(())
    return opening


def not_to_be_made() -> object:
    raise TypeError("no such thing")


class Bad:
    """Can be pickled, and not be made again."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return not_to_be_made, (), self.__dict__


class Node:
    def __init__(self) -> None:
        self.edges: list[Any] = []


class BadNode(Node):
    def __reduce__(self) -> tuple[Any, ...]:
        return not_to_be_made, (), self.__dict__


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(60, 60)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 60)).sum().backward()
    optimizer.step()
    return model, optimizer


def belong_together(model: Any, optimizer: Any) -> bool:
    parameters = optimizer.param_groups[0]["params"]
    return all(one is other for one, other in zip(model.parameters(), parameters, strict=True)) and all(
        "exp_avg" in optimizer.state[parameter] for parameter in model.parameters()
    )


@pytest.mark.parametrize("bad", [
    lambda model, optimizer: Bad(),
    lambda model, optimizer: Bad(model=model, optimizer=optimizer),
    lambda model, optimizer: [model.weight, Bad(of=optimizer)],
], ids=["apart", "around both", "around a parameter"])  # fmt: skip
@pytest.mark.parametrize("comes", ["first", "last"])
def test_model_and_optimizer_belong_together_beside_what_cannot_be_opened(
    bad: Callable[..., Any], comes: str, file: int
) -> None:
    model, optimizer = trained()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    lost, kept = {"trainer": bad(model, optimizer)}, {"model": model, "optimizer": optimizer, "schedule": schedule}
    opening = sent(file, {"": 1.5, **lost, **kept} if comes == "first" else {"": 1.5, **kept, **lost})
    assert opening.values.keys() == {"", "model", "optimizer", "schedule"}
    assert belong_together(opening.values["model"], opening.values["optimizer"])
    assert opening.values["schedule"].optimizer is opening.values["optimizer"]
    assert torch.equal(opening.values["model"].weight, model.weight)
    [problem] = opening.problems.values()
    assert str(problem).startswith('name "trainer" of rank 0 can\'t be unpickled here: TypeError: no such thing')


def test_objects_of_every_kind_that_two_names_have_are_one_again(file: int) -> None:
    whole, array, plain, table = torch.arange(9000.0), numpy.zeros(9000), [1], {"a": 2}
    written = bytearray(b"written")
    first = {"row": whole[:5], "array": array, "plain": plain, "table": table, "bytes": written, "dtype": whole.dtype}
    second = {"whole": whole, "part": array[5:9], "plain": plain, "tables": [table], "bytes": written}
    opening = sent(file, {"first": first, "second": second, "plain": plain})
    got, other = opening.values["first"], opening.values["second"]
    assert got["plain"] is other["plain"] is opening.values["plain"] and got["table"] is other["tables"][0]
    assert got["bytes"] is other["bytes"] == b"written"
    got["row"][3] = other["part"][1] = -1.0
    assert (other["whole"][3].item(), got["array"][6]) == (-1.0, -1.0)
    assert (plain, table, got["dtype"], whole[3].item()) == ([1], {"a": 2}, torch.float32, 3.0)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=150, deadline=None)
def test_what_opens_is_what_reaches_nothing_bad_and_has_the_same_shape(data: st.DataObject) -> None:
    makers = st.sampled_from([Node, list, dict, BadNode])
    nodes = [make() for make in data.draw(st.lists(makers, min_size=1, max_size=9))]
    for node in nodes:
        children = [nodes[i] for i in data.draw(st.lists(st.integers(0, len(nodes) - 1), max_size=3))]
        node.update(enumerate(children)) if isinstance(node, dict) else edges(node).extend(children)
    chosen = data.draw(st.lists(st.integers(0, len(nodes) - 1), min_size=1, max_size=4))
    roots = {f"name{place}": nodes[number] for place, number in enumerate(chosen)}
    descriptor = memory_files.memory_file("test")
    try:
        opening = sent(descriptor, roots)
    finally:
        os.close(descriptor)
    good = {key: root for key, root in roots.items() if not any(isinstance(obj, BadNode) for obj in walk([root])[0])}
    assert opening.values.keys() == good.keys()
    assert opening.problems.keys() == roots.keys() - good.keys()
    # The same walk meets objects of the same kinds, and again the same ones at the same places.
    met, order = walk(good.values())
    met_again, order_again = walk(opening.values[key] for key in good)
    assert ([type(obj) for obj in met], order) == ([type(obj) for obj in met_again], order_again)


def edges(node: Any) -> Any:
    return node if isinstance(node, list) else list(node.values()) if isinstance(node, dict) else node.edges


def walk(roots: Any) -> tuple[list[Any], list[int]]:
    """The objects that are reached, and at each place which of them is there."""
    met: list[Any] = []
    order: list[int] = []
    waiting = list(roots)
    while waiting:
        obj = waiting.pop(0)
        place = next((place for place, other in enumerate(met) if other is obj), None)
        order.append(len(met) if place is None else place)
        if place is None:
            met.append(obj)
            waiting += edges(obj)
    return met, order


def test_what_several_names_share_is_in_the_file_once(file: int) -> None:
    model = torch.nn.Linear(1000, 1000, bias=False)
    sent(
        file, {"": model, "model": model, "optimizer": torch.optim.SGD(model.parameters()), "rows": model.weight[:500]}
    )
    size_bytes = os.fstat(file).st_blocks * 512
    assert 4_000_000 <= size_bytes < 4_100_000


def test_only_the_parts_that_names_look_at_are_in_the_file(file: int) -> None:
    whole = torch.arange(4_000_000.0)
    opening = sent(file, {"first": whole[:10], "last": whole[-10:]})
    assert opening.values["first"][9] == 9 and opening.values["last"][9] == 3_999_999
    assert os.fstat(file).st_blocks * 512 < 100_000


def test_what_cannot_be_pickled_is_left_out_and_said(file: int) -> None:
    opening = sent(
        file,
        {"": {"lock": threading.Lock()}, "weights": torch.ones(3)},
        refused={"late": PayloadError("it is late", path="late")},
    )
    assert opening.values["weights"].tolist() == [1, 1, 1]
    assert [problem.what for problem in opening.problems.values()] == [
        "it is late", "the result of rank 0 -> item 'lock' can't be sent to another process: it is a lock.",
    ]  # fmt: skip
    assert opening.problems[""].fix == "send less"


def test_what_is_nested_too_deeply_loses_nothing_else(file: int) -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    opening = sent(file, {"deep": deep, "fine": 3})
    assert opening.values["fine"] == 3
    assert 'name "deep" of rank 0' in opening.problems["deep"].what
    assert "nested too deeply" in opening.problems["deep"].what


def test_largest_is_left_out_where_there_is_no_room_for_all(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 100 << 20)
    values = {"": 1, "huge": torch.zeros(30 << 20), "large": torch.zeros(20 << 20), "small": torch.ones(5000)}
    opening = sent(file, values)
    assert opening.values.keys() == {"", "large", "small"}
    assert "huge" in str(opening.problems["huge"]) and "don't fit into memory" in str(opening.problems["huge"])


def test_file_that_was_cut_off_is_a_problem_and_no_crash(file: int) -> None:
    for content in (b"", b"short", os.urandom(200)):
        os.ftruncate(file, 0)
        os.pwrite(file, content, 0)
        opening = ResultFile(file, 3)
        opening.unpickle(())
        assert opening.values == {} and "the result of rank 3 can't be unpickled here" in str(opening.problems[""])


# Reading, and asking again --------------------------------------------------------------------------------------------


def test_asked_again_what_has_become_possible_is_bound_and_the_rest_is_left(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a module that only the ranks could import, and that the notebook can import later."""
    (tmp_path / "of_the_ranks.py").write_text("class Held:\n    def __init__(self, what): self.what = what\n")
    monkeypatch.syspath_prepend(tmp_path)
    import of_the_ranks  # type: ignore[import-not-found]

    model, optimizer = trained()
    bound: dict[str, Any] = {}
    descriptors = [memory_files.memory_file("test") for _ in range(2)]
    files = ResultFiles(descriptors, (), bound.update)
    values = {"": "zero", "model": model, "optimizer": optimizer, "held": of_the_ranks.Held(model)}
    write_result_file(descriptors[0], values, rank=0, advice="")
    write_result_file(descriptors[1], {"": of_the_ranks.Held(1)}, rank=1, advice="")
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "of_the_ranks")
    for _ in range(2):
        with pytest.raises(ResultError) as caught:
            files.read(0)
        assert (caught.value.values, caught.value.pulled) == ({0: "zero"}, ("model", "optimizer"))
        assert list(caught.value.reasons) == ['name "held" of rank 0', "the result of rank 1"]
        assert all("No module named 'of_the_ranks'" in reason for reason in caught.value.reasons.values())
        assert belong_together(bound["model"], bound["optimizer"])
    first, bound["optimizer"] = bound["model"], "the notebook's since"
    monkeypatch.syspath_prepend(tmp_path)
    results = files.read(0)
    assert (results[0], results[1].what) == ("zero", 1)
    assert bound["held"].what is bound["model"] is first and bound["optimizer"] == "the notebook's since"
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_results_of_a_later_node_stand_at_their_ranks(file: int) -> None:
    descriptors = [memory_files.memory_file("test") for _ in range(2)]
    for rank, descriptor in enumerate(descriptors, 2):
        write_result_file(descriptor, {"": rank, "x": rank}, rank=rank, advice="")
    bound: dict[str, Any] = {}
    assert ResultFiles(descriptors, (), bound.update).read(2) == [2, 3]
    assert bound == {"x": 2}


def test_variables_of_the_first_rank_of_another_machine_are_not_asked_for() -> None:
    """On a cluster, the first rank of each machine writes them."""
    shared = [1]
    descriptors = [memory_files.memory_file("test") for _ in range(2)]
    bound: dict[str, Any] = {}
    write_result_file(descriptors[0], {"": 7, "x": 0}, rank=0, advice="")
    values = {"": shared, "x": Bad(shared=shared), "lock": threading.Lock()}
    write_result_file(
        descriptors[1], values, rank=1, advice="", refused={"late": PayloadError("there is none", path="late")}
    )
    assert ResultFiles(descriptors, (), bound.update).read(0) == [7, [1]]
    assert bound == {"x": 0}


def test_error_of_one_value_is_that_values_own(file: int) -> None:
    opening = sent(file, {"": Bad(), "x": 3})
    error = result_error({0: opening}, pulled=("x",))
    assert isinstance(error, PayloadError) and isinstance(error.__cause__, TypeError)
    assert "the result of rank 0 can't be unpickled here: TypeError" in str(error) and "all the same: x" in str(error)


def test_names_that_nobody_takes_do_not_count_as_pulled() -> None:
    """As with ``attach`` outside of a magic, which binds nothing."""
    descriptors = [memory_files.memory_file("test")]
    write_result_file(descriptors[0], {"history": [1, 2]}, rank=0, advice="")
    assert ResultFiles(descriptors, (), None).set_saved_variables(0) == ((), {})

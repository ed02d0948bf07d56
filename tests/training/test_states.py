from __future__ import annotations

import contextlib
import copy
import gc
import io
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch

from notebook_accel import Accelerator, AcceleratorState
from notebook_accel.errors import PayloadError, TrainingError
from notebook_accel.payload import serialization
from notebook_accel.training import process_group
from notebook_accel.training.states import PartialState
from tests.training.ranks import Ranks, on_ranks


def test_alone() -> None:
    state = PartialState()
    assert (state.process_index, state.local_process_index, state.num_processes) == (0, 0, 1)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed
    assert PartialState(cpu=True).device == torch.device("cpu")


@pytest.mark.parametrize("kind", [Accelerator, PartialState])
def test_it_does_not_leave_its_process(kind: Callable[..., Any]) -> None:
    roots = {'name "here"': kind(cpu=True)}
    with pytest.raises(PayloadError) as raised:
        serialization.pickle_by_value(roots, roots=roots)
    assert raised.value.path == 'name "here"'
    assert f"this {kind.__name__} stands for the process that made it, rank 0 of 1" in raised.value.what
    assert "make it inside the cell" in raised.value.fix


@pytest.mark.parametrize("kind", [Accelerator, PartialState, AcceleratorState])
def test_within_its_process_a_copy_is_the_object_itself(kind: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    state = kind(cpu=True)
    nested = {"state": [state]}
    assert copy.deepcopy(nested)["state"][0] is state
    assert copy.copy(state) is state
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(nested, protocol))["state"][0] is state
    assert cloudpickle.loads(cloudpickle.dumps(lambda: state))() is state
    torch.save(nested, tmp_path / "nested")
    assert torch.load(tmp_path / "nested", weights_only=False)["state"][0] is state


def unpickle(pickled: bytes) -> Any:
    with pytest.raises(TrainingError, match="This Accelerator was pickled in another process") as raised:
        pickle.loads(pickled)
    return raised.value.fix


def pickle_own() -> bytes:
    return pickle.dumps(Accelerator(cpu=True))


def test_a_pickle_is_refused_in_another_process(two_ranks: Ranks) -> None:
    pickled = pickle.dumps(accelerator := Accelerator(cpu=True))
    assert all("make it inside the cell" in fix for fix in two_ranks.run(unpickle, pickled))
    assert accelerator.num_processes == 1
    for of_rank in two_ranks.run(pickle_own):
        unpickle(of_rank)
    del accelerator
    gc.collect()
    unpickle(pickled)  # it doesn't exist any more


class AsksEachWorker(torch.utils.data.Dataset[bool]):
    def __init__(self, state: Any) -> None:
        self.state = state

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> bool:
        return pickle.loads(pickle.dumps(self.state)) is self.state


@on_ranks(2)
def test_a_worker_of_a_data_loader_has_it_too() -> None:
    loader = torch.utils.data.DataLoader(AsksEachWorker(Accelerator(cpu=True)), num_workers=1)
    assert [bool(item) for batch in loader for item in batch] == [True, True]


@pytest.mark.parametrize("kind", [Accelerator, PartialState])
@on_ranks(2)
def test_functions_that_run_on_some_ranks_only(kind: Callable[..., Any]) -> None:
    control = kind(cpu=True)

    def where() -> int:
        """Say where."""
        return int(control.process_index)

    functions = [
        control.on_main_process(where),
        control.on_local_main_process(where),
        control.on_last_process(where),
        control.on_process(where, process_index=1),
        control.on_process(process_index=0)(where),
        control.on_local_process(where, local_process_index=1),
        control.on_local_process(local_process_index=0)(where),
    ]
    expected = [[0, 0, None, None, 0, None, 0], [None, None, 1, 1, None, 1, None]]
    assert [function() for function in functions] == expected[control.process_index]
    assert functions[0].__doc__ == "Say where."


@on_ranks(2)
def test_it_is_the_accelerators_rank() -> None:
    accelerator = Accelerator(cpu=True)
    state = PartialState()
    output = io.StringIO()
    with contextlib.redirect_stdout(output), state.main_process_first():
        accelerator.print("once", 1, sep="-")
    state.wait_for_everyone()
    assert state._backend is accelerator._backend
    assert (output.getvalue(), state.is_last_process) == (("", True) if state.process_index else ("once-1\n", False))
    accelerator.end_training()
    again = PartialState(cpu=True)
    again.wait_for_everyone()
    assert again.num_processes == 2
    assert again._backend is not state._backend


def test_who_has_left_is_not_the_current_one() -> None:
    backend = process_group.join()
    assert process_group.current() is backend
    backend.leave()
    assert process_group.current() is not backend
